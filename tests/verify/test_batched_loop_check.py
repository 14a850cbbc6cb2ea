"""The check of loops that became one: what people write by hand is derived, and a loop that computes something else is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from unity.base.errors import DerivationError
from unity.pcg.capture.capture import capture
from unity.verify.derivations.batched_loops import check_batched_loops
from unity.verify.derivations.loops import check_loops
from unity.verify.proofs.loop_rules import LanesOfSteps, ReversedSteps, proves

T, B, D = 5, 4, 3
ARGUMENTS = jnp.ones((D, D)), jnp.ones((D, D)), jnp.ones((T, B, D)), jnp.ones((T, B, D))


def body(fn):
    return capture(fn, *ARGUMENTS).body


def apart(x, h, xs, ys, *, start=lambda x, h, xs, ys: ys[0], reverse=False, function=jnp.tanh, second=lambda ys, one: ys):
    """Two loops, the second with another weight, other slices and another start; maybe it depends on the first."""
    one = lax.scan(lambda s, r: ((t := jnp.tanh(r + s @ x)), t), xs[0], xs)
    other = lax.scan(lambda s, r: ((t := function(r + s @ h)), t), start(x, h, xs, ys), second(ys, one[1]), reverse=reverse)
    return *one, *other


def at_once(
    *,
    weights=lambda x, h: (x, h),
    starts=lambda xs, ys: (xs[0], ys[0]),
    rows=lambda xs, ys: (xs, ys),
    function=jnp.tanh,
    results=lambda last, hs: (last[0], hs[:, 0], last[1], hs[:, 1]),
    mixed=lambda s: s,
    reverse=False,
):
    """The two loops as one, by hand."""

    def fn(x, h, xs, ys):
        w = jnp.stack(weights(x, h))

        def step(state, row):
            state = function(row + jnp.einsum("lbd,lde->lbe", mixed(state), w))
            return state, state

        return results(*lax.scan(step, jnp.stack(starts(xs, ys)), jnp.stack(rows(xs, ys), 1), reverse=reverse))

    return fn


def mapped(x, h, xs, ys):
    def loop(w, start, rows):
        return lax.scan(lambda s, r: ((t := jnp.tanh(r + s @ w)), t), start, rows)

    last, hs = jax.vmap(loop, (0, 0, 1), (0, 1))(jnp.stack([x, h]), jnp.stack([xs[0], ys[0]]), jnp.stack([xs, ys], 1))
    return last[0], hs[:, 0], last[1], hs[:, 1]


def second_first(last, hs):
    return last[1], hs[:, 1], last[0], hs[:, 0]


RIGHT = {
    "by hand": at_once(),
    "by vmap": mapped,
    "lanes in another order": at_once(
        weights=lambda x, h: (h, x),
        starts=lambda xs, ys: (ys[0], xs[0]),
        rows=lambda xs, ys: (ys, xs),
        results=second_first,
    ),
    "not at once": apart,
}
WRONG = {
    "swapped weights": at_once(weights=lambda x, h: (h, x)),
    "swapped starts": at_once(starts=lambda xs, ys: (ys[0], xs[0])),
    "swapped slices": at_once(rows=lambda xs, ys: (ys, xs)),
    "swapped results": at_once(results=second_first),
    "one result twice": at_once(results=lambda last, hs: (last[0], hs[:, 0], last[1], hs[:, 0])),
    "a loop twice": at_once(weights=lambda x, h: (x, x), starts=lambda xs, ys: (xs[0],) * 2, rows=lambda xs, ys: (xs,) * 2),
    "another weight": at_once(weights=lambda x, h: (x, x)),
    "another start": at_once(starts=lambda xs, ys: (xs[0], xs[0])),
    "reversed slices": at_once(rows=lambda xs, ys: (xs, ys[::-1])),
    "the other direction": at_once(reverse=True),
    "another step": at_once(function=jnp.sin),
    "lanes that read each other": at_once(mixed=lambda s: s[::-1]),
    "lanes that share a sum": at_once(mixed=lambda s: s + s.sum(0)),
    "another number of loops": lambda *a: (*at_once()(*a)[:2], *apart(*a)[2:]),
}


@pytest.mark.parametrize("fn", RIGHT.values(), ids=RIGHT)
def test_loops_at_once_are_derived(fn):
    check_batched_loops(body(apart), body(fn))


@pytest.mark.parametrize("fn", WRONG.values(), ids=WRONG)
def test_loops_that_compute_something_else_are_refused(fn):
    with pytest.raises(DerivationError):
        check_batched_loops(body(apart), body(fn))


BEFORE = {
    "the second reads the first": lambda *a: apart(*a, second=lambda ys, one: one),
    "the second starts from another value": lambda *a: apart(*a, start=lambda x, h, xs, ys: ys[1]),
    "unequal steps": lambda *a: apart(*a, function=jnp.sin),
    "another direction": lambda *a: apart(*a, reverse=True),
}


@pytest.mark.parametrize("fn", BEFORE.values(), ids=BEFORE)
def test_loops_that_are_not_equal_or_wait_for_each_other_are_not_those_at_once(fn):
    check_batched_loops(body(fn), body(fn))
    with pytest.raises(DerivationError):
        check_batched_loops(body(fn), body(at_once()))


def test_a_loop_in_the_other_direction_is_one_over_reversed_slices_with_reversed_results():
    before = body(lambda *a: apart(*a, reverse=True))

    def after(rows, turned):
        def results(last, hs):
            return last[0], hs[:, 0], last[1], turned(hs[:, 1])

        return body(at_once(rows=lambda xs, ys: (xs, rows(ys)), results=results))

    def turn(x):
        return lax.rev(x, (0,))

    check_batched_loops(before, after(turn, turn))
    for rows, results in ((turn, lambda x: x), (lambda x: x, turn), (lambda x: lax.rev(x, (1,)), turn)):
        with pytest.raises(DerivationError):
            check_batched_loops(before, after(rows, results))


def test_the_check_of_other_rules_accepts_no_loops_at_once():
    with pytest.raises(DerivationError):
        check_loops(body(apart), body(at_once()))


@pytest.mark.parametrize("proof", [LanesOfSteps, ReversedSteps])
def test_the_assumptions_about_lanes_and_directions_prove_nothing_false(proof):
    assert proves(False, proof().assumptions) in ("sat", "unknown")  # with a model of them, or without one, as Z3 finds it
