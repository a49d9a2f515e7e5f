"""Tokens in, tokens out: the multi-draft speculative engine.

The engine knows nothing of HTTP, text or asyncio; its interface is `engine.api`.

Shape key, used as a suffix of array names: B requests of a step, C drafted chains (flat over
requests), K chains of one request, L draft length, M drafted nodes without the roots, or some of N
rows, N tree nodes or rows of probabilities, R rows of a plan, T tokens of a forward pass, V
vocabulary. `L1` is L + 1 (the root and L drafted levels). Other letters name a size that only the
code around them uses; X along chains (`node_CX`) is L + 1, or L for draft distributions.
"""
