"""Check that two programs are equal where one loop of the second takes the equal steps of several loops of the first at once.

Such a batched loop has *lanes*: its operands are those of several loops, joined along a new dimension, or shared by all of them.
The loops of the first program are found by their operands, which are those of a lane. A lane of the batched step, derived by the
lemmas about single steps (`single_steps.py`; the lanes' dimension leads like that of steps), must be the step of its loop. Then
every lane carries what its loop does, by induction (`verify.proofs.loop_rules`). The lanes may also be those of a loop in the steps
of a map (`maps_of_loops.py`). None of the code that applies rules is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from jax import lax

from unity.base.errors import DerivationError
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.propagation.nested.scan_programs import inside
from unity.verify.derivations.evaluation import (
    Evaluation,
    Scan,
    Values,
    applied,
    compare,
    function_value,
    nested_input,
    require_types,
    tensor_of,
)
from unity.verify.derivations.lanes import check_lane_step
from unity.verify.derivations.maps_of_loops import MapOfLoops, is_map_of_loops
from unity.verify.derivations.nodes import CanonicalValue, NodeStore
from unity.verify.derivations.single_steps import single_step


def check_batched_loops(before: Body, after: Body) -> None:
    """Check that a program whose loops may be batched ones computes the one before. Raises DerivationError."""
    require_types(before, after)
    store = NodeStore()
    inputs = [store.unarranged("input", (k,), (), before.tensors[v]) for k, v in enumerate(before.inputs)]
    _check_equal(store, before, after, inputs)


def _check_equal(store: NodeStore, before: Body, after: Body, arguments: Values) -> None:
    """Check that two programs have equal outputs on the same values. Raises DerivationError."""
    first, second = _Dataflow(store, before, arguments), Evaluation(store, after, arguments)
    maps = _Maps(first, second)
    while (e := second.until_nested()) is not None:
        nested = maps.others(first.available())
        one = next((one for one in nested if _equal_nested(first, one, second, e)), None)
        if one is not None:
            results = [second.opaque(e, k) for k in range(len(e.results))]
            first.take(one, results)
            second.know(e, results)
        elif e.name in SCANNED:
            scans = [Scan.of(first, one) for one in nested if one.name in SCANNED]
            if not maps.match(scans, e):
                _check_lanes(first, scans, second, Scan.of(second, e), maps.refusal(scans))
        else:
            raise DerivationError(f"the program before batched loops has no {e.name} like one after them")
    if any(maps.others(first.available())) or first.waiting:
        raise DerivationError("the program after batched loops lacks a scan or a checkpoint")
    compare(first, before.outputs, second, after.outputs)


class _Dataflow(Evaluation):
    """An evaluation in any order that the operands allow, as loops that became one have moved together."""

    def __init__(self, store: NodeStore, body: Body, arguments: Values) -> None:
        super().__init__(store, body, arguments)
        self.waiting = list(body.equations)

    def available(self) -> Iterator[Equation]:
        """Evaluate the equations whose operands are known, and yield the scans and checkpoints among them."""
        waiting, self.waiting = self.waiting, []
        for e in waiting:
            known = all(a in self.values for a in e.operands if isinstance(a, int))
            if not known or inside(e) is not None:
                self.waiting.append(e)
            else:
                self.know(e, applied(self.store, e, self.body, [self.of(a) for a in e.operands]))
        return (e for e in self.waiting if all(a in self.values for a in e.operands if isinstance(a, int)))

    def take(self, e: Equation, results: Values) -> None:
        """Learn the results of a scan or a checkpoint."""
        self.know(e, results)
        self.waiting.remove(e)


class _Maps:
    """The maps of loops of a program, as far as their loops are matched with batched loops of a second program."""

    def __init__(self, first: _Dataflow, second: Evaluation) -> None:
        self.first, self.second = first, second
        self.known: dict[int, MapOfLoops] = {}  # by id of the equation

    def others(self, nested: Iterator[Equation]) -> list[Equation]:
        """Return the scans and checkpoints of the first program that may be matched next, after taking the results of all maps."""
        scans = list(nested)
        while any(self._take(e) for e in scans):
            scans = list(self.first.available())
        return [e for e in scans if id(e) not in self.known or not self.known[id(e)].is_complete]

    def match(self, scans: Sequence[Scan], e: Equation) -> bool:
        """Return whether a scan of the second program is the lanes of the next loop of a map, and note it if it is."""
        for scan in filter(is_map_of_loops, scans):
            key = id(scan.equation)
            if key not in self.known:
                self.known[key] = MapOfLoops(scan, self.second)
            if self.known[key].match_next(e):
                return True
        return False

    def refusal(self, scans: Sequence[Scan]) -> str:
        """Return why no map was matched; empty if no loop of one had the operands."""
        refusals = (self.known[id(scan.equation)].refusal for scan in scans if id(scan.equation) in self.known)
        return next(filter(None, refusals), "")

    def _take(self, e: Equation) -> bool:
        """Return whether the results of a map are known now, and learn them if they are."""
        loops = self.known.get(id(e))
        results = loops.results() if loops is not None and loops.is_complete else None
        if results is not None:
            self.first.take(e, results)
        return results is not None


def _equal_nested(first: Evaluation, one: Equation, second: Evaluation, other: Equation) -> bool:
    """Return whether two scans or two checkpoints, one of each program, compute the same."""
    if one.name != other.name or [first.of(a) for a in one.operands] != [second.of(a) for a in other.operands]:
        return False
    old, new, store = inside(one), inside(other), first.store
    assert old is not None
    assert new is not None
    if one.name in SCANNED:
        scan, scan_after = Scan.of(first, one), Scan.of(second, other)
        if _form(scan) != _form(scan_after) or one.params["reverse"] != other.params["reverse"]:
            return False
        constants = [nested_input(store, "constant", x, x.shape) for x in scan.constants]
        carried = [store.unarranged("input", ("carry", k), (), tensor_of(x, x.shape)) for k, x in enumerate(scan.initial)]
        arguments = [*constants, *carried, *(nested_input(store, "slice", x, x.shape[1:]) for x in scan.stacks)]
    elif one.params.get("policy") is not other.params.get("policy"):
        return False
    else:
        arguments = [nested_input(store, "operand", first.of(a), first.of(a).shape) for a in one.operands]
    try:
        _check_equal(store, old, new, arguments)
    except DerivationError:
        return False
    return True


def _form(scan: Scan) -> tuple[int, int, int, int]:
    """Return the number of steps of a scan, and those of its constants, carries and stacked operands."""
    return int(scan.equation.params["length"]), len(scan.constants), len(scan.initial), len(scan.stacks)


def _check_lanes(first: _Dataflow, loops: list[Scan], second: Evaluation, batched: Scan, refusal: str) -> None:
    """Check that a batched scan takes the steps of some loops, and learn the results of both. Raises DerivationError.

    Args:
        first: the program before.
        loops: its scans that may be lanes.
        second: the program after.
        batched: its scan.
        refusal: why it is not the lanes of a map's loop, if one has its operands.
    """
    carries = len(batched.initial)
    results = [second.opaque(batched.equation, k) for k in range(len(batched.equation.results))]
    second.know(batched.equation, results)
    counts = {x.shape[k >= carries] if len(x.shape) > (k >= carries) else 0 for k, x in enumerate(results)}
    if len(counts) != 1:
        raise DerivationError(refusal or "the program before batched loops has no scan like one after them")
    remaining = [old for old in loops if _form(old) == _form(batched)]
    for lane in range(*counts):
        old = next((old for old in remaining if _has_operands(batched, lane, old)), None)
        if old is None:
            raise DerivationError(refusal or f"lane {lane} of a batched scan has the operands of no scan of the program before")
        remaining.remove(old)
        check_lane_step(batched, old)
        parts = [_part(second.store, x, int(k >= carries), lane) for k, x in enumerate(results)]
        first.take(old.equation, [x if k < carries else _in_order(batched, old, x) for k, x in enumerate(parts)])


def _has_operands(batched: Scan, lane: int, old: Scan) -> bool:
    """Return whether the operands of a scan are a lane's of those of a batched one, or are shared by all lanes."""
    new = batched.equation.operands
    constants, carries = len(old.constants), len(old.initial)
    stacks = [_in_order(batched, old, x) for x in old.stacks]
    for k, (a, x) in enumerate(zip(new, (*old.constants, *old.initial, *stacks), strict=True)):
        whole = batched.around.of(a)
        shared = len(whole.shape) == len(x.shape) and not constants <= k < constants + carries
        if x != (whole if shared else _lane(batched.around, a, int(k >= constants + carries), lane)):
            return False
    return True


