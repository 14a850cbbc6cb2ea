"""Translation of terms to JAX over a captured program's variables, with as few reshapes and transposes as possible.

A value is represented by an array and a pending rearrangement. Operators apply to the array without carrying out the rearrangement
where they can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax

from unity.pcg.ir.program import Equation, Literal
from unity.pcg.operators.pointwise import DERIVED
from unity.pcg.operators.promised_reads import promised
from unity.substitutions.language.rearrangement import (
    Rearrangement,
    after,
    dimensions,
    kept,
    reshaped,
    resized,
    transposed,
    unchanged,
)
from unity.substitutions.language.term import Apply, Term, Variable
from unity.substitutions.language.typecheck import TensorType, concrete
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.substitutions.rewriting.occurrences import Occurrence


@dataclass(frozen=True, eq=False)
class Laid:
    """A value as an array and the rearrangement that turns the array into the value."""

    array: jax.Array
    view: Rearrangement

    @property
    def value(self) -> jax.Array:
        return self.view(self.array)


def laid(value: jax.Array) -> Laid:
    """Return a value without a pending rearrangement."""
    return Laid(value, unchanged(value.shape))


def write(occurrence: Occurrence, terms: Sequence[Term], arrays: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Compute the arrays that replace an occurrence's roots.

    Args:
        occurrence: the occurrence.
        terms: the side of the rule that replaces it.
        arrays: the arrays of the rule's variables.
    """
    writer = _Writer(occurrence, arrays)
    written = map(writer.of, terms)
    triples = zip(written, occurrence.sides[0], occurrence.roots, strict=True)
    return [_array_under(writer.promised(x, old) if root.atom in occurrence.promised else x, root.view) for x, old, root in triples]


def _array_under(x: Laid, view: Rearrangement) -> jax.Array:
    """Return the array whose rearrangement by `view` is the value of x."""
    back = after(view.inverse(), x.view)
    return back(x.array) if back is not None else view.inverse()(x.value)


class _Writer:
    """The translation of an occurrence's terms, each distinct subterm once."""

    def __init__(self, occurrence: Occurrence, arrays: Mapping[str, jax.Array]) -> None:
        self.occurrence, self.arrays = occurrence, arrays
        self.done: dict[Term, list[Laid]] = {}

    def of(self, term: Term) -> Laid:
        if isinstance(term, Variable):
            return Laid(self.arrays[term.name], self.occurrence.tensors[term.name].view)
        node = term.node
        if node not in self.done:
            operands = [self.of(t) for t in node.operands]
            self.done[node] = self.apply(node, operands)
        return self.done[node][term.result]

    def apply(self, term: Apply, operands: list[Laid]) -> list[Laid]:
        operator = VOCABULARY[term.operator]
        write = WRITERS.get(term.operator)
        types = [self.occurrence.types[t] for t in term.operands]
        written = write(self, term, operands, types) if write is not None else None
        if written is not None:
            return written
        attributes = concrete(operator, term.attributes, types)
        extra = {"at": attributes[-1]} if term.operator == "split" else {}
        results = operator.run(*attributes[: len(operator.attributes)], *(x.value for x in operands), **extra)
        return [laid(x) for x in (results if isinstance(results, list) else [results])]

    def promised(self, x: Laid, look_up: Term) -> Laid:
        """Return the replacement of a promised look-up, given that of the clamping one."""
        assert isinstance(look_up, Apply)
        table, ids = look_up.operands
        return laid(promised(x.value, self.of(ids).value, self.occurrence.types[table].shape[0]))

    def example(self, name: str) -> Equation | None:
        """Return the program's equation whose further parameters an operator's equations copy, if there is one."""
        application = self.occurrence.examples.get(name)
        return application.equation if application is not None else None


Writer = Callable[[_Writer, Apply, list[Laid], list[TensorType]], list[Laid] | None]
WRITERS: dict[str, Writer] = {}


def writes(*operators: str) -> Callable[[Writer], Writer]:
    """Register the function that translates applications of some operators without carrying out rearrangements.

    It returns None where it cannot; the operator's own function is then applied to the rearranged arrays.
    """

    def register(writer: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(operators, writer))
        return writer

    return register


