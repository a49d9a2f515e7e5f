"""Compiles the CPU kernels that most tests use, once for all workers of `make test`.

Only the first run after a kernel has changed takes long (most of a minute of a core).
"""

from __future__ import annotations

from engine.request import Speculation
from tests.engine import tiny


def main() -> None:
    """Run steps of float32 models: plain, greedy, filtered ones, and ones with drafts alone."""
    target = tiny.llama(1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02))
    chains = Speculation(rule="bv_race", num_drafts=2, draft_length=2)
    filters = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01}
    for speculation, sampling in ((Speculation(), {}), (chains, {"temperature": 0.0}), (chains, {}), (chains, filters)):
        tiny.run(engine, [tiny.request("0", [1, 2, 3], speculation, max_tokens=6, **{"temperature": 1.0, **sampling})])


if __name__ == "__main__":
    main()
