"""`polydraft check MODEL`: whether and how a model is served, without reading its weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """Return the parser of `polydraft check`."""
    result = argparse.ArgumentParser(
        prog="polydraft check",
        description="Tell from a model's configuration or a GGUF file's header whether it is served, by which decoder, "
        "and what fits.",
    )
    result.add_argument("model", metavar="MODEL", help="a folder with config.json, a GGUF file, or a name on the hub")
    result.add_argument("--revision", help="branch, tag or commit on the hub")
    result.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to serve on")
    return result


def main(arguments: Sequence[str]) -> int:
    """Print what is known about a model; return 0 if it is served, else 2."""
    options = parser().parse_args(arguments)
    from engine.errors import PolydraftError
    from engine.start.check import describe  # loads torch, which completion does not need

    try:
        for line in describe(options.model, options.revision, options.device):
            print(line)
    except PolydraftError as error:
        print(f"not served: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
