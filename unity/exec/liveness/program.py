"""A step as a compiler sees it: flat operations on local pieces, equal ones made once and dead ones dropped.

Kinds are XLA's names of instructions (`dot`, `all-reduce`) where the rules of the passes that follow speak of them, or JAX's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from unity.pcg.ir.program import Tensor

UNIQUE = frozenset({"barrier", "while", "rng", "input"})  # never made one with an equal one


@dataclass(frozen=True)
class Origin:
    """Where an operation came from: the operator's label, and whether it is part of the backward pass or computed again for it."""

    label: str = ""
    backward: bool = False
    again: bool = False


NOWHERE = Origin()


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. Values are integers, as in a `Body`. `inside`: the program of a loop's step; `place`: where it was traced."""

    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: tuple[Any, ...] = ()
    origin: Origin = NOWHERE
    inside: Program | None = None
    place: int = 0


@dataclass(frozen=True, eq=False)
class Program:
    """Operations in an order in which they could run, what goes in and what comes out."""

    ops: tuple[Op, ...]
    tensors: Sequence[Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @cached_property
    def maker(self) -> Mapping[int, int]:
        """The operation that makes a value, by number; inputs are made by none."""
        return {v: i for i, op in enumerate(self.ops) for v in op.results}

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """The operations that read a value, by number, each once, in order."""
        found: dict[int, dict[int, None]] = {}
        for i, op in enumerate(self.ops):
            for v in op.operands:
                found.setdefault(v, {})[i] = None
        return {v: tuple(ops) for v, ops in found.items()}


@dataclass
class Builder:
    """Operations as they are added."""

    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    made: dict[int, Op] = field(default_factory=dict)
    seen: dict[tuple, tuple[int, ...]] = field(default_factory=dict)

    def new(self, tensor: Tensor) -> int:
        """A value that nothing here makes."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def emit(
        self,
        kind: str,
        operands: Iterable[int],
        tensors: Iterable[Tensor],
        params: tuple[Any, ...] = (),
        origin: Origin = NOWHERE,
        inside: Program | None = None,
    ) -> tuple[int, ...]:
        """The results of an operation: of an equal earlier one, if there is one (XLA's HloCSE)."""
        operands, tensors = tuple(operands), tuple(tensors)
        key = (kind, operands, tensors, params)
        if kind not in UNIQUE and key in self.seen:
            return self.seen[key]
        results = tuple(self.new(t) for t in tensors)
        op = Op(kind, operands, results, params, origin, inside, len(self.ops))
        self.ops.append(op)
        self.made.update(dict.fromkeys(results, op))
        self.seen[key] = results
        return results

    def program(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
        """What outputs need, after its operands, the first first: XLA's passes go in this order (MakeInstructionPostOrder)."""
        waiting, order = [self.made[v] for v in reversed(outputs) if v in self.made], []
        met: set[Op] = set()
        done: set[Op] = set()
        while waiting:
            op = waiting[-1]
            if op in met:
                waiting.pop()
                if op not in done:
                    done.add(op)
                    order.append(op)
                continue
            met.add(op)
            waiting += [made for v in reversed(op.operands) if (made := self.made.get(v)) is not None and made not in met]
        return Program(tuple(order), self.tensors, tuple(inputs), tuple(outputs))
