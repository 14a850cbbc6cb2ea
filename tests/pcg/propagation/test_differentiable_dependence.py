"""Each result of a nested program depends on the inputs that its derivative depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.pcg.ir.program import close
from unity.pcg.propagation.differentiable_dependence import dependent

X = np.linspace(0.1, 0.9, 4)
CALLS = {
    "scan": lambda x, y, z: lax.scan(lambda c, _: ((jnp.sin(c[0]), c[0] * c[1], c[1] + c[2]), c[2]), (x, y, z), None, 3),
    "scan that hands on": lambda x, y, z: lax.scan(lambda c, w: ((c[0], c[1] * w), c[0]), (x, y), jnp.stack([z, z])),
    "checkpoint": jax.checkpoint(lambda x, y, z: (jnp.sin(x), x * y, (z > 0.5).astype(z.dtype))),
    "checkpoint in a scan": lambda x, y, z: lax.scan(
        jax.checkpoint(lambda c, _: ((jnp.sin(c[0]), c[1] * 2), lax.stop_gradient(c[0]) + c[1])), (x, y), None, 2
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_depend_on_what_their_derivatives_depend_on(name):
    def fn(*xs):
        return jax.tree.leaves(CALLS[name](*xs))

    body = close(jax.make_jaxpr(fn)(X, X, X))
    for k in range(3):
        flags = tuple(k == p for p in range(3))
        tangents = jax.jvp(fn, (X, X + 1, X + 2), tuple(np.full_like(X, flag) for flag in flags))[1]
        variables = dependent(body, flags)
        assert [a in variables for a in body.outputs] == [bool(np.any(t)) for t in tangents]
