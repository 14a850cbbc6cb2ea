"""Loop-invariant values of a scan are computed once, before its first step: predicted, priced and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ci_cases import one_in
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from rerun_models import drawn, enter, named, right
from small_models import MACHINE, Small, counted, f

from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.pcg.analysis.hoisting import hoisted, residual_factors
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PARALLELIZATION, PCG
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.traffic import traffic
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.memory.memory import predict_memory
from unity.search.simulator.program import Communication, ProgramLoop, SpmdProgram, program_of
from unity.search.solver.minimizer import Minimizer
from unity.search.space.live_buffers import KEPT


def shared(length: int = 3, b: int = 8, d: int = 16) -> Small:
    """All steps have the same weights. One is read twice, another is normed first."""

    def loss(params: Any, x: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            normed = params["b"] * lax.rsqrt(jnp.sum(params["b"] ** 2, 0) + 1.0)
            return jnp.tanh(x + c @ params["a"] + jnp.cos(c) @ params["a"] + c @ normed), None

        return jnp.mean(lax.scan(step, x[0], x)[0] ** 2)

    return Small(loss, {"a": f(d, d), "b": f(d, d)}, f(length, b, d))


def shared_again(length: int = 3, b: int = 8, d: int = 16, around: Callable[..., Any] = lambda step: step) -> Small:
    """The same layer again and again, each a remat."""

    def loss(params: Any, x: Any) -> Any:
        @around
        @jax.checkpoint
        def step(c: Any, x: Any) -> Any:
            return jnp.tanh(x + jax.nn.gelu(c @ params["a"]) @ params["b"]), None

        return jnp.mean(lax.scan(step, x[0], x)[0] ** 2)

    return Small(loss, {"a": f(d, 2 * d), "b": f(2 * d, d)}, f(length, b, d))


def nested(batches: int = 2, length: int = 3, b: int = 8, d: int = 16) -> Small:
    """Batch by batch, and step by step in each; one weight of the steps is made of the batch's number."""

    def loss(params: Any, x: Any) -> Any:
        def one(total: Any, x: Any) -> Any:
            scaled = params["b"] * jnp.mean(x)

            def step(c: Any, x: Any) -> Any:
                return jnp.tanh(x + c @ params["a"] + c @ scaled), None

            return total + jnp.mean(lax.scan(step, x[0], x)[0] ** 2), None

        return lax.scan(one, jnp.zeros((), x.dtype), x)[0]

    return Small(loss, {"a": f(d, d), "b": f(d, d)}, f(batches, length, b, d))


def constant(batches: int = 2, length: int = 3, b: int = 8, d: int = 16) -> Small:
    """Every batch makes the same constant for its loop."""

    def loss(params: Any, x: Any) -> Any:
        def one(c: Any, x: Any) -> Any:
            gate = jnp.cos(jnp.arange(b * d, dtype=x.dtype)).reshape(b, d)
            return lax.scan(lambda c, x: (jnp.tanh(x + c @ params["a"] * gate), None), c, x)[0], None

        return jnp.mean(lax.scan(one, x[0, 0], x)[0] ** 2)

    return Small(loss, {"a": f(d, d)}, f(batches, length, b, d))


