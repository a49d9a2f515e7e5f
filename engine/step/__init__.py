"""A step of the engine: build, draw, verify, report."""
