"""Interpretation of a captured program's equations as applications of the vocabulary's operators.

Reshapes, transposes and broadcasts that only add dimensions of size one are rearrangements rather than operators: an operand is a
variable of the program, viewed through a rearrangement. A product of any dimension numbers is a `matmul` of such operands, with a
view of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor, params_key
from unity.pcg.operators.pointwise import pointwise
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.promises import BOUNDS_PARAMETERS, CLIPPED
from unity.substitutions.language.rearrangement import (
    Rearrangement,
    after,
    reshaped,
    resized,
    target_dimension,
    transposed,
    unchanged,
)
from unity.substitutions.language.term import Attribute


@dataclass(frozen=True, eq=False)
class Viewed:
    """A variable or literal of a program, viewed through a rearrangement."""

    atom: Atom
    view: Rearrangement

    @property
    def key(self) -> tuple[int | str, Rearrangement]:
        """A key that is equal for equal values."""
        return (self.atom.key if isinstance(self.atom, Literal) else self.atom, self.view)

    def through(self, view: Rearrangement) -> Viewed | None:
        """Return the value viewed through one more rearrangement, or None if the composition has no such form."""
        both = after(view, self.view)
        return None if both is None else Viewed(self.atom, both)


@dataclass(frozen=True, eq=False)
class Application:
    """An equation interpreted as an operator: its results, viewed through `views`, are `operator(attributes, operands)`.

    Attributes:
        manner: further parameters of the equation, such as a precision, as text. A replacement must have the same.
        first: the number of the equation's first result among the operator's: a slice may be the second result of a split.
    """

    operator: str
    attributes: tuple[Attribute, ...]
    operands: tuple[Viewed, ...]
    results: tuple[int, ...]
    views: tuple[Rearrangement, ...]
    equation: Equation
    manner: str = ""
    first: int = 0

    def under(self, result: int, view: Rearrangement) -> tuple[tuple[Attribute, ...], tuple[Viewed, ...]] | None:
        """Return the attributes and operands that the operator has if `result` is viewed through `view`, or None if it has none."""
        natural = self.views[result]
        if view == natural:
            return self.attributes, self.operands
        change = after(view, natural.inverse())
        if change is None:
            return None
        if self.operator in ELEMENTWISE:
            return _unless_none(self.attributes, (_followed(x, change, natural.target) for x in self.operands))
        if self.operator == "bias":
            last, (x, b) = len(natural.target) - 1, self.operands
            return _unless_none((), (x.through(change), b)) if target_dimension(change, last) == len(view.target) - 1 else None
        if self.operator in ("concat", "split"):
            d = int(self.attributes[0]) % len(natural.target)
            place = target_dimension(change, d)
            if place is None:
                return None
            moved = (x.through(resized(change, d, x.view.target[d])) for x in self.operands)
            return _unless_none((place - len(view.target),), moved)
        return None


def _followed(x: Viewed, change: Rearrangement, shape: Shape) -> Viewed | None:
    """Return an operand of an elementwise operator whose result's view is changed. Scalars stay as they are."""
    return x.through(change) if x.view.target == shape else x


def _unless_none(
    attributes: tuple[Attribute, ...], operands: Iterable[Viewed | None]
) -> tuple[tuple[Attribute, ...], tuple[Viewed, ...]] | None:
    """Return attributes and operands, or None if an operand is None."""
    values = tuple(operands)
    return None if None in values else (attributes, tuple(x for x in values if x is not None))


# The operators that a single equation can be; the others of the vocabulary consist of several equations.
READABLE = frozenset({"add", "sub", "mul", "map", "scale", "bias", "matmul", "conv2d", "concat", "split", "sum", "embedding"})
ELEMENTWISE = frozenset({"add", "sub", "mul", "map", "scale"})


