"""Code that Numba compiles: passes, products, distributions, draws and verdicts of a CPU."""
