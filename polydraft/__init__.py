"""The `polydraft` command as it is installed: it checks that the project's own packages are found,
then runs them.

The project's packages have common names (`server`, `engine`), so this one, whose name is not
common, starts them.
"""
