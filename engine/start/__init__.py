"""Work that runs once at start: loading, probing, building, compiling, measuring."""
