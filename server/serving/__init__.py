"""Requests in flight: client of the engine, generations, answers, metrics, live page and traces."""
