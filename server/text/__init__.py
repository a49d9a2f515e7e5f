"""Text of prompts and answers: tokens, templates, stop strings, thoughts, calls, grammars."""
