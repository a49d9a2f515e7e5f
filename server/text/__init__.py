"""Text of prompts and answers: tokens, templates, thoughts, calls. Knows no HTTP."""
