"""Whole training steps: the plan of the loss in a step against a plan of the step's whole program.

`python -m benchmarks.training_steps`. The whole program has the backward pass and the optimizer's update among its operators, and
is planned like any function. A search that does not end within `LIMIT` is ended.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from queue import Empty
from typing import Any

import jax
import optax

import unity
from benchmarks.models.gpt import gpt
from benchmarks.record import asked, record, show

LIMIT = 120  # seconds
OPTIMIZERS = {"sgd": optax.sgd(1e-3), "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))}
CASES = {f"GPT of {layers}, {name}": (layers, name) for layers in (1, 2) for name in OPTIMIZERS}


def planned(layers: int, name: str, whole: bool) -> dict[str, Any]:
    """The plan of a step's loss, or of its whole program."""
    model = gpt(layers=layers, hidden=512, heads=8, vocab=8192, seq=256, batch=64)
    optimizer, machine = OPTIMIZERS[name], unity.Machine.grid(1, 8, "a100")

    def step(params: Any, moments: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(unity.loss(model.loss))(params, batch)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    arguments = model.params, jax.eval_shape(optimizer.init, model.params), model.batch
    if whole:
        plan = unity.optimize(step, *arguments, training=False, machine=machine, budget=0, progress=False)
        inputs, outputs = plan.in_specs[:2], plan.out_specs[:2]
        pairs = zip(jax.tree.leaves(inputs), jax.tree.leaves(outputs), strict=True)
        moved: int | str = sum(one != other for one, other in pairs)
    else:
        compiled = unity.step(step, machine=machine, budget=0, progress=False)
        compiled.shardings(*arguments)
        (plan,), moved = compiled.plans, 0
    return {"ms": plan.time * 1e3, "MB": plan.memory / 1e6, "search s": plan.search_seconds, "of the state moved": moved}


def measured(case: str, whole: bool) -> dict[str, Any]:
    """One search, in a process and with a cache of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_into, args=(results, *CASES[case], whole), daemon=True)
    process.start()
    row = {"case": case, "planned": "the whole program" if whole else "the loss"}
    try:
        return {**row, **results.get(timeout=LIMIT)}
    except Empty:
        return {**row, "search s": f"more than {LIMIT}"}
    finally:
        process.terminate()


def _into(results: Any, layers: int, name: str, whole: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        results.put(planned(layers, name, whole))


def main() -> None:
    started = time.perf_counter()
    cases, everything = asked(__doc__, CASES)
    rows = [measured(case, whole) for case in cases for whole in (False, True)]
    show("a training step", rows)
    if everything:
        print(record("training_steps", rows, seconds=time.perf_counter() - started))


if __name__ == "__main__":
    main()
