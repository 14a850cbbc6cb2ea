"""The kernels that write what the steps of loops stack, counted against what JAX itself stacks."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from ci_cases import by_hand
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import unity
from unity.pcg.analysis.hoisting import hoisted
from unity.pcg.analysis.rematerialization import recomputation
from unity.pcg.analysis.stacked_values import NO_KERNELS, stacking_kernels
from unity.pcg.capture.capture import capture
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.search.cost.prediction import predict

D, T = 4, 8
W, X = jnp.zeros((D, D)), jnp.zeros((T, D))
MACHINE = unity.Machine.grid(1, 2, "a100")


def elman(w, xs):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(D), xs)[1])


def gated(w, xs):
    def step(carry, x):
        h, c = carry
        z = h @ w + x
        c = jax.nn.sigmoid(z) * c + jnp.tanh(z)
        return (jnp.sin(c), c), None

    (h, _), _ = lax.scan(step, (jnp.zeros(D), jnp.zeros(D)), xs)
    return jnp.sum(h)


def invariant(w, xs):
    def step(h, x):
        return jnp.sin(h * jnp.exp(w).sum(0) + x), None

    return jnp.sum(lax.scan(step, jnp.zeros(D), xs)[0])


def checkpointed(w, xs):
    @jax.checkpoint
    def step(h, x):
        return jnp.tanh(jnp.tanh(h @ w + x) @ w), None

    return jnp.sum(lax.scan(step, jnp.zeros(D), xs)[0])


def saving(w, xs):
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("inner"))
    def step(h, x):
        return jnp.tanh(checkpoint_name(jnp.tanh(h @ w + x), "inner") @ w), None

    return jnp.sum(lax.scan(step, jnp.zeros(D), xs)[0])


def nested(w, xs):
    def step(h, x):
        return lax.scan(lambda g, y: (jnp.tanh(g @ w + y), None), h, jnp.stack([x, h, jnp.sin(x)]))[0], None

    return jnp.sum(lax.scan(step, jnp.zeros(D), xs)[0])


def nested_constants(w, xs):
    def step(h, x):
        return lax.scan(lambda g, _: (jnp.sin(g * x) @ w, None), h, None, length=2)[0], None

    return jnp.sum(lax.scan(step, jnp.zeros(D), xs)[0])


def checkpointed_loop(w, xs):
    @jax.checkpoint
    def step(h, x):
        return lax.scan(lambda g, _: (jnp.sin(g @ w + x), None), h, None, length=2)[0], None

    return jnp.sum(lax.scan(step, jnp.zeros(D), xs)[0])


def checkpointed_results(w, xs):
    @jax.checkpoint
    def step(h, x):
        g = jnp.tanh(h @ w + x)
        return g, jnp.sin(g)

    h, ys = lax.scan(step, jnp.zeros(D), xs)
    return jnp.sum(h) + jnp.sum(ys * ys)


def beside(w, xs):
    return elman(w, xs) + gated(w, xs)


PROGRAMS = [
    elman, gated, invariant, checkpointed, saving, nested, nested_constants, checkpointed_loop, checkpointed_results, beside
]  # fmt: skip


def rows_written(fn, argnums=(0, 1)):
    """Return the number of kernels that write rows in a step of training."""
    captured = capture(fn, W, X, argnums=argnums)
    flow = gradients(captured.graph, captured.differentiated)
    kernels = stacking_kernels(captured.graph, flow, hoisted(captured.graph, flow), recomputation(captured.graph, flow))
    each = ((kernels.get(id(node), NO_KERNELS), n) for node, n in captured.graph.walk())
    return sum(n * (k.forward + k.backward) for k, n in each)


def rows_stacked_by_jax(jaxpr):
    """Return the number of rows that the loops of a program of JAX's stack."""
    total = 0
    for e in jaxpr.eqns:
        is_loop = e.primitive.name in SCANNED
        times = e.params["length"] if is_loop else 1
        total += times * (len(e.outvars) - constants_and_carry(e.params)[1]) if is_loop else 0
        for nested in (v for v in e.params.values() if hasattr(v, "eqns")):
            total += times * rows_stacked_by_jax(getattr(nested, "jaxpr", nested))
    return total


@pytest.mark.parametrize("argnums", [(0, 1), *by_hand((0,))], ids=str)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_the_kernels_write_the_rows_that_jax_stacks(fn, argnums):
    expected = rows_stacked_by_jax(jax.make_jaxpr(jax.grad(fn, argnums))(W, X).jaxpr)
    assert rows_written(fn, argnums) == pytest.approx(expected)


def test_an_unrolled_loop_writes_once_a_round():
    def unrolled(w, xs):
        return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros(D), xs, unroll=4)[0])

    def plain(w, xs):
        return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros(D), xs)[0])

    assert rows_written(plain) == 4 * rows_written(unrolled) > 0


@pytest.mark.parametrize("fn", PROGRAMS)
def test_the_search_and_the_prediction_price_them_alike(fn, monkeypatch):
    """However a loop is divided, its step takes a launch for each, besides what it would take if nothing were stacked."""
    options = {"machine": MACHINE, "progress": False, "search": "captured", "branches": False, "recompute": False}
    points = unity.optimize(fn, W, X, argnums=(0, 1), **options).frontier
    programs = [(point.program.pcg, MACHINE, point.program.family.captured.differentiated) for point in points]
    whole = [predict(*program) for program in programs]
    assert whole[0].time == pytest.approx(points[0].time, rel=1e-12)
    monkeypatch.setattr("unity.search.cost.operator_runs.stacking_kernels", lambda *_: {})
    launches = rows_written(fn) * MACHINE.device.launch
    assert [p.time for p in whole] == pytest.approx([predict(*program).time + launches for program in programs], rel=1e-12)
