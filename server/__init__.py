"""HTTP in, HTTP out: the OpenAI-compatible front of the engine. Knows no tensors.

The event loop runs routes, streams and the metrics registry; a small thread pool runs the
tokenizer. Everything that touches a model lives in the engine process, behind `engine.api`.
"""
