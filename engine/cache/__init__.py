"""Where keys and values live: which block belongs to whom (pure Python), and the tensors."""
