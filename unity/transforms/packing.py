"""The transformation that joins weights once, in `plan.shard`, where the program would join them in every step."""

from __future__ import annotations

from dataclasses import dataclass

from unity.base.documents import Record
from unity.base.errors import DerivationError, PlanError
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.capture.packed_arguments import Packing
from unity.substitutions.rewriting.joined_weights import Joined, with_joined


class JoiningRecord(Record):
    """A `Joining` in a document: the hash of the graph by which the result is recognized when it is made again."""

    graph: str


@dataclass(frozen=True, eq=False)
class Joining:
    """A program before and after the weights that it joins were replaced by arrays, and the recipe of these arrays."""

    before: Captured
    after: Captured
    sets: tuple[Joined, ...]
    devices: int  # number by which rows of tables are padded to be divisible

    @property
    def packing(self) -> Packing:
        """The packing that `plan.shard` applies."""
        return Packing(self.sets)

    @property
    def record(self) -> JoiningRecord:
        """The joining for a document."""
        return JoiningRecord(self.after.graph.key)

    def check(self) -> None:
        """Make the joining again from the program before it. Raises DerivationError if the result differs."""
        again = joining_of(self.before, self.devices)
        if again is None or again.after.graph.key != self.after.graph.key:
            raise DerivationError("what the program joins of its weights, joined once, is another program")

    def __str__(self) -> str:
        weights, filled = sum(len(s.leaves) for s in self.sets), sum(s.zeros > 0 for s in self.sets)
        arrays = f"{len(self.sets)} array{'s' if len(self.sets) > 1 else ''}"
        return f"{weights} weights joined once, in {arrays}" + (f", {filled} with zeros behind" if filled else "")


def joining_of(captured: Captured, devices: int, known: Bodies | None = None) -> Joining | None:
    """Return the program with all weights that it joins joined once, or None if it joins none.

    Args:
        captured: the program.
        devices: the number of devices that rows are divided by.
        known: see `graph_of`.
    """
    body, sets = with_joined(captured.body, captured.differentiated, devices)
    return Joining(captured, captured.of(body, known), sets, devices) if sets else None


def restored(captured: Captured, record: JoiningRecord, devices: int) -> Joining:
    """Join the weights of a plan file again. Raises PlanError if the program joins others."""
    joining = joining_of(captured, devices)
    if joining is None or joining.after.graph.key != record.graph:
        raise PlanError("the weights that it joins are others: it was made by another version of unity")
    return joining
