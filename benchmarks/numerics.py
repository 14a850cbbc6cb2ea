"""Whether plans compute what the function computes: loss and gradients of every frontier point of small models, on eight devices.

`python -m benchmarks.numerics [case ...]`. The models are small versions of the examples: a GPT (plain, and with scan and remat), a
CNN, a DLRM, an LSTM. Programs are run on virtual CPU devices. Differences are relative to the original's: of the loss, and of all
gradients together, as 2-norms.

In float64 they must be below 1e-10. In float32 two programs that add in another order differ by as much as the model makes of a
rounding error. That is measured, not guessed: every parameter is moved by one unit in its last place, up or down at random; the
largest change of a few such draws is the model's own *conditioning*, and a plan may differ by ten times that (of the loss, which is
a single number, by one unit in its own last place at least).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import unity
from benchmarks.models import concrete, tiny
from benchmarks.models.model import Model, Tree
from benchmarks.record import record, results, show

DEVICES = 8
WIDE, TIMES = 1e-10, 10.0  # targets: relative in float64; of the conditioning in float32
DRAWS = 5

CASES: dict[str, Callable[[str], Model]] = {
    "gpt": lambda dtype: tiny("gpt2_padded", compute=dtype),
    "gpt, scan and remat": lambda dtype: tiny("gpt3_6.7b_scan", vocab=64, compute=dtype),
    "cnn": lambda dtype: tiny("resnet50", blocks=(1, 1), base=16, image=32, batch=16, classes=16),
    "dlrm": lambda dtype: tiny("dlrm"),
    "lstm": lambda dtype: tiny("rnnlm", vocab=64),
}


def cast(tree: Tree, dtype: str) -> Tree:
    """Real numbers in another precision, abstract or not."""

    def one(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.ShapeDtypeStruct(x.shape, dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x, dtype)

    return jax.tree.map(one, tree)


def distance(found: Tree, wanted: Tree) -> float:
    """The relative difference of two trees, as 2-norms over all leaves."""
    leaves = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in leaves]
    away = sum(float(np.sum((x - y) ** 2)) for x, y in pairs)
    return (away / sum(float(np.sum(y**2)) for _, y in pairs)) ** 0.5


def moved(params: Tree, rng: np.random.Generator) -> Tree:
    """Every parameter one unit in its last place up or down."""

    def one(x: jax.Array) -> jax.Array:
        values = np.asarray(x)
        towards = np.where(rng.random(values.shape) < 0.5, -np.inf, np.inf).astype(values.dtype)
        return jnp.asarray(np.nextafter(values, towards))

    return jax.tree.map(one, params)


def distances(found: Tree, wanted: Tree) -> tuple[float, float]:
    """How much a loss differs, and its gradients together."""
    return distance(found[0], wanted[0]), distance(found[1], wanted[1])


def conditioning(step: Callable[..., Tree], params: Tree, batch: Tree, wanted: Tree) -> tuple[float, float]:
    """How much loss and gradients change when every parameter moves by one rounding error: the most of a few draws."""
    found = [distances(step(moved(params, np.random.default_rng(k)), batch), wanted) for k in range(DRAWS)]
    return max(loss for loss, _ in found), max(gradients for _, gradients in found)


def allowed_for(step: Callable[..., Tree], params: Tree, batch: Tree, wanted: Tree, dtype: str) -> tuple[float, float]:
    """The differences of loss and gradients that are allowed."""
    if dtype == "float64":
        return WIDE, WIDE
    loss, gradients = conditioning(step, params, batch, wanted)
    return max(TIMES * loss, float(np.finfo(dtype).eps)), TIMES * gradients


def rows_of(name: str, dtype: str) -> list[dict[str, Any]]:
    """Every frontier point of one case in one precision."""
    with jax.enable_x64(dtype == "float64"):
        model = CASES[name](dtype)
        params, batch = (cast(tree, dtype) for tree in concrete(model))
        plan = unity.optimize(model.loss, params, batch, machine=unity.Machine.grid(1, DEVICES, "a100"), progress=False)
        step = jax.jit(jax.value_and_grad(model.loss))
        wanted = step(params, batch)
        allowed = allowed_for(step, params, batch, wanted, dtype)
        rows = []
        for k, point in enumerate(plan.frontier):
            found = jax.jit(jax.value_and_grad(point))(*point.shard(params, batch))
            away = distances(found, wanted)
            row = {"model": name, "dtype": dtype, "point": f"{k} of {len(plan.frontier) - 1}"}
            row |= {"loss": away[0], "loss allowed": allowed[0], "gradients": away[1], "gradients allowed": allowed[1]}
            rows.append(row | {"met": bool(away[0] <= allowed[0] and away[1] <= allowed[1])})
        return rows


def _alone(name: str, dtype: str) -> list[dict[str, Any]]:
    """One case in a process of its own, which has the devices, and a cache of plans of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache}
        command = [sys.executable, "-m", "benchmarks.numerics", "measure", name, dtype]
        return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)


def main(names: list[str]) -> None:
    """Measures the named cases, or all of them. What was recorded of other cases stays."""
    rows = results("numerics")["rows"]
    for name in names or CASES:
        rows = [row for row in rows if row["model"] != name and row["model"] in CASES]
        for dtype in ("float64", "float32"):
            found = _alone(name, dtype)
            worst = max(found, key=lambda row: row["gradients"])
            print(
                f"{name}, {dtype}: {sum(r['met'] for r in found)} of {len(found)} points;"
                f" largest difference of gradients {worst['gradients']:.1e}, allowed {worst['gradients allowed']:.1e}",
                flush=True,
            )
            rows += found
        record("numerics", rows, devices=DEVICES, allowed={"float64": WIDE, "float32, of the conditioning": TIMES})
    print(f"{sum(row['met'] for row in rows)} of {len(rows)} points compute what the function computes")
    show("beyond what is allowed", [row for row in rows if not row["met"]])


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(rows_of(sys.argv[2], sys.argv[3])))
    else:
        main(sys.argv[1:])
