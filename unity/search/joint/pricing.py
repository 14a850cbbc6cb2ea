"""Prices of programs: the optimum on a machine, by one exact search each that shares all that programs have in common."""

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
from unity.search.memory.backend import backend_of
from unity.search.solver.elimination import TableCache
from unity.search.solver.minimizer import Minimizer
from unity.search.space.masks import Restrict, marked
from unity.substitutions.rewriting.joined_weights import with_joined


@dataclass(frozen=True, eq=False)
class Prices:
    """The optimal costs of programs on one machine.

    Domains, prices of changes of type, and solved subproblems of one program are reused for the next.

    Args:
        machine: The devices.
        training: Whether there is a backward pass, and the sizes of the optimizer's state.
        weight: Seconds that a byte of memory counts.
        bodies: A cache of bodies of operators.
        listed: Caches of domains and costs.
        restrict: The user's constraints.
        solved: A cache of solved subproblems.
        pack: Whether weights that a program joins are stored joined.
    """

    machine: Machine
    training: Training
    weight: float = 0.0
    bodies: Bodies = field(default_factory=dict)
    listed: Listed = field(default_factory=Listed)
    restrict: Restrict = marked
    solved: TableCache = field(default_factory=TableCache)
    pack: bool = False

    def graph(self, body: Body) -> PCG:
        """Return a program as a graph of operators, with numbered inputs."""
        return graph_of(body, [f"input {k}" for k in range(len(body.inputs))], self.bodies)

    def of(self, body: Body, differentiated: Collection[int], own: Collection[int] = (), above: float = math.inf) -> float:
        """Return the seconds of the best strategy of a program; infinite without a strategy.

        Args:
            body: The program.
            differentiated: The inputs, by number, whose gradients are wanted.
            own: Those of them that are weights without another reader.
            above: A bound: the result may be infinite if it certainly exceeds it.
        """
        return self._least(self.stored(body, own), differentiated, marked, above)

    def stored(self, body: Body, own: Collection[int]) -> Body:
        """Return the program with its own weights as they are stored."""
        return with_joined(body, own, self.machine.devices)[0] if self.pack else body

    def whole(self, body: Body, differentiated: Collection[int], above: float = math.inf) -> float:
        """Return the seconds of the best strategy of a whole program, whose inputs the user may constrain.

        The result is infinite if no strategy satisfies the constraints. Arguments are as for `of`.
        """
        try:
            return self._least(self.stored(body, differentiated), differentiated, self.restrict, above)
        except (ConstraintError, InfeasibleError):
            return math.inf

    def _least(self, body: Body, differentiated: Collection[int], restrict: Restrict, above: float) -> float:
        kinds, buffered = (differentiated, self.machine, self.training), backend_of(self.machine).buffered
        assembled = assemble(self.graph(body), *kinds, listed=self.listed, restrict=restrict, buffered=buffered)
        return Minimizer(assembled.problem, solved=self.solved).least(self.weight, above)
