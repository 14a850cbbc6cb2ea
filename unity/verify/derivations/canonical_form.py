"""Translation of a program into canonical values (`nodes.py`), one for every variable, whatever the layout of its tensors.

One reader for each kind of primitive translates its equations into the operators of `constructors.py`. An equation of another
kind, or with a parameter that its reader does not know, becomes an opaque operator, identified by its whole text.

The *manner* of an operator is how it is computed (precision, accumulation type, treatment of indices outside), as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.capture.value_numbering import gradients_add_up
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor, params_key, tensor_type
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.operators.pointwise import pointwise
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.promises import BOUNDS_PARAMETERS, CLIPPED, PROMISED, promised_rows
from unity.substitutions.language.rearrangement import reshaped, transposed
from unity.verify.derivations.constructors import expanded
from unity.verify.derivations.layouts import boxed
from unity.verify.derivations.nodes import CanonicalNode, CanonicalValue, NodeStore, reachable


@dataclass(frozen=True, eq=False)
class CanonicalForms:
    """The values of a program's variables and outputs."""

    body: Body
    store: NodeStore
    values: Mapping[int, CanonicalValue]
    outputs: tuple[CanonicalValue, ...]

    @cached_property
    def nodes(self) -> Mapping[str, CanonicalNode]:
        """The nodes of the outputs, by hash."""
        return {node.hash: node for node in reachable(self.outputs)}

    @cached_property
    def equation_counts(self) -> Mapping[CanonicalNode, int]:
        """The number of equations that compute each node. An equation that only rearranges its operand computes none."""
        counts: Counter[CanonicalNode] = Counter()
        for e in self.body.equations:
            operands = {self.of(a).node for a in e.operands}
            computed = {self.values[v].node for v in e.results} - operands
            if e.name == "gather":  # a promised look-up contains a clamped one
                computed |= {x.node for new in computed for x in new.operands if x.node.kind == "rows"} - operands
            counts.update(computed)
        return counts

    def of(self, atom: Atom) -> CanonicalValue:
        """Return the value of a variable or literal."""
        return _literal(self.store, atom) if isinstance(atom, Literal) else self.values[atom]


def canonical_forms(body: Body, store: NodeStore | None = None) -> CanonicalForms:
    """Return the canonical forms of a program. Those of programs that share a store can be compared."""
    store = store or NodeStore()
    inputs = [store.unarranged("input", (k,), (), body.tensors[v]) for k, v in enumerate(body.inputs)]
    return apply_body(store, body, inputs)


def apply_body(store: NodeStore, body: Body, inputs: Sequence[CanonicalValue], manner: str | None = None) -> CanonicalForms:
    """Apply a program to values. `manner` replaces the manner of its products, convolutions and look-ups."""
    values, calls = dict(zip(body.inputs, inputs, strict=True)), _Calls(store, body)
    for e in body.equations:
        operands = tuple(_literal(store, a) if isinstance(a, Literal) else values[a] for a in e.operands)
        results = tuple(body.tensors[v] for v in e.results)
        reading = _Reading(store, e, operands, results, manner, calls.occurrence(e, operands))
        values.update(zip(e.results, _read(reading), strict=True))
    outputs = tuple(_literal(store, a) if isinstance(a, Literal) else values[a] for a in body.outputs)
    return CanonicalForms(body, store, values, outputs)


def function_of(store: NodeStore, name: str, x: CanonicalValue) -> CanonicalValue:
    """Apply an elementwise function of one tensor, identified by its name."""
    return store.make("function", (name,), (x,), x.node.tensor.dtype)


def rows_of(store: NodeStore, table: CanonicalValue, ids: CanonicalValue, manner: str) -> CanonicalValue:
    """Look up rows of a table [v, h] for indices of any shape. A promised look-up is a clamped one, marked as promised."""
    if manner == PROMISED:
        rows = rows_of(store, table, ids, CLIPPED)
        dtypes = str(rows.node.tensor.dtype), str(ids.node.tensor.dtype)
        return apply_body(store, promised_rows(rows.shape, dtypes[0], ids.shape, dtypes[1], table.shape[0]), [rows, ids]).outputs[0]
    flat = store.rearranged(reshaped(ids.shape, (prod(ids.shape),)), ids)
    rows = store.make("rows", (manner,), (table, flat), table.node.tensor.dtype)
    return store.rearranged(reshaped(rows.shape, (*ids.shape, table.shape[1])), rows)


