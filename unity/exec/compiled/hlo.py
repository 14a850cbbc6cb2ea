"""Collectives and memory of a compiled program, read from the compiled HLO.

    compiled = jax.jit(step).lower(params, batch).compile()
    for collective in collectives(compiled.as_text()):
        print(collective.count, collective.kind, collective.nbytes, collective.source)
    print(memory(compiled))

A plan's predictions are checked against these figures, so they are read from the program that will run, and from nothing else. Two
facts matter for a comparison. XLA may widen an element type (its CPU backend reduces bf16 as f32), so elements are reported beside
bytes. And it may combine several collectives into one: `parts` is their number, and sizes are sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from unity.exec.compiled.hlo_text import Computation, Groups, HloInstruction, HloModule, arrays, groups, nbytes, parse, split
from unity.exec.compiled.trip_counts import loop_part, trip_count

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# Instructions whose computations run as part of the program; a reduction's `to_apply` is only a scalar function.
CALLERS = ("call", "fusion", "conditional", "async-start", "custom-call")


@dataclass(frozen=True)
class CompiledCollective:
    """One collective instruction of a compiled program, as one device sees it.

    kind: one of `KINDS`, XLA's names.
    dtype: XLA's name of the element type as it travels ("f32"); "bf16+f32" where XLA combined several.
    elements: of the full side on one device: the buffer of an all-reduce, all-to-all or permute, the output of an
        all-gather, the input of a reduce-scatter; summed over the operands of a combined one.
    nbytes: bytes of those elements.
    groups: devices that communicate with each other, by position in the program's mesh; of a permute, the
        (source, target) pairs.
    count: how often it runs: the product of the trip counts of the loops around it. A branch of a conditional counts as
        if it were taken.
    trip_unknown: whether the text has no trip count of one of those loops; that loop counts as 1.
    source: the user's "file.py:42", or "" if the program does not tell.
    op_name: JAX's path of the operation, such as "jit(step)/shard_map/psum".
    parts: the number of collectives of the original program that XLA combined into this one.
    """

    kind: str
    dtype: str
    elements: int
    nbytes: int
    groups: Groups
    count: int
    trip_unknown: bool
    source: str
    op_name: str
    parts: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one device while the program runs, by XLA's buffer assignment.

    `total` is arguments + outputs + temporaries - aliased: an aliased (donated) output uses its argument's buffer.
    XLA's own `peak_memory_in_bytes` is not used, because on CPUs it leaves the temporaries out. The program's code, and
    buffers that were offloaded to the host, are not counted.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

    @property
    def total(self) -> int:
        """Bytes that the program needs."""
        return self.arguments + self.outputs + self.temporaries - self.aliased


class HasMemoryAnalysis(Protocol):
    """The part of `jax.stages.Compiled` that `memory` needs."""

    def memory_analysis(self) -> Any:
        """Return the backend's statistics, or None if it reports none."""
        ...


def collectives(text: str) -> list[CompiledCollective]:
    """Return every collective of a compiled program, in the order of execution; one inside a loop once, with its `count`.

    Point-to-point `send` and `recv` are not collectives and are not listed.

    Args:
        text: `jax.jit(f).lower(...).compile().as_text()`.

    Raises:
        ValueError: the text is not compiled HLO.
    """
    module = parse(text)
    return list(_collectives(module, module.entry, 1, trip_unknown=False))


def total_bytes(found: Iterable[CompiledCollective]) -> dict[str, int]:
    """Return the bytes by kind, repetitions included: the sum of count * nbytes."""
    total: Counter[str] = Counter()
    for collective in found:
        total[collective.kind] += collective.count * collective.nbytes
    return dict(total)


def memory(compiled: HasMemoryAnalysis) -> Memory:
    """Return the memory of a compiled program (`jax.jit(f).lower(...).compile()`), in bytes per device.

    Raises:
        NotImplementedError: the backend does not report it.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise NotImplementedError(
            "this backend reports no memory (compiled.memory_analysis() is None): compile for CPU, GPU or TPU instead"
        )
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
    )


def _collectives(module: HloModule, computation: Computation, count: int, *, trip_unknown: bool) -> Iterator[CompiledCollective]:
    """Yield the collectives of a computation that runs `count` times, and of all computations that it calls."""
    for instruction in computation.instructions.values():
        # of an asynchronous pair, the start counts: only it names the operands
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            yield _collective(module, computation, instruction, kind, count, trip_unknown)
        elif instruction.opcode == "while":
            trips = trip_count(module, computation, instruction)
            condition, body = (module.computations[loop_part(instruction, part)] for part in ("condition", "body"))
            unknown = trip_unknown or trips is None
            # the condition is evaluated once more than the body runs
            rounds = (1, 1) if trips is None else (trips + 1, trips)
            yield from _collectives(module, condition, count * rounds[0], trip_unknown=unknown)
            yield from _collectives(module, body, count * rounds[1], trip_unknown=unknown)
        elif instruction.opcode in CALLERS:
            for callee in instruction.callees():
                yield from _collectives(module, module.computations[callee], count, trip_unknown=trip_unknown)


def _collective(
    module: HloModule, computation: Computation, instruction: HloInstruction, kind: str, count: int, trip_unknown: bool
) -> CompiledCollective:
    full = arrays(_full_side(computation, instruction, kind))
    # an all-to-all has one operand for each device: pieces of one tensor, not several tensors that XLA combined
    one_tensor = kind in ("all-to-all", "ragged-all-to-all")
    return CompiledCollective(
        kind=kind,
        dtype="+".join(sorted({dtype for dtype, _ in full})),
        elements=sum(elements for _, elements in full),
        nbytes=sum(nbytes(dtype, elements) for dtype, elements in full),
        groups=groups(instruction, module.devices),
        count=count,
        trip_unknown=trip_unknown,
        source=module.source(instruction),
        op_name=instruction.op_name,
        parts=1 if one_tensor else len(instruction.operands),
    )


def _full_side(computation: Computation, instruction: HloInstruction, kind: str) -> str:
    """Return the type, or types, of the side of a collective that has all of the data."""
    if kind == "all-gather":
        if instruction.opcode == "all-gather-start":  # (operands, results, ...)
            return split(instruction.type[1:-1])[1]
        return instruction.type
    # the input of a ragged all-to-all is its first operand; its output and offsets follow
    operands = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
    return ", ".join(computation.instructions[operand].type for operand in operands)
