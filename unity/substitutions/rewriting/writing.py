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
    reshaped,
    resized,
    target_dimension,
    transposed,
    unchanged,
)
from unity.substitutions.language.term import Apply, Term, Variable
from unity.substitutions.language.typecheck import TensorType, concrete
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.substitutions.rewriting.occurrences import Occurrence


@dataclass(frozen=True, eq=False)
class ViewedArray:
    """A value, represented by an array and the pending rearrangement that turns the array into the value."""

    array: jax.Array
    view: Rearrangement

    @property
    def value(self) -> jax.Array:
        return self.view(self.array)


def unarranged(value: jax.Array) -> ViewedArray:
    """Return a value without a pending rearrangement."""
    return ViewedArray(value, unchanged(value.shape))


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


def _array_under(x: ViewedArray, view: Rearrangement) -> jax.Array:
    """Return the array whose rearrangement by `view` is the value of x."""
    back = after(view.inverse(), x.view)
    return back(x.array) if back is not None else view.inverse()(x.value)


class _Writer:
    """The translation of an occurrence's terms, each distinct subterm once."""

    def __init__(self, occurrence: Occurrence, arrays: Mapping[str, jax.Array]) -> None:
        self.occurrence, self.arrays = occurrence, arrays
        self.written: dict[Term, list[ViewedArray]] = {}

    def of(self, term: Term) -> ViewedArray:
        if isinstance(term, Variable):
            return ViewedArray(self.arrays[term.name], self.occurrence.tensors[term.name].view)
        node = term.node
        if node not in self.written:
            self.written[node] = self.apply(node, [self.of(t) for t in node.operands])
        return self.written[node][term.result]

    def apply(self, term: Apply, operands: list[ViewedArray]) -> list[ViewedArray]:
        operator = VOCABULARY[term.operator]
        write = WRITERS.get(term.operator)
        types = [self.occurrence.types[t] for t in term.operands]
        written = write(self, term, operands, types) if write is not None else None
        if written is not None:
            return written
        attributes = concrete(operator, term.attributes, types)
        extra = {"at": attributes[-1]} if term.operator == "split" else {}
        results = operator.run(*attributes[: len(operator.attributes)], *(x.value for x in operands), **extra)
        return [unarranged(x) for x in (results if isinstance(results, list) else [results])]

    def promised(self, x: ViewedArray, look_up: Term) -> ViewedArray:
        """Return the replacement of a promised look-up, given that of the clamping one."""
        assert isinstance(look_up, Apply)
        table, ids = look_up.operands
        return unarranged(promised(x.value, self.of(ids).value, self.occurrence.types[table].shape[0]))

    def example(self, name: str) -> Equation | None:
        """Return the program's equation whose further parameters an operator's equations copy, if there is one."""
        application = self.occurrence.examples.get(name)
        return application.equation if application is not None else None


Writer = Callable[[_Writer, Apply, list[ViewedArray], list[TensorType]], list[ViewedArray] | None]
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
def _elementwise(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
    x, y = operands
    change = after(x.view.inverse(), y.view)
    if change is None:
        return None
    run = {"add": lax.add, "sub": lax.sub, "mul": lax.mul}[term.operator]
    return [ViewedArray(run(x.array, change(y.array)), x.view)]


@writes("scale")
def _scale(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
    x, factor = operands
    return [ViewedArray(x.array * factor.value, x.view)]


@writes("map")
def _map(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
    """Apply a function by the primitive, and with the parameters, of the program's equation that was read as it."""
    (x,) = operands
    example = writer.example(str(term.attributes[0]))
    if example is None:
        return None
    if example.name == DERIVED:
        return [ViewedArray(jax.nn.relu(x.array), x.view)]
    operands_of_example = [np.asarray(a.value).reshape(()) if isinstance(a, Literal) else x.array for a in example.operands]
    return [ViewedArray(example.primitive.bind(*operands_of_example, **example.params), x.view)]


@writes("bias")
def _bias(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
    x, b = operands
    place = target_dimension(x.view.inverse(), len(types[0].shape) - 1)
    if place is None:
        return None
    shape = [1] * x.array.ndim
    shape[place] = types[1].shape[0]
    return [ViewedArray(x.array + b.value.reshape(shape), x.view)]


@writes("matmul")
def _matmul(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
    x, y = operands
    example = writer.example("matmul")
    if _numbers(x, y) is None:
        x, y = unarranged(x.value), unarranged(y.value)
    numbers = _numbers(x, y)
    assert numbers is not None
    params = example.params if example is not None else {}
    precision = {k: params[k] for k in ("precision", "preferred_element_type") if k in params}
    z = lax.dot_general(x.array, y.array, numbers, **precision)
    *batch, n, _ = types[0].shape
    return [ViewedArray(z, reshaped(z.shape, (*batch, n, types[1].shape[-1])))]


Numbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def _numbers(x: ViewedArray, y: ViewedArray) -> Numbers | None:
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
def _concat(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
    x, y = operands
    place = target_dimension(x.view.inverse(), int(term.attributes[0]) % len(types[0].shape))
    if place is None or len(x.array.shape) != len(y.array.shape):
        return None
    if resized(x.view, place, y.array.shape[place]) != y.view:
        return None
    z = lax.concatenate([x.array, y.array], place)
    return [ViewedArray(z, resized(x.view, place, z.shape[place]))]


@writes("split")
def _split(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
    (x,) = operands
    d = int(term.attributes[0]) % len(types[0].shape)
    place = target_dimension(x.view.inverse(), d)
    if place is None:
        return None
    n = x.array.shape[place]
    at = int(concrete(VOCABULARY["split"], term.attributes, types)[1]) or n // 2
    parts = [lax.slice_in_dim(x.array, 0, at, axis=place), lax.slice_in_dim(x.array, at, n, axis=place)]
    return [ViewedArray(p, resized(x.view, place, p.shape[place])) for p in parts]


@writes("embedding")
def _embedding(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
    """Look up rows with the program's own mode for indices out of range."""
    table, ids = (x.value for x in operands)
    example = writer.example("embedding")
    if example is None:
        return None
    numbers = lax.GatherDimensionNumbers(offset_dims=(ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,))
    p = example.params
    return [unarranged(lax.gather(table, ids[..., None], numbers, (1, table.shape[1]), mode=p["mode"], fill_value=p["fill_value"]))]


@writes("conv2d")
def _conv2d(writer: _Writer, term: Apply, operands: list[ViewedArray], types: list[TensorType]) -> list[ViewedArray] | None:
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
    return [ViewedArray(z, transposed(z.shape, tuple(numbers.out_spec)))]


def _in_order(x: ViewedArray, spec: Sequence[int]) -> jax.Array:
    """Return the array whose transpose by `spec` is the value of x."""
    back = transposed(x.view.target, tuple(sorted(range(len(spec)), key=lambda k: spec[k])))
    both = after(back, x.view)
    return both(x.array) if both is not None else back(x.value)
