"""Programs as people write them, whole: mixtures of experts, alignment losses, differential equations, decoding."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental.ode import odeint
from refusing_rule import scaled
from small_models import arrays, f, i

import unity
from unity.base.errors import CaptureError
from unity.pcg.types.parallel_type import UNUSED
from unity.plan.plan import Plan

DEVICE = unity.Device("slow", {"float32": 1e6, "float64": 1e6}, 10**9, 1e9, 0.5, 0.0)  # so that all that can be is shared
MACHINE = replace(unity.Machine.grid(2, 4), device=DEVICE)


def experts(p: Any, x: Any, y: Any) -> Any:
    """Tokens sorted by expert, each group through the weights of its own; two experts for a token."""
    chosen, which = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    order = jnp.argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=p["router"].shape[1])
    h = jax.nn.gelu(lax.ragged_dot(x[order // 2], p["up"], sizes))
    h = lax.ragged_dot(h, p["down"], sizes) * chosen.reshape(-1)[order][:, None]
    return jnp.mean((jnp.zeros_like(x).at[order // 2].add(h) - y) ** 2)


def aligned(p: Any, x: Any, labels: Any) -> Any:
    logits = jax.nn.relu(x @ p["in"]) @ p["out"]
    return optax.ctc_loss(logits, jnp.zeros(x.shape[:2]), labels, jnp.zeros(labels.shape)).mean()


def flow(p: Any, x: Any, y: Any) -> Any:
    """An equation solved with steps as large as they may be: its derivative rule solves another such equation."""
    end = odeint(lambda h, _: jnp.tanh(h @ p["in"]) @ p["out"], x, jnp.array([0.0, 1.0], x.dtype), rtol=1e-3, atol=1e-3)[-1]
    return jnp.mean((end @ p["head"] - y) ** 2)


def decoded(p: Any, token: Any) -> Any:
    """Twelve tokens, each the likeliest after those before it, whose keys and values are kept."""
    kept = jnp.zeros((token.shape[0], 12, p["key"].shape[1]))

    def step(c: Any) -> Any:
        t, token, keys, values, said = c
        h = p["table"][token]
        keys = lax.dynamic_update_slice(keys, (h @ p["key"])[:, None], (0, t, 0))
        values = lax.dynamic_update_slice(values, (h @ p["value"])[:, None], (0, t, 0))
        scores = jnp.where(jnp.arange(12) <= t, jnp.einsum("bd,btd->bt", h, keys), -1e9)
        h += jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), values)
        token = jnp.argmax(h @ p["table"].T, -1).astype(token.dtype)
        return t + 1, token, keys, values, said.at[:, t].set(token)

    return lax.while_loop(lambda c: c[0] < 12, step, (0, token, kept, kept, jnp.zeros((token.shape[0], 12), token.dtype)))[-1]


def planned(fn: Callable[..., Any], *args: Any) -> tuple[Plan, str]:
    """A plan, and what it says of itself."""
    plan, said = unity.optimize(fn, *args, machine=MACHINE, budget=20), io.StringIO()
    plan.explain(file=said)
    return plan, said.getvalue()


PROGRAMS = {
    "experts": (experts, {"router": f(16, 4), "up": f(4, 16, 32), "down": f(4, 32, 16)}, f(48, 16), f(48, 16)),
    "aligned": (aligned, {"in": f(8, 32), "out": f(32, 12)}, f(8, 10, 8), i(8, 3)),
    "flow": (flow, {"in": f(4, 16), "out": f(16, 4), "head": f(4, 1)}, f(8, 4), f(8, 1)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_the_programs(name: str) -> None:
    fn, *shapes = PROGRAMS[name]
    with jax.enable_x64(True):
        args = tuple(arrays(s, seed) for seed, s in enumerate(shapes))
        plan, _ = planned(fn, *args)
        found = jax.jit(jax.value_and_grad(plan))(*plan.shard(*args))
        wanted = jax.jit(jax.value_and_grad(fn))(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, wanted)


def test_rows_in_groups_are_split() -> None:
    plan, said = planned(*PROGRAMS["experts"])
    assert "ragged_dot_general" not in "".join(line for line in said.splitlines() if "whole" in line)
    assert plan.check().agrees()


def test_tokens_of_a_micro_batch_are_sorted_alone() -> None:
    fn, *args = PROGRAMS["experts"]
    plan = unity.optimize(fn, *args, machine=unity.Machine.grid(1, 2), budget=0, micro_batches=3, progress=False)
    assert [str(t) for t in plan.program.transformations] == ["3 micro-batches of 16 samples, their gradients added up"]


def test_what_cannot_be_followed_into_is_reported() -> None:
    _, said = planned(*PROGRAMS["flow"])
    assert "runs whole on every device: no dimension can be followed through the program inside (test_programs.py" in said


def test_integers_are_planned_without_a_backward_pass() -> None:
    with jax.enable_x64(True):
        args = arrays({"table": f(24, 16), "key": f(16, 16), "value": f(16, 16)}), np.arange(8, dtype=np.int32)
        plan, _ = planned(decoded, *args)
        np.testing.assert_array_equal(jax.jit(plan)(*plan.shard(*args)), jax.jit(decoded)(*args))
        assert plan.check().agrees()


def test_a_kernel_may_be_a_constant() -> None:
    def smoothed(w: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3) / 3, "same"))(x @ w) ** 2)

    plan, _ = planned(smoothed, f(16, 16), f(8, 16))
    assert plan.check().agrees()


def test_a_rule_that_uses_what_is_around_it_is_refused_by_line() -> None:
    def scaled(w: Any, x: Any) -> Any:
        doubled = 2 * x

        @jax.custom_vjp
        def product(w: Any) -> Any:
            return doubled @ w

        product.defvjp(lambda w: (product(w), ()), lambda _, g: (doubled.T @ g,))
        return jnp.mean(product(w) ** 2)

    with pytest.raises(CaptureError, match=r"test_programs.py.*custom_vjp uses a value that was\s+computed outside of it"):
        planned(scaled, f(16, 16), f(8, 16))


def test_a_rule_around_one_that_uses_what_is_around_it_is_enough() -> None:
    """The order of JAX's `expn` may be traced only where nobody differentiates a `jax.jit` of it: before JAX 0.12 its rule closes
    over it."""

    @jax.custom_jvp
    def integral(order: Any, x: Any) -> Any:
        return jax.scipy.special.expn(order, x)

    @integral.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        order, x = primals
        return integral(order, x), -jax.scipy.special.expn(order - 1, x) * tangents[1]

    def loss(w: Any, order: Any) -> Any:
        return jnp.mean(integral(order, jnp.exp(w)))

    w, order = arrays(f(16, 16)), np.arange(1, 17, dtype=np.int32)
    plan, _ = planned(loss, w, order)
    wanted = jax.jit(jax.value_and_grad(loss))(w, order)
    found = jax.jit(jax.value_and_grad(plan))(*plan.shard(w, order))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def test_a_rule_that_asks_what_is_differentiated_runs_whole() -> None:
    """As those of Equinox' `filter_custom_vjp`: planned, all floating arguments are; run, JAX says what is."""

    def loss(w: Any, batch: Any) -> Any:
        return jnp.mean(scaled(batch["x"] @ w, batch["times"]) ** 2)

    shapes = f(16, 16), {"x": f(8, 16), "times": f(5)}
    plan, (w, batch) = planned(loss, *shapes)[0], arrays(shapes)
    (rule,) = (
        n for n in plan.program.pcg.nodes if n.body is not None and any(e.name.startswith("custom_vjp") for e in n.body.equations)
    )
    assert {s for t in rule.types for s in t} == {UNUSED}
    wanted = jax.jit(jax.value_and_grad(loss))(w, batch)
    found = jax.jit(jax.value_and_grad(plan))(*plan.shard(w, batch))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize("in_a_scan", [False, True])
