"""A CUDA device that is not there: operations on it are checked, and compute nothing.

Tensors of the device are torch's fake tensors, which have a device, a type, a shape and strides,
but no numbers. Tensors of the host are real. Every operation that reaches torch's dispatcher is
looked at before it runs, and the launch of every Triton kernel is replaced by a check of its
arguments. What the host reads from the device is zero.

While work is captured, whatever CUDA does not allow there raises `NotOnADevice`,
with the operation's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from engine.cuda.recorded.recorder import WAITS
from tests.kernel_arguments import check_launch
from tests.wrong import instead

DEVICE = torch.device("cuda", 0)
_CUDA, _META, _NUM_KINDS = 1, 14, 20
"""Places in c10's table of device guards."""
_FROM_DATA = ("nonzero", "masked_select", "_unique", "unique", "bincount", "repeat_interleave.Tensor")
"""Operations that the host waits for, because the size of their result depends on numbers."""

_FAKE = FakeTensorMode(allow_non_fake_inputs=True)
"""One for all devices: the engine caches some tensors by their device."""

_MOST_KNOWN = 1 << 12
"""Most numbers of a copy to the device that are kept, for when the host reads them again."""


class NotOnADevice(Exception):
    """An operation that a CUDA device does not allow, or not while work is captured."""


class DryDevice(TorchDispatchMode):
    """Checks operations; counts what the host waits for and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        """Waits, copies, replays, and launches of kernels by name.

        `read` (the host waits), `wait` (an event), `pinned copy` and `pageable copy`
        to the device, `replay`.
        """
        self.places: Counter[str] = Counter()
        """Lines at which the host has waited."""
        self.number_of: Callable[[Tensor], Tensor] = _known_or_zero
        """Numbers that the host finds in a tensor of the device."""
        self.is_capturing = False
        self.may_wait = True
        self.num_captured = 0
        """Operations and kernels that were captured."""

    # -- what engines use of a device --------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return some free memory."""
        return 1 << 40

    @contextlib.contextmanager
    def recorder(self) -> Iterator[Callable[[Callable[[], None]], Any]]:
        """Yield a function that runs work, and then captures it."""

        def record(work: Callable[[], None]) -> DryDevice:
            work()
            with self.capturing():
                work()
            return self

        yield record

    @contextlib.contextmanager
    def without_waits(self) -> Iterator[None]:
        """Raise RuntimeError, as torch does, if the host waits while its context is open."""
        self.may_wait = False
        try:
            yield
        finally:
            self.may_wait = True

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Allow meanwhile only what a graph can be captured of."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def replay(self) -> None:
        """Count a replay; it changes no numbers."""
        self.counts["replay"] += 1

    def launch(self, _run: Any, kernel: GridExecutor, *operands: Any, **constants: Any) -> None:
        """Check the arguments of a kernel, in place of its launch."""
        fault = check_launch(kernel.fn, kernel.grid, operands, constants, DEVICE)
        if fault:
            raise NotOnADevice(f"kernel {kernel.fn.__name__}: {fault}")
        _forget((operands, constants))
        self.counts[kernel.fn.__name__] += 1
        self.num_captured += self.is_capturing

    # -- operations --------------------------------------------------------------------------------

    def __torch_dispatch__(self, operation: Any, types: Any, operands: Any = (), options: Any = None) -> Any:
        options = options or {}
        if operation.namespace == "prim":  # asks for a property
            return operation(*operands, **options)
        tensors = [value for value in tree_leaves((operands, options)) if isinstance(value, Tensor)]
        on_device = [value for value in tensors if isinstance(value, FakeTensor)]
        wanted = [value for value in tree_leaves((operands, options)) if isinstance(value, torch.device)]
        if not on_device and all(value.type != "cuda" for value in wanted):
            return operation(*operands, **options)
        self.num_captured += self.is_capturing
        name = str(operation).removeprefix("aten.").removesuffix(".default")
        base = name.split(".")[0]
        _forget(_written_by(operation, operands, options))
        if base in ("_to_copy", "copy_"):
            return self._copy(name, operation, operands, options)
        if base == "_local_scalar_dense":
            self._read(name)
            return self.number_of(operands[0]).item()
        if base == "equal":
            self._read(name)
            return True
        if name.startswith(_FROM_DATA):
            self._read(name)
        if base == "_grouped_mm" and operands[0].dtype != torch.bfloat16:
            return self._grouped(name, operation, operands, options)
        if base == "nonzero":
            with _FAKE:
                return torch.zeros((1, operands[0].dim()), dtype=torch.int64, device=DEVICE)
        with self:
            result = operation.decompose(*operands, **options)
        if result is not NotImplemented:
            return result
        if torch.Tag.nondeterministic_seeded in operation.tags and "attention" not in name:
            raise NotOnADevice(f"{name}: a random generator")
        if base in ("index", "index_put", "index_put_"):
            operands = self._with_places(name, operands)
            tensors = [value for value in tree_leaves(operands) if isinstance(value, Tensor)]
        self._check_devices(name, base, tensors, on_device)
        with _FAKE:
            result = operation(*operands, **options)
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type != "cuda":
                raise NotOnADevice(f"{name}: its result is on {value.device}")
        return result

    def pinned(self, source: Tensor) -> Tensor:
        """Return a copy in memory that counts as pinned."""
        if self.is_capturing:
            raise NotOnADevice("pin_memory: memory is pinned while work is captured")
        copy = source.clone()
        copy.is_pinned_here = True  # type: ignore[attr-defined]
        return copy

    def listed(self, source: Tensor) -> Any:
        """Return zeros in place of a tensor's numbers."""
        if source.numel():
            self._read("tolist")
        return self.number_of(source).tolist()

    def _copy(self, name: str, operation: Any, operands: Any, options: Any) -> Any:
        if name == "copy_":
            to, source = operands[:2]
            to_device, same = to.device, to
        else:
            source, same = operands[0], None
            to_device = torch.device(options.get("device") or source.device)
        if to_device.type == "cpu":
            self._read(name)
            if same is not None:
                return same.zero_()
            return self.number_of(source).to(options.get("dtype") or source.dtype)
        is_new = name != "copy_" and source.device.type == "cpu"
        if source.device.type == "cpu":
            is_async = options.get("non_blocking") or (name == "copy_" and len(operands) > 2 and operands[2])
            self._copy_in(name, getattr(source, "is_pinned_here", False), bool(is_async))
        with _FAKE:
            result = operation(*operands, **options)
        if is_new and source.numel() <= _MOST_KNOWN:
            result.known = source.to(result.dtype)
        return result

    def _copy_in(self, name: str, is_pinned: bool, is_async: bool) -> None:
        """Note a copy to the device."""
        kind = "blocking copy" if not is_async else "pinned copy" if is_pinned else "pageable copy"
        if self.is_capturing:
            raise NotOnADevice(f"{name}: a {kind} from the host")
        if is_async:
            self.counts[kind] += 1
        else:
            self._wait(name, kind)

    def _read(self, name: str) -> None:
        if self.is_capturing:
            raise NotOnADevice(f"{name}: the host waits for the device")
        self._wait(name, "read")

    def _wait(self, name: str, kind: str) -> None:
        """Note that the host waits."""
        if not self.may_wait:
            raise RuntimeError(f"called a {WAITS}: {name}")
        self.counts[kind] += 1
        self.places[f"{name}: {_place()}"] += 1

    def _grouped(self, name: str, operation: Any, operands: Any, options: Any) -> Tensor:
        """Multiply groups whose ends the host reads; fake tensors know bfloat16 alone."""
        self._read(name)
        rows, weights, *more = operands
        with _FAKE:
            product: Tensor = operation(rows.bfloat16(), weights.bfloat16(), *more, **options)
            return product.to(rows.dtype)

    def _with_places(self, name: str, operands: Any) -> Any:
        """Return an index's operands with the places that masks name, for which the host waits.

        A mask that gets one number of the host is filled without that.
        """
        of, indices, *values = operands
        masks = [index for index in indices if index is not None and index.dtype == torch.bool]
        if not masks or (len(masks) == 1 and values and values[0].dim() == 0 and values[0].device.type == "cpu"):
            return operands
        places: list[Tensor | None] = []
        with self:
            for index in indices:
                is_mask = index is not None and index.dtype == torch.bool
                places += index.nonzero().unbind(1) if is_mask else [index]
        return of, places, *values

    def _check_devices(self, name: str, base: str, tensors: list[Tensor], on_device: list[Tensor]) -> None:
        mixed = [one for one in tensors if one.device.type == "cpu"]
        if not mixed:
            return
        if base.startswith(("index", "_unsafe_index", "_index_put")):
            self._copy_in(name, False, False)
        elif any(one.dim() for one in mixed):
            raise NotOnADevice(f"{name}: a tensor of the host among those of {on_device[0].device if on_device else 0}")


