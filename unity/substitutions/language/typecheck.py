"""Type checking of terms: shapes, seams and parallel types, all derived from the operator table.

An operator's body is traced from its JAX function on the operands' shapes. The states that its operands and results may have along
an axis are the choices of that body (`unity.pcg.propagation.choices`), so that this module has no rules about single operators.

A *seam* is the position in a concatenated dimension where its parts meet. It follows the dimension through every operator that has
a factor along it, and `split` divides there. A dimension without a seam is split in halves; one whose operands have different seams
cannot be split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp

from unity.base.errors import IllTypedError
from unity.pcg.ir.program import Body
from unity.pcg.ir.tracing import trace
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.choices import choices
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import TABLE
from unity.pcg.types.parallel_type import UNUSED, Shape, State, Type, misfit, show
from unity.substitutions.language.term import Attribute, Term, Variable, subterms
from unity.substitutions.language.vocabulary import VOCABULARY, Operator

Seam = tuple[int, "Seam | None", "Seam | None"]  # the size of the first part, and the seams inside both
DIFFERENT: Seam = (-1, None, None)
REFUSALS = (TypeError, ValueError, IndexError, ZeroDivisionError)  # raised by an operator's function for unsuitable operands


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor: its global shape, its states (one for each axis), its dtype and the seams of its dimensions."""

    shape: Shape
    states: Type = ()
    dtype: str = "float32"
    seams: tuple[Seam | None, ...] = ()

    def seam(self, dim: int) -> Seam | None:
        return self.seams[dim] if self.seams else None


def tensor(shape: Sequence[int], states: Sequence[State] = (), dtype: str = "float32") -> TensorType:
    """Return the type of a tensor without seams."""
    return TensorType(tuple(shape), tuple(states), dtype)


def typecheck(terms: Iterable[Term], known: Mapping[str, TensorType], axes: tuple[Axis, ...] = ()) -> dict[Term, TensorType]:
    """Return the type of every subterm, from the types of variables by name.

    Raises IllTypedError, which names the operator, the operand and the reason.
    """
    types: dict[Term, TensorType] = {}
    for term in subterms(terms):
        if isinstance(term, Variable):
            types[term] = known[term.name]
        else:
            types[term] = result_types(term.operator, term.attributes, tuple(types[x] for x in term.operands), axes)[term.result]
    return types


def result_types(
    name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...], axes: tuple[Axis, ...]
) -> tuple[TensorType, ...]:
    """Return the types of an operator's results. Raises IllTypedError if it does not take the operands."""
    outcome = _outcome(name, attributes, operands, axes)
    if isinstance(outcome, str):
        raise IllTypedError(outcome)
    return outcome


@TABLE.clears
@lru_cache(maxsize=1 << 18)
def _outcome(
    name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...], axes: tuple[Axis, ...]
) -> tuple[TensorType, ...] | str:
    """Return the types of an operator's results, or the reason why there are none, which is returned to be cached as well."""
    try:
        types = _typed(VOCABULARY[name], attributes, operands, axes)
    except IllTypedError as problem:
        return problem.reason
    except REFUSALS as problem:
        return f"{_spelled(name, attributes)}: {_first_line(problem)}"
    for t in types:
        why = misfit(t.shape, t.states, axes)
        if why or 0 in t.shape:
            return f"{_spelled(name, attributes)}: {why or f'gives an empty tensor {t.shape}'}"
    return types


def _typed(
    operator: Operator, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...], axes: tuple[Axis, ...]
) -> tuple[TensorType, ...]:
    if operator.change is not None:
        return (_changed(operator, attributes, operands[0], axes),)
    body = body_of(operator.name, concrete(operator, attributes, operands), _structs(operands))
    states = [_along(operator, body, attributes, operands, k, axes) for k in range(len(axes))]
    seams = _seams(operator, attributes, body, operands)
    results = [body.tensor(a) for a in body.outputs]
    return tuple(
        TensorType(t.shape, tuple(s[r] for s in states), str(t.dtype), seams[r] if any(seams[r]) else ())
        for r, t in enumerate(results)
    )