def _literal(store: NodeStore, a: Literal) -> CanonicalValue:
    """Return the value of a literal. One element with dimensions is a reshaped scalar."""
    if prod(a.tensor.shape) != 1 or not a.tensor.shape or jnp.issubdtype(a.tensor.dtype, jax.dtypes.extended):
        return store.unarranged("literal", (a.key,), (), a.tensor)
    scalar = Literal(np.asarray(a.value).reshape(()), tensor_type((), a.tensor.dtype))
    return store.rearranged(reshaped((), a.tensor.shape), store.unarranged("literal", (scalar.key,), (), scalar.tensor))


class _Calls:
    """The calls of a program. Those that equal earlier ones, and whose gradients do not add up, stay apart from them."""

    def __init__(self, store: NodeStore, body: Body) -> None:
        self.store, self.body = store, body
        self.seen: set[tuple[Any, ...]] = set()

    def occurrence(self, e: Equation, operands: Sequence[CanonicalValue]) -> int:
        """Return how many calls precede a call that equal it, but for layouts, and must stay apart; 0 for any other equation."""
        if e.name not in NESTING:
            return 0
        call = _content(self.store, e), *(x.text for x in operands)
        number = e.occurrence
        while (*call, number) in self.seen and not gradients_add_up(self.body, e):
            number += 1
        self.seen.add((*call, number))
        return number


def _content(store: NodeStore, e: Equation) -> tuple[str, int]:
    """Return a text of a primitive and its parameters, and the number of its function, without the occurrence of a call."""
    plain = replace(e, occurrence=0) if e.occurrence else e
    return plain.signature, store.function(plain) if e.identity else 0


@dataclass(frozen=True, eq=False)
class _Reading:
    """An equation with the values of its operands.

    Attributes:
        manner: the manner that replaces the equation's own.
        occurrence: how many equal calls precede it from which it must stay apart.
    """

    store: NodeStore
    equation: Equation
    operands: tuple[CanonicalValue, ...]
    results: tuple[Tensor, ...]
    manner: str | None
    occurrence: int

    @property
    def params(self) -> Mapping[str, Any]:
        return self.equation.params

    def params_without(self, *names: str) -> str:
        """Return the parameters except these as text."""
        return params_key({k: v for k, v in self.params.items() if k not in names})

    def manner_of(self, *names: str) -> str:
        """Return the manner that replaces the equation's own, or the parameters of these names as text."""
        return self.manner if self.manner is not None else params_key({k: self.params[k] for k in names if k in self.params})

    def make(self, kind: str, params: tuple[Any, ...], *operands: CanonicalValue) -> CanonicalValue:
        return self.store.make(kind, params, operands, self.results[0].dtype)

    def viewed(self, k: int, permutation: Sequence[int], target: Shape) -> CanonicalValue:
        """View an operand transposed and reshaped."""
        x = self.operands[k]
        return self.store.rearranged(boxed(x.shape, x.shape, tuple(map(int, permutation)), target), x)

    def unviewed(self, x: CanonicalValue, permutation: Sequence[int], shape: Shape) -> CanonicalValue:
        """Return the value of shape `shape` that becomes `x` if it is transposed and reshaped: the inverse of `viewed`."""
        return self.store.rearranged(boxed(shape, shape, tuple(map(int, permutation)), x.shape).inverse(), x)


def _read(reading: _Reading) -> Sequence[CanonicalValue]:
    """Return the values of an equation's results."""
    e = reading.equation
    empty = any(0 in shape for shape in (*(x.shape for x in reading.operands), *(t.shape for t in reading.results)))
    reader = _pointwise if pointwise(e) is not None else READERS.get(e.name)
    values = reader(reading) if reader is not None and not empty else None
    return values if values is not None else _opaque(reading)


