"""Derivative rules and primitives, such as those of Equinox and Lineax, that compare their arguments with those of tracing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from small_models import arrays, f
from test_programs import planned

import unity


def types(values: Any) -> Any:
    """Return what `equinox.filter_closure_convert` records of arguments, and compares."""
    return [(s.shape, s.dtype, s.sharding) for s in jax.tree.leaves(jax.eval_shape(lambda: values))]


def with_vjp(w: Any, h: Any) -> Any:
    expected = types((w, h))

    @jax.custom_vjp
    def call(w: Any, h: Any) -> Any:
        return jnp.tanh(h @ w), jnp.int32(3)

    def forward(w: Any, h: Any) -> Any:
        assert types((w, h)) == expected
        return call(w, h), (w, h)

    def backward(kept: Any, g: Any) -> Any:
        w, h = kept
        assert types(kept) == expected
        d = g[0] * (1 - jnp.tanh(h @ w) ** 2)
        return h.T @ d, d @ w.T

    call.defvjp(forward, backward)
    return call(w, h)[0]


def with_jvp(w: Any, h: Any) -> Any:
    expected = types((w, h))

    @jax.custom_jvp
    def call(w: Any, h: Any) -> Any:
        return jnp.sin(h @ w), jnp.int32(3)

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        assert types(primals) == expected
        (w, h), (dw, dh) = primals, tangents
        return call(w, h), (jnp.cos(h @ w) * (dh @ w + h @ dw), np.zeros((), jax.dtypes.float0))

    return call(w, h)[0]


def choosy(w: Any, h: Any) -> Any:
    """Call a function that refuses to be differentiated by its last operand; of the others, only active ones have cotangents."""

    @jax.custom_vjp
    def call(w: Any, h: Any, times: Any) -> Any:
        return jnp.sin(h @ w) * times, times

    def forward(w: Any, h: Any, times: Any) -> Any:
        if times.perturbed:
            raise RuntimeError("times cannot be differentiated")
        kept = w.value, h.value, times.value, () if h.perturbed else None
        return call(w.value, h.value, times.value), kept

    def backward(kept: Any, g: Any) -> Any:
        w, h, times, perturbed = kept
        assert not isinstance(g[0], jax.custom_derivatives.SymbolicZero)
        assert isinstance(g[1], jax.custom_derivatives.SymbolicZero)
        d = g[0] * times * jnp.cos(h @ w)
        return h.T @ d, None if perturbed is None else d @ w.T, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(w, h, jnp.cos(jnp.arange(16, dtype=h.dtype)))[0]


product_p = Primitive("other_product")  # linear in what is not fixed; it remembers its operands' types
product_p.def_impl(lambda w, h, expected, turned: _product(w, h, expected, turned))
product_p.def_abstract_eval(lambda w, h, **_: ShapedArray(h.shape, h.dtype))
mlir.register_lowering(product_p, mlir.lower_fun(product_p.impl, multiple_results=False))


def _product(w: Any, h: Any, expected: Any, turned: bool) -> Any:
    assert tuple(types((w, h))) == expected
    steps = lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, h @ (w.T if turned else w)), (0, h))  # no transpose of JAX's
    return steps[1]


def bound(w: Any, h: Any, turned: bool = False) -> Any:
    return product_p.bind(w, h, expected=tuple(types((w, h))), turned=turned)


def _derivative(primals: Any, tangents: Any, expected: Any, turned: bool) -> Any:
    (w, h), (dw, dh) = primals, tangents
    assert tuple(types((w, h))) == expected
    parts = [] if isinstance(dw, ad.Zero) else [h @ (dw.T if turned else dw)]
    parts += [] if isinstance(dh, ad.Zero) else [product_p.bind(w, dh, expected=expected, turned=turned)]
    return product_p.bind(w, h, expected=expected, turned=turned), sum(parts[1:], parts[0])


ad.primitive_jvps[product_p] = _derivative
ad.primitive_transposes[product_p] = lambda g, w, h, expected, turned: (
    None,
    product_p.bind(w, g, expected=expected, turned=not turned),
)


def looped(w: Any, h: Any) -> Any:
    """Run a loop as Diffrax does."""
    return eqx.internal.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (jnp.int32(0), h), kind="checkpointed", max_steps=4
    )[1]


def scanned(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scan whose carry is active from the second step on only."""
    return lambda w, h: lax.scan(lambda h, _: (call(w, h) + h, h.sum()), h, None, 3)[0]


