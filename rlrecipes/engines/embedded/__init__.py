"""A small CPU server that speaks SGLang's HTTP API."""
