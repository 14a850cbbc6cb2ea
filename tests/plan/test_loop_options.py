"""`plan.inspect.compiler_options`: the options of XLA for loops that communicate."""

import io
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import unity
from unity.machine.machine import Machine

TWO_STEPS = {"xla_gpu_enable_while_loop_double_buffering": True}


def layers(weights, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def planned(machine, fn=layers, **options):
    weights = {"up": jax.ShapeDtypeStruct((4, 4096, 16384), "float32"), "down": jax.ShapeDtypeStruct((4, 16384, 4096), "float32")}
    rows = jax.ShapeDtypeStruct((4096, 4096), "float32")
    return unity.optimize(fn, weights, rows, machine=machine, budget=0, progress=False, **options)


def test_loops_that_communicate_take_two_steps_in_a_round():
    plan = planned(Machine.grid(1, 8, "h100"), search="fsdp")
    assert plan.inspect.compiler_options() == TWO_STEPS


def test_no_other_plan_has_options():
    gpu = Machine.grid(1, 8, "h100")
    cpu = replace(gpu, device=replace(gpu.device, name="cpu"), host=None)
    assert planned(cpu, search="fsdp").inspect.compiler_options() == {}
    assert planned(Machine.grid(1, 1, "h100")).inspect.compiler_options() == {}  # nothing is sent
    written_out = planned(
        gpu,
        lambda w, x: jnp.mean((x + jnp.tanh(x @ w["up"][0]) @ w["down"][0]) ** 2),
        search="fsdp",
    )
    assert written_out.inspect.compiler_options() == {}  # it has no loop


@pytest.mark.parametrize(("part", "options"), [(1.1, {}), (1.5, TWO_STEPS), (1.7, {}), (2.3, TWO_STEPS)])
def test_two_steps_are_taken_where_there_is_memory_for_them(part, options):
    """A device has so many times the memory that the plan needs; with less than 1.6 times, gradients are not late."""
    machine = Machine.grid(1, 8, "h100")
    plan = planned(machine, search="fsdp")
    roomy = planned(machine.with_memory(int(part * plan.memory)), search="fsdp")
    assert (roomy.memory, roomy.inspect.compiler_options()) == (plan.memory, options)
    said = io.StringIO()
    roomy.explain(said)
    assert ("compiler_options=plan.inspect.compiler_options()" in said.getvalue()) == bool(options)
    assert ("the gradients of a product are computed together" in said.getvalue()) == (part < 1.6)
