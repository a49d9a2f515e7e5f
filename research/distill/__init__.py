"""`polydraft distill`: trains a head for a target on text that the target samples itself."""
