"""HTTP front of the engine, compatible with OpenAI's and Anthropic's APIs. It imports no torch.

The event loop runs routes, streams and the metrics registry. A small thread pool runs
the tokenizer. Everything that touches a model runs in the engine process, which the
server reaches through `engine.api`.
"""
