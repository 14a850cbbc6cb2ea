"""Check that lanes of batched loops are the loops in the steps of a map: a scan without a carry, whose steps do not wait.

One step of the program's values is derived by the lemmas about single steps. A batched loop whose operands are, in one step of the
map, those of a loop there, and of whose step any lane is the step of that loop, has its results in a lane (`lanes.py`).
"""

from __future__ import annotations

from unity.base.errors import DerivationError
from unity.pcg.ir.program import Equation
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.verify.derivations.evaluation import Evaluation, Scan, Steps, Values
from unity.verify.derivations.lanes import check_step


def is_map_of_loops(scan: Scan) -> bool:
    """Return whether a scan has no carry, and a scan in its steps."""
    return not scan.initial and any(e.name in SCANNED for e in scan.step.equations)


class MappedLoops:
    """A map of loops in one program, and what another has of it: values of all its steps at once, and loops with a lane for each.

    Attributes:
        map: the map.
        steps: the values of one step, as the other program has them.
        inner: a step of the map, evaluated up to the loop whose lanes come next.
    """

    def __init__(self, map: Scan, second: Evaluation) -> None:
        store = second.store
        self.map, self.second = map, second
        self.steps = Steps(store, second, set(map.constants), set(map.stacks), length=int(map.equation.params["length"]))
        arguments = [*(self.steps.constant(x) for x in map.constants), *(self.steps.slice(x) for x in map.stacks)]
        self.inner = Evaluation(store, map.step, arguments)
        self._next = self.inner.until_nested()

    @property
    def are_taken(self) -> bool:
        """Whether the other program has lanes for all loops of a step."""
        return self._next is None

    def take(self, e: Equation) -> bool:
        """Return whether a scan of the other program has the next loop in its lanes, and learn the results of both if it has."""
        if self._next is None or self._next.name not in SCANNED:
            return False
        old, new = Scan.of(self.inner, self._next), Scan.of(self.second, e)
        try:
            if not self._has_operands(old, new):
                return False
            check_step(new, old)
        except DerivationError:
            return False
        results = [self.inner.opaque(old.equation, k, ("lane",)) for k in range(len(old.equation.results))]
        self.inner.know(old.equation, results)
        self.second.know(e, [self.second.opaque(e, k) for k in range(len(e.results))])
        for k, (v, x) in enumerate(zip(e.results, results, strict=True)):
            self.steps.known[v, int(k >= len(old.initial))] = x
        self._next = self.inner.until_nested()
        return True

    def results(self) -> Values:
        """Return the results of the map, which the other program has where one step of a variable is that of a result."""
        for k, a in enumerate(self.map.step.outputs):
            tensor = self.map.around.body.tensors[self.map.equation.results[k]]
            whole = self.second.store.unarranged("loop", (self.second.count, k, "map"), (), tensor)
            self.steps.missing.setdefault(self.inner.of(a), whole)
        self.second.awaited.append(self.steps)
        learned = ((v, self.steps.learned(v)) for v in tuple(self.second.values))
        self.second.values.update((v, x) for v, x in learned if x is not None)
        return [self.steps.missing[self.inner.of(a)] for a in self.map.step.outputs]

    def _has_operands(self, old: Scan, new: Scan) -> bool:
        """Return whether the operands of a loop are, in one step of the map, those of a batched one."""
        slices = len(old.constants) + len(old.initial)
        counts, others = ([len(x) for x in (scan.constants, scan.initial, scan.stacks)] for scan in (old, new))
        if counts != others or any(old.equation.params[name] != new.equation.params[name] for name in ("length", "reverse")):
            return False
        for k, (a, x) in enumerate(zip(new.equation.operands, (*old.constants, *old.initial, *old.stacks), strict=True)):
            is_carried = len(old.constants) <= k < slices
            is_shared = len(self.second.of(a).shape) == len(x.shape) and not is_carried
            if self.steps.at(a, None if is_shared else int(k >= slices)) != x:
                return False
        return True
