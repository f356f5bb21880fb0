"""SGLang server processes, the router in front of them, and the HTTP client to both."""
