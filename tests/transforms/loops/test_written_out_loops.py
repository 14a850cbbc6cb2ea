"""Loops whose steps are written out: to which scans the rule applies, that they compute the same, and when plans have none."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unity
from unity.base.errors import DerivationError
from unity.pcg.capture.capture import capture
from unity.pcg.local.interpreter import run_body
from unity.substitutions.language.library import Library
from unity.substitutions.language.loop_rules import WRITTEN_OUT
from unity.transforms.loops import applicable, loop_rewriting, scans
from unity.verify.derivations.loops import check_loops

pytestmark = pytest.mark.usefixtures("own_cache")

WIDTH, BATCH = 6, 4


def newton(a, scale=0.5):
    return 1.5 * a - scale * ((a @ a.T) @ a)


def by_loop(w, x, steps=4, scale=0.5, unroll=1):
    a = lax.scan(lambda a, _: (newton(a, scale), None), w / jnp.linalg.norm(w), None, steps, unroll=unroll)[0]
    return jnp.square(x @ a).mean()


def by_hand(w, x, steps=4):
    a = w / jnp.linalg.norm(w)
    for _ in range(steps):
        a = newton(a)
    return jnp.square(x @ a).mean()


def numbered(reverse):
    """A loop that slices integers and stacks a result of every step."""

    def loss(w, x):
        def step(h, k):
            h = jnp.tanh(h @ w) * (1 + k)
            return h, h.sum(0)

        h, sums = lax.scan(step, x, jnp.arange(3), reverse=reverse)
        return jnp.mean(h**2) + jnp.mean(sums * jnp.arange(3.0)[:, None])

    return loss


def exchanged(w, x):
    """A loop whose carries take each other's place, so that the last step computes one of them alone."""
    a, b = lax.fori_loop(0, 3, lambda k, c: (c[1], jnp.tanh(c[0] @ w) + k), (x, x + 1))
    return jnp.mean(a * b)


def nested(w, x):
    """A loop in another, beside a checkpoint."""

    def step(h, _):
        h = lax.fori_loop(0, 2, lambda _, g: jnp.tanh(g @ w), h)
        return jax.checkpoint(lambda h: jnp.sin(h @ w))(h), None

    return jnp.mean(lax.scan(step, x, None, 3)[0] ** 2)


def around_long(w, x):
    """A short loop around one that is too long: each step of the first keeps the second."""

    def step(h, _):
        return lax.scan(lambda g, _: (jnp.tanh(g @ w), None), h, None, 100)[0], None

    return jnp.mean(lax.scan(step, x, None, 2)[0] ** 2)


def few_and_many(w, x):
    """Two loops of equal steps, of which one has too many."""

    def step(h, _):
        return jnp.tanh(h @ w), None

    return jnp.mean(lax.scan(step, x, None, 3)[0] * lax.scan(step, x + 1, None, 100)[0])


FORMS = {
    "no slices": by_loop,
    "forward": numbered(reverse=False),
    "backward": numbered(reverse=True),
    "exchanged carries": exchanged,
    "nested": nested,
    "around a long loop": around_long,
    "few and many steps": few_and_many,
}


def arguments(width=WIDTH, batch=BATCH):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(0, 0.4, (width, width))), jnp.asarray(rng.normal(0, 0.4, (batch, width)))


def structs(width, batch):
    return jax.ShapeDtypeStruct((width, width), jnp.float32), jax.ShapeDtypeStruct((batch, width), jnp.float32)


def written_out(captured):
    """Return the rewriting that writes out all short loops of a program, inner ones after those around them."""
    body, path = captured.body, []
    while applications := applicable(body, WRITTEN_OUT):
        path.append(applications[0])
        body = loop_rewriting(captured, path).after.body
    return loop_rewriting(captured, path)


def values_and_gradients(body, args):
    def total(*a):
        return run_body(body, a, [()] * len(body.inputs), [()] * len(body.outputs), ())[0]

    return (total(*args), *jax.grad(total, argnums=(0, 1))(*args))


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_are_the_same_and_the_result_is_derived(name):
    with jax.enable_x64(True):
        args = arguments()
        captured = capture(FORMS[name], *args)
        rewriting = written_out(captured)
        rewriting.check()
        assert len(list(scans(rewriting.after.body))) == {"around a long loop": 2, "few and many steps": 1}.get(name, 0)
        after, before = (values_and_gradients(body, args) for body in (rewriting.after.body, captured.body))
        for a, b in zip(after, before, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("steps", "is_short"), [(2, True), (10, True), (20, False)])
