"""Requests in flight: the engine's client, generations, answers, and what is observed of them."""