def _changed(operator: Operator, attributes: Sequence[Attribute], x: TensorType, axes: tuple[Axis, ...]) -> TensorType:
    """Return the type of a parallelization operator's result."""
    assert operator.change is not None
    *dims, axis = attributes
    k = next(k for k, a in enumerate(axes) if a.name == axis)
    rank = len(x.shape)
    if not all(-rank <= int(d) < rank for d in dims):
        raise IllTypedError(f"{_spelled(operator.name, attributes)}: a tensor of shape {list(x.shape)} has no such dimension")
    before, after = operator.change(*(int(d) % rank for d in dims))
    if before == after:
        raise IllTypedError(f"{_spelled(operator.name, attributes)} changes nothing: both dimensions are the same one")
    if x.states[k] != before:
        raise IllTypedError(
            f"{_spelled(operator.name, attributes)}: the operand is {in_words(x.states[k])} along {axis}, and must be"
            f" {in_words(before)}"
        )
    return TensorType(x.shape, (*x.states[:k], after, *x.states[k + 1 :]), x.dtype, x.seams)


def in_words(state: State) -> str:
    """Return a state in words."""
    words = {"U": "unused", "R": "replicated for use", "S": "a partial sum"}
    return words.get(state.kind) or f"partitioned in dimension {state.dim}" + (f" at {state.outer}" if state.outer > 1 else "")


def concrete(operator: Operator, attributes: tuple[Attribute, ...], operands: Sequence[TensorType]) -> tuple[Attribute, ...]:
    """Return an operator's attributes, completed from its operands' types: a `split` gets the position of the seam."""
    if operator.name != "split":
        return attributes
    dim, rank = int(attributes[0]), len(operands[0].shape)
    seam = operands[0].seam(dim % rank) if -rank <= dim < rank else None
    if seam == DIFFERENT:
        why = "the operand is made of tensors that were concatenated at different places"
        raise IllTypedError(f"{_spelled('split', attributes)}: {why}")
    return (dim, seam[0] if seam else 0)


def _structs(operands: Iterable[TensorType]) -> tuple[tuple[Shape, str], ...]:
    return tuple((t.shape, t.dtype) for t in operands)


@TABLE.clears
@lru_cache(maxsize=1 << 16)
def body_of(name: str, attributes: tuple[Attribute, ...], operands: tuple[tuple[Shape, str], ...]) -> Body:
    """Return the body of an operator on operands of these shapes and dtypes. Raises one of `REFUSALS` if it does not take them."""
    operator = VOCABULARY[name]
    assert operator.prepare is not None
    extra = {"at": attributes[-1]} if name == "split" else {}
    values = attributes[: len(operator.attributes)]
    structs = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in operands]
    operator.prepare(*values, *structs, **extra)  # refuses most unsuitable operands, without a trace
    problems: list[Exception] = []

    def run(*xs: jax.Array) -> object:
        try:
            return operator.run(*values, *xs, **extra)
        except REFUSALS as problem:  # not raised through JAX, which takes milliseconds to filter a traceback
            problems.append(problem)
            return ()

    program = trace(run, structs)
    if problems:
        raise problems[0]
    return program


@lru_cache(maxsize=1 << 16)
def _by_operands(body: Body, seeds: tuple[tuple[int, State], ...]) -> Mapping[tuple[State, ...], Choice]:
    """Return the choices of a body by its operands' states, the first of several."""
    by_operands: dict[tuple[State, ...], Choice] = {}
    for choice in choices(body, seeds):
        by_operands.setdefault(choice.operands, choice)
    return by_operands


