"""Masks of grammars, computed in a process of each request."""
