"""Derivative rules that return the next value of an operand in the place of its gradient, as scales of 8-bit numbers have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from slow_machines import slow
from test_agreed import SLOW

import unity
from benchmarks.fuzz.examine import wrong_plans
from unity.search.cost.prediction import predict


def scaled(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Return a division by a scale, with a derivative rule: what it keeps of (x, scale), and the cotangents from that."""
    call = jax.custom_vjp(lambda x, scale: x / (1 + scale))
    call.defvjp(lambda x, scale: (x / (1 + scale), forward(x, scale)), backward)
    return call


RULES = {
    "the largest, forward": scaled(lambda x, s: jnp.maximum(s, jnp.abs(x).max()), lambda kept, g: (g, kept)),
    "the largest, backward": scaled(lambda x, s: (x, s), lambda kept, g: (g, jnp.maximum(kept[1], jnp.abs(kept[0]).max()))),
    "the largest cotangent": scaled(lambda x, s: s, lambda kept, g: (g, jnp.abs(g).max())),
    "the operand": scaled(lambda x, s: s, lambda kept, g: (g, kept)),
    "from the operand": scaled(lambda x, s: s, lambda kept, g: (g, kept / 2 + 1)),
    "a sum, and the operand": scaled(lambda x, s: (x, s), lambda kept, g: (g, jnp.sum(kept[0] * g) + kept[1])),
    "a number": scaled(lambda x, s: s, lambda kept, g: (g, jnp.ones_like(kept))),
    "zero": scaled(lambda x, s: s, lambda kept, g: (g, jnp.zeros_like(kept))),
    "the largest twice": scaled(lambda x, s: jnp.abs(x).max(), lambda kept, g: (g * kept, kept)),
}
ROWS, SCALE = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32), jnp.array(0.1, jnp.float32)
WIDTH = 256
SLOW_AND_NEAR = slow(unity.Machine.grid(1, 4, "a100"))


@pytest.mark.parametrize("rule", RULES)
def test_every_plan_returns_the_next_value_once(rule: str) -> None:
    """Along axes that divide the samples, every device computes the next value, which is no part of a sum."""

    def loss(scale: Any, x: Any, w: Any) -> Any:
        return jnp.sum(jnp.tanh(RULES[rule](x, scale) @ w))

    assert wrong_plans(loss, (SCALE, ROWS, ROWS.T[:, :4]), unity.Machine.grid(2, 2), count=12) == []


def test_samples_are_divided_though_a_rule_returns_the_next_scale() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(RULES["the largest, forward"](jnp.tanh(x @ params["w"]), params["scale"]) ** 2)

    params = {"w": ROWS[:6], "scale": SCALE}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 6)), jnp.float32)
    plan = unity.optimize(loss, params, x, machine=SLOW, search="captured", progress=False)
    prediction = predict(plan.program.pcg, plan.inspect.machine, plan.program.family.differentiated)
    assert [t.share < 1 for t in prediction.operators if t.node.kind == "custom_vjp"] == [True]
    gradient = jax.jit(jax.grad(plan))(*plan.shard(params, x))
    expected = jax.grad(loss)(params, x)
    np.testing.assert_allclose(gradient["scale"], expected["scale"], rtol=1e-6)
    np.testing.assert_allclose(gradient["w"], expected["w"], rtol=1e-4, atol=1e-6)
    assert plan.check().agrees()


def test_branches_have_no_rule_that_returns_the_next_scale() -> None:
    """The devices of the second branch are not the first along the axis of the branches, which alone would contribute the scale."""
    rule = RULES["the largest, backward"]

    def loss(params: Any, x: Any) -> Any:
        left, right = (rule(jax.nn.relu(x @ params[k]), params["scale"]) @ params[k].T for k in ("a", "b"))
        return jnp.mean(left * right)

    params = {"a": ROWS[:6], "b": ROWS[2:], "scale": SCALE}
    with pytest.raises(unity.InfeasibleError, match=r"custom_vjp at .* must run on all devices"):
        unity.optimize(loss, params, ROWS, machine=unity.Machine.grid(2, 2), search="captured", branch_groups=2, progress=False)


def test_flax_products_in_8_bits_are_planned_as_they_run() -> None:
    """Their rules return zeros for rounded operands, which devices do not add up."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(2):
                dense = nn.Dense(WIDTH, dtype=jnp.float32, dot_general_cls=nn.Fp8DirectDotGeneralOp)
                x = jnp.tanh(dense(x))
            return x

    def loss(variables: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(cast(jax.Array, Net().apply(variables, x))))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2 * WIDTH, WIDTH)), jnp.float32)
    variables = Net().init(jax.random.key(0), x)
    plan = unity.optimize(loss, variables, x, machine=SLOW_AND_NEAR, search="captured", progress=False)
    assert plan.check().agrees()
    gradient, expected = (jax.jit(jax.grad(fn))(variables, x) for fn in (plan, loss))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), gradient, expected)
