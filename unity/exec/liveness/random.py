"""Random bits: where a generator goes by the numbers of elements, a hash of these, whose rounds are a loop on CPUs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from unity.exec.liveness.lower import Lowering, Values, tensors_of
from unity.exec.liveness.program import Origin
from unity.pcg.ir.program import Tensor
from unity.pcg.operators.counter_bits import bits, counted
from unity.pcg.types.parallel_type import Shape

PARITY = 0x1BD11BDA  # the third word of a key, with the others (Salmon et al., section 3.3)
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
GROUPS = 5  # of four rounds


def drawn(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """The bits that keys give."""
    key = b.tensors[operands[0]]
    if not counted(key.dtype):
        return list(b.emit("random_bits", operands, tensors_of(eqn), (eqn.params["shape"],), origin))
    return _inlined(b, _bits(key, eqn.params["bit_width"], tuple(eqn.params["shape"])), operands, origin)


def hashed(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """Threefry of two words, with a key of two words."""
    if not b.backend.eager:  # a kernel of its own
        return list(b.emit("threefry2x32", operands, tensors_of(eqn), (), origin))
    return _inlined(b, _rounds(*(b.tensors[v].shape for v in operands)), operands, origin)


def _inlined(b: Lowering, program: core.ClosedJaxpr, operands: Values, origin: Origin) -> Values:
    return b.run(program.jaxpr, operands, [b.constant(x) for x in program.consts], origin)


@lru_cache(maxsize=1024)
def _bits(key: Tensor, width: int, shape: Shape) -> core.ClosedJaxpr:
    def program(keys: jax.Array) -> jax.Array:
        return bits(keys, width, shape, [jnp.arange(n, dtype=jnp.uint32) for n in shape])

    return jax.make_jaxpr(program)(key.struct)


@lru_cache(maxsize=1024)
def _rounds(*shapes: Shape) -> core.ClosedJaxpr:
    """JAX's loop, for keys and numbers of these shapes."""

    def program(first: jax.Array, second: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(i: jax.Array, state: Any) -> Any:
            x, y, (one, two, three), (now, then) = state
            for k in range(4):
                x = x + y
                y = x ^ (y << now[k] | y >> (32 - now[k]))
            return x + one, y + two + i.astype(jnp.uint32) + 1, (two, three, one), (then, now)

        third = first ^ second ^ np.uint32(PARITY)
        turns = tuple(jnp.asarray(r, jnp.uint32) for r in ROTATIONS)
        return lax.fori_loop(0, GROUPS, step, (x + first, y + second, (second, third, first), turns))[:2]

    return jax.make_jaxpr(program)(*(jax.ShapeDtypeStruct(s, jnp.uint32) for s in shapes))
