"""Settings of the daemon: flags, environment, file, and checks before anything is loaded."""