class Reading:
    """A program with its applications by operator, and the origin of each variable through reshapes and transposes."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.producer: dict[int, Equation] = {v: e for e in body.equations for v in e.results}
        self._origins: dict[int, Viewed] = {}

    def origin(self, atom: Atom) -> Viewed:
        """Return the variable that an atom is a rearrangement of, viewed as the atom."""
        if isinstance(atom, Literal):
            return Viewed(atom, unchanged(atom.tensor.shape))
        if atom not in self._origins:
            self._origins[atom] = self._origin(atom)
        return self._origins[atom]

    def _origin(self, variable: int) -> Viewed:
        itself = Viewed(variable, unchanged(self.body.tensors[variable].shape))
        e = self.producer.get(variable)
        step = rearrangement_of(e, self.body) if e is not None else None
        if e is None or step is None:
            return itself
        return self.origin(e.operands[0]).through(step) or itself

    def seen(self, x: Viewed) -> Viewed:
        """Return a view of a value as a view of the value's origin."""
        return self.origin(x.atom).through(x.view) or x

    @cached_property
    def applications(self) -> tuple[Application, ...]:
        """The applications that equations can be interpreted as, in order."""
        applications = (self.read(e) for e in self.body.equations)
        return tuple(a for a in applications if a is not None)

    @cached_property
    def by_operator(self) -> Mapping[str, tuple[Application, ...]]:
        """The applications of each operator."""
        by_operator: dict[str, list[Application]] = {}
        for a in self.applications:
            by_operator.setdefault(a.operator, []).append(a)
        return {k: tuple(v) for k, v in by_operator.items()}

    @cached_property
    def by_result(self) -> Mapping[int, Application]:
        """The application that produces each variable."""
        return {v: a for a in self.applications for v in a.results}

    def read(self, e: Equation) -> Application | None:
        """Return an equation as an application of the vocabulary, or None if no operator matches it."""
        reader = READERS.get(e.name)
        if reader is not None:
            return reader(self, e)
        return _function(self, e)

    def tensor(self, atom: Atom) -> Tensor:
        return self.body.tensor(atom)


def rearrangement_of(e: Equation, body: Body) -> Rearrangement | None:
    """Return the rearrangement that an equation is, or None if it does more than rearrange its operand's elements."""
    if e.name not in ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims") or len(e.operands) != 1:
        return None
    source, target = body.tensor(e.operands[0]).shape, body.tensors[e.results[0]].shape
    if e.name == "transpose":
        return transposed(source, tuple(int(p) for p in e.params["permutation"]))
    if prod(source) != prod(target) or (e.name == "reshape" and e.params.get("dimensions") is not None):
        return None
    if e.name == "broadcast_in_dim" and not prod(source):
        return None
    return reshaped(source, target)


Reader = Callable[[Reading, Equation], Application | None]
READERS: dict[str, Reader] = {}


def reads(*primitives: str) -> Callable[[Reader], Reader]:
    """Register the function that interprets equations of some primitives."""

    def register(reader: Reader) -> Reader:
        READERS.update(dict.fromkeys(primitives, reader))
        return reader

    return register


def _same(reading: Reading, operator: str, attributes: tuple[Attribute, ...], e: Equation, *operands: Viewed) -> Application:
    """Return an application whose results have no rearrangement."""
    views = tuple(unchanged(reading.tensor(v).shape) for v in e.results)
    return Application(operator, attributes, operands, e.results, views, e)


@reads("add", "sub", "mul", "add_any")
def _binary(reading: Reading, e: Equation) -> Application | None:
    shape, (x, y) = reading.tensor(e.results[0]).shape, e.operands
    a, b = reading.origin(x), reading.origin(y)
    if not _all_floating(reading, e) or not shape:
        return None
    operator = {"add_any": "add"}.get(e.name, e.name)
    if a.view.target == b.view.target == shape:
        return _same(reading, operator, (), e, a, b)
    if operator != "sub" and a.view.target != shape:
        a, b = b, a
    if a.view.target != shape:
        return None
    small = b.view.target
    if operator == "mul" and prod(small) == 1:
        scalar = b.through(reshaped(small, ()))
        return _same(reading, "scale", (), e, a, scalar) if scalar else None
    return _bias(e, a, b, shape) if operator == "add" and len(small) == len(shape) > 1 else None


