"""From logits to tokens: the law of a request, its random numbers, and the draw itself."""
