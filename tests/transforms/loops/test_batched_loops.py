"""Loops beside each other that become one: values and gradients stay, the result is derived, and other loops stay as they are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, fewer
from jax import lax

from unity.pcg.capture.capture import capture
from unity.pcg.local.interpreter import run_body
from unity.substitutions.language.loop_rules import BATCHED, FEWER_ROUNDS, LOOP_RULES
from unity.transforms.loops import applicable, loop_rewriting, scans
from unity.transforms.loops.choose import everywhere
from unity.transforms.loops.dependences import ScanParts

T, B, D = 5, 4, 3


def elman(w, state, row):
    h = jnp.tanh(row @ w["x"] + state[0] @ w["h"])
    return (h,), h * 2


def lstm(w, state, row):
    h, c = state
    i, f, g, o = (row @ w["x"] * k + h @ w["h"] for k in (1, 2, 3, 4))
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), (h, row)


def normalized(w, state, row):
    """Reductions, choices, scalars, a transposed product on the left, a look-up, and a value that no input changes."""
    h = state[0] - state[0].max(-1, keepdims=True)
    h = jnp.where(h > -1, h, jnp.arange(D)) + jnp.take(w["x"], jnp.arange(B) % D, 0, mode="clip")
    h = jnp.where(h.sum() > 0, h, -h) / jnp.sqrt((h * h).sum())
    return (jnp.tanh(w["h"].T @ h.T).T + jnp.concatenate([row, row], 1)[:, 1 : D + 1],), (h.sum(), jnp.ones(2))


OTHER_RULES = tuple(rule for rule in LOOP_RULES.values() if rule not in FEWER_ROUNDS)
CELLS = {"elman": (elman, 1), "lstm": (lstm, 2), "normalized": (normalized, 1)}


def arrays(*shapes):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=s)) for s in shapes]


def run(body, arguments):
    return run_body(body, arguments, [()] * len(body.inputs), [()] * len(body.outputs), ())


def batched(fn, arguments, count, rules=(BATCHED,)):
    """Apply the rule, and check the derivation, all values and all gradients. Returns the program after it."""
    captured = capture(fn, *arguments, argnums=tuple(range(len(arguments))))
    path, _ = everywhere(captured.body, rules)
    rewriting = loop_rewriting(captured, path)
    assert rewriting.applied[BATCHED] == count
    rewriting.check()

    def total(body, leaves):
        results = run(body, leaves)
        return sum(jnp.sin(y).sum() for y in results), results

    both = jax.jit(lambda leaves: [jax.grad(partial(total, r.body), has_aux=True)(leaves) for r in (rewriting.after, captured)])
    for a, b in zip(*map(jax.tree.leaves, both(jax.tree.leaves(arguments))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    return rewriting.after.body


def random_loops(rng, cell, states, count):
    """Return loops that share some of their weights, inputs and first states, in random directions."""
    reverse = rng.integers(2, size=count).tolist()
    shares = {name: bool(rng.integers(2)) for name in ("x", "h", "xs", "start")}

    def which(name, k):
        return 0 if shares[name] else k

    def fn(weights, inputs):
        results = []
        for k in range(count):
            w = {name: weights[name][which(name, k)] for name in ("x", "h")}
            start = (inputs[which("start", k)][0] + 1,) * states
            steps = lax.scan(lambda state, row, w=w: cell(w, state, row), start, inputs[which("xs", k)], reverse=reverse[k])
            results.append(steps)
        return results

    *weights, inputs = arrays((count, D, D), (count, D, D), (count, T, B, D))
    return fn, (dict(zip("xh", map(list, weights), strict=True)), list(inputs))


@pytest.mark.parametrize("seed", range(fewer(6)))
def test_random_equal_loops_become_one(seed):
    rng = np.random.default_rng(seed)
    cell, states = list(CELLS.values())[seed % 3]
    count = int(rng.integers(2, 4))
    with jax.enable_x64(True):
        fn, arguments = random_loops(rng, cell, states, count)
        after = batched(fn, arguments, count)
        assert len(list(scans(after))) == 1


def in_two_directions(weights, xs):
    """Two layers, each of which reads both directions of the one before."""
    for forth, back in zip(weights[::2], weights[1::2], strict=True):
        one, other = (lax.scan(lambda s, r, w=w: elman(w, s, r), (xs[0, :, :D],), xs, reverse=w is back) for w in (forth, back))
        xs = jnp.concatenate([one[1][:, :, 1:], other[1][:, :, :1]], -1)
    return xs


def towers(weights, xs):
    """Two chains of two loops."""
    ys = []
    for k in (0, 2):
        rows = xs
        for w in weights[k : k + 2]:
            rows = lax.scan(lambda s, r, w=w: elman(w, s, r), (xs[0],), rows)[1]
        ys.append(rows)
    return ys


def inside_a_loop(weights, xs):
    def outer(state, row):
        rows = row[:, None] * jnp.ones((B, 2, 1))
        one, other = (lax.scan(lambda s, r, w=w: elman(w, s, r), (state,), rows)[0][0] for w in weights[:2])
        return one * other, one

    return lax.scan(outer, xs[0, :2], xs)


def inside_a_checkpoint(weights, xs):
    return jax.checkpoint(in_two_directions)(weights[:2], xs)


def without_carries(weights, xs):
    return [lax.map(lambda row, w=w: jnp.tanh(row @ w["x"]), xs) for w in weights]


def without_slices(weights, xs):
    return [lax.scan(lambda s, _, w=w: elman(w, s, s[0]), (xs[k],), None, length=4) for k, w in enumerate(weights[:2])]


def of_several_lengths(weights, xs):
    return [lax.scan(lambda s, r, w=w: elman(w, s, r), (xs[0],), xs[k // 2 :]) for k, w in enumerate(weights)]


CASES = {
    "two directions, two layers": (in_two_directions, 4, 2),
    "towers": (towers, 4, 2),
    "inside a loop": (inside_a_loop, 2, 2),
    "inside a checkpoint": (inside_a_checkpoint, 2, 1),
    "without carries": (without_carries, 4, 1),
    "without slices": (without_slices, 2, 1),
    "of several lengths": (of_several_lengths, 4, 2),
}


@pytest.mark.parametrize(("fn", "count", "remaining"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("rules", [OTHER_RULES, *by_hand((BATCHED,))], ids=["after the others", *by_hand("alone")])
def test_equal_loops_become_one_wherever_they_are(fn, count, remaining, rules):
    with jax.enable_x64(True):
        weights = [{"x": x, "h": h} for x, h in zip(*arrays((4, D, D), (4, D, D)), strict=True)]
        if fn is without_carries and len(rules) > 1:
            return  # all of these loops are computed before them
        after = batched(fn, (weights, *arrays((T, B, D))), count, rules)
        assert len(list(scans(after))) == remaining


def test_what_all_loops_read_is_not_stacked():
    def fn(w, xs):
        return [lax.scan(lambda s, row: elman(w, s, row), (start,), xs)[1] for start in (xs[0], xs[1])]

    captured = capture(fn, {"x": jnp.ones((D, D)), "h": jnp.ones((D, D))}, jnp.ones((T, B, D)))
    (application,) = applicable(captured.body, BATCHED)
    (scan,) = scans(loop_rewriting(captured, [application]).after.body)
    parts = ScanParts.of(scan)
    assert [parts.step.tensors[v].shape for v in parts.step.inputs] == [(D, D), (D, D), (2, B, D), (B, D)]


def chained(weights, xs):
    for w in weights:
        xs = lax.scan(lambda s, r, w=w: elman(w, s, r), (xs[0],), xs)[1]
    return xs


def chained_by_the_state(weights, xs):
    state = (xs[0],)
    for w in weights:
        state, _ = lax.scan(lambda s, r, w=w: elman(w, s, r), state, xs)
    return state


def of_unequal_steps(weights, xs):
    return [lax.scan(lambda s, r, f=f: (f(s + r), None), xs[0], xs) for f in (jnp.sin, jnp.cos)]


def of_unequal_constants(weights, xs):
    return [lax.scan(lambda s, r, f=f: (s * f + r, None), xs[0], xs) for f in (2, 3)]


def of_unequal_types(weights, xs):
    return [lax.scan(lambda s, r: (s + r, None), rows[0], rows) for rows in (xs, xs[:, 1:])]


def without_a_lemma(weights, xs):
    return [lax.scan(lambda s, r, k=k: (jnp.sort(s + r), None), xs[k], xs) for k in (0, 1)]


def with_rules_of_derivatives(weights, xs):
    return [lax.scan(lambda s, r, k=k: (jax.nn.relu(s + r), None), xs[k], xs) for k in (0, 1)]


def of_loops_in_steps(weights, xs):
    return [lax.scan(lambda s, r: (lax.fori_loop(0, 2, lambda _, s: s + r, s), None), xs[k], xs) for k in (0, 1)]


@pytest.mark.parametrize(
    "fn",
    [
        chained,
        chained_by_the_state,
        of_unequal_steps,
        of_unequal_constants,
        of_unequal_types,
        without_a_lemma,
        with_rules_of_derivatives,
        of_loops_in_steps,
    ],
    ids=lambda fn: fn.__name__,
)
def test_other_loops_stay_as_they_are(fn):
    weights = [{"x": jnp.ones((D, D)), "h": jnp.ones((D, D))}] * 2
    captured = capture(fn, weights, jnp.ones((T, B, D)))
    assert applicable(captured.body, BATCHED) == []
