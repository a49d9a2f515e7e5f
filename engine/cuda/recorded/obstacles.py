"""Finds what keeps steps from being recorded, and names it by its line of code."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.cuda.recorded.recorder import WAITS, Graphs

_ENGINE = Path(__file__).parents[2]
HOST_WAITS = (
    "decode steps are not recorded as CUDA graphs but launched operation by operation, because the "
    "host waits for the device in them: %s"
)


def find_wait(graphs: Graphs, parts: Iterable[Callable[[], None]]) -> str | None:
    """Return the first operation at which the host waits for the device; None if it never waits.

    Work with such an operation cannot be recorded, and CUDA would report it only in the middle of a
    recording. The code of some models reads on the host which expert a token goes to.
    """
    for work in parts:
        work()  # compiles kernels and fills caches, which may wait
        try:
            with graphs.without_waits():
                work()
        except RuntimeError as error:
            if WAITS not in str(error):
                raise
            return operation_of(error)
    return None


def first_error(error: BaseException) -> BaseException:
    """Return the error that came first: the end of a failed recording may fail as well."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def operation_of(error: BaseException) -> str:
    """Return the line that failed, of the project or of a model's code in transformers."""
    lines = []
    for line in traceback.extract_tb(error.__traceback__):
        path = Path(line.filename)
        if path.is_relative_to(_ENGINE) or "transformers" in path.parts:
            lines.append(line)
    if not lines:
        return "recording"
    last = lines[-1]
    return f"{Path(last.filename).name}, line {last.lineno} ({last.line})"
