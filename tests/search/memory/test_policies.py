"""Values that the policy of a checkpoint saves: live from the forward pass to the checkpoint's backward pass."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpointed_models import MODELS, POLICIES, saving
from ci_cases import by_hand, one_in
from rerun_models import named
from small_models import Small, counted, f, made

import unity
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.cost import Training
from unity.search.memory.memory import predict_memory
from unity.search.solver.minimizer import Minimizer

NEAR = 0.1
MACHINE = unity.Machine.grid(1, 8, "a100", intra=(300e9, 1.9e-6))
OPTIONS: dict[str, Any] = {"machine": MACHINE, "budget": 0, "pipelines": False, "branches": False, "progress": False}


@pytest.mark.parametrize("name", one_in(2, [name for name in MODELS if "saving" in name or "written out" in name]))
@pytest.mark.parametrize("weight", [0.0, math.inf])
def test_the_search_counts_exactly_the_residuals_of_optimal_strategies(name: str, weight: float) -> None:
    captured, assembled = named(name)
    (point,) = Minimizer(assembled.problem).at([weight])
    memory = predict_memory(parallelize(captured.graph, assembled.assignment(point)), captured.differentiated, Training())
    assert point.memory == pytest.approx(counted(assembled, point, "memory")) == pytest.approx(memory.additive)


def block(w: Any, x: Any) -> Any:
    return x + jnp.tanh(jnp.sin(x) @ w[0]) @ w[1]


def around_loops(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (block(w, x), None), x, length=3)[0]


def nested(w: Any, x: Any) -> Any:
    return jax.checkpoint(block)(w, jax.checkpoint(block)(w, x))


def read_later(w: Any, x: Any) -> Any:
    return block(w, x), jnp.tanh(x @ w[0])


@pytest.mark.parametrize("layer", [block, around_loops, nested, read_later])
def test_the_search_counts_results_of_remats_while_they_are_live_outside(layer: Any) -> None:
    def loss(layers: Any, x: Any) -> Any:
        total = 0.0
        for w in layers:
            x = jax.checkpoint(layer)(w, x)
            x, *others = x if isinstance(x, tuple) else (x,)
            total += sum(jnp.mean(y**2) for y in others)
        return jnp.mean(x**2) + total

    layers, x = [(f(16, 64), f(64, 16))] * 3, f(512, 16)
    captured, assembled = made(Small(loss, layers, x), MACHINE)
    (leanest,) = Minimizer(assembled.problem).at([math.inf])
    memory = predict_memory(parallelize(captured.graph, assembled.assignment(leanest)), captured.differentiated, Training())
    assert leanest.memory == pytest.approx(memory.additive)


@pytest.mark.parametrize("scanned", [True, *by_hand(False)])
def test_the_compiled_program_has_the_saved_values(scanned: bool) -> None:
    with jax.enable_x64(True):
        small, large = (saving(policy, layers=8, b=512, d=16, wide=64, scanned=scanned) for policy in ("nothing", "products"))
        plans = [unity.optimize(m.loss, m.params, m.batch, objective="memory", **OPTIONS) for m in (small, large)]
        total = next(line for line in plans[1].check().memory_lines if line.kind == "all")
    assert plans[1].memory > 1.5 * plans[0].memory
    assert total.compiled * (1 - NEAR) <= total.predicted <= total.compiled * 1.12


@pytest.mark.parametrize("inner", ["nothing", "products"])
def test_the_compiled_program_has_the_values_that_are_saved_inside_of_a_nested_checkpoint(inner: str) -> None:
    def loss(layers: Any, x: Any) -> Any:
        def inside(w: Any, x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

        def layer(w: Any, x: Any) -> Any:
            x = jax.checkpoint(inside, policy=POLICIES[inner])(w[:2], x)
            return jnp.sin(x @ w[2]) @ w[3]

        for weights in layers:
            x = jax.checkpoint(layer, policy=POLICIES["products"])(weights, x)
        return jnp.sum(x**2)

    layers = [(f(16, 64), f(64, 16)) * 2] * 4
    with jax.enable_x64(True):
        plan = unity.optimize(loss, layers, f(8192, 16), **OPTIONS)
        total = next(line for line in plan.check().memory_lines if line.kind == "all")
    assert total.predicted == pytest.approx(total.compiled, rel=NEAR)


def test_the_compiled_program_has_the_saved_sums_over_devices() -> None:
    def save_sums(primitive: Any, *_: Any, **__: Any) -> bool:
        return "psum" in primitive.name

    def loss(parts: Any, x: Any) -> Any:
        @partial(jax.checkpoint, policy=save_sums)
        def part(weights: Any, x: Any) -> Any:
            for up, down in weights:
                x = jnp.tanh(x @ up) @ down
            return x

        for weights in parts:
            x = part(weights, x)
        return jnp.sum(x**2)

    parts = [[(f(31, 64), f(64, 31))] * 3] * 4
    with jax.enable_x64(True):
        plan = unity.optimize(loss, parts, f(501, 31), objective="memory", **OPTIONS)  # no axis divides the samples
        total = next(line for line in plan.check().memory_lines if line.kind == "all")
    assert total.predicted == pytest.approx(total.compiled, rel=NEAR)


def test_the_compiled_program_has_the_saved_gathers_that_are_marked_as_recomputed() -> None:
    def totals(policy: Any) -> tuple[int, int]:
        def loss(layers: Any, x: Any) -> Any:
            for weights in layers:
                x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w[0]) @ w[1], policy=policy)(weights, x)
            return jnp.sum(x**2)

        layers = [(f(63, 128), f(128, 63))] * 16
        plan = unity.optimize(loss, layers, f(2048, 63), objective="memory", **OPTIONS)  # the samples are divided, and the weights
        total = next(line for line in plan.check().memory_lines if line.kind == "all")
        return total.predicted, total.compiled

    with jax.enable_x64(True):
        more, less = totals(lambda primitive, *_, **__: primitive.name.startswith("all_gather")), totals(None)
    assert more[1] > less[1]
    assert more[0] - less[0] == pytest.approx(more[1] - less[1], rel=NEAR)


def test_every_policy_saves_at_least_what_none_does() -> None:
    memory = {policy: named(f"saving {policy}")[1] for policy in POLICIES}
    least = {policy: Minimizer(assembled.problem).at([math.inf])[0].memory for policy, assembled in memory.items()}
    assert least["nothing"] < least["names"] < least["everything"]
    assert least["nothing"] < least["products"] < least["everything"]
