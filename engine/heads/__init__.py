"""Trained heads, which draft from the target's hidden states: their published layouts, and their
layers in torch.
"""
