"""The derivation of a parallel graph from the serial one, as data.

Every operator has one rule along every axis, and changes of type stand between operators. The types of arguments and of loops'
carries follow from no rule, and are recorded as they are. Equal rows, as of a model's layers, are written once. Reading a file
runs no code.
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
    """The states of an operator's operands and results along one axis.

    `rule` and `hash` name the library's rule that justifies them. If they are empty, the operator table does.
    """

    operator: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    rule: str = ""
    hash: str = ""

    def __str__(self) -> str:
        sides = (" × ".join(map(str, states)) or "nothing" for states in (self.operands, self.results))
        return f"{self.operator}: {' → '.join(sides)}"


@dataclass(frozen=True)
class Change:
    """A parallelization operator, and the type after it. With `again`, the backward pass repeats it."""

    kind: str
    after: Type
    again: bool = False


Changes = tuple[Change, ...]


@dataclass(frozen=True)
class Row:
    """The parallelization of one node of the serial graph.

    Attributes:
        splits: the rule along each axis, of an operator.
        placed: the results' types, of an argument or a loop.
        changes: the changes of type that each operand passes through.
        again: how much of the operator the backward pass recomputes (`unity.pcg.analysis.rematerialization`).
    """

    splits: tuple[Split, ...] = ()
    placed: tuple[Type, ...] = ()
    changes: tuple[Changes, ...] = ()
    again: int = 0


@dataclass(frozen=True)
class Parallelization:
    """The rules that turn a serial graph into a parallel one.

    Attributes:
        rows: a row for each node of the serial graph, in the order of its walk.
        outputs: the changes of type that the outputs of every graph pass through: of the whole graph first, then of nested ones.
    """

    rows: tuple[Row, ...]
    outputs: tuple[tuple[Changes, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON data in which equal types, splits, changes and rows are shared."""
        types, splits, changes, rows = _Numbers(), _Numbers(), _Numbers(), _Numbers()

        def through(passed: Changes) -> int:
            return changes.of(tuple((c.kind, types.of(c.after), int(c.again)) for c in passed))

        def row(r: Row) -> int:
            placed = tuple(map(types.of, r.placed))
            return rows.of((tuple(map(splits.of, r.splits)), placed, tuple(map(through, r.changes)), r.again))

        nodes = [row(r) for r in self.rows]
        outputs = [[through(c) for c in of_graph] for of_graph in self.outputs]
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
        """Return the parallelization that `to_json` wrote. Raises PlanError for any other data."""
        try:
            types = [_states(t) for t in data["types"]]
            splits = [Split(str(o), _states(a), _states(b), str(rule), str(digest)) for o, a, b, rule, digest in data["splits"]]
            changes = [tuple(Change(str(kind), types[t], bool(again)) for kind, t, again in c) for c in data["changes"]]
            pick = _picked
            rows = [Row(pick(splits, s), pick(types, t), pick(changes, c), int(again)) for s, t, c, again in data["rows"]]
            return cls(pick(rows, data["nodes"]), tuple(pick(changes, of_graph) for of_graph in data["outputs"]))
        except (KeyError, IndexError, TypeError, ValueError) as problem:
            raise PlanError(f"its parallelization is missing or damaged: {type(problem).__name__}: {problem}") from None


class _Numbers:
    """Numbers of distinct values, in the order of first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

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
