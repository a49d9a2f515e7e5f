"""Scheduling: which requests run, how many tokens each computes in a step, and when an answer ends.
No torch.
"""
