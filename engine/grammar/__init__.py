"""Masks of grammars, computed in a separate process for each request."""
