"""The transformation that joins weights once, in `plan.shard`, where the program would join them in every step."""

from __future__ import annotations

from dataclasses import dataclass

from unity.base.errors import PlanError
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.capture.packed_arguments import Packing
from unity.substitutions.rewriting.joined_weights import Joined, with_joined
from unity.transforms.transformation import Transformation, TransformationRecord, TransformationSource


class JoiningRecord(TransformationRecord, tag="joined weights"):
    """A `Joining` in a document: the hash of the graph by which the result is recognized when it is made again."""

    graph: str

    def apply(self, source: TransformationSource) -> Joining:
        joining = joining_of(source.program, source.machine.devices)
        if joining is None or joining.after.graph.key != self.graph:
            raise PlanError("the weights that it joins are others: it was made by another version of unity")
        return joining


@dataclass(frozen=True, eq=False, repr=False)
class Joining(Transformation):
    """A program before and after the weights that it joins were replaced by arrays, which its packing makes.

    devices: the number by which rows of tables are padded to be divisible.
    """

    kind = "weights"
    title = "Joined"
    effect = "Weights that every step would join are joined once"

    devices: int

    @property
    def record(self) -> JoiningRecord:
        return JoiningRecord(self.after.graph.key)

    def check(self) -> None:
        self._check_same(joining_of(self.before, self.devices))

    def __str__(self) -> str:
        sets = self.packing.slots
        weights, filled = sum(len(s.leaves) for s in sets), sum(isinstance(s, Joined) and s.zeros > 0 for s in sets)
        arrays = f"{len(sets)} array{'s' if len(sets) > 1 else ''}"
        return f"{weights} weights joined once, in {arrays}" + (f", {filled} with zeros behind" if filled else "")


def joining_of(captured: Captured, devices: int, known: Bodies | None = None) -> Joining | None:
    """Return the program with all weights that it joins joined once, or None if it joins none.

    Args:
        captured: the program.
        devices: the number of devices that rows are divided by.
        known: see `graph_of`.
    """
    body, sets = with_joined(captured.body, captured.differentiated, devices)
    return Joining(captured, captured.of(body, known), devices, packing=Packing(sets)) if sets else None
