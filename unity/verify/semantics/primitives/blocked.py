"""Primitives of which only the shape of their dependence is known: some dimensions are blocked, the leading ones are shared.

Sorting, decompositions, random bits: each result is an unknown function of all that lies in the blocked dimensions. Fourier
transforms and triangular solves are linear with unknown coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity.pcg.operators.counter_bits import bits, counted
from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import Application, Run, Value, evaluate, meaning
from unity.verify.semantics.primitives.elementwise import as_result, by_jax, named


def rowwise(run: Run, name: str, operands: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Operands `[*shared, blocked]` → results `[*shared, *shape]`, each place its own function of all blocked elements."""
    columns = [x[..., k] for x in operands for k in range(x.shape[-1])]
    found = []
    for i, shape in enumerate(shapes):
        places = [run.domain.function(f"{name} {i}[{','.join(map(str, at))}]", *columns) for at in np.ndindex(*shape)]
        places = np.broadcast_arrays(*places) if places else [np.zeros((0,))]
        found.append(np.stack(places, -1).reshape((*places[0].shape, *shape)))
    return found


def on_each(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Concrete operands: the primitive itself, on every device."""
    lead = np.broadcast_shapes(*(v.array.shape[: run.lead] for v in values))
    arrays = [np.broadcast_to(v.array, lead + run.shape(v.array)) for v in values]
    every = [by_jax(app, [x[at] for x in arrays], {}) for at in np.ndindex(*lead)]
    return [as_result(run, app, np.stack(x).reshape((*lead, *x[0].shape)), True) for x in zip(*every, strict=True)]


def last(run: Run, x: Array, count: int) -> Array:
    """The last dimensions as one."""
    return x.reshape((*x.shape[: x.ndim - count], -1))


@meaning("sort")
def sort(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operands alike, along `dimension`."""
    if all(v.known for v in values):
        return on_each(run, app, values)
    axis = run.lead + app.params["dimension"]
    rows = [np.moveaxis(run.lift(v), axis, -1) for v in values]
    found = rowwise(run, f"sort by {app.params['num_keys']}", rows, [(rows[0].shape[-1],)] * len(rows))
    return [Value(np.moveaxis(x, -1, axis), False) for x in found]


@meaning("top_k", "approx_top_k")
def top_k(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Values and indices along one dimension."""
    if values[0].known:
        return on_each(run, app, values)
    dim = app.params.get("axis", app.params.get("reduction_dimension", -1)) % len(app.operands[0].shape)
    rows = np.moveaxis(values[0].array, run.lead + dim, -1)
    found = rowwise(run, named(app), [rows], [app.results[0].shape[dim : dim + 1]] * 2)
    return [Value(np.moveaxis(x, -1, run.lead + dim), False) for x in found]


@meaning("cholesky", "eig", "eigh", "geqrf", "lu", "qr", "svd")
def decomposition(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Matrices in the last two dimensions."""
    rows = [last(run, run.lift(v), 2) for v in values]
    shared = len(app.operands[0].shape) - 2
    return [Value(x, False) for x in rowwise(run, named(app), rows, [tuple(r.shape[shared:]) for r in app.results])]


@meaning("lu_pivots_to_permutation")
def permutation(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Pivots in the last dimension."""
    return [Value(x, False) for x in rowwise(run, named(app), [run.lift(values[0])], [app.results[0].shape[-1:]])]


@meaning("householder_product")
def reflectors(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Reflectors and their scalars, in the last two dimensions and the last one."""
    rows = [last(run, run.lift(v), k) for v, k in zip(values, (2, 1), strict=True)]
    return [Value(x, False) for x in rowwise(run, named(app), rows, [app.results[0].shape[-2:]])]


@meaning("ormqr")
def reflected(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Linear in the matrices; what they are multiplied by is a function of reflectors and scalars."""
    a, scalars, c = (run.lift(v) for v in values)
    (matrix,) = rowwise(run, named(app), [last(run, a, 2), scalars], [(a.shape[-2], a.shape[-2])])
    return [Value(run.domain.dot(matrix, c) if app.params["left"] else run.domain.dot(c, matrix), False)]


@meaning("tridiagonal_solve")
def tridiagonal_solve(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Linear in the right-hand sides; the inverse's elements are functions of the diagonals."""
    *diagonals, b = (run.lift(v) for v in values)
    n = b.shape[-2]
    (inverse,) = rowwise(run, named(app), diagonals, [(n, n)])
    return [Value(run.domain.dot(inverse, b), False)]


@meaning("triangular_solve")
def triangular_solve(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Linear in the right-hand sides; the inverse's elements are functions of the matrix."""
    a, b = (run.lift(v) for v in values)
    n = a.shape[-1]
    (inverse,) = rowwise(run, named(app), [last(run, a, 2)], [(n, n)])
    return [Value(run.domain.dot(inverse, b) if app.params["left_side"] else run.domain.dot(b, inverse), False)]


@meaning("fft")
def fourier(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Linear over the last dimensions; a real result is the real part."""
    k = len(app.params["fft_lengths"])
    x, shape = last(run, run.lift(values[0]), k), app.results[0].shape
    into, out = x.shape[-1], prod(shape[len(shape) - k :])
    coefficients = np.asarray([[run.domain.function(f"{named(app)} {i} {j}") for j in range(out)] for i in range(into)])
    result = run.domain.dot(x[..., None, :], coefficients.reshape(into, out))[..., 0, :]
    if np.dtype(app.results[0].dtype).kind != "c":
        result = run.domain.additive("real", result)
    return [Value(result.reshape((*x.shape[:-1], *shape[len(shape) - k :])), False)]


@meaning("bitcast_convert_type")
def bitcast(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Concrete where it can be; a change of width takes or gives a last dimension."""
    (value,) = values
    if value.known:
        return on_each(run, app, values)
    old, new = app.operands[0], app.results[0]
    if len(new.shape) < len(old.shape):
        (x,) = rowwise(run, named(app), [value.array], [()])
    else:
        (x,) = rowwise(run, named(app), [value.array[..., None]], [tuple(new.shape[len(old.shape) :])])
    return [Value(x, False)]


# Random numbers: unknown functions of keys, which are elements


@meaning("random_bits", "random_split", "random_unwrap")
def from_keys(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Keys `[*k]` → `[*k, *shape]`. Bits that go by the numbers of elements are functions of these too."""
    (keys,), shape = app.operands, tuple(app.results[0].shape[len(app.operands[0].shape) :])
    if app.name == "random_bits" and counted(keys.dtype):
        every = [np.arange(n, dtype=np.uint32) for n in shape]
        drawn = jax.make_jaxpr(lambda k: [bits(k, app.params["bit_width"], shape, [jnp.asarray(x) for x in every])])(keys)
        return evaluate(run, drawn, values)
    return [Value(rowwise(run, named(app), [run.lift(values[0])[..., None]], [shape])[0], False)]


@meaning("random_wrap")
def wrap(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Raw data `[*k, words]` → keys."""
    count = len(app.operands[0].shape) - len(app.results[0].shape)
    return [Value(rowwise(run, named(app), [last(run, run.lift(values[0]), count)], [()])[0], False)]


@meaning("random_fold_in", "random_seed")
def derived(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Key by key."""
    return [Value(run.domain.function(named(app), *(run.lift(v) for v in values)), False)]


@meaning("rng_bit_generator")
def generator(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """One key's new state, and bits."""
    rows = [last(run, run.lift(values[0]), len(app.operands[0].shape))]
    return [Value(x, False) for x in rowwise(run, named(app), rows, [tuple(r.shape) for r in app.results])]


MOST = 1_000_000  # places of results times operands


@meaning("anything else")
def opaque(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """A primitive that the operator table does not know: every place of its results depends on all of its operands."""
    if any(isinstance(p, (core.Jaxpr, core.ClosedJaxpr)) for p in app.params.values()):
        raise app.refuse("nothing is said about the program in it")
    operands, results = (sum(prod(a.shape) for a in avals) for avals in (app.operands, app.results))
    if operands * results > MOST:
        raise app.refuse("nothing is said about it, and it is too large for a function of all its operands")
    rows = [run.lift(v).reshape((*v.array.shape[: run.lead], -1)) for v in values]
    return [Value(x, False) for x in rowwise(run, named(app), rows, [tuple(r.shape) for r in app.results])]
