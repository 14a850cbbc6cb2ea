"""Predicted time of branches of a conditional: that of their operators outside of it, and of what their checkpoints recompute."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from msgspec import structs
from small_models import Small, made, random_point

import unity
from unity.exec.measure.operators import Timing
from unity.exec.measure.plan_profile import measurement, tasks_of_graph
from unity.machine.profiles.profile import Profile, Where
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import on_one_device, parallelize
from unity.search.cost.prediction import OperatorTerm, predict
from unity.search.cost.profile_lookup import INTERPOLATED, MEASURED

ALONE = unity.Machine.grid(1, 1, "h200")


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


WEIGHTS, X = {"first": f(256, 256), "up": f(256, 1024), "down": f(1024, 256)}, f(1024, 256)


def part(p: Any, x: Any) -> Any:
    return jnp.tanh(checkpoint_name(jnp.sin(x) @ p["up"], "up")) @ p["down"]


def scanned(layer: Any) -> Any:
    return lambda p, x: jax.lax.scan(lambda x, _: (layer(p, x), None), x, length=3)[0]


SAVING = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("up"))
RECOMPUTED: dict[str, Any] = {
    "checkpoint": jax.checkpoint(part),
    "policy": SAVING(part),
    "nested": jax.checkpoint(lambda p, x: jax.checkpoint(part)(p, x) @ p["first"]),
    "scanned": scanned(jax.checkpoint(part)),
}
KEPT: dict[str, Any] = {"nested": lambda p, x: part(p, x) @ p["first"], "scanned": scanned(part)}


def outside(layer: Any) -> Small:
    return Small(lambda p, x: jnp.sum(layer(p, x @ p["first"])), WEIGHTS, X)


def branched(layer: Any) -> Small:
    """The layer in the second of three branches, of which the others do less."""
    branches = [lambda p, x: x, layer, lambda p, x: jnp.sin(x) @ p["first"]]
    return outside(lambda p, x: jax.lax.switch(jnp.int32(x[0, 0]), branches, p, x))


def seconds(model: Small) -> float:
    program = capture(model.loss, model.params, model.batch)
    return predict(on_one_device(program.graph), ALONE, program.differentiated).computing


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_checkpoint_in_a_branch_recomputes_what_it_does_outside(name: str) -> None:
    kept, recomputed = KEPT.get(name, part), RECOMPUTED[name]
    more = seconds(outside(recomputed)) - seconds(outside(kept))
    assert more > 0
    assert seconds(branched(recomputed)) - seconds(branched(kept)) == pytest.approx(more)


def test_a_conditional_takes_the_time_of_its_slowest_branch() -> None:
    index = ALONE.device.launch
    assert seconds(branched(part)) == pytest.approx(seconds(outside(part)) + index, rel=1e-6)


def with_jvp(fn: Any) -> Any:
    call = jax.custom_jvp(fn)
    call.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return call


def with_vjp(fn: Any) -> Any:
    call = jax.custom_vjp(fn)
    call.defvjp(partial(jax.vjp, fn), lambda pull, cotangent: pull(cotangent))
    return call


def switched(p: Any, x: Any) -> Any:
    return jax.lax.switch(jnp.int32(x[0, 0]), [lambda p, x: x, part], p, x)


@pytest.mark.parametrize("ruled", [with_jvp, with_vjp])
def test_a_conditional_in_a_call_with_a_derivative_rule_takes_what_it_takes_outside(ruled: Any) -> None:
    alone, called = (outside(lambda p, x, f=f: f(p, x) @ p["first"]) for f in (switched, ruled(switched)))
    assert seconds(called) == pytest.approx(seconds(alone))


@pytest.mark.parametrize("layer", [part, RECOMPUTED["checkpoint"]])
def test_the_search_prices_branches_as_the_graph_is_priced(layer: Any) -> None:
    """Those of a whole and of a divided conditional."""
    machine = unity.Machine.grid(1, 4, "h200")
    captured, assembled = made(branched(layer), machine)
    (site,) = (s for s, site in enumerate(assembled.opened.sites) if site.node is not None and site.node.kind == "cond")
    shares = set()
    for seed in range(20):
        point = random_point(assembled, np.random.default_rng(seed))
        graph = parallelize(captured.graph, assembled.assignment(point))
        (term,) = (t for t in predict(graph, machine, captured.differentiated).operators if t.node.kind == "cond")
        cost, value = assembled.costs[site], point.values[site]
        assert (cost.forward[value], cost.backward[value]) == pytest.approx((term.forward / term.runs, term.backward))
        shares.add(term.share)
    assert {1, 1 / 4} <= shares


@pytest.mark.parametrize("how", [MEASURED, INTERPOLATED])
@pytest.mark.parametrize("measured", [1.0, 1e-9])
def test_the_seconds_of_a_measured_conditional_are_not_estimated(measured: float, how: str) -> None:
    term = term_of(branched(part), "cond", measured, how)
    assert (term.how, term.forward, term.backward) == (how, pytest.approx(measured), pytest.approx(2 * measured))


@pytest.mark.parametrize("how", [MEASURED, INTERPOLATED])
def test_a_measured_call_with_a_conditional_inside_takes_no_less_than_the_slowest_branch(how: str) -> None:
    """Whichever branch ran while it was measured, which the call computes itself."""
    model, kind = outside(with_jvp(switched)), "custom_jvp_call"
    estimated, fast, slow = term_of(model, kind), term_of(model, kind, 1e-9, how), term_of(model, kind, 1.0, how)
    assert (fast.forward, fast.backward) == pytest.approx((estimated.forward, estimated.backward))
    assert (slow.forward, slow.backward) == pytest.approx((1.0, 2.0))


def term_of(model: Small, kind: str, measured: float | None = None, how: str = MEASURED) -> OperatorTerm:
    """The predicted seconds of the only operator of a kind, measured to take so long forward and twice that backward, or not."""
    program = capture(model.loss, model.params, model.batch)
    graph, machine = on_one_device(program.graph), ALONE
    if measured is not None:
        (task,) = (t for t in tasks_of_graph(graph, program.differentiated).values() if kind in t.operator.body.primitives)
        known = measurement(task, Timing(measured, 2 * measured, 0.0))
        if how == INTERPOLATED:  # from other local shapes, of which as many bytes are read and written
            known = structs.replace(known, shapes=(*known.shapes, (1,)))
        machine = ALONE.with_profile(Profile(Where("NVIDIA H200", 1, 1, "", ""), (known,)))
    (term,) = (t for t in predict(graph, machine, program.differentiated).operators if kind in primitives_of(t))
    return term


def primitives_of(term: OperatorTerm) -> tuple[str, ...]:
    return term.node.body.primitives if term.node.body is not None else ()
