"""OpenAI's API: prompts, sampling, answers and routes of chat, completions and responses."""
