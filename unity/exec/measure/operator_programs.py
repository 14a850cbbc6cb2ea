"""An operator's own program forward and backward, on one device's pieces: what is measured of it (`unity.exec.measure.operators`).

What is kept for the backward pass is what XLA keeps of a whole step (`pcg.residuals`): results of all but the cheap operations,
which are computed again where they are used. So backward is neither the difference of two programs, which would share a pass
over the operands that a step cannot share, nor the derivative of values that no step ever writes.

Results that are operands seen otherwise (a reshape's, the gradients of a sum) are left out: a step does not copy them, and what is
repeated would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from unity.pcg.ir.program import Body, Tensor
from unity.pcg.local.halo_exchange import nothing
from unity.pcg.local.interpreter import Walk
from unity.pcg.operators.layout import Placed
from unity.pcg.propagation.placement import placing
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import Halo, facts_of
from unity.pcg.types.parallel_type import UNUSED, Shape, Type, local_shape
from unity.pcg.types.varying_axes import vary, varying

# The same values, seen otherwise: no code, or none that a step needs.
VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "pvary", "pcast", "unreplicate", "stop_gradient", "copy", "name"})

DRAWN = 1 << 20

Program = Callable[..., list]


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator, and how it is parallelized: all that its local program depends on."""

    body: Body
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    differentiated: tuple[bool, ...]
    axes: tuple[Axis, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of operands and then results, on one device."""
        atoms = (*self.body.inputs, *self.body.outputs)
        types = (*self.operands, *self.results)
        return tuple(local_shape(self.body.tensor(a).shape, t, self.axes) for a, t in zip(atoms, types, strict=True))

    @property
    def used(self) -> tuple[str, ...]:
        """The axes along which devices differ, by name: its values vary along all of them, and along no other."""
        types = (*self.operands, *self.results)
        return tuple(axis.name for k, axis in enumerate(self.axes) if any(t[k] != UNUSED for t in types))


class _Alone(Walk):
    """A body's walk without the collectives inside it."""

    def reduce(self, variable: int, x: Any) -> Any:
        return x

    def exchange(self, x: Any, placed: Placed, dim: int, halo: Halo) -> Any:
        """As large as with what neighbours send."""
        sizes = [(halo.before, halo.after, 0) if i == dim else (0, 0, 0) for i in range(x.ndim)]
        return lax.pad(x, vary(nothing(halo.outside, x.dtype), varying(x)), sizes)


def programs_of(operator: Operator, operands: Sequence[Any]) -> tuple[Program, Program | None, Sequence[Any]]:
    """An operator's forward program, its backward program, and what that one takes."""
    body, flags, names = operator.body, operator.differentiated, operator.used
    place = placing(body, operator.operands, operator.results, len(operator.axes))
    results = [body.tensor(a) for a in body.outputs]
    floating = [k for k, t in enumerate(results) if t.floating]

    def run(*given: Any) -> list:
        return [vary(x, names) for x in _Alone(body, place, operator.axes).run(given)]

    if not (any(flags) and floating):
        return without_views(run, operands), None, ()
    chosen = [x for x, flag in zip(operands, flags, strict=True) if flag]

    def both(*given: Any) -> tuple[list, list, Any]:
        mine = [x for x, flag in zip(given, flags, strict=True) if flag]

        def of(*weights: Any) -> tuple[list, list]:
            following = iter(weights)
            out = run(*(next(following) if flag else x for x, flag in zip(given, flags, strict=True)))
            return [out[k] for k in floating], out

        kept = jax.checkpoint(of, prevent_cse=False, policy=lambda primitive, *_, **__: not facts_of(primitive.name).recomputed)
        _, back, out = jax.vjp(kept, *mine, has_aux=True)
        leaves, tree = jax.tree.flatten(back)
        return out, leaves, tree

    out, leaves, tree = both(*operands)
    cotangents = [vary(jnp.full(out[k].shape, 0.5, out[k].dtype), names) for k in floating]
    n = len(leaves)

    def backward(*given: Any) -> list:
        found = jax.tree.unflatten(tree, given[:n])(list(given[n:]))
        return [g for g, x in zip(found, chosen, strict=True) if g.dtype == x.dtype]

    there = without_views(lambda *given: [x for part in both(*given)[:2] for x in part], operands)
    linear = [*leaves, *cotangents]
    return there, without_views(backward, linear), linear


def without_views(program: Program, operands: Sequence[Any]) -> Program:
    """The program without results that are operands, or earlier results, seen otherwise."""
    closed = jax.make_jaxpr(program)(*operands)
    source: dict[Any, Any] = {}
    for e in closed.jaxpr.eqns:
        if e.primitive.name in VIEWS and not isinstance(e.invars[0], core.Literal):
            source[e.outvars[0]] = source.get(e.invars[0], e.invars[0])
    seen = {*closed.jaxpr.invars, *closed.jaxpr.constvars}
    wanted = []
    for k, v in enumerate(closed.jaxpr.outvars):
        if not isinstance(v, core.Literal) and source.get(v, v) not in seen:
            seen.add(source.get(v, v))
            wanted.append(k)
    run = core.jaxpr_as_fun(closed)

    def only(*given: Any) -> list:
        found = run(*given)
        return [found[k] for k in wanted]

    return only


def local_operands(operator: Operator) -> Iterator[np.ndarray[Any, Any]]:
    """Values for the local operands, as numpy holds them: small numbers, and indices into the largest dimension there is. Large
    operands repeat what the first `DRAWN` elements are: drawing each takes longer than all that is measured with them."""
    rng = np.random.default_rng(0)
    shapes = operator.shapes
    below = max((n for shape in shapes for n in shape), default=1)
    for v, shape in zip(operator.body.inputs, shapes, strict=False):
        tensor, few = operator.body.tensors[v], min(DRAWN, prod(shape))
        if jnp.issubdtype(tensor.dtype, jax.dtypes.extended):
            drawn = np.zeros(few)
        elif tensor.floating:
            drawn = rng.normal(size=few) / 8
        elif tensor.dtype == bool:
            drawn = rng.integers(0, 2, few)
        else:
            drawn = rng.integers(0, min(below, np.iinfo(tensor.dtype).max), few)
        yield np.resize(drawn.astype(plain_dtype(tensor)), shape)


def plain_dtype(tensor: Tensor) -> np.dtype[Any]:
    """What an operand is given as: a key as its seed."""
    return np.dtype(np.uint32 if jnp.issubdtype(tensor.dtype, jax.dtypes.extended) else tensor.dtype)


def with_keys(operator: Operator, pieces: Sequence[Any]) -> list:
    """Local operands, with random keys where there are to be."""
    tensors = [operator.body.tensors[v] for v in operator.body.inputs]
    extended = [jnp.issubdtype(t.dtype, jax.dtypes.extended) for t in tensors]
    return [jax.vmap(jax.random.key)(x.reshape(-1)).reshape(x.shape) if e else x for x, e in zip(pieces, extended, strict=True)]


def is_key(x: Any) -> bool:
    """Whether a value is a random key."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def plain(x: Any) -> Any:
    """What leaves the program: keys cannot."""
    return jax.random.key_data(x) if is_key(x) else x
