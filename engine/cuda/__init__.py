"""A CUDA device: Triton kernels, and steps recorded as graphs."""