@writes("add", "sub", "mul")
def _elementwise(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    x, y = operands
    change = after(x.view.inverse(), y.view)
    if change is None:
        return None
    run = {"add": lax.add, "sub": lax.sub, "mul": lax.mul}[term.operator]
    return [Laid(run(x.array, change(y.array)), x.view)]


@writes("scale")
def _scale(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    x, factor = operands
    return [Laid(x.array * factor.value, x.view)]


@writes("map")
def _map(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    """Apply the function by the primitive of the equation that was interpreted as it."""
    (x,) = operands
    example = writer.example(str(term.attributes[0]))
    if example is None:
        return None
    if example.name == DERIVED:
        return [Laid(jax.nn.relu(x.array), x.view)]
    operands_of_example = [np.asarray(a.value).reshape(()) if isinstance(a, Literal) else x.array for a in example.operands]
    return [Laid(example.primitive.bind(*operands_of_example, **example.params), x.view)]


@writes("bias")
def _bias(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    x, b = operands
    place = kept(x.view.inverse(), len(types[0].shape) - 1)
    if place is None:
        return None
    shape = [1] * x.array.ndim
    shape[place] = types[1].shape[0]
    return [Laid(x.array + b.value.reshape(shape), x.view)]


@writes("matmul")
def _matmul(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    x, y = operands
    example = writer.example("matmul")
    if _numbers(x, y) is None:
        x, y = laid(x.value), laid(y.value)
    numbers = _numbers(x, y)
    assert numbers is not None
    params = example.params if example is not None else {}
    precision = {k: params[k] for k in ("precision", "preferred_element_type") if k in params}
    z = lax.dot_general(x.array, y.array, numbers, **precision)
    *batch, n, _ = types[0].shape
    return [Laid(z, reshaped(z.shape, (*batch, n, types[1].shape[-1])))]


Numbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def _numbers(x: Laid, y: Laid) -> Numbers | None:
    """Return the dimension numbers by which the arrays of two matrices are multiplied, or None if they must be rearranged first."""
    left, right = dimensions(x.view), dimensions(y.view)
    if left is None or right is None:
        return None
    *batch_x, rows, inner_x = left
    *batch_y, inner_y, columns = right
    contracted = (inner_x, inner_y)
    batch = (tuple(d for g in batch_x for d in g), tuple(d for g in batch_y for d in g))
    if [len(g) for g in batch_x] != [len(g) for g in batch_y] or any(list(g) != sorted(g) for g in (rows, columns)):
        return None
    for a, b in (contracted, batch):
        if [x.array.shape[d] for d in a] != [y.array.shape[d] for d in b]:
            return None
    return contracted, batch


@writes("concat")
def _concat(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    x, y = operands
    place = kept(x.view.inverse(), int(term.attributes[0]) % len(types[0].shape))
    if place is None or len(x.array.shape) != len(y.array.shape):
        return None
    if resized(x.view, place, y.array.shape[place]) != y.view:
        return None
    z = lax.concatenate([x.array, y.array], place)
    return [Laid(z, resized(x.view, place, z.shape[place]))]


@writes("split")
def _split(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    (x,) = operands
    d = int(term.attributes[0]) % len(types[0].shape)
    place = kept(x.view.inverse(), d)
    if place is None:
        return None
    n = x.array.shape[place]
    at = int(concrete(VOCABULARY["split"], term.attributes, types)[1]) or n // 2
    parts = [lax.slice_in_dim(x.array, 0, at, axis=place), lax.slice_in_dim(x.array, at, n, axis=place)]
    return [Laid(p, resized(x.view, place, p.shape[place])) for p in parts]


@writes("embedding")
def _embedding(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    """Look up rows with the program's own mode for indices out of range."""
    table, ids = (x.value for x in operands)
    example = writer.example("embedding")
    if example is None:
        return None
    numbers = lax.GatherDimensionNumbers(offset_dims=(ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,))
    p = example.params
    return [laid(lax.gather(table, ids[..., None], numbers, (1, table.shape[1]), mode=p["mode"], fill_value=p["fill_value"]))]


@writes("conv2d")
def _conv2d(writer: _Writer, term: Apply, operands: list[Laid], types: list[TensorType]) -> list[Laid] | None:
    """Convolve images with dimensions in the program's own order."""
    example = writer.example("conv2d")
    if example is None:
        return None
    groups, stride, padding = term.attributes
    p, numbers = example.params, example.params["dimension_numbers"]
    image, kernel = (_in_order(x, spec) for x, spec in zip(operands, (numbers.lhs_spec, numbers.rhs_spec), strict=True))
    z = lax.conv_general_dilated(
        image, kernel, (int(stride),) * 2, str(padding).upper(), dimension_numbers=numbers,
        feature_group_count=int(groups) or types[0].shape[1], precision=p["precision"],
        preferred_element_type=p["preferred_element_type"],
    )  # fmt: skip
    return [Laid(z, transposed(z.shape, tuple(numbers.out_spec)))]


def _in_order(x: Laid, spec: Sequence[int]) -> jax.Array:
    """Return the array whose transpose by `spec` is the value of x."""
    back = transposed(x.view.target, tuple(sorted(range(len(spec)), key=lambda k: spec[k])))
    both = after(back, x.view)
    return both(x.array) if both is not None else back(x.value)
