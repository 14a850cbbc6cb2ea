"""Is what the operator table says of an operator true? Every choice is run by symbols, on all devices, and compared.

The local program is the one that really runs (`exec.walker`), traced for a mesh that need not exist. Its pieces are made of the
whole operands' symbols as the types say; what it gives must be the pieces of what the body gives whole: *partitioned* ones the
slices, *unused* and *replicated* ones all of it on every device, *partial* ones parts that add up to it. A partial operand's
parts are independent symbols. So a proof holds for all values of floating operands (and all PRNG keys), at the given sizes;
integers and truth values are concrete, and the proof is for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend import core

from unity.pcg.ir.program import Body, Tensor, close
from unity.pcg.propagation.choices import Choice, choices
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Shape, Type, misfit, partitioned
from unity.verify.semantics.interpret import NotInterpreted, interpret_values
from unity.verify.semantics.local_programs import (
    dual_type,
    floating_ends,
    local_function,
    pullback,
    traced,
    traced_locally,
    whole_function,
)
from unity.verify.semantics.pieces import cut, sum_partial, symbolic_pieces
from unity.verify.semantics.polynomial_equality import compare
from unity.verify.semantics.primitives.core import StackedValue, is_element
from unity.verify.semantics.symbolic import PolynomialsTooLarge, Symbolic

UNTRACED = (TypeError, ValueError, AssertionError, NotImplementedError)  # how JAX says that a program cannot be
LARGEST = 20_000  # elements of a tensor; beyond that, smaller sizes say the same


@dataclass(frozen=True)
class Counterexample:
    """Numbers that show an operator's pieces wrong.

    `values` are the symbols' (`x0@[1,2,3]`: of operand 0 at [2, 3], the part that device 1 holds).
    """

    result: int
    at: tuple[int, ...]  # device coordinates, then the index in the piece
    shapes: tuple[Shape, ...]  # of the whole operands
    values: Mapping[str, Any]
    whole: float
    pieces: float
    functions: tuple[str, ...] = ()  # those that were given values of their own: nothing is known of them

    def __str__(self) -> str:
        given = ", ".join(f"{k} = {v}" for k, v in self.values.items() if v) or "all symbols zero"
        some = f" and some function for {', '.join(self.functions[:3])}" if self.functions else ""
        shapes = ", ".join(map(str, self.shapes))
        return f"operands {shapes}, {given}{some}: result {self.result} at {self.at} is {self.pieces:g}, not {self.whole:g}"


@dataclass(frozen=True)
class Verdict:
    """What was found of one combination of choices. `answer`: "proved", "refuted", or "unknown", which `why` explains."""

    choices: tuple[Choice, ...]
    degrees: tuple[int, ...]
    of: str  # "values" or "gradients"
    answer: str
    why: str = ""
    counterexample: Counterexample | None = None

    def __str__(self) -> str:
        names = " × ".join(f"{c.name} over {d}" for c, d in zip(self.choices, self.degrees, strict=True))
        return f"{self.of} of {names}: {self.answer}" + (f" ({self.counterexample or self.why})" if self.answer != "proved" else "")


def check_operator(fn: Callable[..., Any], *args: Any, degrees: Sequence[int] = (2,), gradients: bool = True) -> list[Verdict]:
    """Proves all that unity believes of an operator (any JAX function) at the sizes of its arguments.

    Arguments are arrays or `jax.ShapeDtypeStruct`s; integer arrays are taken as they are.
    """
    leaves, tree = jax.tree.flatten(args)
    traced_fn = jax.make_jaxpr(lambda *given: jax.tree.leaves(fn(*jax.tree.unflatten(tree, given))))
    return check_body(close(traced_fn(*leaves)), degrees, leaves, gradients=gradients)


def check_body(
    body: Body, degrees: Sequence[int] = (2,), values: Sequence[Any] = (), *, gradients: bool = False, pairs: bool = False
) -> list[Verdict]:
    """A verdict for every choice of an operator on one axis, for each degree that its sizes allow.

    `pairs`: for every pair of choices on two axes too, inner digits included. `gradients`: for its derivative too.
    """
    proofs = [Proof(body, values), *([Gradient(body, values)] if gradients else [])]
    wanted: list[tuple[tuple[Choice, ...], tuple[int, ...]]] = [((c,), (d,)) for d in degrees for c in choices(body)]
    if pairs:
        wanted += [(both, (d, d)) for d in degrees for both in product(choices(body, inner_digits(body, d)), repeat=2)]
    return [p.check(c, d) for c, d in wanted if fits(body, c, d) for p in proofs]


def check_choice(body: Body, choice: Choice, degree: int, values: Sequence[Any] = ()) -> Verdict:
    """A verdict for the values of one choice on one axis."""
    return Proof(body, values).check((choice,), (degree,))


def inner_digits(body: Body, degree: int) -> Iterator[tuple[int, Any]]:
    """States at the second digit of every dimension of every operand, as a neighbour might ask for."""
    for p, v in enumerate(body.inputs):
        for i, n in enumerate(body.tensors[v].shape):
            if n % degree == 0 and n > degree:
                yield p, partitioned(i, degree)


def mesh(degrees: Sequence[int]) -> tuple[Axis, ...]:
    """Axes of the given sizes."""
    return tuple(Axis("abcdefgh"[k], n, 0) for k, n in enumerate(degrees))


def types(states: Sequence[tuple]) -> tuple[Type, ...]:
    """From states of all tensors along each axis to types of each tensor."""
    return tuple(zip(*states, strict=True))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def fits(body: Body, chosen: Sequence[Choice], degrees: Sequence[int]) -> bool:
    """Whether degrees divide what they must."""
    taken: dict[int, int] = {}
    for c, d in zip(chosen, degrees, strict=True):
        taken[id(c)] = taken.get(id(c), 1) * d
    if any(c.size % taken[id(c)] for c in chosen):
        return False
    ends = [body.tensor(a) for a in (*body.inputs, *body.outputs)]
    every = types([c.states for c in chosen])
    return all(misfit(t.shape, s, mesh(degrees)) is None for t, s in zip(ends, every, strict=True))


class Proof:
    """One operator's body by symbols: what it gives whole, to which every choice is held."""

    of = "values"

    def __init__(self, body: Body, values: Sequence[Any] = ()) -> None:
        self.body, self.domain, self.rng = body, Symbolic(), np.random.default_rng(0)
        given = [*values, *[None] * (len(self.tensors) - len(values))]
        self.operands = [self._operand(k, t, x) for k, (t, x) in enumerate(zip(self.tensors, given, strict=True))]

    @property
    def tensors(self) -> list[Tensor]:
        """What the program takes, whole."""
        return [self.body.tensors[v] for v in self.body.inputs]

    def whole_function(self) -> Callable[..., list]:
        return whole_function(self.body)

    def local_function(self, operands: Sequence[Type], results: Sequence[Type], axes: tuple[Axis, ...]) -> Callable[..., list]:
        return local_function(self.body, operands, results, axes)

    def ends(self, operands: tuple[Type, ...], results: tuple[Type, ...]) -> tuple[tuple[Type, ...], tuple[Type, ...]]:
        """The types of what the program takes and gives, where the operator has these."""
        return operands, results

    def _operand(self, k: int, tensor: Tensor, given: Any) -> StackedValue:
        """Symbols `x0[1,2]`, or concrete integers: the given ones, or small random ones."""
        if is_element(tensor.dtype):
            return StackedValue(self.domain.symbols(f"x{k}", tensor.shape), False)
        if given is None or isinstance(given, jax.ShapeDtypeStruct):
            given = self.rng.integers(0, 2 if tensor.dtype == bool else 4, tensor.shape)
        return StackedValue(np.asarray(given).astype(tensor.dtype), True)

    @cached_property
    def program(self) -> core.ClosedJaxpr | str:
        """The whole program, or why there is none: not every operator has a derivative."""
        try:
            return traced(self.body, self.whole_function(), self.tensors)
        except UNTRACED as error:
            return _first_line(error)

    @cached_property
    def whole(self) -> list[StackedValue] | Exception:
        """What the program gives whole, or why that cannot be known."""
        assert isinstance(self.program, core.ClosedJaxpr)
        self.domain.renew()
        try:
            return interpret_values(self.program, self.operands, self.domain, ())
        except (NotInterpreted, PolynomialsTooLarge) as error:
            return error

    def check(self, chosen: tuple[Choice, ...], degrees: tuple[int, ...]) -> Verdict:
        """One combination of choices, one for each axis."""
        try:
            answer, why, wrong = self._check(chosen, degrees)
        except NotInterpreted as error:
            answer, why, wrong = "unknown", f"not interpreted: {error}", None
        except PolynomialsTooLarge:
            answer, why, wrong = "unknown", "its polynomials have too many terms: prove it at smaller sizes", None
        return Verdict(chosen, degrees, self.of, answer, why, wrong)

    def _check(self, chosen: tuple[Choice, ...], degrees: tuple[int, ...]) -> tuple[str, str, Counterexample | None]:
        if max((prod(t.shape) for t in self.body.tensors.values()), default=0) > LARGEST:
            return "unknown", f"a tensor has more than {LARGEST} elements: prove it at smaller sizes", None
        if not fits(self.body, chosen, degrees):
            return "unknown", "these degrees do not divide what they must", None
        if isinstance(self.program, str):
            return "unknown", f"there are no {self.of} to prove: {self.program}", None
        axes = mesh(degrees)
        states = types([c.operands for c in chosen]), types([c.results for c in chosen])
        into, out = self.ends(*states)
        try:
            run = self.local_function(*states, axes)
            program = traced_locally(self.body, run, self.tensors, into, out, axes)
        except UNTRACED as error:
            return "refuted", f"the local program cannot be built: {_first_line(error)}", None
        if isinstance(self.whole, Exception):
            raise self.whole
        self.domain.renew()
        ends, one = enumerate(zip(self.operands, into, strict=True)), (slice(None),) * len(axes) + (None,)
        given = [StackedValue(symbolic_pieces(v, t, axes, self.domain, f"x{k}", self.rng)[one], v.known) for k, (v, t) in ends]
        return self.compare(interpret_values(program, given, self.domain, axes), self.whole, out, axes)

    def compare(
        self, found: Sequence[StackedValue], expected: Sequence[StackedValue], out: Sequence[Type], axes: tuple[Axis, ...]
    ) -> tuple[str, str, Counterexample | None]:
        """Holds each result's pieces to those of the whole result."""
        shapes, lead = tuple(t.shape for t in self.tensors), tuple(a.size for a in axes)
        for k, (value, whole, type_) in enumerate(zip(found, expected, out, strict=True)):
            known, array, want = value.known and whole.known, np.squeeze(value.array, len(axes)), whole.array
            if value.known != whole.known:
                array = self.domain.constant(array) if value.known else array
                want = self.domain.constant(want) if whole.known else want
            array = sum_partial(array, type_, known, self.domain)
            want = cut(np.broadcast_to(want, (*lead, *want.shape)), want.ndim, type_, axes)
            if array.shape != want.shape:
                return "refuted", f"result {k}: pieces of shape {array.shape[len(lead) :]}, not {want.shape[len(lead) :]}", None
            if known:
                if not np.array_equal(array, want):
                    at = tuple(np.argwhere(array != want)[0].tolist())
                    return "refuted", "", Counterexample(k, at, shapes, {}, float(want[at]), float(array[at]))
                continue
            answer = compare(self.domain, array, want)
            if answer.answer == "unknown":
                return "unknown", f"result {k} at {answer.at}: neither equal nor shown to differ", None
            if answer.answer == "different":
                numbers = answer.values or {}, answer.right, answer.left
                return "refuted", "", Counterexample(k, answer.at, shapes, *numbers, answer.functions)
        concrete = any(v.known for v in self.operands)
        return "proved", "for these integers and truth values" if concrete else "", None


class Gradient(Proof):
    """The same of an operator's derivative: cotangents in, gradients out, in their dual types."""

    of = "gradients"

    @property
    def tensors(self) -> list[Tensor]:
        _, results = floating_ends(self.body)
        return [*super().tensors, *(self.body.tensor(self.body.outputs[k]) for k in results)]

    def whole_function(self) -> Callable[..., list]:
        return pullback(self.body, super().whole_function())

    def local_function(self, operands: Sequence[Type], results: Sequence[Type], axes: tuple[Axis, ...]) -> Callable[..., list]:
        return pullback(self.body, super().local_function(operands, results, axes))

    def ends(self, operands: tuple[Type, ...], results: tuple[Type, ...]) -> tuple[tuple[Type, ...], tuple[Type, ...]]:
        wanted, given = floating_ends(self.body)
        return (*operands, *(dual_type(results[k]) for k in given)), tuple(dual_type(operands[k]) for k in wanted)
