"""Weights that a program joins and reads nowhere else, as one array that is joined before the program runs.

A rewriting may join weights: three products of one operand become one, tables are stacked. Inside of the program that is done in
every step, and every weight lies on the devices as its own size allows. Joined once, what lies there is the whole, which may be
divided where its parts cannot: a table of 5 rows and one of 3 lie on 8 devices. Rows of tables that nothing but a look-up reads are
filled up with zeros, too, so that all devices can share them.
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
from unity.pcg.ir.program import Atom, Body, Equation, Tensor, close, tensor_type
from unity.pcg.operators.promised_reads import promised
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.promises import Mode
from unity.substitutions.language.rearrangement import Rearrangement, unchanged
from unity.substitutions.rewriting.reading import Reading, rearrangement_of
from unity.substitutions.rewriting.rewriting import renamed


@dataclass(frozen=True)
class Joined(Packed):
    """Each leaf seen through a rearrangement, one after another along a dimension.

    Parts of one size have a dimension of their own to be told apart by, so that an array can be divided within all of them; but
    not where there are zeros behind them.
    """

    views: tuple[Rearrangement, ...]
    dim: int
    zeros: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the parts, along the dimension."""
        return tuple(view.target[self.dim] for view in self.views)

    @property
    def equal(self) -> bool:
        """Whether all parts are of one size."""
        return len(set(self.sizes)) == 1

    @property
    def joined(self) -> Shape:
        """The shape of the parts one after another, which the program reads."""
        shape = self.views[0].target
        return (*shape[: self.dim], sum(self.sizes), *shape[self.dim + 1 :])

    @property
    def stacked(self) -> Shape:
        if self.zeros or not self.equal or len(self.leaves) < 2:
            return (*self.joined[: self.dim], self.joined[self.dim] + self.zeros, *self.joined[self.dim + 1 :])
        return (*self.joined[: self.dim], len(self.leaves), self.sizes[0], *self.joined[self.dim + 1 :])

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(view.source for view in self.views)

    def join(self, library: Any, arrays: Sequence[Any]) -> Any:
        parts = [_seen(x, view) for x, view in zip(arrays, self.views, strict=True)]
        behind = [library.zeros((*self.joined[: self.dim], self.zeros, *self.joined[self.dim + 1 :]), arrays[0].dtype)]
        return library.concatenate([*parts, *(behind if self.zeros else [])], self.dim).reshape(self.stacked)

    def parts(self, array: Any) -> list[Any]:
        whole, ends = array if self.zeros else array.reshape(self.joined), np.cumsum(self.sizes).tolist()
        places = [(*[slice(None)] * self.dim, slice(end - n, end)) for n, end in zip(self.sizes, ends, strict=True)]
        return [_seen(whole[place], view.inverse()) for place, view in zip(places, self.views, strict=True)]


def _seen(x: Any, view: Rearrangement) -> Any:
    """An array of whatever library, rearranged."""
    return x if view.identity else x.reshape(view.sizes).transpose(view.permutation).reshape(view.target)


