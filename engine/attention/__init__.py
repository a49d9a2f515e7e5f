"""Attention over paged K/V: inputs of a pass, storage, masks."""
