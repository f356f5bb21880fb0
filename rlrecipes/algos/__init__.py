"""Pure torch functions of the algorithms: no configuration, no collectives, no I/O."""
