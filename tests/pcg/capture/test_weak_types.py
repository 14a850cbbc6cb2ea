"""A plan keeps the function's weak types, so that its results promote dtypes as the function's do."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from pipelined_models import TREE
from pipelined_models import loss as layered_loss

import unity
from unity.base.errors import PlanError

EIGHT = unity.Machine.grid(1, 8, "a100")
W, X = jnp.ones((8, 8)) / 8, jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16).reshape(8, 8)


def planned(fn: Any, *args: Any, **options: Any) -> unity.Plan:
    options = {"machine": EIGHT, "search": "captured", "progress": False, **options}
    return unity.optimize(fn, *args, **options)


def kinds(tree: Any) -> list[tuple[Any, bool]]:
    return [(x.dtype, x.weak_type) for x in map(jnp.asarray, jax.tree.leaves(tree))]


def same(got: Any, wanted: Any) -> None:
    assert kinds(got) == kinds(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-2)


RESULTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "the number": lambda w, x, c: c,
    "a number": lambda w, x, c: 2.5,
    "a whole number": lambda w, x, c: 3,
    "an array": lambda w, x, c: jnp.full((8,), 0.5),
    "a counter": lambda w, x, c: lax.while_loop(lambda k: k < 5, lambda k: k + 1, 0),
    "a carry": lambda w, x, c: lax.scan(lambda k, _: (k * 2, k), 1.0, None, 3),
    "the number, changed": lambda w, x, c: jnp.sin(c) * 2,
    "the number, scaled": lambda w, x, c: x * c,
    "the number, by a rule": lambda w, x, c: jax.nn.relu(c) * x,
    "the number in a branch": lambda w, x, c: lax.cond(w[0, 0] > 0, lambda c: c * 2, lambda c: c, c),
    "weights": lambda w, x, c: w * c,
    "a product": lambda w, x, c: x @ w.astype(x.dtype) * c,
    "a sum": lambda w, x, c: (x * c).sum(),
}


@settings(max_examples=fewer(6))
@given(st.lists(st.sampled_from(sorted(RESULTS)), min_size=1, max_size=5), st.booleans())
def test_results_and_gradients_have_the_types_of_the_function(names: list[str], weak: bool) -> None:
    def fn(w: Any, c: Any, x: Any) -> Any:
        found = [RESULTS[name](w, x, c) for name in names]
        return jnp.mean((x @ w) ** 2) * c, found

    args = W, 0.5 if weak else jnp.float32(0.5), X
    plan = planned(fn, *args, argnums=(0, 1))
    same(plan(*args), jax.jit(fn)(*args))
    same(jax.jit(plan)(*args), jax.jit(fn)(*args))
    gradient = jax.value_and_grad(plan, (0, 1), has_aux=True), jax.value_and_grad(fn, (0, 1), has_aux=True)
    same(jax.jit(gradient[0])(*args), jax.jit(gradient[1])(*args))
    same(gradient[0](*args), gradient[1](*args))


@jax.custom_vjp
def rounded(x: Any, step: Any) -> Any:
    return jnp.round(x / step) * step


@jax.custom_vjp
def doubled_by_rule(x: Any) -> Any:
    return x * 2.0


@jax.custom_jvp
def product_by_rule(x: Any, y: Any) -> Any:
    return x * y


def rounded_gradients(residuals: Any, g: Any) -> Any:
    ratio = residuals[0] / residuals[1]
    return g, (g * (jnp.round(ratio) - ratio)).sum(0, keepdims=True)


rounded.defvjp(lambda x, step: (rounded(x, step), (x, step)), rounded_gradients)
doubled_by_rule.defvjp(lambda x: (x * 2.0, None), lambda _, g: (jnp.full(g.shape, 2.0),))
product_by_rule.defjvp(lambda p, t: (p[0] * p[1], p[0] * t[1] + p[1] * t[0]))

LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "an operand of a rule with two": lambda w, x: (rounded(x, w[:1]) ** 2).mean(),
    "the other operand of it": lambda w, x: (rounded(w, jnp.abs(x[:1]) + 1) ** 2).mean(),
    "an operand of a rule alone": lambda w, x: (doubled_by_rule(w) * x).sum(),
    "an operand of a rule and plainly": lambda w, x: (rounded(x, w[:1]) * w).sum(),
    "an operand of a rule of tangents": lambda w, x: product_by_rule(w, x).sum(),
    "an operand of a rule of tangents and plainly": lambda w, x: (product_by_rule(w, x) * w).sum(),
    "an operand of a rule in a loop": lambda w, x: lax.scan(lambda c, _: (product_by_rule(c, w), None), x, None, 2)[0].sum(),
    "a factor": lambda w, x: (w * x).sum(),
    "an operand of a product": lambda w, x: (x @ w).sum(),
    "an operand of a branch": lambda w, x: lax.cond(x.sum() > 0, lambda w: w * 2, lambda w: w * 3, w).sum(),
    "nothing": lambda w, x: (x * x).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_is_as_weakly_typed_as_that_of_the_function(name: str) -> None:
    fn, strong, weak = LOSSES[name], jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.full((8, 8), 0.5)
    assert weak.weak_type
    for w in weak, weak + strong * 0:  # an array of a weak type, and one of none
        plan = planned(fn, w, strong, machine=unity.Machine.grid(1, 1, "a100"), argnums=(0, 1))
        wanted = jax.jit(jax.value_and_grad(fn, (0, 1)))(w, strong)
        same(jax.value_and_grad(plan, (0, 1))(w, strong), wanted)
        same(jax.jit(jax.value_and_grad(plan, (0, 1)))(w, strong), wanted)
        same(jax.grad(plan)(w, strong), wanted[1][0])
        mapped = jax.vmap(jax.grad(plan), (None, 0))(w, jnp.stack([strong, strong]))
        same(mapped, jnp.stack([wanted[1][0]] * 2))


@jax.custom_vjp
def strong_by_rule(s: Any) -> Any:
    return s * 1.0


strong_by_rule.defvjp(lambda s: (s * 1.0, None), lambda _, g: (jnp.float32(3.0) + 0 * g,))


def test_gradients_of_several_results_have_the_types_of_all_of_them() -> None:
    def fn(s: Any, x: Any) -> Any:
        return x * 2, (x * strong_by_rule(s)).sum()

    def gradient(of: Callable[..., Any]) -> Any:
        results, pull = jax.vjp(of, 0.5, jnp.ones(8))
        return pull(jax.tree.map(jnp.ones_like, results))

    plan = planned(fn, 0.5, jnp.ones(8), machine=unity.Machine.grid(1, 1, "a100"), argnums=(0, 1))
    same(gradient(plan), gradient(fn))


def test_a_plan_inside_of_a_function_is_captured_without_its_conversions() -> None:
    fn, w, x = LOSSES["an operand of a rule with two"], jnp.full((8, 8), 0.5), jnp.ones((8, 8))
    inner = planned(fn, w, x, machine=unity.Machine.grid(1, 1, "a100"))
    outer = planned(inner, w, x)
    assert [node.kind for node in outer.program.original.nodes] == [node.kind for node in inner.program.original.nodes]
    same(jax.grad(outer)(w, x), jax.grad(fn)(w, x))


def everything(w: Any, c: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2), {name: make(w, x, c) for name, make in sorted(RESULTS.items())}


def exported(plan: unity.Plan, folder: Path) -> Any:
    plan.files.export(folder / "exported.py")
    spec = importlib.util.spec_from_file_location("exported", folder / "exported.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fn


@pytest.mark.parametrize("c", [0.5, *by_hand(jnp.float32(0.5))])
def test_so_have_those_of_a_file_and_of_an_export(c: Any, tmp_path: Path) -> None:
    plan = planned(everything, W, c, X)
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", everything, W, c, X)
    wanted = jax.jit(everything)(W, c, X)
    same(again(W, c, X), wanted)
    same(exported(plan, tmp_path)(W, c, X), wanted)


def test_a_rewritten_plan_has_them_too(own_cache: Path) -> None:
    for _ in range(2):  # searched for, and from the cache
        plan = planned(everything, W, 0.5, X, search="unity", budget=4)
        same(plan(W, 0.5, X), jax.jit(everything)(W, 0.5, X))


@pytest.mark.parametrize("schedule", ["1f1b", *by_hand("gpipe")])
def test_pipelines_have_them_too(schedule: str) -> None:
    def fn(params: Any, x: Any, y: Any, c: Any) -> Any:
        return layered_loss(params, x, y), 2.5, c * 2, x[0].astype(jnp.bfloat16) * c

    shapes = {"in": (8, 8), "layers": (4, 8, 8), "out": (8, 3)}
    params = {name: jnp.full(s, 0.1, jnp.float32) for name, s in shapes.items()}
    args = params, jnp.ones((16, 8)), jnp.ones((16, 3)), 0.5
    plan = planned(fn, *args, machine=TREE, pipeline=unity.PipelineShape(2, 4, schedule))
    assert plan.program.pipelining is not None
    run = lambda f: jax.jit(jax.value_and_grad(lambda *a: (f(*a)[0], f(*a)[1:]), has_aux=True))  # noqa: E731
    same(run(plan)(*args), run(fn)(*args))


def test_a_call_with_other_weak_types_is_the_function_or_is_refused() -> None:
    scaled = lambda w, x, c: (jnp.mean((x @ w) ** 2), x * c)  # noqa: E731
    plan = planned(scaled, W, X, jnp.float32(0.5))
    with pytest.raises(PlanError, match=r"args\[2\]: planned as an array that is not weakly typed, given as weakly typed"):
        plan(W, X, 0.5)
    plan = planned(scaled, W, X, 0.5)
    with pytest.raises(PlanError, match=r"args\[2\]: planned as weakly typed"):
        jax.jit(plan)(W, X, jnp.float32(0.5))
    doubled = lambda w, x, c: (jnp.mean((x @ w) ** 2) * c, c * 2)  # noqa: E731
    plan = planned(doubled, W, X, jnp.float32(0.5))
    for c in (jnp.float32(0.5), 0.5):
        same(plan(W, X, c), jax.jit(doubled)(W, X, c))
