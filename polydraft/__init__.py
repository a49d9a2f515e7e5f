"""The installed `polydraft` command: it checks that its own packages are found, and runs.

The project's packages have common names (`server`, `engine`), so this one, whose name is
not common, starts them.
"""
