"""Check that the lanes of batched loops are the loops in the steps of a map, a scan without a carry.

The values of one step of the map are derived, by the lemmas about single steps, from those of all steps at once. If the operands of
a batched loop are, in one step of the map, the operands of an inner loop, and any lane of its step is the inner step (`lanes.py`),
then lane t holds the results of the inner loop in step t of the map.
"""

from __future__ import annotations

from unity.base.errors import DerivationError
from unity.pcg.ir.program import Equation
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.verify.derivations.evaluation import Evaluation, Scan, Steps
from unity.verify.derivations.lanes import check_lane_step
from unity.verify.derivations.nodes import CanonicalValue


def is_map_of_loops(scan: Scan) -> bool:
    """Return whether a scan has no carry, and a scan in its steps."""
    return not scan.initial and any(e.name in SCANNED for e in scan.step.equations)


class MapOfLoops:
    """A map of one program, whose inner loops are matched one by one with batched loops of a second program.

    Attributes:
        scan: the map.
        steps: the values of one step of the map, derived from the second program.
        inner: a step of the map, evaluated up to the loop that is not matched yet.
        refusal: why the last batched loop with the operands of that loop was not its lanes; empty if none had them.
    """

    def __init__(self, scan: Scan, second: Evaluation) -> None:
        store = second.store
        self.scan, self.second, self.refusal = scan, second, ""
        self.steps = Steps(store, second, set(scan.constants), set(scan.stacks), length=int(scan.equation.params["length"]))
        arguments = [*(self.steps.constant(x) for x in scan.constants), *(self.steps.slice(x) for x in scan.stacks)]
        self.inner = Evaluation(store, scan.step, arguments)
        self._next = self.inner.until_nested()

    @property
    def is_complete(self) -> bool:
        """Whether all inner loops are matched."""
        return self._next is None

    def match_next(self, e: Equation) -> bool:
        """Return whether a scan of the second program is the lanes of the next inner loop; if it is, learn the results of both."""
        if self._next is None or self._next.name not in SCANNED:
            return False
        old, new = Scan.of(self.inner, self._next), Scan.of(self.second, e)
        try:
            if not self._has_operands(old, new):
                return False
            check_lane_step(new, old)
        except DerivationError as problem:
            self.refusal = problem.reason
            return False
        results = [self.inner.opaque(old.equation, k, ("lane",)) for k in range(len(old.equation.results))]
        self.inner.know(old.equation, results)
        self.second.know(e, [self.second.opaque(e, k) for k in range(len(e.results))])
        for k, (v, x) in enumerate(zip(e.results, results, strict=True)):
            self.steps.known[v, int(k >= len(old.initial))] = x
        self._next = self.inner.until_nested()
        return True

    def results(self) -> list[CanonicalValue] | None:
        """Return the values of the second program that are the map's results; None while it has not computed all of them."""
        values = [self._value_of(self.inner.of(a)) for a in self.scan.step.outputs]
        return None if None in values else [x for x in values if x is not None]

    def _value_of(self, step: CanonicalValue) -> CanonicalValue | None:
        """Return a value of the second program that is a given one in each step of the map."""
        for v, x in self.second.values.items():
            if self.second.body.tensors[v].shape[:1] == (self.steps.length,):
                try:
                    if self.steps.at(v, 0) == step:
                        return x
                except DerivationError:  # it is not a value of the map's steps
                    continue
        return None

    def _has_operands(self, old: Scan, new: Scan) -> bool:
        """Return whether the operands of a batched loop are, in one step of the map, those of an inner loop."""
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
