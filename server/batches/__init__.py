"""OpenAI's files and batches, stored in a folder and answered by the generating routes."""
