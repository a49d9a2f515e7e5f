"""The embedded model pair: a small target, a smaller draft, and the scripts that made them."""
