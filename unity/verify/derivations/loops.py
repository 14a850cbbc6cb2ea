"""Check that two programs are equal by rules of loops: their scans, in the same order, take equal steps.

Scans that carry the same and take equal steps compute the same, by induction on the steps (`verify.proofs.loop_rules`). A step
of the second program may read values that are computed before the loop. Their value in one step is derived from the equations that
compute them (`single_steps.py`), down to constants and slices that the scan of the first program reads. The canonical forms of both
steps must be equal then, and so must those of the programs' outputs. None of the code that applies rules is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from unity.base.errors import DerivationError
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor, tensor_type
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.propagation.scan_programs import inside
from unity.verify.derivations.canonical_form import apply_body
from unity.verify.derivations.nodes import CanonicalValue, NodeStore
from unity.verify.derivations.products_by_parts import by_parts
from unity.verify.derivations.single_steps import SingleStep, single_step

Values = Sequence[CanonicalValue]
_OneStep = tuple[Atom, int | None]  # an atom, and the dimension of the steps; None where it is the same in every step


def check_loops(before: Body, after: Body) -> None:
    """Check that a program after rules of loops computes the one before. Raises DerivationError where that is not derived."""
    types = [[str(b.tensors[v]) for v in b.inputs] for b in (before, after)]
    if types[0] != types[1] or len(before.outputs) != len(after.outputs):
        raise DerivationError("the program after rules of loops has other inputs or outputs than the one before")
    try:
        _check_programs(before, after)
    except DerivationError:
        _check_programs(by_parts(before), by_parts(after))


def _check_programs(before: Body, after: Body) -> None:
    """Check that two programs of the same inputs have equal outputs. Raises DerivationError."""
    store = NodeStore()
    inputs = [store.unarranged("input", (k,), (), before.tensors[v]) for k, v in enumerate(before.inputs)]
    _check_equal(store, before, inputs, after, inputs)


def _check_equal(store: NodeStore, before: Body, arguments: Values, after: Body, arguments_after: Values) -> None:
    """Check that two programs have equal outputs on values. Raises DerivationError."""
    first, second = _walked(store, before, arguments, after, arguments_after)
    _compare(first, before.outputs, second, after.outputs)


def _walked(
    store: NodeStore, before: Body, arguments: Values, after: Body, arguments_after: Values
) -> tuple[_Evaluation, _Evaluation]:
    """Evaluate two programs on values, and check that their scans and checkpoints, in order, compute the same."""
    first, second = _Evaluation(store, before, arguments), _Evaluation(store, after, arguments_after)
    while True:
        one, other = first.until_nested(), second.until_nested()
        if one is None or other is None:
            break
        if one.name != other.name:
            raise DerivationError(f"where the program has a {one.name}, the program after rules of loops has a {other.name}")
        if one.name in SCANNED:
            _check_scans(first, one, second, other)
        else:
            _check_checkpoints(first, one, second, other)
    if one is not other:
        raise DerivationError("the program after rules of loops has another number of scans and checkpoints")
    return first, second


def _compare(first: _Evaluation, outputs: Sequence[Atom], second: _Evaluation, others: Sequence[Atom]) -> None:
    for k, (a, b) in enumerate(zip(outputs, others, strict=True)):
        if first.of(a) != second.of(b):
            raise DerivationError(f"the rules of loops do not lead to the derived program: output {k} is something else")


class _Evaluation:
    """The canonical values of a program's variables, equation by equation, and the equation of each."""

    def __init__(self, store: NodeStore, body: Body, arguments: Values) -> None:
        self.store, self.body = store, body
        self.values: dict[int, CanonicalValue] = dict(zip(body.inputs, arguments, strict=True))
        self.producers = {v: e for e in body.equations for v in e.results}
        self.remaining = iter(body.equations)
        self.count = 0
        self.awaited: list[_Steps] = []  # loops with results that equations after them compute

    def until_nested(self) -> Equation | None:
        """Evaluate equations up to the next scan or checkpoint, and return that; None at the end."""
        for e in self.remaining:
            if inside(e) is not None:
                self.count += 1
                return e
            self.know(e, _applied(self.store, e, self.body, [self.of(a) for a in e.operands]))
            for steps in self.awaited:
                self.values.update((v, x) for v in e.results if (x := steps.learned(v)) is not None)
        return None

    def know(self, e: Equation, results: Values) -> None:
        self.values.update(zip(e.results, results, strict=True))

    def of(self, a: Atom) -> CanonicalValue:
        """Return the value of an atom."""
        return _literal(self.store, a) if isinstance(a, Literal) else self.values[a]

    def opaque(self, e: Equation, k: int, name: tuple[Any, ...] = (), body: Body | None = None) -> CanonicalValue:
        """Return an uninterpreted value for a result of a scan or checkpoint.

        Args:
            e: the equation.
            k: the number of the result.
            name: tells results of different equations apart.
            body: the program of the equation, if it is another.
        """
        return self.store.unarranged("loop", (self.count, k, *name), (), (body or self.body).tensors[e.results[k]])


