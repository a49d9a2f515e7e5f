"""Decode steps as CUDA graphs: drafting is one, the target's pass with the verdict another (`steps.py`)."""