def with_joined(body: Body, own: Collection[int], devices: int) -> tuple[Body, tuple[Joined, ...]]:
    """The program with what it joins of some inputs (by number) as inputs, and what these are made of.

    The first input of several carries their array, and the others are empty, so inputs keep their numbers. `devices`: what the
    rows of tables are to be divided by.
    """
    walk = _Walk(body, own)
    found = [*walk.joins(devices), *walk.tables(devices)]
    tensors, names = dict(body.tensors), dict[int, Atom]()
    instead: dict[int, tuple[Equation, ...]] = dict.fromkeys(walk.gone, ())
    for place in found:
        one, array = place.joined, body.inputs[place.joined.first]
        dtype = body.tensors[array].dtype
        tensors[array] = tensor_type(one.stacked, dtype)
        tensors.update((body.inputs[leaf], tensor_type((0,), dtype)) for leaf in one.others)
        if place.join is not None:
            e, apart = body.equations[place.join], len(one.stacked) > len(one.joined)
            instead[place.join] = (_reshaped(e, array, one),) if apart else ()
            names.update({} if apart else {e.results[0]: array})
        if one.zeros and place.look_up is not None:
            instead[place.look_up] = _in_range(body.equations[place.look_up], one, tensors)
    if not found:
        return body, ()
    kept = [e for k, old in enumerate(body.equations) for e in instead.get(k, (old,))]
    outputs = tuple(names.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    made = Body(body.inputs, outputs, tuple(renamed(e, names) for e in kept), tensors)
    return made, tuple(place.joined for place in found)


def _reshaped(e: Equation, array: int, one: Joined) -> Equation:
    """Instead of what joins parts of one size: the array, their two dimensions made one."""
    program = close(jax.make_jaxpr(lambda x: x.reshape(one.joined))(jax.ShapeDtypeStruct(one.stacked, jnp.float32)))
    (made,) = program.equations
    return replace(made, operands=(array,), results=e.results, source=e.source, group=e.group, scope=e.scope)


def _in_range(e: Equation, one: Joined, tensors: dict[int, Tensor]) -> tuple[Equation, ...]:
    """Instead of a look-up: one whose indices are never of the zeros behind the table. `tensors` gets what is new."""
    table, ids = e.operands
    assert isinstance(ids, int)
    assert isinstance(table, int)
    rows = one.joined[one.dim]

    def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
        found = e.primitive.bind(table, lax.min(ids, jnp.asarray(rows - 1, ids.dtype)), **e.params)
        promises = e.params["mode"] == Mode.PROMISE_IN_BOUNDS
        return promised(found, ids.reshape(ids.shape[:-1]), rows) if promises else found

    program = close(jax.make_jaxpr(look_up)(tensors[table].struct, tensors[ids].struct))
    new: dict[int, int] = dict(zip(program.inputs, (table, ids), strict=True))
    new.update(zip((a for a in program.outputs if isinstance(a, int)), e.results, strict=True))
    made = []
    for step in program.equations:
        for v in step.results:
            if v not in new:
                new[v] = max(tensors) + 1
                tensors[new[v]] = program.tensors[v]
        operands = tuple(new[a] if isinstance(a, int) else a for a in step.operands)
        results = tuple(new[v] for v in step.results)
        group = e.group if step.name == e.name else ()
        made.append(replace(step, operands=operands, results=results, source=e.source, group=group, scope=e.scope))
    return tuple(made)


@dataclass(frozen=True)
class _Place:
    """What is joined, the equation that joins it, if one does, and the look-up that alone reads it, if one does."""

    joined: Joined
    join: int | None
    look_up: int | None


class _Walk:
    """A program's joins, followed back to its inputs."""

    def __init__(self, body: Body, own: Collection[int]) -> None:
        self.body, self.reading = body, Reading(body)
        self.own = {v: k for k, v in enumerate(body.inputs) if k in own and body.tensors[v].floating}
        self.maker = {v: k for k, e in enumerate(body.equations) for v in e.results}
        self.readers: dict[int, list[int]] = {}
        for k, e in enumerate(body.equations):
            for a in e.operands:
                if isinstance(a, int):
                    self.readers.setdefault(a, []).append(k)
        self.ends = {a for a in body.outputs if isinstance(a, int)}
        self.gone: set[int] = set()  # equations that lead to a join

    def joins(self, devices: int) -> list[_Place]:
        """All joins of inputs that nothing else reads, in order: of joins of joins, the outermost."""
        found: list[_Place] = []
        for k in reversed(range(len(self.body.equations))):
            e = self.body.equations[k]
            if e.name == "concatenate" and k not in self.gone and (one := self.joined(k, e)) is not None:
                found.append(self.filled(one, e.results[0], k, devices))
        return found[::-1]

    def tables(self, devices: int) -> list[_Place]:
        """Inputs alone that only a look-up reads, and whose rows nothing divides."""
        whole = [(k, v, unchanged(self.body.tensors[v].shape)) for v, k in self.own.items() if len(self.body.tensors[v].shape) == 2]
        found = [self.filled(Joined((k,), (view,), 0), v, None, devices) for k, v, view in whole]
        return [place for place in found if place.joined.zeros]

    def filled(self, one: Joined, variable: int, join: int | None, devices: int) -> _Place:
        """What is read as a variable, with zeros behind it if that is a table whose rows are only looked up."""
        look_up = self.look_up(variable) if one.dim == 0 else None
        return _Place(one if look_up is None else replace(one, zeros=-one.joined[0] % devices), join, look_up)

    def look_up(self, table: int) -> int | None:
        """The equation that alone reads a variable, if it is a look-up of its rows."""
        (k, *others) = self.readers.get(table, [-1])
        if k < 0 or others or table in self.ends:
            return None
        e = self.body.equations[k]
        found, rows = self.reading.by_result.get(e.results[0]), self.body.tensors[table].shape[0]
        if found is None or found.operator != "embedding" or e.operands[0] != table or not isinstance(e.operands[1], int):
            return None
        return k if rows - 1 <= jnp.iinfo(self.body.tensors[e.operands[1]].dtype).max else None

    def joined(self, k: int, e: Equation) -> Joined | None:
        """What an equation joins, if that is inputs that nothing else reads, and nothing but them."""
        dim = int(e.params["dimension"])
        found = [self.parts(a, k, dim) for a in e.operands]
        parts = [part for some in found for part in some or ()]
        if None in found or len(parts) < 2 or not prod(self.body.tensors[e.results[0]].shape):
            return None
        self.gone.update(m for part in parts for m in part.equations)
        return Joined(tuple(part.leaf for part in parts), tuple(part.view for part in parts), dim)

    def parts(self, atom: Atom, reader: int, dim: int) -> list[_Part] | None:
        """The inputs that an operand is made of by rearranging one, or by joining several along the same dimension."""
        if not isinstance(atom, int) or self.readers[atom] != [reader] or atom in self.ends:
            return None
        k = self.maker.get(atom)
        e = None if k is None else self.body.equations[k]
        if k is None or e is None or e.name != "concatenate" or int(e.params["dimension"]) != dim:
            return self.input(atom, reader)
        inner = [self.parts(a, k, dim) for a in e.operands]
        return None if None in inner else [replace(x, equations=(*x.equations, k)) for some in inner for x in some or ()]

    def input(self, atom: int, reader: int) -> list[_Part] | None:
        """The input that a variable is, seen through equations that only rearrange it, each the only reader of the last."""
        origin, found = self.reading.origin(atom), list[int]()
        v: Atom = atom
        while isinstance(v, int) and self.readers[v] == [reader] and v not in self.ends:
            if v in self.own:
                return [_Part(self.own[v], origin.view, tuple(found))] if origin.atom == v else None
            reader = self.maker.get(v, -1)
            if reader < 0 or rearrangement_of(self.body.equations[reader], self.body) is None:
                return None
            found.append(reader)
            v = self.body.equations[reader].operands[0]
        return None


@dataclass(frozen=True)
class _Part:
    """An input that is joined, by number, how it is seen, and the equations between."""

    leaf: int
    view: Rearrangement
    equations: tuple[int, ...]
