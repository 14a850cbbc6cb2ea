"""The timeline of a step's memory: its peak is the search's prediction, and every live buffer has a reason and a line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ci_cases import by_hand
from small_models import gpt

from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.plan.plan import Plan
from unity.search.cost.cost import Training
from unity.search.memory.backend import CPU, GPU
from unity.search.memory.memory import predict_memory
from unity.search.memory.timeline import memory_timeline
from unity.search.space.live_buffers import AGAIN, ARGUMENTS, GRADIENTS, KEPT, SLOTS

TARGET = 0.2  # of all bytes, at worst: the benchmark's target


def f(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layers(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)  # the line that holds most
    return jnp.mean(x**2)


def planned(devices: int = 8) -> Plan:
    return optimize(layers, [f(256, 256)] * 4, f(1024, 256), machine=Machine.grid(1, devices, "a100"), progress=False)


def transformer(**options: bool) -> Plan:
    model = gpt(2, 64, 64, 16, 32, **options)
    return optimize(model.loss, model.params, model.batch, machine=Machine.grid(1, 8, "a100"), progress=False)


@pytest.mark.parametrize(("gradient", "backend"), [(True, CPU), (False, GPU), *by_hand((True, GPU), (False, CPU))])
def test_the_peak_over_time_is_what_the_search_predicts(backend: Any, gradient: bool) -> None:
    training = Training(gradient)
    for plan in (planned(), transformer()):
        for point in (plan.frontier[0], plan.frontier[-1]):
            weights = point.program.family.captured.differentiated
            timeline = memory_timeline(point.program.pcg, weights, training, backend)
            predicted = predict_memory(point.program.pcg, weights, training, backend)
            table = timeline.step - predicted.step  # of pointers to results, which the search leaves out
            assert 0 <= table <= 8 * len(point.program.serial.inputs)
            assert timeline.peak == pytest.approx(predicted.total + table)
            assert timeline.nbytes.max() == timeline.nbytes[timeline.moment] == pytest.approx(predicted.step, abs=table)


@pytest.mark.usefixtures("as_users_compile")
def test_the_memory_of_a_plan_is_that_of_the_compiled_program() -> None:
    plan = planned()
    for point in (plan.frontier[0], plan.frontier[-1]):
        arguments, outputs, _, together = point.check().memory_lines
        assert arguments.difference == outputs.difference == 0
        assert abs(together.difference) <= TARGET


@pytest.mark.usefixtures("as_users_compile")
def test_the_memory_of_a_transformer_is_that_of_the_compiled_program() -> None:
    check = transformer().check()
    assert abs(check.memory_lines[-1].difference) <= TARGET
    assert (repr(check), repr(check.timeline)) == (str(check), str(check.timeline)), "what a prompt shows"


def test_every_residual_at_the_peak_names_its_line() -> None:
    timeline = planned().inspect.memory_timeline()
    residuals = [buffer for buffer in timeline.held if buffer.why == KEPT]
    assert residuals
    assert all("test_timeline.py" in buffer.line for buffer in residuals)
    assert {ARGUMENTS, GRADIENTS, SLOTS} <= set(timeline.by_reason)
    assert timeline.by_reason[SLOTS] == 2 * timeline.by_reason[GRADIENTS]
    assert "test_timeline.py" in str(timeline)


def test_buffers_at_the_peak_add_up() -> None:
    timeline = planned().inspect.memory_timeline()
    assert timeline.nbytes.max() == timeline.nbytes[timeline.moment]
    assert timeline.nbytes.max() <= timeline.step <= timeline.peak
    assert sum(buffer.nbytes for buffer in timeline.held) == timeline.peak


def test_the_forward_pass_comes_before_the_backward_pass() -> None:
    plan = planned()
    timeline, operators = plan.inspect.memory_timeline(), sum(node.kind != "input" for node in plan.program.pcg.nodes)
    assert len(timeline.nbytes) == 1 + 2 * operators  # before the step, and one turn for each operator in each pass
    forward = timeline.nbytes[: 1 + operators]
    assert (forward[1:] >= forward[0]).all()
    assert forward[0] < timeline.nbytes.max()
    assert timeline.moment >= len(forward)


def test_without_a_gradient_nothing_is_a_residual() -> None:
    timeline = planned().inspect.memory_timeline(gradient=False)
    assert KEPT not in timeline.by_reason
    assert GRADIENTS not in timeline.by_reason
    assert timeline.slots == 0


def test_recomputed_values_have_their_own_reason() -> None:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x + jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T)(w, x)
        return jnp.mean(x**2)

    plan = optimize(loss, [f(64, 1024)] * 3, f(1024, 64), machine=Machine.grid(1, 8, "a100"), progress=False)
    assert AGAIN in plan.inspect.memory_timeline().by_reason


def test_no_device_is_needed() -> None:
    timeline = planned(devices=64).inspect.memory_timeline()
    assert timeline.arguments < 4 * 256 * 256 * 4 + 1024 * 256 * 4
    assert timeline.peak > timeline.step > 0


def test_the_timeline_of_a_function_without_operators_is_its_arguments() -> None:
    plan = optimize(lambda x: x, f(8), machine=Machine.grid(1, 8, "a100"), progress=False)
    timeline = plan.inspect.memory_timeline(gradient=False)
    assert timeline.step == timeline.arguments + timeline.outputs + timeline.temporaries
    assert timeline.moment == 0


def test_the_timeline_is_drawn(tmp_path: Any) -> None:
    path = tmp_path / "memory.png"
    planned().inspect.memory_timeline().plot(path)
    assert path.stat().st_size > 1000
