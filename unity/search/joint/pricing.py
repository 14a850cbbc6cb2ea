"""What programs cost at best on a machine: one exact search each, sharing all that programs have in common."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from unity.base.errors import ConstraintError, InfeasibleError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Bodies, graph_of
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.program import Body
from unity.search.cost.assembly import Listed, assemble
from unity.search.cost.cost import Training
from unity.search.solver.elimination import Solved
from unity.search.solver.minimizer import Minimizer
from unity.search.space.masks import Restrict, marked
from unity.substitutions.rewriting.joined_weights import with_joined


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices programs on one machine. `weight`: seconds that a byte of memory counts. `pack`: weights that a program joins are
    joined before it runs.

    Operators that were listed, changes of type that were priced, and what was solved for one program are there for the next.
    """

    machine: Machine
    training: Training
    weight: float = 0.0
    bodies: Bodies = field(default_factory=dict)
    listed: Listed = field(default_factory=Listed)
    restrict: Restrict = marked  # what users constrain
    solved: Solved = field(default_factory=Solved)
    pack: bool = False

    def graph(self, body: Body) -> PCG:
        """The program as a graph of operators; its inputs are not named."""
        return graph_of(body, [f"input {k}" for k in range(len(body.inputs))], self.bodies)

    def of(self, body: Body, differentiated: Collection[int], own: Collection[int] = (), above: float = math.inf) -> float:
        """Seconds of the best strategy, infinite if there is none. `differentiated`: inputs, by number, with wanted gradients.

        `own`: those of them that are weights which nothing but this program reads. `above`: what is certainly more may be infinite.
        """
        return self._least(self.stored(body, own), differentiated, marked, above)

    def stored(self, body: Body, own: Collection[int]) -> Body:
        """The program as its weights are stored."""
        return with_joined(body, own, self.machine.devices)[0] if self.pack else body

    def whole(self, body: Body, differentiated: Collection[int], above: float = math.inf) -> float:
        """The same of a whole program, whose inputs are what users constrain. Infinite, too, where they leave nothing of it."""
        try:
            return self._least(self.stored(body, differentiated), differentiated, self.restrict, above)
        except (ConstraintError, InfeasibleError):
            return math.inf

    def _least(self, body: Body, differentiated: Collection[int], restrict: Restrict, above: float) -> float:
        assembled = assemble(self.graph(body), differentiated, self.machine, self.training, None, self.listed, restrict)
        return Minimizer(assembled.problem, solved=self.solved).least(self.weight, above)
