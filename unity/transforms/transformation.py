"""Transformations of a captured program before it is parallelized: rewriting, checkpoints, pipelines, branches, joined weights.

Like a reduction in CVXPY, a transformation leads to another program (`after`), maps arguments to it and gradients back (`packing`),
and has a form as data (`record`), from which it is applied again. A plan has a tuple of them, in the order of application.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

from unity.base.documents import Record
from unity.base.errors import DerivationError, PlanError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.packed_arguments import NOTHING, Packing
from unity.pcg.ir.gradient_flow import leading_to, wanted_by
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.types.axis import Axis
from unity.search.session import Candidate, Search
from unity.substitutions.language.library import Library

T = TypeVar("T", bound="Transformation")


@dataclass(frozen=True, eq=False)
class TransformationSource:
    """A program to which a recorded transformation is applied.

    Attributes:
        captured: the program as captured.
        earlier: the transformations that were applied to it.
        machine: the machine that the plan is for.
        library: returns the rules of rewritings.
    """

    captured: Captured
    earlier: tuple[Transformation, ...]
    machine: Machine
    library: Callable[[], Library]

    @property
    def program(self) -> Captured:
        """The program after the earlier transformations."""
        return transformed(self.captured, self.earlier)

    def axes(self, what: str, names: Sequence[str]) -> tuple[Axis, ...]:
        """Return the machine's axes with some names, for the part of the plan `what`. Raises PlanError if it lacks one."""
        along = tuple(axis for axis in self.machine.axes if axis.name in names)
        if len(along) != len(names):
            raise PlanError(f"{what} cannot be on the machine {self.machine.name}, which lacks the mesh axes along which they lie")
        return along


class TransformationRecord(Record, tag_field="transformation"):
    """A transformation in a document."""

    def apply(self, source: TransformationSource) -> Transformation:
        """Apply the transformation. Raises PlanError if the program or the machine does not allow it."""
        raise NotImplementedError  # abstract, which msgspec's metaclass does not enforce


@dataclass(frozen=True)
class RewrittenLines:
    """A rule that a transformation applied, its statement, the user's lines that it rewrote, and the number of equal places."""

    rule: str
    statement: str
    lines: tuple[str, ...]
    times: int


@dataclass(frozen=True, eq=False, repr=False)
class Transformation(ABC):
    """A program before and after a transformation. `str` describes it in one line, without mesh axes.

    Attributes:
        before: the program before it.
        after: the program after it.
        along: the mesh axes that it reserves, such as those of stages.
        packing: how `plan.shard` packs arguments for it, and `plan.shard.unpack` unpacks gradients.
        stopped: the paths of inputs whose gradients it leaves out, since the program is not planned to differentiate them.
    """

    by_rules: ClassVar[bool] = False  # whether it applies rules (`uses`), by a derivation that its record states
    kind: ClassVar[str]  # its name in messages; the kind of its nodes, if it makes nodes of a new kind
    title: ClassVar[str]  # the title of its step in a report
    effect: ClassVar[str]  # the text of that step: a sentence without its full stop

    before: Captured
    after: Captured
    along: tuple[Axis, ...] = field(default=(), kw_only=True)
    packing: Packing = field(default=NOTHING, kw_only=True)
    stopped: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    @abstractmethod
    def record(self) -> TransformationRecord:
        """The transformation for a document."""

    @abstractmethod
    def check(self) -> None:
        """Derive the program after it again. Raises DerivationError if the result differs."""

    @cached_property
    def uses(self) -> tuple[RewrittenLines, ...]:
        """The rules of the library that it applied, in order."""
        return ()

    def graphs(self, most: int) -> Iterator[tuple[PCG, tuple[RewrittenLines, ...]]]:
        """Yield the graphs that it leads through, at most `most`, each with the rules that were applied since the one before."""
        yield self.after.graph, ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def _check_same(self, again: Transformation | None) -> None:
        """Raise DerivationError unless the transformation, applied once more, leads to the same program."""
        if again is None or again.after.graph.key != self.after.graph.key:
            raise DerivationError(f"the transformation {self.kind!r}, applied again to its program, leads to another program")

    def described(self, names: AxisNames) -> str:
        """Return the transformation in one line, with the mesh axes that it reserves as users see them."""
        along = names.positions(axis.name for axis in self.along)
        return f"{self}, along {names.in_words(along)}" if along else str(self)

    def explained(self, names: AxisNames) -> list[str]:
        """Return the lines of `plan.explain` about it."""
        return [self.described(names)]


def undifferentiated(captured: Captured, variables: Collection[int]) -> frozenset[str]:
    """Return the paths of inputs without a planned gradient that reach the results by some variables, differentiably."""
    body, planned = captured.body, captured.differentiated
    active = wanted_by(body, (True,) * len(body.outputs)).intersection(variables)
    flags = leading_to(replace(body, outputs=tuple(active)), (True,) * len(active))
    return frozenset(path for k, (path, flag) in enumerate(zip(captured.paths, flags, strict=False)) if flag and k not in planned)


def reserved_in_words(machine: Machine, along: Sequence[Axis]) -> str:
    """Return axes of a machine that a transformation reserves, as users see them."""
    positions = [k for k, axis in enumerate(machine.axes) if axis in along]
    return AxisNames.of(machine.axes, machine.named_levels, [positions]).in_words(positions)


def transformed(captured: Captured, transformations: tuple[Transformation, ...]) -> Captured:
    """Return a captured program after transformations."""
    return transformations[-1].after if transformations else captured


@dataclass(frozen=True, eq=False)
class TransformationCandidate(Generic[T]):
    """A transformation, the search of the program after it, and the best point of that search."""

    transformation: T
    search: Search
    candidate: Candidate
