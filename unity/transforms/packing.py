"""Weights that a plan takes joined: `plan.shard` joins them once, and `plan.unshard` gives the function's own again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unity.base.errors import DerivationError, PlanError
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.capture.packed_arguments import Packing
from unity.substitutions.rewriting.joined_weights import Joined, with_joined


@dataclass(frozen=True, eq=False)
class Joining:
    """A program before and after weights that it joins became arrays, and how these are made."""

    before: Captured
    after: Captured
    sets: tuple[Joined, ...]
    devices: int  # that rows of tables are divided by

    @property
    def packing(self) -> Packing:
        """What `plan.shard` does."""
        return Packing(self.sets)

    def to_json(self) -> dict[str, Any]:
        """What is needed to see that it is the same when it is made again."""
        return {"graph": self.after.graph.key}

    def check(self) -> None:
        """Makes it again, from the program before it. Raises DerivationError if something else comes out."""
        again = joining_of(self.before, self.devices)
        if again is None or again.after.graph.key != self.after.graph.key:
            raise DerivationError("what the program joins of its weights, joined once, is another program")

    def __str__(self) -> str:
        weights, filled = sum(len(s.leaves) for s in self.sets), sum(s.zeros > 0 for s in self.sets)
        arrays = f"{len(self.sets)} array{'s' if len(self.sets) > 1 else ''}"
        return f"{weights} weights joined once, in {arrays}" + (f", {filled} with zeros behind" if filled else "")


def joining_of(captured: Captured, devices: int, known: Bodies | None = None) -> Joining | None:
    """The program with all that it joins of its weights joined once, for so many devices. None if it joins none. `known`: see
    `graph_of`."""
    body, sets = with_joined(captured.body, captured.differentiated, devices)
    return Joining(captured, captured.of(body, known), sets, devices) if sets else None


def from_json(captured: Captured, data: Any, devices: int) -> Joining:
    """The joined weights of a file, joined again. Raises PlanError if the program joins others."""
    found = joining_of(captured, devices)
    if found is None or not isinstance(data, dict) or found.after.graph.key != data.get("graph"):
        raise PlanError("the weights that it joins are others: it was made by another version of unity")
    return found
