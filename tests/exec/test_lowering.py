"""Whatever the strategy, the program computes what the function computes: values and gradients, in float64."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from small_models import MODELS, arrays, random_point

import unity
from benchmarks.fuzz.examine import wrong_plans
from unity.exec.lowering import mesh_of, program
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.solver.minimizer import Minimizer


def close(got: Any, wanted: Any) -> None:
    def one(x: Any, y: Any) -> None:
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-10, atol=1e-10 * max(1e-30, float(np.abs(y).max())))

    jax.tree.map(one, got, wanted)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("machine", [Machine.grid(1, 6, "v100"), *by_hand(Machine.grid(2, 4, "a100"))], ids=str)
def test_random_strategies_keep_values_and_gradients(name: str, machine: Machine) -> None:
    with jax.enable_x64(True):
        model = MODELS[name]()
        captured = capture(model.loss, model.params, model.batch)
        assembled = assemble(captured.graph, captured.differentiated, machine, Training())
        params, batch = arrays(model.params), arrays(model.batch)
        wanted = jax.jit(jax.value_and_grad(model.loss))(params, batch)
        mesh = mesh_of(machine.axes, jax.devices())
        point = random_point(assembled, np.random.default_rng(0))
        run = program(parallelize(captured.graph, assembled.assignment(point)), mesh)
        got = jax.jit(jax.value_and_grad(lambda p, b: run(*jax.tree.leaves((p, b)))[0]))(params, batch)
        close(got, wanted)


def test_what_is_computed_again_keeps_values_and_gradients() -> None:
    machine = Machine.grid(2, 4, "a100")
    with jax.enable_x64(True):
        model = MODELS["gpt"]()
        captured = capture(model.loss, model.params, model.batch)
        assembled = assemble(captured.graph, captured.differentiated, machine, Training())
        params, batch = arrays(model.params), arrays(model.batch)
        (leanest,) = Minimizer(assembled.problem).at([math.inf])
        graph = parallelize(captured.graph, assembled.assignment(leanest))
        assert any(node.body is not None and node.again for node in graph.nodes)
        run = program(graph, mesh_of(machine.axes, jax.devices()))
        got = jax.jit(jax.value_and_grad(lambda p, b: run(*jax.tree.leaves((p, b)))[0]))(params, batch)
        close(got, jax.jit(jax.value_and_grad(model.loss))(params, batch))


@pytest.mark.parametrize("start", [8, 100, -20])
def test_a_slice_that_begins_outside_is_where_jax_clamps_it_to_on_every_device(start: int) -> None:
    """Before JAX 0.12, XLA joins such a slice with the one that a device takes of it, and clamps where both begin together."""

    def read(x: Any, i: Any) -> Any:
        return jax.lax.dynamic_slice(x, (i, 0), (4, 2))

    def written(x: Any, y: Any, i: Any) -> Any:
        return jax.lax.dynamic_update_slice(x, y, (i, 0))

    x, y, i = np.arange(16.0, dtype=np.float32).reshape(8, 2), np.ones((4, 2), np.float32), jnp.asarray(start)
    for fn, args in ((read, (x, i)), (written, (x, y, i))):
        assert wrong_plans(fn, args, Machine.grid(1, 2)) == []


def test_an_operator_is_named_in_the_compiled_program_and_so_is_what_is_inside_of_it() -> None:
    """`plan.check` tells by these names how often a conditional is taken."""

    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, None, length=3)[0]

    machine, x = Machine.grid(1, 1, "a100"), jax.ShapeDtypeStruct((4,), jnp.float32)
    plan = unity.optimize(looped, x, machine=machine, training=False, search="captured", progress=False)
    text = jax.jit(plan).lower(x).compile().as_text() or ""
    assert re.search(r'op_name="[^"]*/scan at test_lowering\.py:\d+/while/body/[^"]*\bsin\b', text)
