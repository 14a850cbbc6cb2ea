"""The programs by which `unity.exec.measure.operators` times an operator: its forward and backward pass on one device's pieces.

The residuals are those that XLA keeps in a whole step (`unity.pcg.analysis.residuals`): the results of all but cheap operations,
which are recomputed where they are used. The backward pass is a separate program that reads them. The difference of two programs,
forward and forward with backward, would be too small: the two passes would share reads of the operands that they do not share in a
step.

Results that are views of operands (of a reshape, or the gradients of a sum) are dropped: a step does not copy them, but a repeated
program would.
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

from unity.pcg.ir.program import Body, Tensor, tensor_type
from unity.pcg.local.interpreter import BodyInterpreter
from unity.pcg.operators.layout import PlacedTensor
from unity.pcg.propagation.nested.programs import branch_indices
from unity.pcg.propagation.placement import placing
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import TABLE, Halo, facts_of
from unity.pcg.types.neutral_elements import neutral_element
from unity.pcg.types.parallel_type import UNUSED, Shape, Type, local_shape
from unity.pcg.types.varying_axes import CASTS, vary, varying

DRAWN = 1 << 20

Program = Callable[..., list]


@dataclass(frozen=True, eq=False)
class LocalOperator:
    """An operator with the parallel types of its operands and results: everything that its local program depends on."""

    body: Body
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    differentiated: tuple[bool, ...]
    axes: tuple[Axis, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Local shapes of the operands, followed by those of the results."""
        atoms = (*self.body.inputs, *self.body.outputs)
        types = (*self.operands, *self.results)
        return tuple(local_shape(self.body.tensor(a).shape, t, self.axes) for a, t in zip(atoms, types, strict=True))

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the axes that some type uses: the operator's values vary along exactly these."""
        types = (*self.operands, *self.results)
        return tuple(axis.name for k, axis in enumerate(self.axes) if any(t[k] != UNUSED for t in types))


class _Alone(BodyInterpreter):
    """An interpreter of local programs that leaves collectives out."""

    def reduce(self, variable: int, x: Any) -> Any:
        return x

    def exchange(self, x: Any, placed: PlacedTensor, dim: int, halo: Halo) -> Any:
        """Return the array, padded to its size with halos."""
        sizes = [(halo.before, halo.after, 0) if i == dim else (0, 0, 0) for i in range(x.ndim)]
        beyond = jnp.asarray(neutral_element(halo.outside, x.dtype), x.dtype)
        return lax.pad(x, vary(beyond, varying(x)), sizes)


def programs_of(operator: LocalOperator, operands: Sequence[Any]) -> tuple[Program, Program | None, Sequence[Any]]:
    """Return an operator's forward program, its backward program, and the backward program's operands."""
    body, flags, names = operator.body, operator.differentiated, operator.used
    place = placing(body, operator.operands, operator.results, len(operator.axes))
    results = [body.tensor(a) for a in body.outputs]
    floating = [k for k, t in enumerate(results) if t.floating]

    def run(*pieces: Any) -> list:
        return [vary(x, names) for x in _Alone(body, place, operator.axes).run(pieces)]

    if not (any(flags) and floating):
        return without_views(run, operands), None, ()
    chosen = [x for x, flag in zip(operands, flags, strict=True) if flag]

    def both(*pieces: Any) -> tuple[list, list, Any]:
        mine = [x for x, flag in zip(pieces, flags, strict=True) if flag]

        def of(*weights: Any) -> tuple[list, list]:
            following = iter(weights)
            out = run(*(next(following) if flag else x for x, flag in zip(pieces, flags, strict=True)))
            return [out[k] for k in floating], out

        checkpointed = jax.checkpoint(of, prevent_cse=False, policy=lambda p, *_, **__: not facts_of(p.name).recomputed)
        _, back, out = jax.vjp(checkpointed, *mine, has_aux=True)
        leaves, tree = jax.tree.flatten(back)
        return out, leaves, tree

    out, leaves, tree = both(*operands)
    cotangents = [vary(jnp.full(out[k].shape, 0.5, out[k].dtype), names) for k in floating]
    n = len(leaves)

    def backward(*linear: Any) -> list:
        gradients = jax.tree.unflatten(tree, linear[:n])(list(linear[n:]))
        return [g for g, x in zip(gradients, chosen, strict=True) if g.dtype == x.dtype]

    there = without_views(lambda *given: [x for part in both(*given)[:2] for x in part], operands)
    linear = [*leaves, *cotangents]
    return there, without_views(backward, linear), linear


