"""Vectors of the processor at hand, and the LLVM instructions that the loops over them share.

`block_products.py` and `dot_products.py` write their loops as LLVM instructions, because no
compiler keeps the sums of a loop over an array in registers.

Numba compiles kernels for this machine's processor alone, at a first start
(`compiler.cache_folder`). `LANES` and the constants below are constants of that code, so one source
serves AVX-512, AVX2, SSE and ARM, and there are no copies of it.
"""

# mypy: disable-error-code="no-any-unimported, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core.registry import cpu_target

FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Features that Numba compiles for: this processor's, or NUMBA_CPU_FEATURES."""
LANES = 16 if {"+avx512f", "+avx512bw"} <= set(FEATURES) else 8 if "+avx2" in FEATURES else 4
"""Numbers of a vector."""
VECTORS = 2
"""Vectors of a row's sums: each number of a row is used in this many multiplications."""
BLOCK = VECTORS * LANES
"""B, columns of a block."""
_HAS_FEW_REGISTERS = LANES < 16 and any(feature.startswith(("+sse", "+avx")) for feature in FEATURES)
MOST_ROWS = 6 if _HAS_FEW_REGISTERS else 12
"""Rows whose sums fit the registers with a block's vectors.

SSE and AVX2 have 16 registers, AVX-512 and ARM have 32.
"""
MOST_BLOCKS = 4
"""Blocks that few rows process at once: sums of a single block would wait for each other."""
GROUP = 32
"""Numbers of a column of weights in few bits that share a scale."""
LINE = 64
"""Bytes of a cache line; weights are aligned to it."""

FLOAT = ir.FloatType()
LONG = ir.IntType(64)
INT = ir.IntType(32)
SHORT = ir.IntType(16)
BYTE = ir.IntType(8)
VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)

Sums = list[list[Any]]
"""Vectors of sums, of each row and each vector of its columns."""


def long(value: int) -> Any:
    """Return a constant of 64 bits."""
    return ir.Constant(LONG, value)


def ints(value: int) -> Any:
    """Return a vector of one integer of 32 bits."""
    return ir.Constant(INTS, [value] * LANES)


def blocks_at_once(num_rows: int) -> int:
    """Return the blocks that this many rows process at once, by registers."""
    return max(1, MOST_BLOCKS // num_rows)


class Emitter:
    """Emits instructions at the position of a builder."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def load(self, kind: Any, address: Any, offset: Any = 0, align: int = 1) -> Any:
        """Load a value of an LLVM type, at an address plus bytes."""
        return self.builder.load(self._pointer(kind, address, offset), align=align)

    def store(self, value: Any, address: Any, offset: Any = 0) -> None:
        """Store a vector of float32 numbers or of integers, at an address plus bytes."""
        self.builder.store(value, self._pointer(value.type, address, offset), align=1)

    def _pointer(self, kind: Any, address: Any, offset: Any) -> Any:
        place = self.builder.add(address, long(offset) if isinstance(offset, int) else offset)
        return self.builder.inttoptr(place, kind.as_pointer())

    def broadcast(self, value: Any) -> Any:
        """Return a vector of one value."""
        vector = ir.VectorType(value.type, LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        alone = self.builder.insert_element(undefined, value, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(alone, undefined, ir.Constant(INTS, [0] * LANES))

    def call(self, name: str, result: Any, *operands: Any) -> Any:
        """Call an operation of LLVM by its name."""
        module = self.builder.module
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.builder.call(function, operands)

    def prefetch(self, address: Any) -> None:
        """Prefetch the cache line at an address."""
        hints = [ir.Constant(INT, hint) for hint in (0, 3, 1)]  # for reading, high locality, data
        self.call("llvm.prefetch.p0", ir.VoidType(), self.builder.inttoptr(address, BYTE.as_pointer()), *hints)

    def multiply_add(self, first: Any, second: Any, added: Any) -> Any:
        """Return first * second + added, rounded once if the processor can."""
        product = self.builder.fmul(first, second, flags=["contract"])
        return self.builder.fadd(product, added, flags=["contract"])

    def load_columns(self, address: Any, num_blocks: int) -> list[Any]:
        """Load float32 numbers of all columns of consecutive blocks."""
        return [self.load(VECTOR, address, 4 * LANES * vector, 4) for vector in range(num_blocks * VECTORS)]

    def store_rows(self, sums: Sums, address: Any, stride: Any) -> None:
        """Store the sums of rows, which are `stride` bytes apart."""
        for number, row_sums in enumerate(sums):
            place = self.builder.add(address, self.builder.mul(stride, long(number)))
            for vector, one in enumerate(row_sums):
                self.store(one, place, 4 * LANES * vector)

    def repeat(self, start: Any, stop: Any, width: int, sums: Sums, body: Callable[[Any, Sums], Sums]) -> Sums:
        """Return the sums after `body(step, sums)` for one step or more."""
        builder = self.builder
        before = builder.block
        loop = builder.append_basic_block("loop")
        done = builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(LONG)
        olds = [[builder.phi(first.type) for first in row_sums] for row_sums in sums]
        news = body(step, olds)
        following = builder.add(step, long(width))
        step.add_incoming(start, before)
        step.add_incoming(following, builder.block)
        for old_row, first_row, new_row in zip(olds, sums, news, strict=True):
            for old, first, new in zip(old_row, first_row, new_row, strict=True):
                old.add_incoming(first, before)
                old.add_incoming(new, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, done)
        builder.position_at_end(done)
        return news


def switch_by_size(
    builder: ir.IRBuilder, num_rows: Any, num_blocks: Any, at_once: Sequence[int], make: Callable[[int, int], Any]
) -> None:
    """Emit an unrolled loop for each pair (rows, blocks), and a switch among the loops.

    at_once: the number of blocks that 1, 2, ... rows process at once; rows also get a loop over one
    block. make: returns the loop of a pair, whose `build` emits it.
    """
    sizes = {(rows, blocks) for rows, most in enumerate(at_once, 1) for blocks in (1, most)}
    after = builder.append_basic_block("after")
    switch = builder.switch(builder.add(builder.mul(num_rows, long(MOST_BLOCKS + 1)), num_blocks), after)
    for rows, blocks in sorted(sizes):
        block = builder.append_basic_block(f"rows{rows}_blocks{blocks}")
        switch.add_case(long(rows * (MOST_BLOCKS + 1) + blocks), block)
        builder.position_at_end(block)
        make(rows, blocks).build(after)
    builder.position_at_end(after)
