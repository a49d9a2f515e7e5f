"""`python -m engine`: the engine process (`process.py`).

Python searches for garbage again and again while modules are imported and a model is loaded, and would search what they
left for ever after. Both are left out: the search begins when the engine is ready, and looks at nothing older.
"""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Run the process; its exit code."""
    gc.disable()
    from engine.process import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