def test_a_rule_may_ask_whether_an_operand_that_it_does_not_read_is_differentiated(in_a_scan: bool) -> None:
    """As Equinox' loops stop the derivatives of what neither their start nor their weights differentiate."""

    @jax.custom_jvp
    def stopped(weight: Any, end: Any) -> Any:
        return 2 * end

    def rule(primals: Any, tangents: Any) -> Any:
        still = isinstance(tangents[0], SymbolicZero)
        return 2 * primals[1], jnp.zeros_like(primals[1]) if still or isinstance(tangents[1], SymbolicZero) else 2 * tangents[1]

    stopped.defjvp(rule, symbolic_zeros=True)

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return stopped(w, jnp.tanh(x @ w)) + stopped(jnp.ones(3), jnp.sin(x)), None

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((jax.lax.scan(layer, x, w)[0] if in_a_scan else layer(x, w[0])[0]) ** 2)

    shapes = f(2, 16, 16), f(8, 16)
    plan, args = planned(loss, *shapes)[0], arrays(shapes)
    wanted = jax.jit(jax.value_and_grad(loss))(*args)
    found = jax.jit(jax.value_and_grad(plan))(*plan.shard(*args))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)
    assert np.abs(np.asarray(found[1])).max() > 1e-3


@pytest.mark.parametrize("read", [False, True])
def test_a_rule_may_have_another_derivative_where_an_operand_has_no_tangent(read: bool) -> None:
    """It is planned as if all had one; what has none is known when the plan is differentiated."""

    @jax.custom_jvp
    def scaled(m: Any, x: Any) -> Any:
        return jnp.tanh(x) * m if read else jnp.tanh(x)

    def rule(primals: Any, tangents: Any) -> Any:
        m_tangent, x_tangent = (None if isinstance(t, SymbolicZero) else t for t in tangents)
        from_x = 0 * primals[1] if x_tangent is None else x_tangent * primals[0]
        return scaled(*primals), 3 * from_x if m_tangent is None else from_x + m_tangent

    scaled.defjvp(rule, symbolic_zeros=True)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(scaled(x, jnp.sin(x @ w)) ** 2)

    shapes = f(16, 16), f(64, 16)
    plan, args = planned(loss, *shapes)[0], arrays(shapes)
    assert any(s.kind == "P" for node in plan.program.pcg.nodes if node.kind == "input" for t in node.types for s in t)
    placed = plan.shard(*args)
    for argnums in (0, 1, (0, 1)):
        wanted = jax.jit(jax.value_and_grad(loss, argnums))(*args)
        found = jax.jit(jax.value_and_grad(plan, argnums))(*placed)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize("constant", [False, True])
