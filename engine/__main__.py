"""`python -m engine`: the engine process (`process.py`).

The garbage collector is off while modules are imported and the model is loaded, and later ignores
the objects that were created then. It would otherwise scan them repeatedly.
"""

from __future__ import annotations

import gc
import sys


def main() -> int:
    gc.disable()
    from engine.process import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
