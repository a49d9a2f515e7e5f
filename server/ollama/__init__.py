"""Ollama's API: `/api/chat`, `/api/generate`, and the description of the served model."""
