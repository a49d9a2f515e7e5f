"""A step of the engine: draw, forward, verify, compact, report."""
