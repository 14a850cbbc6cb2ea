"""Measure one entry of the zoo: plans at full size, and a run at tiny size against the function itself.

`python -m benchmarks.zoo.measure LABEL full` (or `tiny`) prints the figures as a line of JSON, the last one with the error
that ended the measurement, if one did;
`ZOO_TRACEBACK=1` prints the error's traceback, too.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import unity
from benchmarks.zoo import ENTRIES, Entry
from unity.base.formatting import short
from unity.machine.hardware import Device
from unity.search.cost.prediction import predict

NODES = (1, 8)  # of 8 H100s
TOLERANCE = 2e-4  # of the largest element: sums come in another order
SMALLEST = 1e-3  # of the largest gradient: what is smaller may be a sum that cancels
SHOWN = 3  # of the operators that every device runs whole
LENGTH = 600  # of an error
ROOT = Path(__file__).parents[2]


def whole(plan: unity.Plan) -> tuple[float, list[str]]:
    """Return the share of the computing that every device does whole, and its largest parts."""
    prediction = predict(plan.program.pcg, plan.inspect.machine, plan.program.family.differentiated)
    parts: dict[str, float] = {}
    for term in prediction.operators:
        if term.share == 1:
            name = f"{term.node.kind} at {short(term.node.source)}"
            parts[name] = parts.get(name, 0.0) + (term.forward + term.backward) / prediction.computing
    largest = sorted(parts.items(), key=lambda item: -item[1])[:SHOWN]
    return sum(parts.values()), [f"{part:.1%} {name}" for name, part in largest if part > 0.01]


def full(entry: Entry) -> Iterator[dict[str, Any]]:
    """Plan an entry at full size for 8 and 64 H100s, and yield the figures of both, and before that of the first."""
    fn, arguments = entry.case(tiny=False)
    args = jax.eval_shape(arguments)
    row: dict[str, Any] = {}
    for nodes in NODES:
        machine, devices = unity.Machine.grid(nodes, 8, "h100"), 8 * nodes
        clock, processor = time.perf_counter(), time.process_time()
        plan = unity.optimize(fn, *args, machine=machine, budget=0, progress=False)
        seconds, processor_seconds = time.perf_counter() - clock, time.process_time() - processor
        part, operators = whole(plan)
        row |= {
            f"search s, {devices}": round(seconds, 1),
            f"search CPU s, {devices}": round(processor_seconds, 1),  # what other work on the machine does not change
            f"step ms, {devices}": plan.time * 1e3,
            f"GB, {devices}": plan.memory / 1e9,
            f"whole, {devices}": round(part, 4),
            f"whole operators, {devices}": operators,
        }
        yield row


def difference(actual: Any, expected: Any) -> float:
    """Return the largest difference of two trees of arrays, relative to the largest element of each leaf.

    Leaves whose elements are all below a thousandth of the tree's largest are compared with that: of a sum that cancels, such as
    the gradient of the bias of attention's keys, only rounding is left.
    """
    pairs = [(_plain(a), _plain(b)) for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)]
    if not all(np.array_equal(np.isfinite(a), np.isfinite(b)) for a, b in pairs):
        return float("inf")
    scales = [float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0)) for _, b in pairs]
    floor = max(SMALLEST * max(scales, default=0.0), 1e-6)
    errors = (float(np.max(np.abs(a - b)[np.isfinite(b)], initial=0.0)) for a, b in pairs)
    return max((error / max(scale, floor) for error, scale in zip(errors, scales, strict=True)), default=0.0)


def _plain(x: Any) -> np.ndarray:
    """Return an array, or the data of keys, in a wide type of NumPy."""
    if x.dtype == jax.dtypes.float0:  # the gradient of an integer
        return np.zeros(x.shape)
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def tiny(entry: Entry) -> Iterator[dict[str, Any]]:
    """Run an entry at tiny size on virtual devices that are so slow that dividing is worth it."""
    fn, arguments = entry.case(tiny=True)
    args = arguments()
    slow = Device("slow", {"float32": 1e6, "float64": 1e6, "bfloat16": 1e6}, 10**9, 1e7, 1.0, 0.0)
    machine = unity.Machine.grid(1, jax.device_count(), slow, intra=(1e9, 1e-9), inter=(1e9, 1e-9))
    plan = unity.optimize(fn, *args, machine=machine, budget=0, progress=False)
    auxiliary = isinstance(jax.eval_shape(fn, *args), tuple)
    expected = jax.jit(jax.value_and_grad(fn, has_aux=auxiliary, allow_int=True))(*args)
    actual = jax.jit(jax.value_and_grad(plan, has_aux=auxiliary, allow_int=True))(*plan.shard(*args))
    value, gradient = (difference(actual[k], expected[k]) for k in (0, 1))
    yield {
        "value": value,
        "gradients": gradient,
        "right": max(value, gradient) < TOLERANCE,
        "whole": round(whole(plan)[0], 4),
        "collectives agree": plan.check().agrees(),
    }


def shortened(text: str) -> str:
    """Return the beginning of a text without the folders of this checkout and of the environment."""
    for folder in (sysconfig.get_path("purelib"), str(ROOT)):
        text = text.replace(f"{folder}/", "")
    return text[:LENGTH]


def main(label: str, stage: str) -> None:
    entry = next(entry for entry in ENTRIES if entry.label == label)
    figures: dict[str, Any] = {}
    try:
        for figures in {"full": full, "tiny": tiny}[stage](entry):
            print(json.dumps(figures), flush=True)
    except Exception as error:
        if os.environ.get("ZOO_TRACEBACK"):
            traceback.print_exc()
        print(json.dumps(figures | {"error": shortened(f"{type(error).__name__}: {error}")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
