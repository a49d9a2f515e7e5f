"""Embedded model pair: a small target, a smaller draft, and the scripts that created them."""