def test_few_steps_are_written_out(steps, is_short):
    captured = capture(lambda w, x: by_loop(w, x, steps), *structs(WIDTH, BATCH))
    assert bool(applicable(captured.body, WRITTEN_OUT)) == is_short


def exchanging(w, x):
    """A loop without equations in its step, whose results are stacked."""
    (_, b), stack = lax.scan(lambda c, _: ((c[1], c[0]), c[0]), (x, x + 1), None, 100)
    return jnp.mean(stack @ w) * b.sum()


def deep(w, x):
    """Few equations, which short loops in each other repeat often."""

    def inner(h, _):
        return jnp.tanh(h @ w), None

    return jnp.mean(lax.scan(lambda h, _: (lax.scan(inner, h, None, 15)[0], None), x, None, 10)[0])


@pytest.mark.parametrize(("fn", "applications"), [(exchanging, 0), (deep, 1)])
def test_loops_that_would_become_many_equations_stay_loops(fn, applications):
    captured = capture(fn, *structs(WIDTH, BATCH))
    assert len(written_out(captured).applications) == applications
    assert len(list(scans(captured.body))) - len(list(scans(written_out(captured).after.body))) == applications


def test_layers_and_loops_that_are_unrolled_stay_loops():
    def layers(w, x):
        return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0])

    stack = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32)
    for captured in (
        capture(layers, stack, structs(WIDTH, BATCH)[1]),
        capture(lambda w, x: by_loop(w, x, unroll=2), *structs(WIDTH, BATCH)),
    ):
        assert list(scans(captured.body))
        assert not applicable(captured.body, WRITTEN_OUT)


def test_steps_that_are_others_are_not_derived():
    first, fewer, other = (
        capture(fn, *structs(WIDTH, BATCH)) for fn in (by_loop, partial(by_loop, steps=3), partial(by_loop, scale=2.0))
    )
    (scan,) = applicable(first.body, WRITTEN_OUT)
    loops = frozenset({(scan.step, 4, 1)})
    check_loops(first.body, written_out(first).after.body, written_out=loops)
    for captured in (fewer, other):
        with pytest.raises(DerivationError):
            check_loops(first.body, written_out(captured).after.body, written_out=loops)
    with pytest.raises(DerivationError, match="number of scans"):
        check_loops(first.body, written_out(first).after.body)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (1, 4), (2, 2)])
def test_a_short_loop_is_as_fast_as_its_steps_written_out(nodes, devices):
    """The first step reads the weight as it is stored, the last returns it as the product reads it, and none stacks anything."""
    options = {"machine": unity.Machine.grid(nodes, devices, "h100"), "progress": False}
    args = structs(1024, 8192)
    loop = unity.optimize(by_loop, *args, rules=Library((), loops=(WRITTEN_OUT,)), **options)
    steps = unity.optimize(by_hand, *args, search="captured", **options)
    alone = unity.optimize(by_loop, *args, search="captured", **options)
    assert str(loop.program.loop_rewriting) == "loops rewritten by 1 × written-out-loop"
    assert loop.time == pytest.approx(steps.time, rel=1e-9)
    assert loop.time < 0.95 * alone.time


def test_a_plan_with_a_written_out_loop_is_loaded_exported_and_what_it_says(tmp_path):
    shapes, rules = structs(64, 32), Library((), loops=(WRITTEN_OUT,))
    plan = unity.optimize(by_loop, *shapes, machine=unity.Machine.grid(1, 2, "h200"), progress=False, rules=rules)
    assert not list(scans(plan.program.family.captured.body))
    plan.program.check_derivation()
    assert plan.check(gradient=True).agrees(0.02)
    args = [jnp.asarray(a, jnp.float32) for a in arguments(64, 32)]
    for a, b in zip(*(jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(*args)) for fn in (plan, by_loop)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", by_loop, *shapes)
    assert again.program.pcg.key == plan.program.pcg.key
    plan.files.export(tmp_path / "exported.py")
    assert "scan" not in (tmp_path / "exported.py").read_text()
