"""A black-box load test of an OpenAI-compatible server; imports neither server nor engine."""