def _along(
    operator: Operator,
    body: Body,
    attributes: Sequence[Attribute],
    operands: Sequence[TensorType],
    k: int,
    axes: tuple[Axis, ...],
) -> tuple[State, ...]:
    """Return the states of an operator's results along one axis."""
    states = tuple(t.states[k] for t in operands)
    seeds = tuple((i, s) for i, s in enumerate(states) if s.kind == "P" and s.outer > 1)
    choice = _by_operands(body, seeds).get(states)
    if choice is None:
        raise IllTypedError(_refusal(operator, body, attributes, states, axes[k]))
    used = 1  # devices along all axes with these states, which divide the same factor
    for axis, others in zip(axes, zip(*(t.states for t in operands), strict=True), strict=True):
        used *= axis.size if tuple(others) == states and any(s != UNUSED for s in states) else 1
    if choice.size % used:
        raise IllTypedError(f"{_spelled(operator.name, attributes)}: {used} devices do not divide a factor of size {choice.size}")
    return choice.results


def _refusal(operator: Operator, body: Body, attributes: Sequence[Attribute], states: Sequence[State], axis: Axis) -> str:
    """Return why an operator does not take its operands' states: an operand, and the states that it could have instead."""
    head = f"{_spelled(operator.name, attributes)} along {axis.name}"
    legal = list(_by_operands(body, ()))
    for i, state in sorted(enumerate(states), key=lambda pair: pair[1] != UNUSED):
        others = {c[i] for c in legal if all(s == t for j, (s, t) in enumerate(zip(c, states, strict=True)) if j != i)}
        if others:
            which = "the operand" if len(states) == 1 else f"operand {i + 1}"
            alternatives = " or ".join(sorted(in_words(s) for s in others))
            return f"{head}: {which} is {in_words(state)}, and must be {alternatives}"
    return f"{head}: no factor of it has operands that are " + " and ".join(in_words(s) for s in states)


def _seams(
    operator: Operator, attributes: Sequence[Attribute], body: Body, operands: Sequence[TensorType]
) -> list[tuple[Seam | None, ...]]:
    """Return the seams of an operator's results: those of its operands along its factors, except for `concat` and `split`."""
    shapes = [body.tensor(a).shape for a in body.outputs]
    seams_of: list[list[Seam | None]] = [[None] * len(shape) for shape in shapes]
    if any(any(t.seams) for t in operands):
        along: dict[tuple[int, int], set[Seam | None]] = {}
        for operand, e, result, d in _links(body):
            along.setdefault((result, d), set()).add(operands[operand].seam(e))
        for (result, d), seams in along.items():
            seams_of[result][d] = seams.pop() if len(seams) == 1 else DIFFERENT
    if operator.name == "concat":
        d = int(attributes[0]) % len(shapes[0])
        seam = (operands[0].shape[d], operands[0].seam(d), operands[1].seam(d))
        halves = seam == (operands[1].shape[d], None, None)
        seams_of[0][d] = None if halves else seam
    if operator.name == "split":
        d = int(attributes[0]) % len(shapes[0])
        seam = operands[0].seam(d)
        for result, inner in enumerate(seam[1:] if seam else (None, None)):
            seams_of[result][d] = inner
    return [tuple(seams) for seams in seams_of]


@lru_cache(maxsize=1 << 16)
def _links(body: Body) -> tuple[tuple[int, int, int, int], ...]:
    """Return (operand, its dimension, result, its dimension) for every factor that covers both dimensions entirely."""
    links = []
    for choice in choices(body):
        if choice.halos:  # a window over a seam mixes both parts
            continue
        for i, s in enumerate(choice.operands):
            for r, t in enumerate(choice.results):
                whole = s.kind == t.kind == "P" and s.outer == t.outer == 1
                if whole and body.tensors[body.inputs[i]].shape[s.dim] == body.tensor(body.outputs[r]).shape[t.dim]:
                    links.append((i, s.dim, r, t.dim))
    return tuple(dict.fromkeys(links))


def _spelled(name: str, attributes: Sequence[Attribute]) -> str:
    return f"{name}({', '.join([*map(str, attributes), '…'])})"


def _first_line(problem: BaseException) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__


def shown(type_: TensorType, axes: tuple[Axis, ...]) -> str:
    """Return a type as text: shape and parallel type."""
    return f"{list(type_.shape)} {show(type_.states, axes, len(type_.shape))}"
