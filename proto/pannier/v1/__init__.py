"""Generated from the protos beside it by ``make stubs``."""
