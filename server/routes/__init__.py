"""Routes that do not generate: operation of the daemon, and pages for people."""
