"""Proofs of the operator table: every choice of an operator, run on symbols on all devices, and compared with the whole operator.

The local program is the one that really runs (`pcg.local.interpreter`), traced for a mesh without devices. Its operands are pieces
of tensors of symbols, as their types say; its results must be the pieces of what the operator computes on whole tensors: slices of
*partitioned* results, all of an *unused* or *replicated* result on every device, and addends of a *partial sum*. The addends of a
partial operand are independent symbols. So a proof holds for all values of floating operands and all PRNG keys, at the given
sizes; integers and truth values are concrete, and the proof is for these alone.
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
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.choices import choices_with_moves
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Shape, Type, misfit, partitioned
from unity.verify.semantics.interpret import NotInterpreted, interpret_values
from unity.verify.semantics.local_programs import (
    dual_type,
    floating_positions,
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

UNTRACEABLE = (TypeError, ValueError, AssertionError, NotImplementedError)  # raised by JAX for a function that it cannot trace
LARGEST = 20_000  # elements of a tensor; for more of them, smaller sizes prove as much


@dataclass(frozen=True)
class OperatorCounterexample:
    """Numbers for which an operator computes wrong pieces.

    `values` are those of the symbols. `x0@[1,2,3]` is the addend of operand 0 at [2, 3] that device 1 holds.
    """

    result: int
    at: tuple[int, ...]  # device coordinates, then the index in the piece
    shapes: tuple[Shape, ...]  # of the whole operands
    values: Mapping[str, Any]
    whole: float
    pieces: float
    functions: tuple[str, ...] = ()  # uninterpreted ones, for which values were chosen

    def __str__(self) -> str:
        values = ", ".join(f"{k} = {v}" for k, v in self.values.items() if v) or "all symbols zero"
        functions = f" and some function for {', '.join(self.functions[:3])}" if self.functions else ""
        shapes = ", ".join(map(str, self.shapes))
        return f"operands {shapes}, {values}{functions}: result {self.result} at {self.at} is {self.pieces:g}, not {self.whole:g}"


@dataclass(frozen=True)
class ChoiceVerdict:
    """The verdict on one combination of choices. `answer` is "proved", "refuted", or "unknown", which `why` explains."""

    choices: tuple[Choice, ...]
    degrees: tuple[int, ...]
    of: str  # "values" or "gradients"
    answer: str
    why: str = ""
    counterexample: OperatorCounterexample | None = None

    def __str__(self) -> str:
        names = " × ".join(f"{c.name} over {d}" for c, d in zip(self.choices, self.degrees, strict=True))
        return f"{self.of} of {names}: {self.answer}" + (f" ({self.counterexample or self.why})" if self.answer != "proved" else "")


def check_operator(
    fn: Callable[..., Any], *args: Any, degrees: Sequence[int] = (2,), gradients: bool = True
) -> list[ChoiceVerdict]:
    """Check every way to split an operator, any JAX function, at the sizes of its arguments.

    Args:
        fn: the operator.
        args: arrays or `jax.ShapeDtypeStruct`s. Integer arrays keep their values.
        degrees: of the axis along which it is split.
        gradients: whether to check its derivative too.
    """
    leaves, tree = jax.tree.flatten(args)
    traced_fn = jax.make_jaxpr(lambda *flat: jax.tree.leaves(fn(*jax.tree.unflatten(tree, flat))))
    return check_body(close(traced_fn(*leaves)), degrees, leaves, gradients=gradients)


def check_body(
    body: Body, degrees: Sequence[int] = (2,), values: Sequence[Any] = (), *, gradients: bool = False, pairs: bool = False
) -> list[ChoiceVerdict]:
    """Check every choice of an operator on one axis, for each degree that its sizes allow.

    Args:
        body: the operator.
        degrees: of the axis.
        values: of the operands, used for integers and truth values.
        gradients: whether to check its derivative too.
        pairs: whether to check every pair of choices on two axes too, inner digits included.
    """
    proofs = [OperatorProof(body, values), *([GradientProof(body, values)] if gradients else [])]
    single = choices_with_moves(body)
    combinations: list[tuple[tuple[Choice, ...], tuple[int, ...]]] = [((c,), (d,)) for d in degrees for c in single]
    if pairs:
        every = {d: choices_with_moves(body, inner_digits(body, d)) for d in degrees}
        combinations += [(both, (d, d)) for d in degrees for both in product(every[d], repeat=2)]
    return [p.check(c, d) for c, d in combinations if fits(body, c, d) for p in proofs]


def inner_digits(body: Body, degree: int) -> Iterator[tuple[int, Any]]:
    """Yield (operand, state) for the second digit of every dimension, as a neighbour may require."""
    for p, v in enumerate(body.inputs):
        for i, n in enumerate(body.tensors[v].shape):
            if n % degree == 0 and n > degree:
                yield p, partitioned(i, degree)


def mesh(degrees: Sequence[int]) -> tuple[Axis, ...]:
    """Return axes of the given sizes."""
    return tuple(Axis("abcdefgh"[k], n, 0) for k, n in enumerate(degrees))


def types(states: Sequence[tuple]) -> tuple[Type, ...]:
    """Return the type of each tensor, from the states of all tensors along each axis."""
    return tuple(zip(*states, strict=True))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def fits(body: Body, chosen: Sequence[Choice], degrees: Sequence[int]) -> bool:
    """Return whether degrees divide the factors and the tensors' dimensions."""
    degree_of: dict[int, int] = {}
    for c, d in zip(chosen, degrees, strict=True):
        degree_of[id(c)] = degree_of.get(id(c), 1) * d
    if any(c.size % degree_of[id(c)] for c in chosen):
        return False
    ends = [body.tensor(a) for a in (*body.inputs, *body.outputs)]
    every = types([c.states for c in chosen])
    return all(misfit(t.shape, s, mesh(degrees)) is None for t, s in zip(ends, every, strict=True))


