"""Bytes on one device of the values inside operators, computed once for equal operators with equal types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache

from unity.pcg.analysis.residuals import Residuals, residuals
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.halos import extended
from unity.pcg.propagation.placement import moved_waists, placing
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import Type


class Inner:
    """The inner values of an operator whose operands and results have given types.

    Attributes:
        extended: For each operand, the bytes of its copy with halos; 0 without a halo.
    """

    def __init__(self, body: Body, operands: tuple[Type, ...], results: tuple[Type, ...], axes: tuple[Axis, ...]) -> None:
        self.body = body
        placement = self.placement = placing(body, operands, results, len(axes))
        self.along = [(axis.size, s) for axis, s in zip(axes, placement, strict=True) if s is not None]
        elements = extended(body, placement, axes)
        self.extended = tuple(elements.get(v, 0) * body.tensors[v].itemsize for v in body.inputs)
        self.cache: dict[tuple[tuple[bool, ...], bool, bool], tuple[Residuals, tuple[float, ...]]] = {}

    def local(self, variable: int, nbytes: float, produced: bool = False) -> float:
        """Return the bytes on one device of a value of `nbytes` that is partitioned like a variable.

        The variable's state is the one in which it is read, or the one in which it is `produced`.
        """
        for size, solution in self.along:
            if variable in solution.states:
                state = solution.states[variable] if produced else solution.seen(variable)
                nbytes /= size if state.kind == "P" else 1
        return nbytes

    @cached_property
    def largest(self) -> float:
        """Bytes on one device of the largest inner value, not counting results of the last equation."""
        return self._largest(self.body.equations[:-1])

    @cached_property
    def largest_unfused(self) -> float:
        """Bytes on one device of the largest inner value that is not an elementwise function of others.

        A compiler for GPUs computes elementwise functions in the loop that reads them, and writes none to memory.
        """
        return self._largest(e for e in self.body.equations[:-1] if not (facts_of(e.name).recomputed or facts_of(e.name).pointwise))

    def _largest(self, equations: Iterable[Equation]) -> float:
        variables = (v for e in equations for v in e.results)
        return max((self.local(v, self.body.tensors[v].nbytes, produced=True) for v in variables), default=0.0)

    @cached_property
    def looked_up(self) -> float:
        """Bytes on one device of the values that gathers alone read from: the gradient of others is there to scatter into."""
        tables = self._tables - self._read_otherwise
        return sum(self.local(v, self.body.tensors[v].nbytes) for v in tables)

    @cached_property
    def adds_rows(self) -> bool:
        """Whether the backward pass adds rows to a gradient that is there, as others than a gather read what this reads from."""
        return bool(self._tables & self._read_otherwise)

    @cached_property
    def _tables(self) -> set[int]:
        tables = (e.operands[0] for e in self.body.equations if facts_of(e.name).looks_up)
        return {v for v in tables if isinstance(v, int) and self.body.tensors[v].floating}

    @cached_property
    def _read_otherwise(self) -> set[int]:
        readers = (e for e in self.body.equations if not facts_of(e.name).looks_up)
        return {a for e in readers for a in e.operands if isinstance(a, int)}

    def residuals(
        self, differentiated: tuple[bool, ...], stacked: bool, buffered: bool = False
    ) -> tuple[Residuals, tuple[float, ...]]:
        """Return the residuals of the operator, and the bytes on one device of each inner value among them."""
        key = differentiated, stacked, buffered
        if key not in self.cache:
            needed = residuals(self.body, *key)
            if any(differentiated):  # the backward pass does not move a value again
                moved = sorted(moved_waists(self.placement).difference(v for v, _ in needed.inner))
                needed = replace(needed, inner=(*needed.inner, *((v, self.body.tensors[v].nbytes) for v in moved)))
            self.cache[key] = needed, tuple(self.local(v, nbytes) for v, nbytes in needed.inner)
        return self.cache[key]


@lru_cache(maxsize=65536)
def inner_of(body: Body, operands: tuple[Type, ...], results: tuple[Type, ...], axes: tuple[Axis, ...]) -> Inner:
    """Return the inner values of an operator."""
    return Inner(body, operands, results, axes)
