"""ChainSource: chains from a draft model or a trained head."""
