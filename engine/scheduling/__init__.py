"""Who runs, how many tokens each, and what becomes of the answer. Pure Python, no tensors."""
