"""The only code that knows transformers: loading, the attention hook, and the forward pass."""
