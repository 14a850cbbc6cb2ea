"""Joined weights: weights that a program only concatenates are stored as one array, concatenated before the program runs.

Rewriting may concatenate weights: three products of one operand become one, tables are stacked. In the program this happens in
every step, and every weight is sharded as its own size allows. A joined array is concatenated once, and can be sharded where its
parts cannot: tables of 5 and of 3 rows fit on 8 devices. Tables that only a look-up reads are also padded with rows of zeros, to a
multiple of the number of devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.capture.packed_arguments import Packed
from unity.pcg.ir.program import Atom, Body, Equation, Tensor, tensor_type
from unity.pcg.ir.tracing import trace
from unity.pcg.operators.promised_reads import promised
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.promises import Mode
from unity.substitutions.language.rearrangement import Rearrangement, unchanged
from unity.substitutions.rewriting.reading import Reading, rearrangement_of
from unity.substitutions.rewriting.rewriting import renamed


@dataclass(frozen=True)
class Joined(Packed):
    """An array of several leaves, each rearranged, concatenated along a dimension.

    Parts of equal size are stacked in a further dimension instead, so that the array can be sharded within all of them, unless
    zeros pad it.

    Attributes:
        views: the rearrangement of each leaf.
        dim: the dimension of the concatenation.
        zeros: the size of the padding along it.
    """

    views: tuple[Rearrangement, ...]
    dim: int
    zeros: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the parts along the dimension of the concatenation."""
        return tuple(view.target[self.dim] for view in self.views)

    @property
    def equal(self) -> bool:
        """Whether all parts have one size."""
        return len(set(self.sizes)) == 1

    @property
    def joined(self) -> Shape:
        """The shape of the concatenation without padding, which the program reads."""
        shape = self.views[0].target
        return (*shape[: self.dim], sum(self.sizes), *shape[self.dim + 1 :])

    @property
    def stacked(self) -> Shape:
        """The shape of the array: equal parts in a further dimension, unless zeros pad it."""
        if self.zeros or not self.equal or len(self.leaves) < 2:
            return (*self.joined[: self.dim], self.joined[self.dim] + self.zeros, *self.joined[self.dim + 1 :])
        return (*self.joined[: self.dim], len(self.leaves), self.sizes[0], *self.joined[self.dim + 1 :])

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(view.source for view in self.views)

    def join(self, library: Any, arrays: Sequence[Any]) -> Any:
        parts = [_rearranged(x, view) for x, view in zip(arrays, self.views, strict=True)]
        if self.zeros:
            shape = (*self.joined[: self.dim], self.zeros, *self.joined[self.dim + 1 :])
            parts.append(library.zeros(shape, arrays[0].dtype))
        return library.concatenate(parts, self.dim).reshape(self.stacked)

    def parts(self, array: Any) -> list[Any]:
        whole, ends = array if self.zeros else array.reshape(self.joined), np.cumsum(self.sizes).tolist()
        places = [(*[slice(None)] * self.dim, slice(end - n, end)) for n, end in zip(self.sizes, ends, strict=True)]
        return [_rearranged(whole[place], view.inverse()) for place, view in zip(places, self.views, strict=True)]


def _rearranged(x: Any, view: Rearrangement) -> Any:
    """Return an array of any library, such as NumPy or JAX, rearranged."""
    return x if view.identity else x.reshape(view.sizes).transpose(view.permutation).reshape(view.target)


