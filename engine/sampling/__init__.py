"""From logits to tokens: the distribution of a request, its random numbers, and sampling."""
