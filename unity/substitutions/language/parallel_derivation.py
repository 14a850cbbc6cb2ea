"""A parallel graph as the rules that lead to it from the serial one, as data.

Every operator has one rule along every axis; between operators stand the changes of type. What no rule decides is how arguments,
and what loops carry, are stored. Equal rows are written once, as the layers of a model are; reading a file runs no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from unity.base.errors import PlanError
from unity.pcg.types.parallel_type import State, Type

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """A parallelization of an operator along one axis: its operands' and results' states.

    `rule` and `hash` name a rule of the library that says so. Without one the operator table does.
    """

    operator: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    rule: str = ""
    hash: str = ""

    def __str__(self) -> str:
        ends = (" × ".join(map(str, states)) or "nothing" for states in (self.operands, self.results))
        return f"{self.operator}: {' → '.join(ends)}"


@dataclass(frozen=True)
class Change:
    """A parallelization operator, and the type after it. `again`: it is done once more in the backward pass."""

    kind: str
    after: Type
    again: bool = False


Changes = tuple[Change, ...]


@dataclass(frozen=True)
class Row:
    """What was done at one node of the serial graph.

    `splits` has a rule for each axis, of operators; `placed` the results' types, of arguments and loops. `changes` has what each
    operand goes through; `again` says what of the operator is computed again (`pcg.again`).
    """

    splits: tuple[Split, ...] = ()
    placed: tuple[Type, ...] = ()
    changes: tuple[Changes, ...] = ()
    again: int = 0


@dataclass(frozen=True)
class Parallelization:
    """A row for each node of the serial graph, in the order of its walk, and what the outputs of every graph go through: the whole
    one's first, then those inside."""

    rows: tuple[Row, ...]
    outputs: tuple[tuple[Changes, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        types, splits, changes, rows = _Numbers(), _Numbers(), _Numbers(), _Numbers()

        def through(found: Changes) -> int:
            return changes.of(tuple((c.kind, types.of(c.after), int(c.again)) for c in found))

        def row(r: Row) -> int:
            placed = tuple(map(types.of, r.placed))
            return rows.of((tuple(map(splits.of, r.splits)), placed, tuple(map(through, r.changes)), r.again))

        nodes = [row(r) for r in self.rows]
        outputs = [[through(c) for c in ends] for ends in self.outputs]
        return {
            "types": [_shown(t) for t in types.every],
            "splits": [[s.operator, _shown(s.operands), _shown(s.results), s.rule, s.hash] for s in splits.every],
            "changes": changes.every,
            "rows": rows.every,
            "nodes": nodes,
            "outputs": outputs,
        }

    @classmethod
    def from_json(cls, data: Any) -> Parallelization:
        """What `to_json` gave. Raises PlanError if it is something else."""
        try:
            types = [_states(t) for t in data["types"]]
            splits = [Split(str(o), _states(a), _states(b), str(rule), str(digest)) for o, a, b, rule, digest in data["splits"]]
            changes = [tuple(Change(str(kind), types[t], bool(again)) for kind, t, again in c) for c in data["changes"]]
            pick = _picked
            rows = [Row(pick(splits, s), pick(types, t), pick(changes, c), int(again)) for s, t, c, again in data["rows"]]
            return cls(pick(rows, data["nodes"]), tuple(pick(changes, ends) for ends in data["outputs"]))
        except (KeyError, IndexError, TypeError, ValueError) as problem:
            raise PlanError(f"its parallelization is missing or damaged: {type(problem).__name__}: {problem}") from None


class _Numbers:
    """Numbers for things by first appearance: equal ones have one."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))

    @property
    def every(self) -> list:
        return list(self.numbers)


def _picked(every: Sequence[T], numbers: Sequence[int]) -> tuple[T, ...]:
    if any(n < 0 for n in numbers):
        raise ValueError("a number below zero")
    return tuple(every[n] for n in numbers)


def _shown(states: Sequence[State]) -> str:
    return " ".join(s.kind if s.kind != "P" else f"P{s.dim}" + (f"/{s.outer}" if s.outer > 1 else "") for s in states)


def _states(text: str) -> tuple[State, ...]:
    return tuple(map(_state, text.split()))


def _state(text: str) -> State:
    if text in ("U", "R", "S"):
        return State(text)
    if not text.startswith("P"):
        raise ValueError(f"{text!r} is no state")
    dim, _, outer = text.removeprefix("P").partition("/")
    return State("P", int(dim), int(outer or 1))