def _check_checkpoints(first: _Evaluation, one: Equation, second: _Evaluation, other: Equation) -> None:
    """Check that two checkpoints, one of each program, compute the same."""
    old, new, operands = inside(one), inside(other), [first.of(a) for a in one.operands]
    assert old is not None
    assert new is not None
    if operands != [second.of(a) for a in other.operands] or one.params.get("policy") is not other.params.get("policy"):
        raise DerivationError(f"the program after rules of loops has a {one.name} of other operands")
    arguments = [_input(first.store, "operand", x, x.shape) for x in operands]
    _check_equal(first.store, old, arguments, new, arguments)
    first.know(one, [first.opaque(one, k) for k in range(len(one.results))])
    second.know(other, [first.values[v] for v in one.results])


def _check_scans(first: _Evaluation, one: Equation, second: _Evaluation, other: Equation) -> None:
    """Check that two scans, one of each program, compute the same, and learn their results.

    The second may lack carries of the first that only add up values.
    """
    old, new = _Scan.of(first, one), _Scan.of(second, other)
    if any(one.params[name] != other.params[name] for name in ("length", "reverse")):
        raise DerivationError("a scan after rules of loops has another length or direction")
    store, others, others_after = first.store, old.others, new.others
    if len(others) != len(others_after):
        raise DerivationError("a scan after rules of loops carries something else")
    carried = [store.unarranged("input", ("carry", k), (), _tensor(x, x.shape)) for k, x in enumerate(old.initial)]
    # No step reads a sum except to add to it, so their evaluation does not need to know which sums are equal.
    carried_after = [store.unarranged("input", ("sum", j), (), _tensor(x, x.shape)) for j, x in enumerate(new.initial)]
    for k, j in zip(others, others_after, strict=True):
        carried_after[j] = carried[k]
    steps = _Steps(store, second, set(old.constants), set(old.stacks), length=int(old.equation.params["length"]))
    arguments = [*map(steps.constant, old.constants), *carried, *map(steps.slice, old.stacks)]
    slices = [steps.at(a, 0) for a in new.atoms[1]]
    arguments_after = [*(steps.at(a, None) for a in new.atoms[0]), *carried_after, *slices]
    inner, inner_after = _walked(store, old.step, arguments, new.step, arguments_after)
    origins = _origins(old, inner, new, inner_after)
    # equal results of a step are equal in all steps at once, and so are a result and the stack of which it is a slice
    stacked = dict(zip(slices, new.stacks, strict=True)) | {steps.slice(x): x for x in old.stacks}
    results = {k: first.opaque(old.equation, k) for k in origins}
    carry = [results[k] for k in origins]
    for j, a in list(enumerate(new.step.outputs))[len(carry) :]:
        stacked.setdefault(inner_after.of(a), first.opaque(new.equation, j, ("emitted",), second.body))
        steps.known[new.equation.results[j], 0] = inner_after.of(a)
    for k in range(len(old.initial), len(old.step.outputs)):
        value = inner.of(old.step.outputs[k])
        if value not in stacked:
            stacked[value] = steps.missing[value] = first.opaque(old.equation, k)
        results[k] = stacked[value]
    for k in (k for k in old.sums if k not in results):
        results[k] = _sum_over_steps(old, k, inner, stacked, steps)
    first.know(old.equation, [results[k] for k in range(len(old.step.outputs))])
    second.know(new.equation, [*carry, *(stacked[inner_after.of(a)] for a in new.step.outputs[len(carry) :])])
    if steps.missing:
        second.awaited.append(steps)


@dataclass(frozen=True, eq=False)
class _Scan:
    """A scan in a program, with the values of its operands."""

    around: _Evaluation
    equation: Equation
    step: Body
    constants: Values
    initial: Values
    stacks: Values
    atoms: tuple[Sequence[Atom], Sequence[Atom]]  # the constants and the stacks

    @classmethod
    def of(cls, around: _Evaluation, e: Equation) -> _Scan:
        step, (c, k) = inside(e), constants_and_carry(e.params)
        assert step is not None
        values = [around.of(a) for a in e.operands]
        return cls(around, e, used(step), values[:c], values[c : c + k], values[c + k :], (e.operands[:c], e.operands[c + k :]))

    @cached_property
    def sums(self) -> dict[int, _Sum]:
        """The carries, by number, to which each step only adds a value of their type, and which it does not read otherwise."""
        producers = {v: e for e in self.step.equations for v in e.results}
        reads = Counter(
            a for atoms in (*(e.operands for e in self.step.equations), self.step.outputs) for a in atoms if isinstance(a, int)
        )
        sums = {}
        for k in range(len(self.initial)):
            carry, output = self.step.inputs[len(self.constants) + k], self.step.outputs[k]
            addition = producers.get(output) if isinstance(output, int) else None
            if addition is None or addition.name not in ("add", "add_any") or carry not in addition.operands:
                continue
            added = [a for a in addition.operands if isinstance(a, int) and a != carry]
            alone = reads[carry] == 1 and reads[addition.results[0]] == 1
            if alone and added and self.step.tensors[added[0]] == self.step.tensors[carry]:
                sums[k] = _Sum(addition, added[0])
        return sums

    @property
    def others(self) -> list[int]:
        """The numbers of the carries that are not such sums."""
        return [k for k in range(len(self.initial)) if k not in self.sums]