def _bias(e: Equation, x: Viewed, b: Viewed, shape: Shape) -> Application | None:
    """Return the addition of a vector along one dimension, which a transpose makes the last one."""
    long = [d for d, n in enumerate(b.view.target) if n > 1]
    if len(long) != 1 or b.view.target[long[0]] != shape[long[0]]:
        return None
    view = transposed(shape, (*(d for d in range(len(shape)) if d != long[0]), long[0]))
    vector, tensor = b.through(reshaped(b.view.target, (shape[long[0]],))), x.through(view)
    return None if vector is None or tensor is None else Application("bias", (), (tensor, vector), e.results, (view,), e)


def _function(reading: Reading, e: Equation) -> Application | None:
    """Return an elementwise function of one tensor, for which the rules about all such functions hold."""
    name = pointwise(e)
    if name is None or not _all_floating(reading, e):
        return None
    (x,) = (a for a in e.operands if isinstance(a, int))
    shape = reading.tensor(x).shape
    if not shape or reading.tensor(e.results[0]).shape != shape:
        return None
    return _same(reading, "map", (name,), e, reading.origin(x))


@reads("dot_general")
def _product(reading: Reading, e: Equation) -> Application | None:
    """Return a product as one of matrices: batch dimensions lead, free dimensions are merged, and so are contracted ones."""
    ((cx, cy), (bx, by)) = e.params["dimension_numbers"]
    x, y = (reading.tensor(a) for a in e.operands)
    z = reading.tensor(e.results[0])
    if not (x.dtype == y.dtype == z.dtype and z.floating):
        return None
    pairs = sorted(zip(map(int, cx), map(int, cy), strict=True))
    cx, cy = tuple(p for p, _ in pairs), tuple(q for _, q in pairs)
    bx, by = tuple(map(int, bx)), tuple(map(int, by))
    free_x = tuple(d for d in range(x.ndim) if d not in cx + bx)
    free_y = tuple(d for d in range(y.ndim) if d not in cy + by)
    batch = tuple(x.shape[d] for d in bx)
    m, k, n = (prod(t.shape[d] for d in ds) for t, ds in ((x, free_x), (x, cx), (y, free_y)))
    if not m * k * n * prod(batch):
        return None
    left = _seen(reading, e.operands[0], (*bx, *free_x, *cx), (*batch, m, k))
    right = _seen(reading, e.operands[1], (*by, *cy, *free_y), (*batch, k, n))
    if left is None or right is None:
        return None
    manner = params_key({k: v for k, v in e.params.items() if k != "dimension_numbers"})
    return Application("matmul", (), (left, right), e.results, (reshaped(z.shape, (*batch, m, n)),), e, manner)


def _seen(reading: Reading, atom: Atom, permutation: tuple[int, ...], shape: Shape) -> Viewed | None:
    """Return an operand transposed and reshaped."""
    source = reading.tensor(atom).shape
    transpose = transposed(source, permutation)
    step = after(reshaped(transpose.target, shape), transpose)
    return reading.origin(atom).through(step) if step is not None else None


@reads("concatenate")
def _concatenate(reading: Reading, e: Equation) -> Application | None:
    shape = reading.tensor(e.results[0]).shape
    if len(e.operands) != 2 or not _all_floating(reading, e):
        return None
    return _same(reading, "concat", (int(e.params["dimension"]) - len(shape),), e, *map(reading.origin, e.operands))


@reads("split")
def _split(reading: Reading, e: Equation) -> Application | None:
    rank = len(reading.tensor(e.operands[0]).shape)
    if len(e.results) != 2 or not _all_floating(reading, e):
        return None
    return _same(reading, "split", (int(e.params["axis"]) - rank,), e, reading.origin(e.operands[0]))


@reads("slice")
def _slice(reading: Reading, e: Equation) -> Application | None:
    """Return a slice of the first or the last part of one dimension, as a result of a split."""
    shape = reading.tensor(e.operands[0]).shape
    starts, limits, strides = e.params["start_indices"], e.params["limit_indices"], e.params["strides"]
    cut = [d for d, n in enumerate(shape) if (starts[d], limits[d]) != (0, n)]
    if len(cut) != 1 or not _all_floating(reading, e) or (strides is not None and any(s != 1 for s in strides)):
        return None
    (d,) = cut
    first = 0 if starts[d] == 0 else 1
    if first and limits[d] != shape[d]:
        return None
    view = unchanged(reading.tensor(e.results[0]).shape)
    operands = (reading.origin(e.operands[0]),)
    return Application("split", (d - len(shape),), operands, e.results, (view,), e, "", first)


