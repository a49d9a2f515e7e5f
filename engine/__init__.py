"""Tokens in, tokens out: the multi-draft speculative engine.

The engine knows nothing of HTTP, text or asyncio; its interface is `engine.api`.

Shape key, used as a suffix of array names: B requests of a step, C drafted chains (flat over requests), K chains of one
request, L draft length, N tree nodes or rows of probabilities, T tokens of a forward pass, V vocabulary. `L1` is L + 1
(the root and L drafted levels).
"""
