"""What is given arguments of other types than it takes says which argument, and what was expected."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unity

WRONG: dict[str, Any] = {"a number": 3, "a file": io.StringIO(), "bytes": b"plan", "a list": [], "an object": object()}
X = jax.ShapeDtypeStruct((8, 8), "float32")


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.fixture(scope="module")
def plan() -> unity.Plan:
    return unity.optimize(loss, X, X, machine=unity.Machine.grid(1, 8), search="captured", progress=False)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_files_are_named_by_paths(plan: unity.Plan, wrong: Any) -> None:
    ways = (
        plan.files.save,
        plan.files.report,
        plan.files.export,
        plan.inspect.simulate().save_trace,
        lambda path: unity.load(path, loss, X, X),
    )
    for way in ways:
        with pytest.raises(unity.PlanError, match=rf"path=.*: expected a path .*, got {type(wrong).__name__}"):
            way(wrong)


@pytest.mark.parametrize("wrong", [w for w in WRONG.values() if not hasattr(w, "write")])
def test_explain_and_diff_name_what_they_take(plan: unity.Plan, wrong: Any) -> None:
    with pytest.raises(unity.PlanError, match=r"path=.*: expected what is to be explained"):
        plan.explain(wrong)
    with pytest.raises(unity.PlanError, match=r"file=.*: expected an open file"):
        plan.explain(file=wrong)
    with pytest.raises(unity.PlanError, match=r"other=.*: expected another Plan"):
        plan.inspect.diff(wrong)


def test_explain_prints_into_a_file(plan: unity.Plan, tmp_path: Path) -> None:
    first, second = io.StringIO(), io.StringIO()
    plan.explain(first)
    plan.explain(file=second)
    assert first.getvalue() == second.getvalue() != ""
    with pytest.raises(unity.PlanError, match="expected what is to be explained"):
        plan.explain(first, file=second)


def _looped(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.while_loop(lambda y: jnp.sum(y) > 1, lambda y: jnp.tanh(y @ w), x))


def _multiplied_into(w: Any, x: Any) -> Any:
    return jnp.sum(jax.ops.segment_prod(x @ w, jnp.arange(len(x)) // 2, num_segments=4))


@pytest.mark.parametrize("function", [_looped, _multiplied_into])
def test_a_check_of_gradients_that_jax_cannot_take_names_the_option(function: Any) -> None:
    for training in (True, False):
        plan = unity.optimize(
            function, X, X, machine=unity.Machine.grid(1, 2), training=training, search="captured", progress=False
        )
        if training:
            with pytest.raises(unity.OptionError, match="Plan with training=False"):
                plan.check()
        else:
            plan.check()


def test_plans_in_64_bits_are_refused_where_these_are_not_enabled() -> None:
    """JAX would make their constants narrower, and then miss that of the arguments."""
    options: Any = {"machine": unity.Machine.grid(1, 8), "search": "captured", "progress": False}

    def doubled(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) * 2.0)

    with jax.enable_x64(True):
        wide, narrow = (jnp.ones((8, 8)), jnp.ones((16, 8))), (jnp.ones((8, 8), "float32"), jnp.ones((16, 8), "float32"))
        plan, plan_in_32 = unity.optimize(doubled, *wide, **options), unity.optimize(doubled, *narrow, **options)
        args = plan.shard(*wide)
    ways = {"call": plan, "jit": jax.jit(plan), "grad": jax.grad(plan), "constrained": plan.constrained()}
    with jax.enable_x64(False):
        for way in ways.values():
            with pytest.raises(unity.PlanError, match="doubled was planned with 64-bit types"):
                way(*args)
        np.testing.assert_allclose(plan_in_32(*narrow), doubled(*narrow), rtol=1e-6)
    with jax.enable_x64(True):
        for way in ways.values():
            assert way(*args).dtype == jnp.float64
        np.testing.assert_allclose(plan(*args), doubled(*wide), rtol=1e-14)


def test_a_function_may_enable_64_bits_itself() -> None:
    def precise(w: Any, x: Any) -> Any:
        with jax.enable_x64(True):
            return jnp.mean(jnp.tanh((x @ w).astype("float64")) * (1 / 3)).astype("float32")

    args = jnp.ones((8, 8)) / 8, jnp.ones((16, 8)) / 2
    plan = unity.optimize(precise, *args, machine=unity.Machine.grid(1, 8), search="captured", progress=False)
    for got, expected in ((plan, precise), (jax.jit(jax.grad(plan)), jax.grad(precise))):
        np.testing.assert_allclose(got(*args), expected(*args), rtol=1e-6)


class Lazy:
    def __jax_array__(self) -> jax.Array:
        return jnp.ones((8, 8))


NO_ARRAYS: dict[str, tuple[Any, str]] = {
    "a string": ("a", r"'a' \(str\)"),
    "a function": (loss, "the function loss"),
    "an array of strings": (np.array(["a"]), r"array\(\['a'\].*\(ndarray\)"),
    "a type without values": (X, r"ShapeDtypeStr.*\(ShapeDtypeStruct\)"),
    "what would make an array": (Lazy(), r"<.*\(Lazy\)"),
    "a number that JAX cannot hold": (2**70, r"1180591620717411303424 \(int\)"),
}


@pytest.mark.parametrize(("wrong", "words"), NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_an_argument_that_is_no_array_is_named(plan: unity.Plan, wrong: Any, words: str) -> None:
    w = jnp.ones((8, 8))

    def call(w: Any) -> Any:
        return plan(w, wrong)

    for way in (call, jax.jit(call), jax.grad(call), jax.jit(jax.grad(call)), lambda w: jax.grad(plan)(w, wrong)):
        with pytest.raises(
            unity.PlanError, match=rf"no array:\n    args\[1\]: planned for float32\[8,8\], given {words}\n    Give"
        ):
            way(w)
    for place in (plan.shard, lambda *args: plan.shard.local(args[1])):
        with pytest.raises(unity.PlanError, match=rf"no array:\n    args\[1\]: planned for \[8, 8\], given {words}\n    Give"):
            place(w, wrong)


@pytest.mark.parametrize(("wrong", "kind"), [(None, "None"), ({"x": jnp.ones(8)}, "a dict"), ([1.0], "a list")])
def test_a_tree_where_an_array_was_planned_is_named(plan: unity.Plan, wrong: Any, kind: str) -> None:
    for way in (plan, jax.grad(plan), jax.jit(plan), jax.jit(jax.grad(plan))):
        with pytest.raises(unity.PlanError, match=rf"args\[1\]: planned for an array, given {kind}"):
            way(jnp.ones((8, 8)), wrong)


@pytest.mark.parametrize("options", [{"rules": "nowhere.json"}, {"rules": 3}, {"constraints": unity.without_rules("no such rule")}])
def test_options_are_refused_before_the_function_is_traced(options: dict[str, Any]) -> None:
    def traced(w: Any, x: Any) -> Any:
        raise AssertionError("traced")

    with pytest.raises(unity.UnityError, match=r"nowhere|rules=|no such rule"):
        unity.optimize(traced, X, X, machine=unity.Machine.grid(1, 8), progress=False, **options)