@dataclass(frozen=True, eq=False)
class _Sum:
    """The addition of a carry to which each step only adds a value, and the variable of this value."""

    addition: Equation
    added: int


def _origins(old: _Scan, inner: _Evaluation, new: _Scan, inner_after: _Evaluation) -> list[int]:
    """Return the carry of a scan, by number, that each carry of the scan after rules of loops is. Raises DerivationError.

    Sums are equal if they start from the same value and each step adds the same one.

    Args:
        old: the scan.
        inner: its step, evaluated.
        new: the scan after rules of loops.
        inner_after: the step of that.
    """
    sums: dict[tuple[CanonicalValue, CanonicalValue], list[int]] = {}
    for k, x in reversed(old.sums.items()):
        sums.setdefault((old.initial[k], inner.of(x.added)), []).append(k)
    others, origins = iter(old.others), list[int]()
    for j, initial in enumerate(new.initial):
        if j in new.sums:
            equal = sums.get((initial, inner_after.of(new.sums[j].added)))
            if not equal:
                raise DerivationError("a scan after rules of loops adds up something else")
            origins.append(equal.pop())
            continue
        k = next(others)
        if initial != old.initial[k] or inner.of(old.step.outputs[k]) != inner_after.of(new.step.outputs[j]):
            raise DerivationError("a scan after rules of loops carries something else")
        origins.append(k)
    return origins


def _sum_over_steps(
    old: _Scan, k: int, inner: _Evaluation, stacked: dict[CanonicalValue, CanonicalValue], steps: _Steps
) -> CanonicalValue:
    """Return the last value of a carry that only adds up a value: the first one plus the sum over the steps.

    The sum of products whose operands the new loop returns is a product that contracts the steps, too.

    Args:
        old: the scan.
        k: the carry, by number.
        inner: its step, evaluated.
        stacked: the values of all steps at once, by those of one step. A value that the new loop lacks is added.
        steps: the values of one step; the value is missing until it is computed after the loop.
    """
    addition, added = old.sums[k].addition, old.sums[k].added
    product = next((e for e in old.step.equations if added in e.results and e.name == "dot_general"), None)
    operands = [stacked.get(inner.of(a)) for a in product.operands] if product is not None else []
    if product is None or None in operands:
        value, tensor = inner.of(added), old.step.tensors[added]
        whole = tensor_type((steps.length, *tensor.shape), tensor.dtype)
        if value not in stacked:
            name = (old.around.count, k, "added")
            stacked[value] = steps.missing[value] = inner.store.unarranged("loop", name, (), whole)
        sums = apply_body(inner.store, trace(lambda x: jnp.sum(x, 0), [whole.struct]), [stacked[value]]).outputs
        return _applied(inner.store, addition, inner.body, [old.initial[k], *sums])[0]
    ((cx, cy), (bx, by)) = product.params["dimension_numbers"]
    contracted = (0, *(int(d) + 1 for d in cx)), (0, *(int(d) + 1 for d in cy))
    numbers = contracted, (tuple(int(d) + 1 for d in bx), tuple(int(d) + 1 for d in by))
    contraction = replace(product, params={**product.params, "dimension_numbers": numbers}, origin=None)
    sums = _applied(inner.store, contraction, inner.body, [x for x in operands if x is not None])
    return _applied(inner.store, addition, inner.body, [old.initial[k], *sums])[0]


