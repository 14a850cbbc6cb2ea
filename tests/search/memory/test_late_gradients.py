"""Gradients of weights that a GPU's scheduler puts off, and the buffers that wait for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import unity
from unity.pcg.ir.gradient_flow import gradients
from unity.search.cost.cost import Training
from unity.search.memory.backend import GPU
from unity.search.memory.late_gradients import late_turns, waiting, weight_of
from unity.search.memory.memory import predict_memory

LAYERS, WIDTH, ROWS = 4, 512, 1024
WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
DEVICES = 8


def loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def data_parallel() -> unity.Plan:
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    machine = unity.Machine.grid(1, DEVICES, "h200")
    return unity.optimize(loss, WEIGHTS, x, machine=machine, search="data-parallel", progress=False)


def test_without_collectives_on_the_way_all_gradients_of_weights_run_last() -> None:
    program = data_parallel().program
    nodes = [n for n in program.pcg.nodes if n.kind != "input"]
    late = late_turns(nodes, gradients(program.pcg, program.family.differentiated))
    assert [nodes[i].kind for i in late] == ["dot_general"] * LAYERS
    assert set(late.values()) == {0}
    assert all(weight_of(nodes[i].operands[1]) is not None for i in late)


def test_what_late_gradients_read_waits_for_them() -> None:
    """At the end all cotangents of products wait, and the operands of all products but the first, which is an argument."""
    program = data_parallel().program
    on = {
        late: predict_memory(program.pcg, program.family.differentiated, Training(), replace(GPU, late=late))
        for late in (True, False)
    }
    activation = ROWS * WIDTH * 4 / DEVICES
    kept = LAYERS * activation  # at the start of the backward pass
    assert on[True].step - on[False].step <= LAYERS * activation
    assert on[True].step >= on[False].step
    assert on[True].step >= 2 * LAYERS * WIDTH * WIDTH * 4 + kept


def test_a_buffer_is_counted_at_every_turn_that_it_is_live() -> None:
    assert waiting(4, [(8.0, 1, 2), (2.0, 0, 3), (1.0, 3, 1)]) == [2.0, 10.0, 10.0, 2.0]


def test_a_value_of_several_arguments_is_no_weight() -> None:
    program = data_parallel().program
    product = next(n for n in program.pcg.nodes if n.kind == "dot_general")
    assert weight_of(product.operands[1]) in program.pcg.inputs
    assert all(weight_of(v) is None for n in program.pcg.nodes if n.kind == "tanh" for v in n.results)