def in_rule(w: Any, h: Any) -> Any:
    """Differentiate implicitly as Optimistix does, with a solve by Lineax."""
    expected = tuple(types((w, h)))

    @jax.custom_jvp
    def call(w: Any, h: Any) -> Any:
        return h @ w

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (w, h), (dw, dh) = primals, tangents
        return call(w, h), product_p.bind(w, dh, expected=expected, turned=False) + h @ dw

    return call(w, h)


CALLS = {"custom_vjp": with_vjp, "custom_jvp": with_jvp, "choosy": choosy, "primitive": bound, "primitive in a rule": in_rule}
AROUND = {"plain": lambda call: call, "scanned": scanned, "remat": jax.checkpoint}
CASES = {f"{name}, {around}": (call, AROUND[around]) for name, call in CALLS.items() for around in AROUND}


@pytest.mark.parametrize("name", [*one_in(3, CASES), "Equinox' loop"])
def test_rules_are_read_outside_of_the_mesh(name: str) -> None:
    call = CASES[name][1](CASES[name][0]) if name in CASES else looped

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(call(w["inner"], x) @ w["outer"]) ** 2)

    shapes = {"inner": f(16, 16), "outer": f(16, 16)}, f(16, 16)
    with jax.enable_x64(True):
        w, x = arrays(shapes)
        plan, _ = planned(loss, *shapes)
        placed = plan.shard(w, x)
        same = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
        same(jax.jit(plan)(*placed), loss(w, x))
        for argnums in ((0, 1), 0):  # in this order: JAX remembers what it has read of rules
            found = jax.jit(jax.grad(plan, argnums))(*placed)
            jax.tree.map(same, found, jax.grad(loss, argnums)(w, x))


def test_a_rule_that_refuses_is_reported() -> None:
    @jax.custom_vjp
    def call(x: Any, times: Any) -> Any:
        return x * times

    def forward(x: Any, times: Any) -> Any:
        if times.perturbed:
            raise RuntimeError("times cannot be differentiated")
        return call(x.value, times.value), times.value

    call.defvjp(forward, lambda times, g: (g * times, None), symbolic_zeros=True)
    plan, _ = planned(lambda w, times: jnp.mean(call(w, times)), f(16), f(16))
    with pytest.raises(unity.CaptureError, match=r"test_whole.py.*times cannot be differentiated"):
        jax.grad(plan, 1)(*plan.shard(*arrays((f(16), f(16)))))


@pytest.mark.parametrize("kind", ["keys", "complex numbers"])
def test_values_of_eight_bytes_do_not_enable_64_bits(kind: str) -> None:
    """Random keys and complex numbers have 64 bits; rules have 32-bit integers beside them, as in JAX."""

    @jax.custom_vjp
    def call(x: Any, beside: Any) -> Any:
        return jnp.sin(x)

    def forward(x: Any, beside: Any) -> Any:
        assert jnp.arange(3).dtype == jnp.int32
        return call(x, beside), x

    call.defvjp(forward, lambda x, g: (g * jnp.cos(x), None))
    beside = jax.random.key(0) if kind == "keys" else jnp.ones(16, jnp.complex64)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(call(x @ w, beside) ** 2)

    with jax.enable_x64(False):
        w, x = (jnp.full(shape, 0.1, jnp.float32) for shape in ((16, 16), (64, 16)))
        plan, _ = planned(loss, w, x)
        found, wanted = jax.grad(plan)(*plan.shard(w, x)), jax.grad(loss)(w, x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
