"""Counts what a step would launch on a device, where there is none: tensor operations that compute,
and kernels.

Kernels run in Triton's interpreter, whose own tensor operations do not count.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tests.wrong import instead

# They give another view of a tensor, or memory without numbers.
_FREE = {
    *(
        "view",
        "_unsafe_view",
        "numpy_T",
        "expand",
        "permute",
        "transpose",
        "t",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
    ),
    *("split", "split_with_sizes", "unbind", "as_strided", "detach", "detach_", "alias", "lift_fresh", "unfold"),
    *("empty", "new_empty", "empty_like", "empty_strided", "reshape", "flatten", "resolve_conj", "resolve_neg"),
}


class _Counting(TorchDispatchMode):
    def __init__(self, launches: Counter[str]) -> None:
        super().__init__()
        self.launches = launches
        self.counts = True

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = operation._schema.name.removeprefix("aten::")
        result = operation(*arguments, **(options or {}))
        is_nothing = isinstance(result, Tensor) and (
            result.numel() == 0 or (name == "to" and result.data_ptr() == arguments[0].data_ptr())
        )
        if self.counts and name not in _FREE and not is_nothing:
            self.launches[name] += 1
        return result


@contextlib.contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Count launches by name."""
    launches: Counter[str] = Counter()
    mode = _Counting(launches)

    def launch(run: Any, kernel: GridExecutor, *operands: Any, **constants: Any) -> None:
        launches[kernel.fn.__name__] += 1
        mode.counts = False
        run(kernel, *operands, **constants)
        mode.counts = True

    with instead(GridExecutor, "__call__", launch), mode:
        yield launches
