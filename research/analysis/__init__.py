"""`polydraft analyze`: what drafts are worth, without serving anything.

A module per command, joined in `__main__`.
"""
