"""The derivation of a parallel graph from the serial one, as data.

Every operator has one rule along every axis, and changes of type stand between operators. The types of arguments and of loops'
carries follow from no rule, and are recorded as they are. Equal rows, as of a model's layers, are written once. Reading a file
runs no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from unity.base.documents import Misfit, Natural, Record, at
from unity.pcg.ir.state_text import TypeText, type_of, type_text
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
        again: how much of the operator the backward pass recomputes (`unity.pcg.analysis.recomputation_marks`).
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

    def to_record(self) -> ParallelizationRecord:
        """Return the document's form, in which equal types, splits, changes and rows are shared."""
        types, splits, changes, rows = _Numbers(), _Numbers(), _Numbers(), _Numbers()

        def through(passed: Changes) -> int:
            return changes.of(tuple(ChangeRow(c.kind, types.of(type_text(c.after)), c.again) for c in passed))

        def split(s: Split) -> int:
            return splits.of(SplitRow(s.operator, type_text(s.operands), type_text(s.results), s.rule, s.hash))

        def row(r: Row) -> int:
            placed = tuple(types.of(type_text(t)) for t in r.placed)
            return rows.of(NodeRow(tuple(map(split, r.splits)), placed, tuple(map(through, r.changes)), r.again))

        nodes = tuple(map(row, self.rows))
        outputs = tuple(tuple(map(through, of_graph)) for of_graph in self.outputs)
        return ParallelizationRecord(types.every, splits.every, changes.every, rows.every, nodes, outputs)

    @classmethod
    def from_record(cls, record: ParallelizationRecord) -> Parallelization:
        """Return the parallelization that `to_record` converted. Raises Misfit if one part refers to what another lacks."""
        types = tuple(map(type_of, record.types))
        splits = [Split(s.operator, type_of(s.operands), type_of(s.results), s.rule, s.hash) for s in record.splits]
        with at(".changes"):
            afters = [_picked(types, [c.after for c in passed]) for passed in record.changes]
        pairs = [zip(passed, after, strict=True) for passed, after in zip(record.changes, afters, strict=True)]
        changes = [tuple(Change(c.kind, t, c.again) for c, t in passed) for passed in pairs]
        with at(".rows"):
            rows = [
                Row(_picked(splits, r.splits), _picked(types, r.placed), _picked(changes, r.changes), r.again) for r in record.rows
            ]
        with at(".nodes"):
            nodes = _picked(rows, record.nodes)
        with at(".outputs"):
            return cls(nodes, tuple(_picked(changes, of_graph) for of_graph in record.outputs))


class SplitRow(Record, array_like=True):
    """A `Split`."""

    operator: str
    operands: TypeText
    results: TypeText
    rule: str
    hash: str


class ChangeRow(Record, array_like=True):
    """A `Change`, with the number of its type."""

    kind: str
    after: Natural
    again: bool


class NodeRow(Record, array_like=True):
    """A `Row`, with the numbers of its splits, types and changes."""

    splits: tuple[Natural, ...]
    placed: tuple[Natural, ...]
    changes: tuple[Natural, ...]
    again: Annotated[int, Meta(ge=0, le=2)]


class ParallelizationRecord(Record):
    """A `Parallelization` in a document: tables of distinct values, and the numbers of the nodes' rows."""

    types: tuple[TypeText, ...]
    splits: tuple[SplitRow, ...]
    changes: tuple[tuple[ChangeRow, ...], ...]
    rows: tuple[NodeRow, ...]
    nodes: tuple[Natural, ...]
    outputs: tuple[tuple[Natural, ...], ...]


class _Numbers:
    """Numbers of distinct values, in the order of first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def every(self) -> tuple[Any, ...]:
        return tuple(self.numbers)


def _picked(every: Sequence[T], numbers: Sequence[int]) -> tuple[T, ...]:
    """Return the values of these numbers. Raises Misfit if a number is too large."""
    if numbers and max(numbers) >= len(every):
        raise Misfit(f"there is no number {max(numbers)} among {len(every)}")
    return tuple(every[n] for n in numbers)
