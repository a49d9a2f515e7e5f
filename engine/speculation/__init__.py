"""Drafting, trees and verification: pure algorithms, tensors in, tensors out.

Not for: models, K/V storage or scheduling; nothing here knows where a law comes from.
"""