@dataclass(frozen=True, eq=False)
class _Steps:
    """The values of one step of a loop, derived from the program around it.

    Attributes:
        store: the nodes.
        around: the program around the loop.
        constants: the values of that program that are constants of the loop.
        stacks: the values of which the loop reads a slice in every step.
        known: the values in one step of results of the loop, and of all that is derived so far, by variable and dimension of the
            steps. Each is derived once, however often it is read.
        underived: variables, with the dimension of the steps, that are not derived from the others.
        missing: the results of the loop before rules that it does not have after them: the values of all steps, by that of one.
        length: the number of steps.
    """

    store: NodeStore
    around: _Evaluation
    constants: set[CanonicalValue]
    stacks: set[CanonicalValue]
    known: dict[_OneStep, CanonicalValue] = field(default_factory=dict)
    underived: set[_OneStep] = field(default_factory=set)
    missing: dict[CanonicalValue, CanonicalValue] = field(default_factory=dict)
    length: int = 0

    def constant(self, x: CanonicalValue) -> CanonicalValue:
        """Return a constant of the loop as the step sees it: a literal as if the step had it itself."""
        return x if x.node.kind == "literal" else _input(self.store, "constant", x, x.shape)

    def slice(self, x: CanonicalValue) -> CanonicalValue:
        """Return a slice of a value as the step sees it."""
        return _input(self.store, "slice", x, x.shape[1:])

    def at(self, a: Atom, d: int | None) -> CanonicalValue:
        """Return one step of an atom. Raises DerivationError if it is not derived.

        Args:
            a: the atom.
            d: the dimension of the steps; None for an atom that is the same in every step.
        """
        waiting: list[_OneStep] = [(a, d)]
        while waiting:
            if self._known(*waiting[-1]) is None:
                variable, along = waiting[-1]
                e, step = self._equation(variable, along)
                needed = list(zip(e.operands, step.dims, strict=True))
                operands = [self._known(*x) for x in needed]
                if None in operands:
                    waiting += [x for x, value in zip(needed, operands, strict=True) if value is None]
                    continue
                results = self._results(e, step, along, [x for x in operands if x is not None])
                self.known.update(((v, along), x) for v, x in zip(e.results, results, strict=True))
            waiting.pop()
        value = self._known(a, d)
        assert value is not None
        return value

    def learned(self, a: int) -> CanonicalValue | None:
        """Return the missing result that a variable computed after the loop is, if it is one; it can be read like a result then."""
        if self.around.body.tensors[a].shape[:1] != (self.length,):
            return None
        try:
            return self.missing.get(self.at(a, 0))
        except DerivationError:
            self.underived.add((a, 0))
            return None

    def _known(self, a: Atom, d: int | None) -> CanonicalValue | None:
        """Return one step of an atom if no equation is needed to derive it."""
        if not isinstance(a, Literal) and (a, d) in self.known:
            return self.known[a, d]
        value = self.around.of(a)
        if d is None:
            return self.constant(value) if isinstance(a, Literal) or value in self.constants else None
        return self.slice(value) if d == 0 and value in self.stacks else None

    def _equation(self, a: Atom, d: int | None) -> tuple[Equation, SingleStep]:
        """Return the equation that computes a variable, and one step of it. Raises DerivationError for other variables."""
        e = self.around.producers.get(a) if isinstance(a, int) else None
        if e is None or inside(e) is not None or (a, d) in self.underived:
            raise DerivationError("a scan after rules of loops reads a value that its steps did not read before")
        step = SingleStep(e.params, (None,) * len(e.operands)) if d is None else single_step(e, self.around.body, d)
        if step is None:
            raise DerivationError(f"no lemma is about one step of {e.name}, which is computed before a loop")
        return e, step

    def _results(self, e: Equation, step: SingleStep, d: int | None, operands: Values) -> list[CanonicalValue]:
        """Return the results of one step of an equation."""
        if d is None:
            return _applied(self.store, e, self.around.body, operands)
        tensors = {v: self.around.body.tensors[v] for v in e.results}
        types = {v: tensor_type((*t.shape[:d], *t.shape[d + 1 :]), t.dtype) for v, t in tensors.items()}
        one = replace(e, params=step.params, origin=None)
        return _applied(self.store, one, replace(self.around.body, tensors=types), operands)


def _applied(store: NodeStore, e: Equation, body: Body, operands: Values) -> list[CanonicalValue]:
    """Return the results of an equation on values. Its results have the types of a program."""
    inputs = tuple(range(-len(operands), 0))
    types: Mapping[int, Tensor] = {v: _tensor(x, x.shape) for v, x in zip(inputs, operands, strict=True)}
    alone = Body(inputs, e.results, (replace(e, operands=inputs),), {**types, **{v: body.tensors[v] for v in e.results}})
    return list(apply_body(store, alone, operands).outputs)


def _literal(store: NodeStore, a: Literal) -> CanonicalValue:
    return apply_body(store, Body((), (a,), (), {}), []).outputs[0]


def _input(store: NodeStore, role: str, x: CanonicalValue, shape: Sequence[int]) -> CanonicalValue:
    """Return a value of a nested program that stands for one of the program around it."""
    return store.unarranged("input", (role, x.text), (), _tensor(x, shape))


def _tensor(x: CanonicalValue, shape: Sequence[int]) -> Tensor:
    return tensor_type(tuple(shape), x.node.tensor.dtype)