def with_joined(body: Body, own: Collection[int], devices: int) -> tuple[Body, tuple[Joined, ...]]:
    """Return a program that takes joined arrays, and the joined arrays.

    The array of several inputs takes the place of the first of them. The others become empty, so that inputs keep their numbers.

    Args:
        body: the program.
        own: the numbers of the inputs that may be joined.
        devices: the number by which the rows of padded tables are to be divisible.
    """
    walk = _Walk(body, own)
    places = [*walk.joins(devices), *walk.tables(devices)]
    tensors, names = dict(body.tensors), dict[int, Atom]()
    replacements: dict[int, tuple[Equation, ...]] = dict.fromkeys(walk.absorbed, ())
    for place in places:
        joined, array = place.joined, body.inputs[place.joined.first]
        dtype = body.tensors[array].dtype
        tensors[array] = tensor_type(joined.stacked, dtype)
        tensors.update((body.inputs[leaf], tensor_type((0,), dtype)) for leaf in joined.others)
        if place.join is not None:
            e = body.equations[place.join]
            if len(joined.stacked) > len(joined.joined):
                replacements[place.join] = (_reshaped(e, array, joined),)
            else:
                replacements[place.join], names[e.results[0]] = (), array
        if joined.zeros and place.look_up is not None:
            replacements[place.look_up] = _in_range(body.equations[place.look_up], joined, tensors)
    if not places:
        return body, ()
    equations = [e for k, old in enumerate(body.equations) for e in replacements.get(k, (old,))]
    outputs = tuple(names.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    after = Body(body.inputs, outputs, tuple(renamed(e, names) for e in equations), tensors)
    return after, tuple(place.joined for place in places)


def _reshaped(e: Equation, array: int, joined: Joined) -> Equation:
    """Return the replacement of a concatenation of equal parts: a reshape of the stacked array."""
    program = trace(lambda x: x.reshape(joined.joined), [jax.ShapeDtypeStruct(joined.stacked, jnp.float32)])
    (reshape,) = program.equations
    return replace(reshape, operands=(array,), results=e.results).with_provenance_of(e)


def _in_range(e: Equation, joined: Joined, tensors: dict[int, Tensor]) -> tuple[Equation, ...]:
    """Return the replacement of a look-up in a padded table, which never reads the padding. Adds new variables to `tensors`."""
    table, ids = e.operands
    assert isinstance(ids, int)
    assert isinstance(table, int)
    rows = joined.joined[joined.dim]

    def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
        result = e.primitive.bind(table, lax.min(ids, jnp.asarray(rows - 1, ids.dtype)), **e.params)
        promises = e.params["mode"] == Mode.PROMISE_IN_BOUNDS
        return promised(result, ids.reshape(ids.shape[:-1]), rows) if promises else result

    program = trace(look_up, [tensors[table].struct, tensors[ids].struct])
    new: dict[int, int] = dict(zip(program.inputs, (table, ids), strict=True))
    new.update(zip((a for a in program.outputs if isinstance(a, int)), e.results, strict=True))
    equations = []
    for step in program.equations:
        for v in step.results:
            if v not in new:
                new[v] = max(tensors) + 1
                tensors[new[v]] = program.tensors[v]
        operands = tuple(new[a] if isinstance(a, int) else a for a in step.operands)
        results = tuple(new[v] for v in step.results)
        placed = replace(step, operands=operands, results=results).with_provenance_of(e)
        equations.append(placed if step.name == e.name else replace(placed, group=()))
    return tuple(equations)


@dataclass(frozen=True)
class _Place:
    """A joined array, and its place in the program by numbers of equations.

    Attributes:
        joined: the array.
        join: the concatenation that it replaces; None for a single table.
        look_up: the look-up that is its only user, if one is.
    """

    joined: Joined
    join: int | None
    look_up: int | None


class _Walk:
    """A search for concatenations of inputs, from each concatenation backward to the inputs.

    Attributes:
        own: the numbers of the inputs that may be joined, by variable.
        producer: the number of the equation that produces each variable.
        readers: the numbers of the equations that read each variable.
        ends: the variables that are outputs.
        absorbed: the numbers of the equations between inputs and concatenations, which joined arrays replace.
    """

    def __init__(self, body: Body, own: Collection[int]) -> None:
        self.body, self.reading = body, Reading(body)
        self.own = {v: k for k, v in enumerate(body.inputs) if k in own and body.tensors[v].floating}
        self.producer = {v: k for k, e in enumerate(body.equations) for v in e.results}
        self.readers: dict[int, list[int]] = {}
        for k, e in enumerate(body.equations):
            for a in e.operands:
                if isinstance(a, int):
                    self.readers.setdefault(a, []).append(k)
        self.ends = {a for a in body.outputs if isinstance(a, int)}
        self.absorbed: set[int] = set()

    def joins(self, devices: int) -> list[_Place]:
        """Return all concatenations of inputs without other users, in order; of nested ones, the outermost."""
        places: list[_Place] = []
        for k in reversed(range(len(self.body.equations))):
            e = self.body.equations[k]
            if e.name == "concatenate" and k not in self.absorbed and (joined := self.joined(k, e)) is not None:
                places.append(self.padded(joined, e.results[0], k, devices))
        return places[::-1]

    def tables(self, devices: int) -> list[_Place]:
        """Return single inputs that only a look-up reads, and whose rows must be padded."""
        shapes = {v: self.body.tensors[v].shape for v in self.own}
        tables = {v: Joined((k,), (unchanged(shapes[v]),), 0) for v, k in self.own.items() if len(shapes[v]) == 2}
        places = [self.padded(table, v, None, devices) for v, table in tables.items()]
        return [place for place in places if place.joined.zeros]

    def padded(self, joined: Joined, variable: int, join: int | None, devices: int) -> _Place:
        """Return the place of the joined array that replaces a variable, padded if only a look-up of rows reads it."""
        look_up = self.look_up(variable) if joined.dim == 0 else None
        return _Place(joined if look_up is None else replace(joined, zeros=-joined.joined[0] % devices), join, look_up)

    def look_up(self, table: int) -> int | None:
        """Return the number of the only equation that reads a variable, if it is a look-up of its rows."""
        readers = self.readers.get(table, [])
        if len(readers) != 1 or table in self.ends:
            return None
        (k,) = readers
        e = self.body.equations[k]
        application, rows = self.reading.by_result.get(e.results[0]), self.body.tensors[table].shape[0]
        is_look_up = application is not None and application.operator == "embedding"
        if not is_look_up or e.operands[0] != table or not isinstance(e.operands[1], int):
            return None
        return k if rows - 1 <= jnp.iinfo(self.body.tensors[e.operands[1]].dtype).max else None

    def joined(self, k: int, e: Equation) -> Joined | None:
        """Return the joined array for a concatenation, or None unless all its parts are inputs without other users."""
        dim = int(e.params["dimension"])
        groups = [self.parts(a, k, dim) for a in e.operands]
        parts = [part for group in groups for part in group or ()]
        if None in groups or len(parts) < 2 or not prod(self.body.tensors[e.results[0]].shape):
            return None
        self.absorbed.update(m for part in parts for m in part.equations)
        return Joined(tuple(part.leaf for part in parts), tuple(part.view for part in parts), dim)

    def parts(self, atom: Atom, reader: int, dim: int) -> list[_Part] | None:
        """Return the inputs of an operand that is a rearranged input, or a concatenation of several along the same dimension.

        Returns None for any other operand.
        """
        if not isinstance(atom, int) or self.readers[atom] != [reader] or atom in self.ends:
            return None
        k = self.producer.get(atom)
        e = None if k is None else self.body.equations[k]
        if k is None or e is None or e.name != "concatenate" or int(e.params["dimension"]) != dim:
            return self.input(atom, reader)
        inner = [self.parts(a, k, dim) for a in e.operands]
        return None if None in inner else [replace(x, equations=(*x.equations, k)) for group in inner for x in group or ()]

    def input(self, atom: int, reader: int) -> list[_Part] | None:
        """Return the input that a variable is a rearrangement of, if each value between them has one user only; otherwise None."""
        origin, equations = self.reading.origin(atom), list[int]()
        v: Atom = atom
        while isinstance(v, int) and self.readers[v] == [reader] and v not in self.ends:
            if v in self.own:
                return [_Part(self.own[v], origin.view, tuple(equations))] if origin.atom == v else None
            reader = self.producer.get(v, -1)
            if reader < 0 or rearrangement_of(self.body.equations[reader], self.body) is None:
                return None
            equations.append(reader)
            v = self.body.equations[reader].operands[0]
        return None


@dataclass(frozen=True)
class _Part:
    """A part of a joined array: the number of an input, its rearrangement, and the equations that rearrange it."""

    leaf: int
    view: Rearrangement
    equations: tuple[int, ...]
