"""OpenAI's API: fields, answers and routes of chat, completions and responses."""
