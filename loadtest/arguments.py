"""Parser of command lines that suggests a flag for an unknown one, and of lists of numbers."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any


def integers(text: str) -> list[int]:
    """Parse comma-separated whole numbers from 1 on."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError("must be whole numbers from 1 on")
    return values


def numbers(text: str) -> list[float]:
    """Parse comma-separated numbers from 0 on."""
    values = [float(part) for part in text.split(",")]
    if not min(values) >= 0:
        raise argparse.ArgumentTypeError("must be numbers from 0 on")
    return values


class Parser(argparse.ArgumentParser):
    """Argument parser that accepts full names only, and suggests one for an unknown flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; end with exit code 2 if a flag is unknown."""
        found, rest = super().parse_known_args(args, namespace)
        if unknown := next((word.partition("=")[0] for word in rest if word.startswith("--")), None):
            close = difflib.get_close_matches(unknown, re.findall(r"--[a-z][a-z-]*", self.format_help()), n=1)
            self.error(f"unknown flag {unknown}" + (f" (did you mean {close[0]}?)" if close else ""))
        return found, rest
