"""Each result of a nested program depends on the inputs that its derivative depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.pcg.ir.gradient_flow import leading_to, reached
from unity.pcg.ir.program import close

X = np.linspace(0.1, 0.9, 4)
CALLS = {
    "scan": lambda x, y, z: lax.scan(lambda c, _: ((jnp.sin(c[0]), c[0] * c[1], c[1] + c[2]), c[2]), (x, y, z), None, 3),
    "scan that hands on": lambda x, y, z: lax.scan(lambda c, w: ((c[0], c[1] * w), c[0]), (x, y), jnp.stack([z, z])),
    "checkpoint": jax.checkpoint(lambda x, y, z: (jnp.sin(x), x * y, (z > 0.5).astype(z.dtype))),
    "while": lambda x, y, z: lax.while_loop(
        lambda c: jnp.sum(c[0]) < 5, lambda c: (c[0] + 1, c[1] * jnp.cos(c[0]), lax.stop_gradient(c[1]) * c[2]), (x, y, z)
    ),
    "while that reads": lambda x, y, z: lax.while_loop(
        lambda c: jnp.sum(c[0] + x) < 9, lambda c: (c[0] + 1, c[1] * z), (jnp.ones_like(x), y)
    ),
    "cond": lambda x, y, z: lax.cond(
        jnp.sum(x) > 0, lambda x, y, z: (jnp.sin(x) * z, y, y > 0.5), lambda x, y, z: (x * z, y * 2, y > 0.2), x, y, z
    )[:2],
    "checkpoint in a scan": lambda x, y, z: lax.scan(
        jax.checkpoint(lambda c, _: ((jnp.sin(c[0]), c[1] * 2), lax.stop_gradient(c[0]) + c[1])), (x, y), None, 2
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_depend_on_what_their_derivatives_depend_on(name):
    def fn(*xs):
        return jax.tree.leaves(CALLS[name](*xs))

    body = close(jax.make_jaxpr(fn)(X, X, X))
    flags = [tuple(k == p for p in range(3)) for k in range(3)]
    tangents = [jax.jvp(fn, (X, X + 1, X + 2), tuple(np.full_like(X, flag) for flag in of))[1] for of in flags]
    expected = [tuple(bool(np.any(t)) for t in of) for of in tangents]
    assert [reached(body, of) for of in flags] == expected
    results = range(len(body.outputs))
    assert [leading_to(body, tuple(k == p for p in results)) for k in results] == list(zip(*expected, strict=True))
