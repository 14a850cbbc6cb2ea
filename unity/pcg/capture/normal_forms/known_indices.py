"""Look-ups at indices that are known: `logits[arange(n), labels]` has a row per sample, `table[arange(n)]` is a part of a table.

An index that numbers the rows of a result divides like a dimension of both operands, as in `take_along_axis`, once the look-up says
so by its batching dimensions. Rows at consecutive indices, or at one, are a slice, whose gradient is padding and not a scatter. So
are those of `x.take(0, axis)`, by which Optax's cross-entropy drops a dimension, and of a dynamic slice at constant indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import primitives

from unity.pcg.capture.routing.integer_tables import IntegerTables
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation, Tensor
from unity.pcg.jaxprs.jaxprs import BRANCHED, REMATERIALIZED, SCANNED
from unity.pcg.propagation.nested.programs import branches, nested_body

LABELS = ("top_k", "argmax", "argmin")  # their results are known as functions of labels only
SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
LOOK_UPS = ("gather", "dynamic_slice", *SCATTERS)


def with_known_indices(body: Body) -> Body:
    """Return a body whose look-ups at known indices are slices, or have batching dimensions.

    Bodies of scans, remats and branches in it, too. Returns the same object if nothing changes.
    """
    inside = tuple(map(_with_known_indices_inside, body.equations))
    if any(a is not b for a, b in zip(inside, body.equations, strict=True)):
        body = replace(body, equations=inside)
    if not any(e.name in LOOK_UPS for e in body.equations):
        return body
    return _KnownIndices(body).run()


def _with_known_indices_inside(e: Equation) -> Equation:
    if e.name not in SCANNED + REMATERIALIZED + BRANCHED:
        return e
    programs = branches(e) if e.name in BRANCHED else (nested_body(e),)
    results = tuple(map(with_known_indices, programs))
    if all(a is b for a, b in zip(results, programs, strict=True)):
        return e
    changed: Any = {"branches": results} if e.name in BRANCHED else {"jaxpr": results[0]}
    return replace(e, params={**e.params, **changed}, origin=None)


class _Component(NamedTuple):
    """One coordinate of the indices of a look-up.

    Attributes:
        atom: the array with it, whose last dimension has size one.
        dim: the dimension of the operand that it is an index of.
        values: its values in one dimension, if they are known and vary along at most one dimension.
        along: the dimension along which they vary; None if all are equal.
    """

    atom: Atom
    dim: int
    values: np.ndarray | None
    along: int | None


class _KnownIndices:
    """The rewriting of one body, equation by equation."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.tensors: dict[int, Tensor] = dict(body.tensors)
        self.next = max(body.tensors) + 1
        self.equations: list[Equation] = []
        self.makers: dict[int, Equation] = {}
        self.same: dict[int, Atom] = {}  # results that equal an operand
        self.known = IntegerTables()

    def run(self) -> Body:
        for e in self.body.equations:
            e = e.reading(tuple(map(self.read, e.operands))) if self.same else e
            if e.name not in LABELS:
                self.known.note(self.body, e)
            if e.name == "gather":
                e = self.sliced_gather(e) or self.batched(e, *self.gather_numbers(e))
            elif e.name == "dynamic_slice":
                e = self.static_slice(e) or e
            elif e.name in SCATTERS:
                e = self.batched(e, *self.scatter_numbers(e))
            self.equations.append(e)
            self.makers.update((v, e) for v in e.results)
        if not self.same and all(a is b for a, b in zip(self.equations, self.body.equations, strict=False)):
            return self.body
        equations = tuple(e for e in self.equations if self.same.keys().isdisjoint(e.results))
        return used(Body(self.body.inputs, tuple(map(self.read, self.body.outputs)), equations, self.tensors))

    def read(self, atom: Atom) -> Atom:
        return self.same.get(atom, atom) if isinstance(atom, int) else atom

    def components(self, indices: Atom, dims: Sequence[int]) -> list[_Component]:
        """Return the coordinates of indices, if they are single or joined along the last dimension; else none."""
        maker = self.makers.get(indices) if isinstance(indices, int) else None
        parts: Sequence[Atom] = [indices]
        if len(dims) > 1:
            last = self.body.tensor(indices).ndim - 1
            if maker is None or maker.name != "concatenate" or maker.params["dimension"] != last:
                return []
            parts = maker.operands
        if len(parts) != len(dims) or any(self.body.tensor(a).shape[-1:] != (1,) for a in parts):
            return []
        return [self.component(a, d) for a, d in zip(parts, dims, strict=True)]

    def component(self, atom: Atom, dim: int) -> _Component:
        table = self.known.of(atom)
        if table is None or table.root is not None or table.values.dtype.kind not in "iu":
            return _Component(atom, dim, None, None)
        varying = [k for k, n in enumerate(table.values.shape) if n > 1]
        if len(varying) > 1:
            return _Component(atom, dim, None, None)
        return _Component(atom, dim, table.flat, varying[0] if varying else None)

    # Batching dimensions

    def gather_numbers(self, e: Equation) -> tuple[Sequence[int], Sequence[int], Mapping[str, str]]:
        """Return the dimensions that indices are for, those that results lack, and the names of a gather's parameters."""
        numbers = e.params["dimension_numbers"]
        names = {"dims": "start_index_map", "dropped": "collapsed_slice_dims", "batched": "start_indices_batching_dims"}
        return numbers.start_index_map, numbers.collapsed_slice_dims, names

    def scatter_numbers(self, e: Equation) -> tuple[Sequence[int], Sequence[int], Mapping[str, str]]:
        """Return the dimensions that indices are for, those that updates lack, and the names of a scatter's parameters."""
        numbers = e.params["dimension_numbers"]
        names = {
            "dims": "scatter_dims_to_operand_dims",
            "dropped": "inserted_window_dims",
            "batched": "scatter_indices_batching_dims",
        }
        return numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims, names

    def batched(self, e: Equation, dims: Sequence[int], dropped: Sequence[int], names: Mapping[str, str]) -> Equation:
        """Return a look-up whose coordinates that number the rows are batching dimensions."""
        if len(dims) < 2:  # the last coordinate stays, as a look-up without one would be a transpose
            return e
        components, numbers = self.components(e.operands[1], dims), e.params["dimension_numbers"]
        shape = self.body.tensor(e.operands[0]).shape
        pairs = dict(zip(numbers.operand_batching_dims, getattr(numbers, names["batched"]), strict=True))
        rest = list(components)
        for c in components:
            counts = c.values is not None and np.array_equal(c.values, np.arange(shape[c.dim]))
            if counts and shape[c.dim] > 1 and c.dim in dropped and c.along not in pairs.values() and len(rest) > 1:
                pairs[c.dim] = c.along
                rest.remove(c)
        if len(rest) == len(components):
            return e
        batching = sorted(pairs)
        changed = numbers._replace(
            **{
                names["dims"]: tuple(c.dim for c in rest),
                names["dropped"]: tuple(d for d in dropped if d not in pairs),
                "operand_batching_dims": tuple(batching),
                names["batched"]: tuple(pairs[d] for d in batching),
            }
        )
        indices = rest[0].atom if len(rest) == 1 else self.joined(e, [c.atom for c in rest])
        params = {**e.params, "dimension_numbers": changed, "indices_are_sorted": False}
        return replace(e, params=params, operands=(e.operands[0], indices, *e.operands[2:]), origin=None)

    def joined(self, e: Equation, atoms: Sequence[Atom]) -> int:
        """Concatenate coordinates along their last dimension."""
        first = self.body.tensor(atoms[0])
        tensor = replace(first, shape=(*first.shape[:-1], len(atoms)))
        return self.emit(e, primitives.concatenate_p, {"dimension": first.ndim - 1}, atoms, tensor)

    # Slices

    def sliced_gather(self, e: Equation) -> Equation | None:
        """Return a gather at one known index, or at consecutive ones, as a slice; None if it is another."""
        numbers, sizes, shape = e.params["dimension_numbers"], e.params["slice_sizes"], self.body.tensor(e.operands[0]).shape
        components = self.components(e.operands[1], numbers.start_index_map)
        if numbers.operand_batching_dims or not components or any(c.values is None for c in components):
            return None
        if sum(c.along is not None for c in components) > 1:
            return None
        starts, limits, places = [0] * len(shape), list(sizes), dict[int, int]()
        for c in components:
            assert c.values is not None
            first, count = int(c.values[0]), len(c.values)
            consecutive = np.array_equal(c.values, np.arange(first, first + count))
            if not consecutive or first < 0 or first + count - 1 + sizes[c.dim] > shape[c.dim] or (count > 1 and sizes[c.dim] != 1):
                return None
            if count > 1 and c.dim not in numbers.collapsed_slice_dims:
                return None
            starts[c.dim], limits[c.dim] = first, first + max(count, sizes[c.dim])
        result = self.body.tensors[e.results[0]]
        offsets = iter(numbers.offset_dims)
        rows = [k for k in range(result.ndim) if k not in numbers.offset_dims]
        row_of = {c.dim: rows[c.along] for c in components if c.along is not None}
        for d in range(len(shape)):
            if d not in numbers.collapsed_slice_dims:
                places[d] = next(offsets)
            elif d in row_of:
                places[d] = row_of[d]
        order = [places[d] for d in sorted(places)]
        return self.slice(e, starts, limits, sorted(places), order) if order == sorted(order) else None

    def static_slice(self, e: Equation) -> Equation | None:
        """Return a dynamic slice at known indices as a slice; None if any is not known."""
        shape, sizes = self.body.tensor(e.operands[0]).shape, e.params["slice_sizes"]
        tables = [self.known.of(a) for a in e.operands[1:]]
        if len(tables) != len(shape) or any(t is None or t.root is not None or t.values.dtype.kind not in "iu" for t in tables):
            return None
        starts = [min(max(int(t.flat[0]), 0), n - size) for t, n, size in zip(tables, shape, sizes, strict=True) if t is not None]
        limits = [first + size for first, size in zip(starts, sizes, strict=True)]
        return self.slice(e, starts, limits, range(len(shape)), range(len(shape)))

    def slice(
        self, e: Equation, starts: Sequence[int], limits: Sequence[int], kept: Sequence[int], places: Sequence[int]
    ) -> Equation:
        """Return an equation of a part of the first operand, without dimensions that are not kept, repeated along new ones.

        Args:
            e: the look-up.
            starts: the first index along every dimension.
            limits: the last index and one.
            kept: the dimensions of the operand that the result has.
            places: their places in the result.
        """
        atom, (v,) = e.operands[0], e.results
        source, result = self.body.tensor(atom), self.body.tensors[v]
        shape = tuple(high - low for low, high in zip(starts, limits, strict=True))
        steps: list[tuple[Any, dict[str, Any], tuple[int, ...]]] = []
        if shape != source.shape:
            params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
            steps.append((primitives.slice_p, params, shape))
        if len(kept) < len(shape):
            dropped = tuple(d for d in range(len(shape)) if d not in kept)
            steps.append((primitives.squeeze_p, {"dimensions": dropped}, tuple(shape[d] for d in kept)))
        if len(places) < result.ndim:
            params = {"shape": result.shape, "broadcast_dimensions": tuple(places), "sharding": None}
            steps.append((primitives.broadcast_in_dim_p, params, result.shape))
        if not steps:
            self.same[v] = atom
            return e
        for primitive, params, size in steps[:-1]:
            atom = self.emit(e, primitive, params, (atom,), replace(source, shape=size))
        primitive, params, _ = steps[-1]
        return replace(e, primitive=primitive, params=params, operands=(atom,), origin=None)

    def emit(self, e: Equation, primitive: Any, params: dict[str, Any], operands: Sequence[Atom], tensor: Tensor) -> int:
        """Append an equation with a new result, in the place of `e`; return the result."""
        v, self.next = self.next, self.next + 1
        self.tensors[v] = tensor
        self.equations.append(replace(e, primitive=primitive, params=params, operands=tuple(operands), results=(v,), origin=None))
        return v
