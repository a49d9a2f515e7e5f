"""Settings of the daemon: flags, environment and file, other servers' flags, checks before anything
is loaded.
"""