def _opaque(reading: _Reading) -> list[CanonicalValue]:
    store, content = reading.store, _content(reading.store, reading.equation)
    apart = (reading.occurrence,) if reading.occurrence else ()
    return [
        store.make("opaque", ("opaque", t.shape, *content, k, *apart), reading.operands, t.dtype)
        for k, t in enumerate(reading.results)
    ]


Reader = Callable[[_Reading], Sequence[CanonicalValue] | None]
READERS: dict[str, Reader] = {}


def _reads(*primitives: str) -> Callable[[Reader], Reader]:
    """Register the decorated function as the reader of some primitives. It returns None for parameters that it does not know."""

    def register(reader: Reader) -> Reader:
        READERS.update(dict.fromkeys(primitives, reader))
        return reader

    return register


def _pointwise(reading: _Reading) -> Sequence[CanonicalValue] | None:
    (x,) = (x for x, a in zip(reading.operands, reading.equation.operands, strict=True) if isinstance(a, int))
    if prod(x.shape) != prod(reading.results[0].shape) or reading.params.get("accuracy") is not None:  # not part of a name
        return None
    value = reading.make("function", (pointwise(reading.equation),), x)
    return [reading.store.rearranged(reshaped(x.shape, reading.results[0].shape), value)]


@_reads("add", "add_any", "sub", "mul")
def _binary(reading: _Reading) -> Sequence[CanonicalValue]:
    name = "add" if reading.equation.name == "add_any" else reading.equation.name
    pair = (expanded(reading.store, x, reading.results[0].shape) for x in reading.operands)
    return [reading.make(name, (name, reading.params_without()), *pair)]


@_reads("reshape", "squeeze", "expand_dims")
def _reshape(reading: _Reading) -> Sequence[CanonicalValue] | None:
    permutes = reading.equation.name == "reshape" and reading.params.get("dimensions") is not None
    if len(reading.operands) != 1 or permutes or reading.params.get("sharding") is not None:
        return None
    (x,) = reading.operands
    return [reading.store.rearranged(reshaped(x.shape, reading.results[0].shape), x)]


@_reads("transpose")
def _transpose(reading: _Reading) -> Sequence[CanonicalValue]:
    (x,) = reading.operands
    return [reading.store.rearranged(transposed(x.shape, tuple(map(int, reading.params["permutation"]))), x)]


@_reads("broadcast_in_dim")
def _broadcast(reading: _Reading) -> Sequence[CanonicalValue] | None:
    dims, shape = [int(d) for d in reading.params["broadcast_dimensions"]], reading.results[0].shape
    if len(reading.operands) != 1 or reading.params.get("sharding") is not None or dims != sorted(set(dims)):
        return None
    (x,) = reading.operands
    sizes = dict(zip(dims, x.shape, strict=True))
    full = reading.store.rearranged(reshaped(x.shape, tuple(sizes.get(d, 1) for d in range(len(shape)))), x)
    return [expanded(reading.store, full, shape)]


@_reads("dot_general")
def _dot(reading: _Reading) -> Sequence[CanonicalValue]:
    ((cx, cy), (bx, by)) = reading.params["dimension_numbers"]
    x, y = (v.shape for v in reading.operands)
    free_x = [d for d in range(len(x)) if d not in (*cx, *bx)]
    free_y = [d for d in range(len(y)) if d not in (*cy, *by)]
    b, m, k, n = (prod(shape[d] for d in dims) for shape, dims in ((x, bx), (x, free_x), (x, cx), (y, free_y)))
    left, right = reading.viewed(0, (*bx, *free_x, *cx), (b, m, k)), reading.viewed(1, (*by, *cy, *free_y), (b, k, n))
    manner = reading.manner if reading.manner is not None else reading.params_without("dimension_numbers")
    product = reading.make("dot", (manner,), left, right)
    return [reading.store.rearranged(reshaped(product.shape, reading.results[0].shape), product)]


def _last(rank: int, *dims: int) -> tuple[int, ...]:
    """Return the permutation that moves some dimensions behind the others."""
    return (*(d for d in range(rank) if d not in dims), *dims)


