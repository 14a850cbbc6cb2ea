"""Gradients flow through the operands in which a primitive has a derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.pcg.analysis.residuals import residuals
from unity.pcg.ir.gradient_flow import leading_to, reached
from unity.pcg.ir.program import close

X = np.linspace(0.1, 0.9, 4, dtype=np.float32)
FUNCTIONS = {
    "sum": lambda x, y: x + y,
    "stopped": lambda x, y: jnp.sin(x) + lax.stop_gradient(jnp.exp(y)),
    "next number": lambda x, y: lax.nextafter(x, y),
    "next number of a function": lambda x, y: lax.nextafter(jnp.sin(x), jnp.tanh(y)) * 2,
}
NEXT = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX cannot differentiate it")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[NEXT] if "next" in name else []) for name in FUNCTIONS])
def test_gradients_flow_to_those_operands_that_have_one(name):
    fn = FUNCTIONS[name]
    body, tangents = close(jax.make_jaxpr(fn)(X, X)), (np.ones_like(X), np.zeros_like(X))
    expected = tuple(bool(np.any(jax.jvp(fn, (X, X), pair)[1])) for pair in (tangents, tangents[::-1]))
    assert leading_to(body, (True,)) == expected
    assert tuple(reached(body, flags)[0] for flags in ((True, False), (False, True))) == expected


def test_nothing_is_kept_for_an_operand_without_a_derivative():
    kept = residuals(close(jax.make_jaxpr(FUNCTIONS["next number of a function"])(X, X)), (True, True))
    assert (kept.operands, kept.results, kept.inner) == ((True, False), (False,), ())
