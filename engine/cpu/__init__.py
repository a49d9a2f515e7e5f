"""A CPU: passes, drafting and verdicts compiled by Numba."""