class OperatorProof:
    """One operator on symbols: its whole results, with which the pieces of every choice are compared."""

    of = "values"

    def __init__(self, body: Body, values: Sequence[Any] = ()) -> None:
        self.body, self.domain, self.rng = body, Symbolic(), np.random.default_rng(0)
        padded = [*values, *[None] * (len(self.tensors) - len(values))]
        self.operands = [self._operand(k, t, x) for k, (t, x) in enumerate(zip(self.tensors, padded, strict=True))]

    @property
    def tensors(self) -> list[Tensor]:
        """The whole operands of the program."""
        return [self.body.tensors[v] for v in self.body.inputs]

    def whole_function(self) -> Callable[..., list]:
        """Return the program as a function of whole tensors."""
        return whole_function(self.body)

    def local_function(self, operands: Sequence[Type], results: Sequence[Type], axes: tuple[Axis, ...]) -> Callable[..., list]:
        """Return the program as a function of one device's pieces."""
        return local_function(self.body, operands, results, axes)

    def boundary_types(self, operands: tuple[Type, ...], results: tuple[Type, ...]) -> tuple[tuple[Type, ...], tuple[Type, ...]]:
        """Return the types of the program's operands and results, from those of the operator."""
        return operands, results

    def _operand(self, k: int, tensor: Tensor, value: Any) -> StackedValue:
        """Return symbols `x0[1,2]`, or concrete integers: the value, or small random ones."""
        if is_element(tensor.dtype):
            return StackedValue(self.domain.symbols(f"x{k}", tensor.shape), False)
        if value is None or isinstance(value, jax.ShapeDtypeStruct):
            value = self.rng.integers(0, 2 if tensor.dtype == bool else 4, tensor.shape)
        return StackedValue(np.asarray(value).astype(tensor.dtype), True)

    @cached_property
    def program(self) -> core.ClosedJaxpr | str:
        """The program on whole tensors, or the reason that JAX gives for not tracing it: not every operator has a derivative."""
        try:
            return traced(self.body, self.whole_function(), self.tensors)
        except UNTRACEABLE as error:
            return _first_line(error)

    @cached_property
    def whole(self) -> list[StackedValue] | Exception:
        """The results of the program on whole tensors, or the error that prevents their computation."""
        assert isinstance(self.program, core.ClosedJaxpr)
        self.domain.renew()
        try:
            return interpret_values(self.program, self.operands, self.domain, ())
        except (NotInterpreted, PolynomialsTooLarge) as error:
            return error

    def check(self, chosen: tuple[Choice, ...], degrees: tuple[int, ...]) -> ChoiceVerdict:
        """Check one combination of choices, one for each axis."""
        try:
            answer, why, wrong = self._check(chosen, degrees)
        except NotInterpreted as error:
            answer, why, wrong = "unknown", f"not interpreted: {error}", None
        except PolynomialsTooLarge:
            answer, why, wrong = "unknown", "its polynomials have too many terms: prove it at smaller sizes", None
        return ChoiceVerdict(chosen, degrees, self.of, answer, why, wrong)

    def _check(self, chosen: tuple[Choice, ...], degrees: tuple[int, ...]) -> tuple[str, str, OperatorCounterexample | None]:
        if max((prod(t.shape) for t in self.body.tensors.values()), default=0) > LARGEST:
            return "unknown", f"a tensor has more than {LARGEST} elements: prove it at smaller sizes", None
        if not fits(self.body, chosen, degrees):
            return "unknown", "these degrees do not divide what they must", None
        if isinstance(self.program, str):
            return "unknown", f"there are no {self.of} to prove: {self.program}", None
        axes = mesh(degrees)
        states = types([c.operands for c in chosen]), types([c.results for c in chosen])
        operand_types, result_types = self.boundary_types(*states)
        try:
            run = self.local_function(*states, axes)
            program = traced_locally(self.body, run, self.tensors, operand_types, result_types, axes)
        except UNTRACEABLE as error:
            return "refuted", f"the local program cannot be built: {_first_line(error)}", None
        if isinstance(self.whole, Exception):
            raise self.whole
        self.domain.renew()
        one = (slice(None),) * len(axes) + (None,)  # `[*devices, 1, *piece]`
        operands = [
            StackedValue(symbolic_pieces(v, t, axes, self.domain, f"x{k}", self.rng)[one], v.known)
            for k, (v, t) in enumerate(zip(self.operands, operand_types, strict=True))
        ]
        return self.compare(interpret_values(program, operands, self.domain, axes), self.whole, result_types, axes)

    def compare(
        self,
        results: Sequence[StackedValue],
        expected: Sequence[StackedValue],
        result_types: Sequence[Type],
        axes: tuple[Axis, ...],
    ) -> tuple[str, str, OperatorCounterexample | None]:
        """Compare the pieces of each result with those of the whole result."""
        shapes, lead = tuple(t.shape for t in self.tensors), tuple(a.size for a in axes)
        for k, (value, whole, type_) in enumerate(zip(results, expected, result_types, strict=True)):
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
                    return "refuted", "", OperatorCounterexample(k, at, shapes, {}, float(want[at]), float(array[at]))
                continue
            answer = compare(self.domain, array, want)
            if answer.answer == "unknown":
                return "unknown", f"result {k} at {answer.at}: neither equal nor shown to differ", None
            if answer.answer == "different":
                numbers = answer.values or {}, answer.right, answer.left
                return "refuted", "", OperatorCounterexample(k, answer.at, shapes, *numbers, answer.functions)
        concrete = any(v.known for v in self.operands)
        return "proved", "for these integers and truth values" if concrete else "", None


class GradientProof(OperatorProof):
    """The derivative of one operator on symbols: from operands and cotangents to gradients, in their dual types."""

    of = "gradients"

    @property
    def tensors(self) -> list[Tensor]:
        _, results = floating_positions(self.body)
        return [*super().tensors, *(self.body.tensor(self.body.outputs[k]) for k in results)]

    def whole_function(self) -> Callable[..., list]:
        return pullback(self.body, super().whole_function())

    def local_function(self, operands: Sequence[Type], results: Sequence[Type], axes: tuple[Axis, ...]) -> Callable[..., list]:
        return pullback(self.body, super().local_function(operands, results, axes))

    def boundary_types(self, operands: tuple[Type, ...], results: tuple[Type, ...]) -> tuple[tuple[Type, ...], tuple[Type, ...]]:
        gradients, cotangents = floating_positions(self.body)
        return (*operands, *(dual_type(results[k]) for k in cotangents)), tuple(dual_type(operands[k]) for k in gradients)