def without_views(program: Program, operands: Sequence[Any]) -> Program:
    """Return the program without results that are views of operands or of earlier results."""
    closed = jax.make_jaxpr(program)(*operands)
    source: dict[Any, Any] = {}
    for e in closed.jaxpr.eqns:
        if _is_view(e) and not isinstance(e.invars[0], core.Literal):
            source[e.outvars[0]] = source.get(e.invars[0], e.invars[0])
    sources = {*closed.jaxpr.invars, *closed.jaxpr.constvars}
    numbers = []
    for k, v in enumerate(closed.jaxpr.outvars):
        if not isinstance(v, core.Literal) and source.get(v, v) not in sources:
            sources.add(source.get(v, v))
            numbers.append(k)
    run = core.jaxpr_as_fun(closed)

    def only(*operands: Any) -> list:
        results = run(*operands)
        return [results[k] for k in numbers]

    return only


def _is_view(eqn: core.JaxprEqn) -> bool:
    """Return whether a step needs no code for an equation, since its result is a view of the whole operand."""
    entry = TABLE.get(eqn.primitive.name)
    if entry is None:
        return eqn.primitive.name in CASTS
    avals: list[list[Any]] = [[v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]]
    operands, results = ([tensor_type(x.shape, x.dtype) for x in side] for side in avals)
    return [t.nbytes for t in operands] == [t.nbytes for t in results] and entry.spec(eqn.params, operands, results).view


def local_operands(operator: LocalOperator, branch: int = 0) -> Iterator[np.ndarray[Any, Any]]:
    """Yield values for the local operands as numpy arrays: small random numbers, and indices into the largest dimension.

    Large operands repeat their first `DRAWN` elements, because drawing all of them takes longer than the measurement.

    Args:
        operator: The operator.
        branch: The number of the branch that conditionals run.
    """
    rng = np.random.default_rng(0)
    shapes, indices = operator.shapes, branch_indices(operator.body)
    below = max((n for shape in shapes for n in shape), default=1)
    for v, shape in zip(operator.body.inputs, shapes, strict=False):
        tensor, few = operator.body.tensors[v], min(DRAWN, prod(shape))
        if v in indices:
            drawn = np.full(few, branch)
        elif is_key(tensor):
            drawn = np.zeros(few)
        elif tensor.floating:
            drawn = rng.normal(size=few) / 8
        elif tensor.dtype == bool:
            drawn = rng.integers(0, 2, few)
        else:
            drawn = rng.integers(0, min(below, np.iinfo(tensor.dtype).max), few)
        yield np.resize(drawn.astype(plain_dtype(tensor)), shape)


def plain_dtype(tensor: Tensor) -> np.dtype[Any]:
    """Return the NumPy dtype in which an operand is passed. A key is passed as its seed."""
    return np.dtype(np.uint32 if is_key(tensor) else tensor.dtype)


def with_keys(operator: LocalOperator, pieces: Sequence[Any]) -> list:
    """Return the local operands, with seeds turned into random keys."""
    tensors = [operator.body.tensors[v] for v in operator.body.inputs]
    pairs = zip(pieces, tensors, strict=True)
    return [jax.vmap(jax.random.key)(x.reshape(-1)).reshape(x.shape) if is_key(t) else x for x, t in pairs]


def is_key(x: Any) -> bool:
    """Return whether a value or a tensor has random keys as elements."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def plain(x: Any) -> Any:
    """Return a value in a form that can leave a program, which keys cannot."""
    return jax.random.key_data(x) if is_key(x) else x
