"""Tokens in, tokens out: the multi-draft speculative engine.

Knows nothing of HTTP, text or asyncio. `engine.api` is the front door.

Shape key, used as a suffix of array names in `sampling`, `speculation` and `execution`:
B requests of a step, C drafted chains (flat over requests), K chains of one request, L draft
length, N tree nodes or law rows, T tokens of a forward pass, V vocabulary.
`L1` is L + 1 (the root and L drafted levels).
"""
