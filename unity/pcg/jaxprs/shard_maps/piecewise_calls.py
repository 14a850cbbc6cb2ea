"""Calls of programs that `vmap` does not enter: over stacked operands, a call becomes a loop over the pieces.

Under `vmap`, JAX's generators other than threefry draw for a whole batch from its first key, whereas each device of a `shard_map`
draws from its own. So a draw is such a call. Once all `vmap`s have run, calls are replaced by their programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import batching, mlir

from unity.pcg.jaxprs.jaxprs import chosen_of, merged, with_equations, with_nested
from unity.pcg.types.random_keys import by_key

FROM_KEYS = frozenset({"random_bits", "random_split", "random_fold_in", "random_gamma"})
UNKEYED = frozenset({"rng_bit_generator", "rng_uniform"})  # primitives that draw from plain numbers

_CALL = core.Primitive("piecewise_call")
_CALL.multiple_results = True
_CALL.def_abstract_eval(lambda *operands, program: program.out_avals)


def _run(*operands: Any, program: core.ClosedJaxpr) -> list[Any]:
    return core.jaxpr_as_fun(program)(*operands)


# JAX runs the derivative rule of a call that no axis divides as it is, without `with_ordinary_calls`
_CALL.def_impl(_run)
mlir.register_lowering(_CALL, mlir.lower_fun(_run, multiple_results=True))


def draws_by_batch(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation draws other numbers under `vmap` than piece by piece, or cannot be batched."""
    name = eqn.primitive.name
    if name not in FROM_KEYS:
        return name in UNKEYED
    key: Any = eqn.invars[0].aval
    return not by_key(key.dtype)


def piecewise(program: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Call a program of one piece. For stacked operands it runs for one piece after the other."""
    return _CALL.bind(*operands, program=program)


def with_ordinary_calls(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Replace piecewise calls, which no `vmap` will see, by ordinary ones."""
    return with_equations(program, _as_call)


def _as_call(eqn: core.JaxprEqn) -> core.JaxprEqn:
    if eqn.primitive is not _CALL:
        return with_nested(eqn, _as_call)
    return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": eqn.params["program"]})


def _batched(operands: Any, dims: Any, *, program: core.ClosedJaxpr) -> tuple[list[Any], list[int]]:
    """Call a program for stacked operands in a loop over them."""
    batched = [dim is not None for dim in dims]
    stacks = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True) if dim is not None]
    equal = chosen_of(batched, operands, False)
    _, results = lax.scan(lambda _, pieces: (None, piecewise(program, merged(batched, pieces, equal))), None, stacks)
    return results, [0] * len(results)


batching.primitive_batchers[_CALL] = _batched
