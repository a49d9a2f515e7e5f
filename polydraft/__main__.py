"""Entry point of the `polydraft` command, and of `python -m polydraft`."""

from __future__ import annotations

import sys

from polydraft.shadows import shadow


def main() -> int:
    """Run the command and return its exit code; 2 if another package hides one of the project's."""
    if line := shadow():
        print(f"polydraft: {line}", file=sys.stderr)
        return 2
    from server.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
