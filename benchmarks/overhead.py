"""What unity's way of running a function costs, when it decides nothing: against plain JAX, and against the same strategy by hand.

`python -m benchmarks.overhead`. Two comparisons, each of programs that take turns:

1. A function captured, lowered and run on one device, against `jax.jit` of the function: the seconds of a run, and the seconds of
   tracing and lowering it (with JAX's own caches cleared each time, and without capture and search, which are reported apart).
2. A GPT block on eight virtual CPU devices under Megatron's strategy, against the same strategy written with `shard_map`.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.alternate import Times, alternate, ratio
from benchmarks.baselines import gpt_block, megatron_by_hand, megatron_specs, mesh_of
from benchmarks.models import concrete, get
from benchmarks.models.model import Model, Tree
from benchmarks.record import record, show
from unity.exec import lowering
from unity.exec.compiled.hlo import collectives, total_bytes
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.parallel.parallelize import Assignment, parallelize
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.choices import choices
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, State, Type, partitioned

RUN, TRACE = 1.03, 2.0  # targets
DEVICES = 8

MODELS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: get("gpt2", layers=4, hidden=128, heads=4, vocab=512, seq=64, batch=8),
    "cnn": lambda: get("alexnet", image=63, width=256, batch=16, classes=10),
    "lstm": lambda: get("rnnlm", hidden=128, vocab=512, steps=20, batch=16),
}


def one_device(name: str, rounds: int) -> list[dict[str, Any]]:
    """A model on a machine of one device, forward and with gradients."""
    model = MODELS[name]()
    params, batch = (jax.device_put(tree, jax.devices()[0]) for tree in concrete(model))
    start = time.perf_counter()
    captured = capture(model.loss, params, batch)
    capturing = time.perf_counter() - start
    graph = parallelize(captured.graph, _unused(captured.graph))
    mesh = lowering.mesh_of((), jax.devices())

    def lowered() -> Callable[[Tree, Tree], Any]:
        run = lowering.program(graph, mesh)
        return lambda p, b: run(*jax.tree.leaves((p, b)), *captured.consts)[0]

    rows = []
    for kind, outer in (("forward", jax.jit), ("gradient", lambda f: jax.jit(jax.grad(f)))):
        makers = {"unity": lambda outer=outer: outer(lowered()), "jax": lambda outer=outer: outer(lambda p, b: model.loss(p, b))}
        rows.append({"model": name, "step": kind, **_compared(makers, (params, batch), rounds), "capture s": capturing})
    return rows


def _unused(graph: PCG) -> Assignment:
    """No axes, so no states."""
    results = {id(node): ((),) * len(node.tensors) for node, _ in graph.walk()}
    return Assignment((), results, {}, {})


def megatron(rounds: int) -> dict[str, Any]:
    """A GPT block under Megatron's strategy, by unity's lowering and by hand."""
    heads, axis = 8, Axis("d", DEVICES, 0)
    model = gpt_block(256, heads, 128, 8)
    by_hand = megatron_by_hand(model, mesh_of(DEVICES), heads)
    captured = capture(model.loss, model.params, model.batch)
    states = [_state(spec) for spec in jax.tree.leaves(megatron_specs(model.params))] + [UNUSED, UNUSED]
    graph = parallelize(captured.graph, assigned(captured.graph, axis, states))
    run = lowering.program(graph, lowering.mesh_of((axis,), jax.devices()))
    args = tuple(jax.tree.map(jax.device_put, x, s) for x, s in zip(concrete(model), by_hand.shardings, strict=True))
    makers = {
        "unity": lambda: jax.jit(jax.value_and_grad(lambda p, b: run(*jax.tree.leaves((p, b)))[0])),
        "jax": lambda: jax.jit(lambda p, b: by_hand.step(p, b)),
    }
    sent = {name: total_bytes(collectives(make().lower(*args).compile().as_text() or "")) for name, make in makers.items()}
    row = {"model": "gpt block, Megatron", "step": "gradient", **_compared(makers, args, rounds)}
    return row | {"collectives": {name: dict(sorted(bytes_.items())) for name, bytes_ in sent.items()}}


def _state(spec: Sequence[Any]) -> State:
    dim = next((k for k, name in enumerate(spec) if name is not None), None)
    return UNUSED if dim is None else partitioned(dim)


def assigned(graph: PCG, axis: Axis, inputs: Sequence[State]) -> Assignment:
    """The strategy that follows from where the inputs lie, if every operator takes what moves least."""
    at: dict[Value, State] = {Value(n): s for n, s in zip(graph.inputs, inputs, strict=True)}
    results: dict[int, tuple[Type, ...]] = {id(n): ((s,),) for n, s in zip(graph.inputs, inputs, strict=True)}
    operands: dict[tuple[int, int], tuple[Type, ...]] = {}
    for node in graph.nodes:
        if node.kind != "input":
            choice = _least(node, [at[v] for v in node.operands])
            at.update(zip(node.results, choice.results, strict=True))
            results[id(node)] = tuple((s,) for s in choice.results)
            operands |= {(id(node), p): ((s,),) for p, s in enumerate(choice.operands)}
    return Assignment((axis,), results, operands, {(id(graph), k): ((UNUSED,),) for k in range(len(graph.outputs))})


def _least(node: Node, have: Sequence[State]) -> Choice:
    assert node.body is not None, node
    price = {"UR": 1, "SR": 10, "SU": 10}

    def cost(choice: Choice) -> float:
        moves = [a.kind + b.kind for a, b in zip(have, choice.operands, strict=True) if a != b]
        needless = bool(moves) and REPLICATED in choice.results
        return sum(price.get(move, np.inf) for move in moves) + 5 * needless + len(choice.reduced)

    return min(choices(node.body, [(p, s) for p, s in enumerate(have) if s.kind == "P"]), key=cost)


def _compared(makers: dict[str, Callable[[], Any]], args: tuple[Tree, Tree], rounds: int) -> dict[str, Any]:
    """Seconds of tracing and lowering, and of running, of programs that take turns."""

    def cold(make: Callable[[], Any], times: Times) -> None:
        jax.clear_caches()
        wall, own = time.perf_counter(), time.process_time()
        make().lower(*args)
        times.wall.append(time.perf_counter() - wall)
        times.own.append(time.process_time() - own)

    traced = {name: Times([], []) for name in makers}
    for k in range(7):
        for name in sorted(makers, reverse=bool(k % 2)):
            cold(makers[name], traced[name])
    compiled = {name: make().lower(*args).compile() for name, make in makers.items()}
    times = alternate({name: lambda run=run: run(*args) for name, run in compiled.items()}, rounds)
    run, lower = ratio(times["unity"], times["jax"]), ratio(traced["unity"], traced["jax"])
    same = len({tuple(sorted(_operations(program.as_text()).items())) for program in compiled.values()}) == 1
    return {
        "run ms": times["unity"].median * 1e3,
        "jax run ms": times["jax"].median * 1e3,
        **{f"run {k}": v for k, v in run.items()},
        "same HLO": same,
        "trace ms": traced["unity"].median * 1e3,
        "jax trace ms": traced["jax"].median * 1e3,
        **{f"trace {k}": v for k, v in lower.items()},
        "within": bool((same or min(run["ratio"], run["own ratio"]) <= RUN) and min(lower["ratio"], lower["own ratio"]) <= TRACE),
    }


def _operations(text: str) -> Counter[str]:
    """How many instructions of each kind a compiled program has."""
    return Counter(re.findall(r" = \S+ ([a-z][a-z\-]*)\(", text))


def main(rounds: int = 30) -> None:
    rows = [row for name in MODELS for row in one_device(name, rounds)]
    rows.append(megatron(rounds))
    show("unity's lowering against JAX", [{k: v for k, v in row.items() if k != "collectives"} for row in rows])
    record("overhead", rows, targets={"run": RUN, "trace": TRACE})


if __name__ == "__main__":
    main()
