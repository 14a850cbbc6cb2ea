"""Whole training steps: the plan of the loss in a step against a plan of the step's whole program.

`python -m benchmarks.training_steps`. The whole program has the backward pass and the optimizer's update among its operators, and
is planned like any function. A search that does not end within `LIMIT` is ended. Leaves of the state that change their sharding are
counted in the compiled step of the loss's plan, and in the specifications of the whole program's plan.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import multiprocessing
import tempfile
import time
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
    """Return the figures of the plan of a step's loss, or of its whole program."""
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
        moved = sum(before != after for before, after in zip(jax.tree.leaves(inputs), jax.tree.leaves(outputs), strict=True))
    else:
        planned_step = unity.step(step, machine=machine, budget=0, progress=False)
        moved = moved_by(planned_step, arguments)
        (plan,) = planned_step.plans
    return {"ms": plan.time * 1e3, "MB": plan.memory / 1e6, "search s": plan.inspect.search_seconds, "of the state moved": moved}


def moved_by(step: Any, arguments: tuple[Any, ...]) -> int:
    """Return the number of leaves of the state that a compiled step returns with another sharding."""
    before, after = step.shardings(*arguments)[:2], step.lower(*arguments).compile().output_shardings  # the loss comes last
    leaves = zip(jax.tree.leaves(arguments[:2]), jax.tree.leaves(before), after, strict=False)
    return sum(not one.is_equivalent_to(other, x.ndim) for x, one, other in leaves)


def measured(case: str, whole: bool) -> dict[str, Any]:
    """Search once, in a separate process with an empty cache. Raises EOFError if the process fails."""
    context = multiprocessing.get_context("spawn")
    results, end = context.Pipe(duplex=False)
    process = context.Process(target=_into, args=(end, *CASES[case], whole), daemon=True)
    process.start()
    end.close()
    row = {"case": case, "planned": "the whole program" if whole else "the loss"}
    try:
        return {**row, **(results.recv() if results.poll(LIMIT) else {"search s": f"more than {LIMIT}"})}
    finally:
        process.terminate()


def _into(end: Any, layers: int, name: str, whole: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        end.send(planned(layers, name, whole))


def main() -> None:
    started = time.perf_counter()
    cases, everything = asked(__doc__, CASES)
    rows = [measured(case, whole) for case in cases for whole in (False, True)]
    show("a training step", rows)
    if everything:
        print(record("training_steps", rows, seconds=time.perf_counter() - started))


if __name__ == "__main__":
    main()
