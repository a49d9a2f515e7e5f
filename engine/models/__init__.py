"""Models: files, loading, and the backends that run their passes."""
