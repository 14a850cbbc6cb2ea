"""Programs with loops as canonical values: a program's evaluation up to its next loop, a scan's parts, and values of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from unity.base.errors import DerivationError
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor, tensor_type
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.propagation.nested.scan_programs import inside
from unity.verify.derivations.canonical_form import apply_body
from unity.verify.derivations.constructors import expanded
from unity.verify.derivations.nodes import CanonicalValue, NodeStore
from unity.verify.derivations.single_steps import SingleStep, elementwise, single_step

Values = Sequence[CanonicalValue]
_OneStep = tuple[Atom, int | None]  # an atom, and the dimension of the steps; None where it is the same in every step


class Evaluation:
    """The canonical values of a program's variables, equation by equation, and the equation of each.

    Args:
        store: the nodes.
        body: the program.
        arguments: the values of its inputs.
        place: the numbers that tell it from other programs which the same program runs, if one runs it.
    """

    def __init__(self, store: NodeStore, body: Body, arguments: Values, place: tuple[int, ...] = ()) -> None:
        self.store, self.body, self.place = store, body, place
        self.values: dict[int, CanonicalValue] = dict(zip(body.inputs, arguments, strict=True))
        self.producers = {v: e for e in body.equations for v in e.results}
        self.remaining = iter(body.equations)
        self.count = 0
        self.awaited: list[Steps] = []  # loops with results that equations after them compute

    def until_nested(self) -> Equation | None:
        """Evaluate equations up to the next scan or checkpoint, and return that; None at the end."""
        for e in self.remaining:
            if inside(e) is not None:
                self.count += 1
                return e
            self.know(e, applied(self.store, e, self.body, [self.of(a) for a in e.operands]))
            for steps in self.awaited:
                self.values.update((v, x) for v in e.results if (x := steps.learned(v)) is not None)
        return None

    def know(self, e: Equation, results: Values) -> None:
        self.values.update(zip(e.results, results, strict=True))

    def of(self, a: Atom) -> CanonicalValue:
        """Return the value of an atom."""
        return literal_value(self.store, a) if isinstance(a, Literal) else self.values[a]

    def opaque(self, e: Equation, k: int, name: tuple[Any, ...] = (), body: Body | None = None) -> CanonicalValue:
        """Return an uninterpreted value for a result of a scan or checkpoint.

        Args:
            e: the equation.
            k: the number of the result.
            name: tells results of different equations apart.
            body: the program of the equation, if it is another.
        """
        return self.store.unarranged("loop", (*self.name, k, *name), (), (body or self.body).tensors[e.results[k]])

    @property
    def name(self) -> tuple[int, ...]:
        """The numbers that tell the scan or checkpoint that was reached last from all others."""
        return (*self.place, self.count)


@dataclass(frozen=True, eq=False)
class Scan:
    """A scan in a program, with the values of its operands."""

    around: Evaluation
    equation: Equation
    step: Body
    constants: Values
    initial: Values
    stacks: Values
    atoms: tuple[Sequence[Atom], Sequence[Atom]]  # the constants and the stacks

    @classmethod
    def of(cls, around: Evaluation, e: Equation) -> Scan:
        step, (c, k) = inside(e), constants_and_carry(e.params)
        assert step is not None
        values = [around.of(a) for a in e.operands]
        return cls(around, e, used(step), values[:c], values[c : c + k], values[c + k :], (e.operands[:c], e.operands[c + k :]))

    @cached_property
    def sums(self) -> dict[int, AddedCarry]:
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
                sums[k] = AddedCarry(addition, added[0])
        return sums

    @property
    def others(self) -> list[int]:
        """The numbers of the carries that are not such sums."""
        return [k for k in range(len(self.initial)) if k not in self.sums]


@dataclass(frozen=True, eq=False)
class AddedCarry:
    """The addition of a carry to which each step only adds a value, and the variable of this value."""

    addition: Equation
    added: int


@dataclass(frozen=True, eq=False)
class Steps:
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
    around: Evaluation
    constants: set[CanonicalValue]
    stacks: set[CanonicalValue]
    known: dict[_OneStep, CanonicalValue] = field(default_factory=dict)
    underived: set[_OneStep] = field(default_factory=set)
    missing: dict[CanonicalValue, CanonicalValue] = field(default_factory=dict)
    length: int = 0

    def constant(self, x: CanonicalValue) -> CanonicalValue:
        """Return a constant of the loop as the step sees it: a literal as if the step had it itself."""
        return x if x.node.kind == "literal" else nested_input(self.store, "constant", x, x.shape)

    def slice(self, x: CanonicalValue) -> CanonicalValue:
        """Return a slice of a value as the step sees it."""
        return nested_input(self.store, "slice", x, x.shape[1:])

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
            return applied(self.store, e, self.around.body, operands)
        tensors = {v: self.around.body.tensors[v] for v in e.results}
        types = {v: tensor_type((*t.shape[:d], *t.shape[d + 1 :]), t.dtype) for v, t in tensors.items()}
        one = replace(e, params=step.params, origin=None)
        return applied(self.store, one, replace(self.around.body, tensors=types), operands)


def applied(store: NodeStore, e: Equation, body: Body, operands: Values) -> list[CanonicalValue]:
    """Return the results of an equation on values. Its results have the types of a program.

    Operands that an elementwise operator repeats are repeated before it, as those of a lane may have other dimensions of size one.
    """
    if elementwise(e) and len(operands) > 1:
        operands = [expanded(store, x, body.tensors[e.results[0]].shape) for x in operands]
    inputs = tuple(range(-len(operands), 0))
    types: Mapping[int, Tensor] = {v: tensor_of(x, x.shape) for v, x in zip(inputs, operands, strict=True)}
    alone = Body(inputs, e.results, (replace(e, operands=inputs),), {**types, **{v: body.tensors[v] for v in e.results}})
    return list(apply_body(store, alone, operands).outputs)


def function_value(store: NodeStore, function: Callable[..., Any], operands: Values) -> CanonicalValue:
    """Return a JAX function of values."""
    return apply_body(store, trace(function, [tensor_of(x, x.shape).struct for x in operands]), operands).outputs[0]


def literal_value(store: NodeStore, a: Literal) -> CanonicalValue:
    """Return the value of a literal."""
    return apply_body(store, Body((), (a,), (), {}), []).outputs[0]


def nested_input(store: NodeStore, role: str, x: CanonicalValue, shape: Sequence[int]) -> CanonicalValue:
    """Return a value of a nested program that stands for one of the program around it."""
    return store.unarranged("input", (role, x.text), (), tensor_of(x, shape))


def tensor_of(x: CanonicalValue, shape: Sequence[int]) -> Tensor:
    """Return the type of elements of a value in another shape."""
    return tensor_type(tuple(shape), x.node.tensor.dtype)


def require_types(before: Body, after: Body) -> None:
    """Check that two programs have inputs of the same types, and as many outputs. Raises DerivationError."""
    types = [[str(b.tensors[v]) for v in b.inputs] for b in (before, after)]
    if types[0] != types[1] or len(before.outputs) != len(after.outputs):
        raise DerivationError("the program after rules of loops has other inputs or outputs than the one before")


def compare(first: Evaluation, outputs: Sequence[Atom], second: Evaluation, others: Sequence[Atom]) -> None:
    """Check that the outputs of two evaluated programs are equal. Raises DerivationError."""
    if len(outputs) != len(others):
        raise DerivationError("the program after rules of loops has another number of outputs")
    for k, (a, b) in enumerate(zip(outputs, others, strict=True)):
        if first.of(a) != second.of(b):
            raise DerivationError(f"the rules of loops do not lead to the derived program: output {k} is something else")
