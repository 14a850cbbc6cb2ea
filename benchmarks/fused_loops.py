"""Two loops of one length as two scans and as one: is there a gain that the cost model sees?

`python -m benchmarks.fused_loops`. Predicted for one H200 and 8 A100s, written by hand each way, without rewriting. A *fused* loop
takes a step of both in one; a *batched* one takes equal steps of both at once, on stacked carries and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import unity
from benchmarks.loops import lstm
from benchmarks.models.model import f32
from benchmarks.record import record_cases, show
from unity.machine.machine import Machine

MACHINES = {"1 H200": Machine.grid(1, 1, "h200"), "8 A100": Machine.preset("dgx-a100")}
BATCH, WIDTH, STEPS = 64, 1024, 40

Step = Callable[[Any, Any, Any], Any]
Loss = Callable[[Any, Any], Any]


def average(decay: Any, state: Any, row: Any) -> Any:
    """A step of a moving average with a learned decay."""
    h = jax.nn.sigmoid(decay) * state[0] + row
    return (h,), h


def scanned(step: Step, w: Any, xs: Any, states: int) -> Any:
    return lax.scan(lambda state, row: step(w, state, row), (jnp.zeros((BATCH, WIDTH)),) * states, xs)[1]


def chained(step: Step, states: int, between: Callable[[Any, Any], Any]) -> dict[str, Loss]:
    """Return losses of a loop over another's results, with a function of these and of the second loop's weights between them."""

    def two(params: Any, xs: Any) -> Any:
        first, second = params
        return jnp.mean(scanned(step, second, between(second, scanned(step, first, between(first, xs), states)), states) ** 2)

    def fused(params: Any, xs: Any) -> Any:
        first, second = params

        def both(_: Any, carry: Any, row: Any) -> Any:
            one, y = step(first, carry[:states], row)
            other, y = step(second, carry[states:], between(second, y))
            return (*one, *other), y

        return jnp.mean(scanned(both, None, between(first, xs), 2 * states) ** 2)

    return {"two loops": two, "fused": fused}


def beside(step: Step, states: int, between: Callable[[Any, Any], Any]) -> dict[str, Loss]:
    """Return losses of two loops over the same input, with a function of this and of each loop's weights before them."""

    def two(params: Any, xs: Any) -> Any:
        one, other = (scanned(step, w, between(w, xs), states) for w in params)
        return jnp.mean(one * other)

    def fused(params: Any, xs: Any) -> Any:
        def both(_: Any, carry: Any, rows: Any) -> Any:
            (one, y), (other, z) = (
                step(w, carry[k * states : (k + 1) * states], row) for k, (w, row) in enumerate(zip(params, rows, strict=True))
            )
            return (*one, *other), (y, z)

        y, z = scanned(both, None, tuple(between(w, xs) for w in params), 2 * states)
        return jnp.mean(y * z)

    def batched(params: Any, xs: Any) -> Any:
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *({"w": w, "rows": between(w, xs)} for w in params))
        return jnp.mean(jnp.prod(jax.vmap(lambda s: scanned(step, s["w"], s["rows"], states))(stacked), 0))

    return {"two loops": two, "fused": fused, "batched": batched}


def rows_only(_: Any, xs: Any) -> Any:
    return xs


def projected(w: Any, xs: Any) -> Any:
    return xs @ w["x"] + w["b"]


CELL = {"x": f32(WIDTH, 4 * WIDTH), "h": f32(WIDTH, 4 * WIDTH), "b": f32(4 * WIDTH)}
CASES: dict[str, tuple[dict[str, Loss], Any]] = {
    "moving averages, one of the other": (chained(average, 1, rows_only), f32(WIDTH)),
    "moving averages of one input": (beside(average, 1, rows_only), f32(WIDTH)),
    "LSTMs, one after the other": (chained(lstm, 2, projected), CELL),
    "LSTMs of one input": (beside(lstm, 2, projected), CELL),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return one row for each machine, with the milliseconds of a step in each form."""
    losses, weights = CASES[name]
    rows = []
    for machine, devices in MACHINES.items():
        plans = {
            form: unity.optimize(loss, (weights,) * 2, f32(STEPS, BATCH, WIDTH), machine=devices, search="captured", progress=False)
            for form, loss in losses.items()
        }
        rows.append({"case": name, "machine": machine, **{f"{form}, ms": plan.time * 1e3 for form, plan in plans.items()}})
    show(name, rows)
    return rows


if __name__ == "__main__":
    record_cases("fused_loops", __doc__, CASES, "case", rows_of)