def cast(length: int = 3, b: int = 8, d: int = 16) -> Small:
    """A lower precision: every step casts the weight for itself."""

    def loss(params: Any, x: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            return jnp.tanh(x.astype(jnp.bfloat16) + c @ params["a"].astype(jnp.bfloat16)), None

        return jnp.mean(lax.scan(step, x[0].astype(jnp.bfloat16), x)[0].astype(x.dtype) ** 2)

    return Small(loss, {"a": f(d, d)}, f(length, b, d))


def shared_in_three(policy: Any = None) -> Small:
    """The same layer again and again, each three remats, the middle one with a policy."""
    return shared_again(around=lambda step: jax.checkpoint(jax.checkpoint(step, policy=policy)))


def recomputed_loop(
    step: Callable[..., Any] = lambda step: step, batches: int = 0, length: int = 3, b: int = 8, d: int = 16
) -> Small:
    """The same layer again and again in a remat: of the whole loop, or of each of some batches' loops.

    `step` is what is around a layer.
    """

    def loss(params: Any, x: Any) -> Any:
        def layer(c: Any, x: Any) -> Any:
            return jnp.tanh(x + jax.nn.gelu(c @ params["a"]) @ params["b"]), None

        @jax.checkpoint
        def loop(c: Any, x: Any) -> Any:
            return lax.scan(step(layer), c, x)[0], None

        first = x.reshape(-1, b, d)[0]
        return jnp.mean((lax.scan(loop, first, x) if batches else loop(first, x))[0] ** 2)

    return Small(loss, {"a": f(d, 2 * d), "b": f(2 * d, d)}, f(*(batches,) * bool(batches), 3, b, d))


EVERYTHING = jax.checkpoint_policies.everything_saveable
IN_THREE = {"shared, in three": shared_in_three, "shared, in three, saved": partial(shared_in_three, EVERYTHING)}
RECOMPUTED = {
    "a loop again": recomputed_loop,
    "loops again": partial(recomputed_loop, batches=2),
    "a loop of remats again": partial(recomputed_loop, jax.checkpoint),
}
enter(
    {
        **RECOMPUTED,
        "shared": shared,
        "shared, again": shared_again,
        "nested scans": nested,
        "cast": cast,
        "constant": constant,
        **IN_THREE,
    }
)


def found(model: Small) -> dict[str, list[int]]:
    """By kind, of operators in scans: how many times less often than its step each runs."""
    with jax.enable_x64(True):
        graph = capture(model.loss, model.params, model.batch).graph
    numbers, less = hoisted(graph, lambda _: True), dict[str, list[int]]()
    for node, times in graph.walk():
        if times > 1 and node.kind != "input":
            less.setdefault(node.kind, []).append(numbers.get(id(node), 1))
    return less


def test_values_of_constants_alone_are_hoisted() -> None:
    less = found(shared(length=5))
    assert less.pop("batch_norm") == [5]
    assert {n for each in less.values() for n in each} == {1}


def test_each_of_nested_scans_hoists_its_own_invariants() -> None:
    def loss(w: Any, x: Any) -> Any:
        def one(total: Any, x: Any) -> Any:
            def step(c: Any, x: Any) -> Any:
                return c @ jnp.exp(w) + x @ (total.T @ total), None

            return total + lax.scan(step, x[0], x)[0], None

        return jnp.sum(lax.scan(one, jnp.zeros(x.shape[2:], x.dtype), x)[0])

    less = found(Small(loss, f(16, 16), f(2, 3, 8, 16)))
    assert less["exp"] == [6]
    assert sorted(less["dot_general"]) == [1, 1, 3]


def test_values_of_nothing_are_hoisted_out_of_all_scans() -> None:
    assert found(constant(batches=5))["constant"] == [5]


def collectives_ahead(name: str, seed: int) -> int:
    captured, _, _, graph = drawn(name, seed)
    return sum(c.hoisted > 1 for c in traffic(graph, captured.differentiated))


def marks_changes(graph: PCG) -> bool:
    """Whether the backward pass repeats changes of type that are marked."""
    return any(node.again and node.kind in PARALLELIZATION for node, _ in graph.walk())


@pytest.mark.parametrize(("name", "saves"), [("shared, in three", False), ("shared, in three, saved", True)])
def test_of_a_remat_in_a_remat_only_what_its_policy_saves_is_hoisted(name: str, saves: bool) -> None:
    # Without marked changes, which count too often there if what they read does not vary by step.
    drawable = (
        seed for seed in range(40) if not any(n.again and n.kind in PARALLELIZATION for n, _ in drawn(name, seed)[3].walk())
    )
    seed = next(seed for seed in drawable if collectives_ahead("shared, in three, saved", seed) > 1)
    assert (collectives_ahead(name, seed) > 1) == saves
    right(name, [seed])


@pytest.mark.parametrize("name", ["shared", "shared, again", "constant"])
def test_programs_send_the_predicted_bytes(name: str) -> None:
    """Values and gradients are right, too."""
    seeds = [seed for seed in range(40) if collectives_ahead(name, seed) > 2]
    right(name, seeds[:2])


@pytest.mark.parametrize("name", one_in(2, RECOMPUTED))
def test_a_recomputed_loop_hoists_as_the_loop_itself_does(name: str) -> None:
    """Also what is marked to be recomputed, but not out of a remat in the loop."""
    repeated = {seed: [c for c in traffic(drawn(name, seed)[3], named(name)[0].differentiated) if c.repeats] for seed in range(60)}
    most_hoisted = max(repeated, key=lambda seed: sum(c.repeats % 3 > 0 for c in repeated[seed]))
    most_marked = max(repeated, key=lambda seed: sum(bool(c.node.again) for c in repeated[seed]))
    right(name, {most_hoisted, most_marked})


NAMES = ["shared", "shared, again", "nested scans", "cast", "constant", "a loop again", "loops again"]


@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32 - 1))
def test_the_search_counts_no_less_than_it_costs(name: str, seed: int) -> None:
    captured, assembled, point, graph = drawn(name, seed)
    assert counted(assembled, point, "time") >= predict(graph, MACHINE, captured.differentiated).time * (1 - 1e-9)
    held = predict_memory(graph, captured.differentiated, Training()).additive
    assert counted(assembled, point, "memory") >= held * (1 - 1e-9)


