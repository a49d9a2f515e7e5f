"""Training and evaluation of the embedded pair, and synthetic pairs of other sizes."""
