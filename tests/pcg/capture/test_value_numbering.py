"""Equal calls are computed once only where that leaves the gradient what it is: not with a rule that clips a cotangent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from precision import in_64_bits
from slow_machines import slow
from small_models import arrays, f

import unity
from unity.pcg.capture.capture import capture
from unity.substitutions.rewriting.rewriting import content_key

MACHINE = slow(unity.Machine.grid(1, 4, "a100"))
Call = Callable[[Any], Any]
Rule = Callable[[Any, Any], Any]
RULES: dict[str, Rule] = {
    "clipped": lambda x, g: jnp.clip(g, -0.01, 0.01),
    "rounded": lambda x, g: jnp.round(8 * g) / 8,
    "with a term": lambda x, g: g + 0.1 * x,
    "rounded to 8 bits": lambda x, g: g.astype(jnp.float8_e4m3fn).astype(g.dtype),
    "of one bit's precision": lambda x, g: lax.reduce_precision(g, 5, 1),
    "twice": lambda x, g: 2 * g,
}
LINEAR = {"twice"}


def ruled(rule: Rule) -> Call:
    call = jax.custom_vjp(lambda x: x)
    call.defvjp(lambda x: (x, x), lambda x, g: (rule(x, g),))
    return call


def two_heads(call: Call, w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.sum(call(h) @ w) + jnp.sum(jnp.sin(call(h) @ w))


def in_jits(call: Call, w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.sum(jax.jit(call)(h) ** 2) + jnp.sum(jnp.sin(jax.jit(call)(h)))


def mapped(call: Call, w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.sum(jax.vmap(call)(h) ** 2) + jnp.sum(jnp.sin(jax.vmap(call)(h)))


def layers_of_one_weight(call: Call, w: Any, x: Any) -> Any:
    for _ in range(3):
        x = jnp.tanh(x @ call(w))
    return jnp.sum(x**2)


def in_a_step(call: Call, w: Any, x: Any) -> Any:
    step = lambda c, x: (jnp.tanh((c + x) @ call(w)) @ call(w), None)  # noqa: E731
    return jnp.sum(lax.scan(step, jnp.zeros(16), x)[0] ** 2)


def scans(call: Call, w: Any, x: Any) -> Any:
    one = lambda: lax.scan(lambda c, x: (jnp.tanh(c + call(x @ w)), c), jnp.zeros(16), x)[1]  # noqa: E731
    return jnp.sum(one() ** 2) + jnp.sum(jnp.sin(one()))


def conditionals(call: Call, w: Any, x: Any) -> Any:
    one = lambda: lax.cond(x[0, 0] > 0, lambda: call(x @ w), lambda: 2 * call(x @ w))  # noqa: E731
    return jnp.sum(one() ** 2) + jnp.sum(jnp.sin(one()))


def checkpointed(call: Call, w: Any, x: Any) -> Any:
    return jax.checkpoint(lambda w: two_heads(call, w, x))(w)


def a_loop(call: Call, w: Any, x: Any) -> Any:
    """A loop that the search writes out."""
    return jnp.sum(lax.fori_loop(0, 4, lambda _, c: jnp.tanh(c @ call(w) + x), x) ** 2)


PLACES = [two_heads, in_jits, mapped, layers_of_one_weight, in_a_step, scans, conditionals, checkpointed]


def assert_gradient(loss: Callable[..., Any], search: str) -> None:
    with in_64_bits():
        w, x = arrays(f(16, 16)), arrays(f(8, 16))
        w, x = jnp.asarray(w, jnp.float64), jnp.asarray(x, jnp.float64)
        plan = unity.optimize(loss, w, x, machine=MACHINE, search=search, progress=False)
        np.testing.assert_allclose(jax.grad(plan)(w, x), jax.grad(loss)(w, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("rule", RULES)
def test_equal_calls_have_the_gradient_of_the_function(rule: str, place: Callable[..., Any]) -> None:
    call = ruled(RULES[rule])
    assert_gradient(lambda w, x: place(call, w, x), "captured")


@pytest.mark.parametrize("place", [a_loop, *PLACES], ids=lambda place: place.__name__)
def test_equal_calls_that_a_rewriting_brings_together_stay_apart(place: Callable[..., Any]) -> None:
    call = ruled(RULES["clipped"])
    assert_gradient(lambda w, x: place(call, w, x), "unity")


@pytest.mark.parametrize("rule", RULES)
def test_calls_are_computed_once_if_their_rule_is_linear(rule: str) -> None:
    call = ruled(RULES[rule])
    body = capture(lambda w, x: two_heads(call, w, x), f(16, 16), f(8, 16)).body
    graph = capture(lambda w, x: two_heads(call, w, x), f(16, 16), f(8, 16)).graph
    assert sum(e.name.startswith("custom_vjp") for e in body.equations) == 2
    equations = [e for n, _ in graph.walk() if n.body is not None for e in n.body.equations]
    assert sum(e.name.startswith("custom_vjp") for e in equations) == (1 if rule in LINEAR else 2)


def test_calls_of_a_rule_that_cannot_be_read_stay_apart() -> None:
    call = jax.custom_vjp(lambda x: x)

    def backward(x: Any, g: Any) -> Any:
        return (jax.pure_callback(lambda g: np.clip(g, -0.01, 0.01), jax.ShapeDtypeStruct(g.shape, g.dtype), g),)

    call.defvjp(lambda x: (x, x), backward)
    graph = capture(lambda w, x: two_heads(call, w, x), f(16, 16), f(8, 16)).graph
    equations = [e for n, _ in graph.walk() if n.body is not None for e in n.body.equations]
    assert sum(e.name.startswith("custom_vjp") for e in equations) == 2


@pytest.mark.parametrize("place", [two_heads, layers_of_one_weight, in_a_step], ids=lambda place: place.__name__)
def test_gathers_of_calls_that_stay_apart_are_predicted_as_compiled(place: Callable[..., Any]) -> None:
    """Their values are equal, so that the compiler gathers them once."""
    call = ruled(RULES["clipped"])
    plan = unity.optimize(
        lambda w, x: place(call, w, x), f(16, 16), f(8, 16), argnums=(0, 1), machine=MACHINE, search="captured", progress=False
    )
    for point in (plan, plan.frontier[-1]):
        check = point.check()
        assert check.lines
        assert not any(line.difference for line in check.lines)


def first_twice(call: Call, h: Any, again: Any) -> Any:
    u, v = call(h), call(again)
    return jnp.tanh(u) + jnp.sin(u) + jnp.cos(v)


def second_twice(call: Call, h: Any, again: Any) -> Any:
    u, v = call(h), call(again)
    return jnp.tanh(u) + jnp.sin(v) + jnp.cos(v)


@pytest.mark.parametrize("again", [lambda w, x, h: h, lambda w, x, h: x @ w], ids=["one value", "an equal value"])
@pytest.mark.parametrize("rule", RULES)
def test_programs_that_read_other_ones_of_equal_calls_have_other_contents(rule: str, again: Callable[..., Any]) -> None:
    call = ruled(RULES[rule])

    def of(pairing: Callable[..., Any]) -> Any:
        return capture(lambda w, x: jnp.sum(pairing(call, x @ w, again(w, x, x @ w))), f(16, 16), f(8, 16))

    one, other = of(first_twice), of(second_twice)
    for key in (lambda c: content_key(c.body), lambda c: c.graph.key):
        assert (key(one) == key(other)) == (rule in LINEAR)


def test_layers_that_read_other_ones_of_equal_calls_are_not_rolled_into_one() -> None:
    call = ruled(RULES["clipped"])

    def loss(weights: Any, x: Any) -> Any:
        for k, w in enumerate(weights):
            x = (second_twice if k in (1, 2, 5, 7) else first_twice)(call, x @ w, x @ w)
        return jnp.mean(x**2)

    with in_64_bits():
        weights, x = [jax.random.normal(jax.random.key(k), (16, 16)) / 4 for k in range(8)], jnp.ones((8, 16))
        options = {"machine": MACHINE, "search": "captured", "progress": False, "pipeline": unity.PipelineShape(2, 4)}
        plan = unity.optimize(loss, weights, x, **options)
        for gradient, own in zip(jax.grad(plan)(weights, x), jax.grad(loss)(weights, x), strict=True):
            np.testing.assert_allclose(gradient, own, rtol=1e-10, atol=1e-12)