def test_a_rule_may_have_another_derivative_where_a_result_has_no_cotangent(constant: bool) -> None:
    """It is planned as if all had one; what has none is known when the plan is differentiated."""

    @jax.custom_vjp
    def waves(x: Any, m: Any) -> Any:
        return jnp.tanh(x) * m, jnp.sin(x)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (x, m), (first, second) = residuals, (None if isinstance(c, SymbolicZero) else c for c in cotangents)
        if first is None:
            return second * m, jnp.zeros_like(m)
        return (3 * first if second is None else first * second), (jnp.ones_like(m) if constant else first * x)

    waves.defvjp(lambda x, m: (waves(x.value, m.value), (x.value, m.value)), backward, symbolic_zeros=True)

    def loss(w: Any, x: Any, of: str) -> Any:
        first, second = waves(x @ w, x)
        first, second = (v if name in of else jax.lax.stop_gradient(v) for v, name in ((first, "first"), (second, "second")))
        return jnp.mean(first**2 * jnp.cos(second))

    shapes = f(16, 16), f(64, 16)
    args = arrays(shapes)
    for of in ("first", "second", "first and second"):
        plan = planned(partial(loss, of=of), *shapes)[0]
        assert any(s.kind == "P" for node in plan.program.pcg.nodes if node.kind == "input" for t in node.types for s in t)
        wanted = jax.jit(jax.value_and_grad(partial(loss, of=of), (0, 1)))(*args)
        found = jax.jit(jax.value_and_grad(plan, (0, 1)))(*plan.shard(*args))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)
