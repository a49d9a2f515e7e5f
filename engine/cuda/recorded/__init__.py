"""Decode steps as CUDA graphs: drafting, the target's pass, and the verdict (`steps.py`)."""