@_reads("concatenate")
def _concatenate(reading: _Reading) -> Sequence[CanonicalValue]:
    shape, d = reading.results[0].shape, int(reading.params["dimension"])
    order, rest = _last(len(shape), d), prod(shape) // shape[d]
    operands = (reading.viewed(k, order, (rest, x.shape[d])) for k, x in enumerate(reading.operands))
    return [reading.unviewed(reading.make("concat", (), *operands), order, shape)]


def _part(reading: _Reading, x: CanonicalValue, d: int, bounds: tuple[int, int, int]) -> CanonicalValue:
    """Slice one dimension by (start, limit, stride)."""
    order, n = _last(len(x.shape), d), x.shape[d]
    if bounds == (0, n, 1):
        return x
    flat = reading.store.rearranged(boxed(x.shape, x.shape, order, (prod(x.shape) // n, n)), x)
    part = reading.make("slice", bounds, flat)
    return reading.unviewed(part, order, (*x.shape[:d], part.shape[1], *x.shape[d + 1 :]))


@_reads("split")
def _split(reading: _Reading) -> Sequence[CanonicalValue]:
    sizes = [int(n) for n in reading.params["sizes"]]
    ends = np.cumsum(sizes).tolist()
    (x,), d = reading.operands, int(reading.params["axis"])
    return [_part(reading, x, d, (end - n, end, 1)) for n, end in zip(sizes, ends, strict=True)]


@_reads("slice")
def _slice(reading: _Reading) -> Sequence[CanonicalValue]:
    (x,), p = reading.operands, reading.params
    strides = p["strides"] or (1,) * len(x.shape)
    for d, bounds in enumerate(zip(p["start_indices"], p["limit_indices"], strides, strict=True)):
        start, limit, stride = map(int, bounds)
        x = _part(reading, x, d, (start, limit, stride))
    return [x]


@_reads("reduce_sum")
def _reduce_sum(reading: _Reading) -> Sequence[CanonicalValue]:
    (x,), axes = reading.operands, [int(a) for a in reading.params["axes"]]
    n = prod(x.shape[a] for a in axes)
    total = reading.make(
        "sum", (reading.params_without("axes"),), reading.viewed(0, _last(len(x.shape), *axes), (prod(x.shape) // n, n))
    )
    return [reading.store.rearranged(reshaped(total.shape, reading.results[0].shape), total)]


@_reads("gather")
def _gather(reading: _Reading) -> Sequence[CanonicalValue] | None:
    """Read a look-up of rows of a table, in any mode except the one that fills in a value."""
    numbers, p, (table, ids) = reading.params["dimension_numbers"], reading.params, reading.operands
    plain = (
        len(table.shape) == 2
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == (len(reading.results[0].shape) - 1,)
        and tuple(p["slice_sizes"]) == (1, table.shape[1])
        and p["mode"] != lax.GatherScatterMode.FILL_OR_DROP
        and not p["indices_are_sorted"]
        and not p["unique_indices"]
    )
    if not plain:
        return None
    where = reading.store.rearranged(reshaped(ids.shape, ids.shape[:-1]), ids)
    return [rows_of(reading.store, table, where, reading.manner_of(*BOUNDS_PARAMETERS))]


@_reads("conv_general_dilated")
def _convolution(reading: _Reading) -> Sequence[CanonicalValue]:
    """Read a convolution of images [n, c, …] with kernels [o, c, …], in any order of dimensions."""
    numbers, shape = reading.params["dimension_numbers"], reading.results[0].shape
    manner = reading.manner_of("precision", "preferred_element_type")
    others = reading.params_without("dimension_numbers", "precision", "preferred_element_type")
    x, w = (reading.viewed(k, spec, _permuted(reading.operands[k].shape, spec)) for k, spec in enumerate(numbers[:2]))
    z = reading.make("conv", ("conv", _permuted(shape, numbers.out_spec), others, manner), x, w)
    return [reading.unviewed(z, numbers.out_spec, shape)]


def _permuted(shape: Shape, permutation: Sequence[int]) -> Shape:
    return tuple(shape[d] for d in permutation)