def _known_or_zero(tensor: Tensor) -> Tensor:
    """Return numbers that the host copied and nothing has written to; else zeros."""
    known: Tensor | None = getattr(tensor, "known", None)
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if known is None else known


def _written_by(operation: Any, operands: Any, options: Any) -> list[Any]:
    """Return the operands that an operation writes to."""
    arguments = enumerate(operation._schema.arguments)
    written = [(place, one.name) for place, one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return [operands[place] if place < len(operands) else options.get(name) for place, name in written]


def _forget(written: Any) -> None:
    """Let the host read zeros from tensors that a kernel or an operation may have written to."""
    for value in tree_leaves(written):
        if isinstance(value, FakeTensor):
            vars(value).pop("known", None)


def _place() -> str:
    """Return the innermost line of the project or of transformers that is running."""
    lines = [one for one in traceback.extract_stack() if "/engine/" in one.filename or "/transformers/" in one.filename]
    lines = [one for one in lines if "/tests/" not in one.filename]
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno} ({lines[-1].line})" if lines else "nowhere"


def _keep(weight: Tensor, other: Tensor) -> None:
    """Keep a module's weight; fake tensors cannot be swapped."""
    assert (weight.device, weight.dtype, weight.shape) == (other.device, other.dtype, other.shape)


class _Event:
    """In place of `torch.cuda.Event`."""

    def __init__(self, dry: DryDevice) -> None:
        self._dry = dry

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Whether the device has reached it: never, as soon after a step."""
        return False

    def synchronize(self) -> None:
        """Count a wait."""
        self._dry.counts["wait"] += 1


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Let CUDA tensors find a device guard in a torch without CUDA: that of meta tensors."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _NUM_KINDS).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


@contextlib.contextmanager
def dry_device() -> Iterator[DryDevice]:
    """Let there be a device `DEVICE`, temporarily."""
    dry = DryDevice()
    lifts = torch._C._only_lift_cpu_tensors()
    with (
        _guarded(),
        instead(GridExecutor, "__call__", dry.launch),
        patch.object(Tensor, "pin_memory", lambda source: dry.pinned(source)),
        patch.object(FakeTensor, "tolist", lambda source: dry.listed(source)),
        patch.object(torch.utils, "swap_tensors", _keep),
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(torch.cuda, "Event", lambda **_: _Event(dry)),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: dry.is_capturing),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132)),
    ):
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with dry:
                yield dry
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
