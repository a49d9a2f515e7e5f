"""Limits of request bodies, each of which a refusal names. The size in bytes is a setting."""

DEEPEST = 100
"""Nested objects and lists: templates, grammars and copies use several stack frames per level."""
MOST_OBJECTS = 1 << 14
"""Objects and lists of a body."""
MOST_TEXTS = 1 << 17
"""Strings of a body."""
MOST_VALUES = 1 << 20
"""Values of a body."""
MOST_NAMES = 256
"""Names of an object."""
MOST_UNKNOWN = 64
"""Unknown names of a body."""
MOST_MESSAGES = 8192
MOST_PARTS = 4096
"""Parts of a message."""
MOST_TOOLS = 512
"""Tools; coding agents with several tool servers offer hundreds."""
MOST_STRINGS = 1024
"""Strings of a list that is refused before its elements are looked at."""
MOST_STOPS = 16
MOST_PROMPTS = 128
MOST_PROMPT_LOGPROBS = 1 << 20
"""Reported logprobs over all choices of a call; each takes about 60 bytes."""
MOST_FURTHER = 1024
"""Further texts of a gap (`input_extra`)."""
LONGEST_GRAMMAR = 1 << 16
"""Characters of a grammar."""
