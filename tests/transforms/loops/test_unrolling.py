"""Unrolled loops: to which scans the rule applies, when plans have them, that they compute the same, and what memory they need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unity
from unity.base.errors import DerivationError
from unity.pcg.capture.capture import capture
from unity.pcg.local.interpreter import run_body
from unity.substitutions.language.loop_rules import UNROLLED
from unity.transforms.loops import applicable, loop_rewriting, scans
from unity.verify.derivations.loops import check_loops

pytestmark = pytest.mark.usefixtures("own_cache")

ONE = unity.Machine.grid(1, 1, "h200")


def recurrent(unroll=1, reverse=False, scale=1.0):
    def loss(w, xs):
        def step(h, x):
            h = jnp.tanh(scale * (h @ w) + x)
            return h, h

        return jnp.mean(lax.scan(step, jnp.zeros_like(xs[0]), xs, unroll=unroll, reverse=reverse)[1] ** 2)

    return loss


def nested(w, xs):
    def step(h, x):
        return lax.scan(lambda g, y: (jnp.tanh(g @ w + y), None), h, jnp.stack([x, h, x, h]))[0], None

    return jnp.mean(lax.scan(step, jnp.zeros_like(xs[0]), xs)[0] ** 2)


def arguments(steps=8, width=64, batch=4, dtype="float32"):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), dtype)  # noqa: E731
    return draw(width, width), draw(steps, batch, width)


def structs(steps, width, batch):
    return jax.ShapeDtypeStruct((width, width), jnp.float32), jax.ShapeDtypeStruct((steps, batch, width), jnp.float32)


def rounds(plan):
    return [e.params["unroll"] for e in scans(plan.program.family.captured.body)]


def unrolled(captured):
    """Return the rewriting that unrolls all loops of a program."""
    return loop_rewriting(captured, applicable(captured.body, UNROLLED))


@pytest.mark.parametrize(("steps", "round_"), [(2, 1), (3, 1), (4, 2), (6, 3), (7, 1), (8, 4), (40, 4), (41, 1)])
def test_a_round_has_up_to_four_steps_and_leaves_no_rest(steps, round_):
    captured = capture(recurrent(), *structs(steps, 8, 2))
    if round_ == 1:
        assert not applicable(captured.body, UNROLLED)
        return
    (scan,) = scans(unrolled(captured).after.body)
    assert scan.params["unroll"] == round_


def test_a_loop_that_is_unrolled_stays_as_it_is():
    captured = capture(recurrent(unroll=2), *structs(8, 8, 2))
    assert not applicable(captured.body, UNROLLED)


@pytest.mark.parametrize("fn", [recurrent(), recurrent(reverse=True), nested], ids=["forward", "backward", "nested"])
def test_values_and_gradients_are_the_same_and_the_result_is_derived(fn):
    with jax.enable_x64(True):
        args = arguments(dtype="float64")
        captured = capture(fn, *args)
        rewriting = unrolled(captured)
        rewriting.check()
        assert rewriting.applied == {UNROLLED: 1 if fn is not nested else 2}
        for a, b in zip(_gradients(rewriting.after.body, args), _gradients(captured.body, args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-15)


def _gradients(body, args):
    def total(*a):
        return run_body(body, a, [()] * len(body.inputs), [()] * len(body.outputs), ())[0]

    return (total(*args), *jax.grad(total, argnums=(0, 1))(*args))


def test_a_loop_of_other_steps_is_not_derived():
    first, other = (capture(recurrent(scale=s), *structs(8, 8, 2)) for s in (1.0, 2.0))
    with pytest.raises(DerivationError):
        check_loops(first.body, unrolled(other).after.body)


def test_plans_unroll_loops_of_small_steps_only():
    small = unity.optimize(recurrent(), *structs(40, 512, 16), machine=ONE, progress=False)
    assert rounds(small) == [4]
    assert str(small.program.loop_rewriting) == "loops rewritten by 1 × unrolled-loop"
    excluded = unity.without_rules("unrolled-*")
    without = unity.optimize(recurrent(), *structs(40, 512, 16), machine=ONE, progress=False, constraints=excluded)
    assert rounds(without) == [1]
    assert small.time < without.time
    large = unity.optimize(recurrent(), *structs(8, 8192, 4096), machine=ONE, progress=False)
    assert rounds(large) == [1]


def test_the_steps_of_a_round_are_in_memory_at_once():
    plans = {n: unity.optimize(recurrent(n), *structs(8, 1024, 4), machine=ONE, progress=False, search="captured") for n in (1, 4)}
    gradients = 3 * 4 * 1024**2  # of the weight, in three more steps
    assert gradients <= plans[4].memory - plans[1].memory <= 1.02 * gradients


def lstm(params, xs):
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return ((h := jax.nn.sigmoid(o) * jnp.tanh(c)), c), h

    zero = jnp.zeros_like(xs[0])
    return jnp.mean(lax.scan(step, (zero, zero), xs)[1] ** 2)


def lstm_arguments(width=512, batch=64, steps=20):
    weight = jax.ShapeDtypeStruct((width, 4 * width), jnp.float32)
    return {"x": weight, "h": weight}, jax.ShapeDtypeStruct((steps, batch, width), jnp.float32)


def test_other_rules_of_loops_stay_where_an_unrolled_loop_does_not_fit():
    options = {"machine": ONE, "progress": False}
    free = unity.optimize(lstm, *lstm_arguments(), **options)
    rolled = unity.optimize(lstm, *lstm_arguments(), constraints=unity.without_rules("unrolled-loop"), **options)
    assert str(free.program.loop_rewriting) == "loops rewritten by 1 × products-before-loop, 1 × unrolled-loop"
    assert rolled.memory < free.memory
    limited = unity.optimize(lstm, *lstm_arguments(), memory_limit=(free.memory + rolled.memory) / 2, **options)
    assert str(limited.program.loop_rewriting) == "loops rewritten by 1 × products-before-loop"
    assert limited.time == rolled.time


def test_a_plan_with_an_unrolled_loop_is_loaded_exported_and_what_it_says(tmp_path):
    shapes = lstm_arguments(width=32, batch=4, steps=8)
    plan = unity.optimize(lstm, *shapes, machine=unity.Machine.grid(1, 2, "h200"), progress=False)
    assert rounds(plan) == [4]
    plan.program.check_derivation()
    assert plan.check(gradient=True).agrees(0.02)
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.1, s.shape), s.dtype), shapes)
    for a, b in zip(*(jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(*args)) for fn in (plan, lstm)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", lstm, *shapes)
    assert again.program.pcg.key == plan.program.pcg.key
    plan.files.export(tmp_path / "exported.py")
    assert "unroll=4" in (tmp_path / "exported.py").read_text()


def test_loops_are_unrolled_together_where_each_saves_little():
    """Of two loops, each saves less than is worth a longer compilation."""

    def two(v, w, xs):
        return recurrent()(v, xs) + recurrent(reverse=True)(w, jnp.tanh(xs @ w) @ v)

    weight, xs = structs(40, 512, 16)
    plan = unity.optimize(
        two, weight, weight, xs, machine=ONE, progress=False, constraints=unity.without_rules("equal-*", "*-before-*")
    )
    assert rounds(plan) == [4, 4]
