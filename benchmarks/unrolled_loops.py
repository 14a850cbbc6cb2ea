"""Loops that take several steps in a round: kernels and memory of programs compiled for an H200, and what is predicted.

`pip install 'jax[cuda13]'`, then `python -m benchmarks.unrolled_loops`; no GPU is needed. Each row is a loop with its gradients:
one layer of a recurrent network, or a scan of layers. Kernels are those in the bodies of the compiled loops, for each step;
predicted ones write rows of stacked values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import unity
from benchmarks.absent_gpus import described
from benchmarks.loops import gru, lstm, simple
from benchmarks.models.model import f32
from benchmarks.record import record_cases, show
from unity.machine.machine import Machine
from unity.pcg.analysis.hoisting import hoisted
from unity.pcg.analysis.rematerialization import recomputation
from unity.pcg.analysis.stacked_values import stacking_kernels
from unity.pcg.ir.gradient_flow import gradients

CELLS: dict[str, tuple[Callable[..., Any], int, int]] = {"LSTM": (lstm, 2, 4), "GRU": (gru, 1, 3), "Elman": (simple, 1, 1)}
BATCH, WIDTH, STEPS = 64, 1024, 40
LAYERS = {"16 layers, 256 rows": 256, "16 layers, 8,192 rows": 8192}
UNROLLED = (1, 2, 4, 8)
KERNEL = re.compile(r" = .*? (fusion|fusion-start|custom-call|dot|copy|concatenate|dynamic-update-slice)\(")
BODY = re.compile(r"body=%?([\w.\-]+)")


def recurrent(cell: Callable[..., Any], states: int, unroll: int) -> Callable[..., Any]:
    """Return the loss of a recurrent layer whose inputs are multiplied before the loop."""

    def run(params: Any, xs: Any) -> Any:
        first = (jnp.zeros((BATCH, WIDTH)),) * states
        return jnp.mean(lax.scan(partial(cell, params), first, xs @ params["x"], unroll=unroll)[1] ** 2)

    return run


def stacked(unroll: int) -> Callable[..., Any]:
    """Return the loss of a loop over the stacked weights of layers."""

    def run(params: Any, x: Any) -> Any:
        layer = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(lax.scan(layer, x, params, unroll=unroll)[0] ** 2)

    return run


def case(name: str, unroll: int) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Return a loss and its arguments."""
    if name in LAYERS:
        weights = {"up": f32(16, WIDTH, 4 * WIDTH), "down": f32(16, 4 * WIDTH, WIDTH)}
        return stacked(unroll), (weights, f32(LAYERS[name], WIDTH))
    cell, states, gates = CELLS[name]
    weight = f32(WIDTH, gates * WIDTH)
    return recurrent(cell, states, unroll), ({"h": weight, "x": weight}, f32(STEPS, BATCH, WIDTH))


def kernels(text: str) -> int:
    """Return the number of kernels in the bodies of a compiled program's loops."""
    bodies = set(BODY.findall(text))
    blocks = (block.splitlines() for block in text.split("\n\n"))
    inside = (block for block in blocks if block and block[0].lstrip("%").split(" ")[0].split("(")[0] in bodies)
    return sum(KERNEL.search(line) is not None for block in inside for line in block)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Compile one network's loop for each number of steps in a round, and compare."""
    (device,) = described(1)
    rows = [row(name, unroll, device) for unroll in UNROLLED]
    show(name, rows)
    return rows


def row(name: str, unroll: int, device: Any) -> dict[str, Any]:
    """Compile one loop, and compare."""
    fn, args = case(name, unroll)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(device)), args
    )
    compiled = jax.jit(jax.value_and_grad(fn)).lower(*placed).compile()
    plan = unity.optimize(fn, *args, machine=Machine.grid(1, 1, "h200"), progress=False, search="captured")
    graph = plan.program.original
    flow = gradients(graph, plan.program.family.captured.differentiated)
    rows = stacking_kernels(graph, flow, hoisted(graph, flow), recomputation(graph, flow)).values()
    memory = plan.check(gradient=True, devices=[device]).memory_lines[-1]
    return {
        "loop": name,
        "steps in a round": unroll,
        "kernels a step": kernels(compiled.as_text() or "") / unroll,
        "of these predicted to write rows": sum(k.forward + k.backward for k in rows),
        "compiled MB": memory.compiled / 1e6,
        "predicted MB": memory.predicted / 1e6,
        "predicted ms": plan.time * 1e3,
    }


if __name__ == "__main__":
    record_cases("unrolled_loops", __doc__, [*CELLS, *LAYERS], "loop", rows_of)
