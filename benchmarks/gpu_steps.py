"""Whole steps on one GPU with and without what a plan changes in them, run in turns, against what was predicted.

`python -m benchmarks.gpu_steps`, where there is a GPU; elsewhere it runs the same at small sizes, and records nothing. If parts
are named, the recorded rows of the other parts stay, if they are of the same kind of device. *loops*: recurrent networks whose
products are in the loop; the plan takes them out of it, as in `benchmarks.loops`. *state on the host*: steps of GPT-2 large with
Adam's state in the memory of the host, and on the device. GB are the peak of the process, so each of these parts needs a process
of its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import unity
from benchmarks.alternate import alternate, ratio
from benchmarks.loops import gru, lstm, network
from benchmarks.models import concrete
from benchmarks.models.gpt import gpt
from benchmarks.models.model import Model
from benchmarks.record import BESIDE, asked, by_case, in_order, record, results, show
from unity.machine.machine import Machine

TINY = jax.default_backend() != "gpu"
TURNS = 10
TRAINED = 3  # steps whose losses are compared
PTB = {"layers": 1, "hidden": 16, "steps": 4, "batch": 4} if TINY else {"layers": 2, "hidden": 1024, "steps": 40, "batch": 64}
LOOPS: dict[str, tuple[Any, ...]] = {
    "LSTM": (lstm, 2, 4, PTB),
    "LSTM, output layer in the loop": (lstm, 2, 4, PTB | {"looped": ("output",)}),
    "GRU": (gru, 1, 3, PTB),
}
LARGE = {"layers": 36, "hidden": 1280, "heads": 20, "batch": 4, "compute": "bfloat16"}
GPT: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 64, "seq": 16, "batch": 4} if TINY else LARGE
ADAM = optax.adam(1e-4)


def drawn(args: Any) -> Any:
    """Return small weights, and tokens that every table has."""
    rng = np.random.default_rng(0)
    is_float = lambda leaf: np.issubdtype(leaf.dtype, np.floating)  # noqa: E731
    draw = lambda x: rng.normal(0, 0.02, x.shape).astype(x.dtype) if is_float(x) else rng.integers(0, 99, x.shape, x.dtype)  # noqa: E731
    return jax.tree.map(lambda leaf: jax.numpy.asarray(draw(leaf)), args)


def loops() -> Iterator[dict[str, Any]]:
    """Yield steps of networks with products in a loop: the function's, the plan's, and those written by hand."""
    options: dict[str, Any] = {"machine": Machine.grid(1, 1, "h200"), "progress": False, "seconds": 10.0}
    for name, (cell, states, gates, sizes) in LOOPS.items():
        loss, abstract = network(cell, states, gates, **sizes)
        plan = unity.optimize(loss(False), *abstract, **options)
        without = unity.optimize(loss(False), *abstract, constraints=unity.without_rules("*-loop"), **options)
        args = drawn(abstract)
        programs = {
            which: jax.jit(jax.value_and_grad(step)).lower(*args).compile()
            for which, step in (("function", loss(False)), ("plan", plan), ("by hand", loss(True)))
        }
        values = {which: float(program(*args)[0]) for which, program in programs.items()}
        times = alternate({which: lambda program=program, args=args: program(*args) for which, program in programs.items()}, TURNS)
        yield {
            "what": name,
            "rules": str(plan.program.loop_rewriting),
            "predicted": without.time / plan.time,
            "predicted ms": plan.time * 1e3,
            **{f"{which} ms": timing.median * 1e3 for which, timing in times.items()},
            "times as fast": ratio(times["function"], times["plan"])["ratio"],
            "loss differs by": abs(values["plan"] - values["function"]) / abs(values["function"]),
        }


def host(model: Model) -> Iterator[dict[str, Any]]:
    """Yield steps of Adam, with its state in the memory of the host and then on the device, whose peak is larger."""
    row: dict[str, Any] = {"parameters": model.parameters}
    losses = {}
    for where, state in (("host", unity.OptimizerState(2, host=True)), ("device", unity.OptimizerState(2))):
        figures, losses[where] = trained(model, state)
        row |= {f"{where} {what}": figure for what, figure in figures.items()}
    row["losses differ by"] = max(abs(a - b) / abs(b) for a, b in zip(losses["host"], losses["device"], strict=True))
    yield row


def trained(model: Model, optimizer: unity.OptimizerState) -> tuple[dict[str, float], list[float]]:
    """Train some steps from the same weights. Return predicted and measured figures, and the losses."""
    marked = unity.loss(model.loss)

    def train_step(weights: Any, moments: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(marked)(weights, batch)
        updates, moments = ADAM.update(gradient, moments, weights)
        return optax.apply_updates(weights, updates), moments, loss

    machine = Machine.grid(1, 1, "h200")
    step = unity.step(train_step, donate_argnums=(0, 1), machine=machine, optimizer=optimizer, search="captured", progress=False)
    weights, batch = concrete(model)
    abstract = jax.eval_shape(ADAM.init, weights)
    shardings = step.shardings(weights, abstract, batch)
    moments = jax.jit(ADAM.init, out_shardings=shardings[1])(weights)
    state, losses = [weights, moments], []

    def run() -> Any:
        state[:] = step(*state, batch)
        return state.pop()

    for _ in range(TRAINED):
        losses.append(float(run()))
    times = alternate({"step": run}, TURNS)
    (plan,) = step.plans
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    figures = {
        "predicted ms": plan.time * 1e3,
        "ms": times["step"].median * 1e3,
        "predicted GB": plan.memory / 1e9,
        "GB": peak / 1e9,
    }
    return figures, losses


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "loops": loops,
    "state on the host": lambda: host(gpt(**GPT)),
    "state on the host, scanned": lambda: host(gpt(**GPT, scan=True)),
}


def main() -> None:
    parts, _ = asked(__doc__, PARTS, BESIDE)
    recorded, device = results("gpu_steps"), jax.devices()[0].device_kind
    rows = by_case(recorded["rows"] if recorded.get("device") == device else [], "part")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for part in parts:
            rows[part] = []
            for row in PARTS[part]():
                rows[part].append({"part": part, **row})
                print(row, flush=True)
                if not TINY:
                    record("gpu_steps", in_order(rows, PARTS), device=device)
    for part in parts:
        show(part, rows[part])


if __name__ == "__main__":
    main()
