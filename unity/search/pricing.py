"""What programs cost at best on a machine: one exact search each, sharing all that programs have in common."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from unity.pcg.body import Body
from unity.pcg.capture import Bodies, graph_of
from unity.pcg.graph import PCG
from unity.search.assemble import Listed, assemble
from unity.search.cost import Training
from unity.search.machine import Machine
from unity.search.minimizer import Minimizer


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices programs on one machine. `weight`: seconds that a byte of memory counts.

    Operators that were listed, and changes of type that were priced, for one program are there for the next.
    """

    machine: Machine
    training: Training
    weight: float = 0.0
    bodies: Bodies = field(default_factory=dict)
    listed: Listed = field(default_factory=Listed)

    def graph(self, body: Body) -> PCG:
        """The program as a graph of operators; its inputs are not named."""
        return graph_of(body, [f"input {k}" for k in range(len(body.inputs))], self.bodies)

    def of(self, body: Body, differentiated: Collection[int]) -> float:
        """Seconds of the best strategy, infinite if there is none. `differentiated`: inputs, by number, with wanted gradients."""
        assembled = assemble(self.graph(body), differentiated, self.machine, self.training, None, self.listed)
        return Minimizer(assembled.problem).least(self.weight)
