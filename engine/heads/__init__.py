"""Heads, which draft from the target's hidden states: published layouts and layers."""