@reads("reduce_sum")
def _reduce_sum(reading: Reading, e: Equation) -> Application | None:
    axes, rank = e.params["axes"], len(reading.tensor(e.operands[0]).shape)
    if len(axes) != 1 or not _all_floating(reading, e):
        return None
    return _same(reading, "sum", (int(axes[0]) - rank,), e, reading.origin(e.operands[0]))


@reads("gather")
def _gather(reading: Reading, e: Equation) -> Application | None:
    """Return a look-up of a table's rows.

    JAX has already wrapped negative indices. For an index out of range, the look-up must read the nearest row, or the program must
    promise to have no such index; a mode that fills in another value (NaN) is not an operator of the vocabulary.
    """
    numbers, (table, ids) = e.params["dimension_numbers"], e.operands
    t, i, z = (reading.tensor(a) for a in (table, ids, e.results[0]))
    rows = (
        t.ndim == 2
        and t.floating
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == (z.ndim - 1,)
        and tuple(e.params["slice_sizes"]) == (1, t.shape[1])
        and e.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP
        and not e.params["indices_are_sorted"]
        and not e.params["unique_indices"]
    )
    if not rows:
        return None
    indices = reading.origin(ids).through(reshaped(i.shape, i.shape[:-1]))
    bounds = params_key({k: e.params[k] for k in BOUNDS_PARAMETERS})
    if indices is None:
        return None
    return Application("embedding", (), (reading.origin(table), indices), e.results, (unchanged(z.shape),), e, bounds)


def clamping(x: Application) -> Application:
    """Return a promised look-up as one that clamps."""
    params = {**x.equation.params, "mode": lax.GatherScatterMode.CLIP}
    return replace(x, equation=replace(x.equation, params=params), manner=CLIPPED)


@reads("conv_general_dilated")
def _convolution(reading: Reading, e: Equation) -> Application | None:
    """Return a convolution of images with dimensions in any order."""
    p, numbers = e.params, e.params["dimension_numbers"]
    x, w = (reading.tensor(a) for a in e.operands)
    plain = (
        x.ndim == 4
        and p["batch_group_count"] == 1
        and set(p["lhs_dilation"]) == set(p["rhs_dilation"]) == {1}
        and len(set(p["window_strides"])) == 1
        and x.dtype == w.dtype == reading.tensor(e.results[0]).dtype
    )
    if not plain:
        return None
    image, kernel = transposed(x.shape, tuple(numbers.lhs_spec)), transposed(w.shape, tuple(numbers.rhs_spec))
    stride, padding = int(p["window_strides"][0]), _padding(image.target[2:], kernel.target[2:], p)
    a, b = reading.origin(e.operands[0]).through(image), reading.origin(e.operands[1]).through(kernel)
    if padding is None or a is None or b is None:
        return None
    groups = int(p["feature_group_count"])
    attributes = (0 if groups > 2 and groups == image.target[1] else groups, stride, padding)
    result = transposed(reading.tensor(e.results[0]).shape, tuple(numbers.out_spec))
    manner = params_key({k: p[k] for k in ("precision", "preferred_element_type")})
    return Application("conv2d", attributes, (a, b), e.results, (result,), e, manner)


def _padding(image: Shape, kernel: Shape, params: Mapping[str, Any]) -> str | None:
    """Return a convolution's padding as "same" or "valid", or None if it is neither."""
    padding = tuple((int(a), int(b)) for a, b in params["padding"])
    if all(p == (0, 0) for p in padding):
        return "same" if set(kernel) == {1} else "valid"
    same = []
    for n, k, s in zip(image, kernel, params["window_strides"], strict=True):
        total = max((-(-n // s) - 1) * s + k - n, 0)
        same.append((total // 2, total - total // 2))
    return "same" if tuple(same) == padding else None


def _all_floating(reading: Reading, e: Equation) -> bool:
    dtypes = {reading.tensor(a).dtype for a in (*e.operands, *e.results)}
    return len(dtypes) == 1 and all(jnp.issubdtype(d, jnp.floating) for d in dtypes)