def _in_order(batched: Scan, old: Scan, stack: CanonicalValue) -> CanonicalValue:
    """Return a stack in the order of another loop's steps: a loop in the other direction is one over reversed stacks."""
    if batched.equation.params["reverse"] == old.equation.params["reverse"]:
        return stack
    return function_value(batched.around.store, lambda x: lax.rev(x, (0,)), [stack])


def _lane(around: Evaluation, a: Atom, d: int, lane: int) -> CanonicalValue | None:
    """Return a lane of values that a program joins, or of one that it repeats, along dimension `d`; None for any other atom."""
    e = around.producers.get(a) if isinstance(a, int) else None
    if e is None:
        return None
    if e.name == "stack" and int(e.params["axis"]) == d:
        return around.of(e.operands[lane]) if lane < len(e.operands) else None
    if e.name == "concatenate" and int(e.params["dimension"]) == d:
        sizes = [around.of(x).shape[d] for x in e.operands]
        part = next((x for x, end in zip(e.operands, accumulate(sizes), strict=True) if lane < end), None)
        if part is None or around.of(part).shape[d] != 1:
            return None
        return function_value(around.store, lambda x: lax.squeeze(x, (d,)), [around.of(part)])
    step = single_step(e, around.body, d) if e.name == "broadcast_in_dim" else None
    if step is None or step.dims != (None,):
        return None
    (x,) = (around.of(x) for x in e.operands)
    return function_value(around.store, lambda x: e.primitive.bind(x, **step.params), [x])


def _part(store: NodeStore, x: CanonicalValue, d: int, lane: int) -> CanonicalValue:
    return function_value(store, lambda x: lax.index_in_dim(x, lane, d, keepdims=False), [x])