@pytest.mark.parametrize("name", ["shared, again", "cast"])  # no value has several readers that change it
@pytest.mark.parametrize("weight", [0.0, math.inf])
def test_for_the_best_strategies_it_counts_exactly_that(name: str, weight: float) -> None:
    captured, assembled = named(name)
    (point,) = Minimizer(assembled.problem).at([weight])
    graph = parallelize(captured.graph, assembled.assignment(point))
    assert point.time == pytest.approx(predict(graph, MACHINE, captured.differentiated).time)
    assert point.memory == pytest.approx(predict_memory(graph, captured.differentiated, Training()).additive)


@pytest.mark.parametrize("length", [4, 32])
def test_a_hoisted_value_is_computed_once_and_kept_once(length: int) -> None:
    model, machine = cast(length), Machine.grid(1, 1, "a100")
    captured = capture(model.loss, model.params, model.batch)
    graph = optimize(model.loss, model.params, model.batch, machine=machine, progress=False).program.pcg
    (weight,) = (n for n, _ in graph.walk() if n.kind == "convert_element_type" and n.tensors[0].shape == (16, 16))
    terms = {id(t.node): t for t in predict(graph, machine, captured.differentiated).operators}
    assert (terms[id(weight)].first, terms[id(weight)].count) == (1, length)
    held = predict_memory(graph, captured.differentiated, Training()).held
    assert sum(h.nbytes for h in held if h.why == KEPT and h.node is weight) == weight.tensors[0].nbytes


def test_a_recomputed_value_is_kept_for_its_own_step() -> None:
    """In a remat it is not made ahead when it runs again."""
    model = shared_again()
    graph = capture(model.loss, model.params, model.batch).graph
    inside = {id(n) for remat, _ in graph.walk() if remat.kind == "remat" and remat.inside for n, _ in remat.inside.walk()}
    assert inside & set(hoisted(graph, lambda _: True))
    assert not inside & set(residual_factors(graph))


@given(name=st.sampled_from(["shared", "shared, again", "nested scans"]), seed=st.integers(0, 2**32 - 1))
def test_a_simulated_loop_takes_the_predicted_time(name: str, seed: int) -> None:
    """One step of a loop is simulated, with its part of what runs before all of them."""
    captured, _, _, graph = drawn(name, seed)
    program = program_of(graph, MACHINE, captured.differentiated)
    sent = sum(c.seconds for c in predict(graph, MACHINE, captured.differentiated).collectives)
    assert communicating(program) == pytest.approx(sent)


def communicating(program: SpmdProgram) -> float:
    """Seconds of all collectives of a program, in its loops, too."""
    loops = ((i.action.length, i.action.program) for i in program.instructions if isinstance(i.action, ProgramLoop))
    own = sum(i.seconds for i in program.instructions if isinstance(i.action, Communication))
    return own + sum(length * communicating(inside) for length, inside in loops)
