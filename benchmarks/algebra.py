"""Algebra alone, on one H200: what rewriting gains by prediction, in the compiled program, and as it runs.

    python -m benchmarks.algebra [case ...]

Each model is planned for one H200. With `--plans FOLDER` plans are saved there and read where they are, so that searching
(`--search`) may be done apart from running. Then the function's step and the rewritten one's, each with all gradients, are
compiled: for the GPU that JAX has, where both are run in turns as well; else for an H200 that need not be there, which takes
`jax[cuda13]`. Flops and bytes accessed are XLA's own. Kernels are counted in the entry computation of the compiled program: those
of a loop's body are not. A gain is *real* where the rewritten step takes less time or, where it is not run, accesses fewer bytes.
A model that is not rewritten is one program, and is not compiled. Means are of the models on record, and of as many as they say.
Models of packages are those of `benchmarks.packages`; one whose package is not installed is left out.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import unity
from benchmarks import packages
from benchmarks.alternate import alternate, ratio
from benchmarks.models import concrete
from benchmarks.models.bert import attention_stack, bert
from benchmarks.models.candle import candle_uno
from benchmarks.models.gpt import gpt
from benchmarks.models.inception import inception_v3
from benchmarks.models.llama import llama
from benchmarks.models.mixtral import mixtral
from benchmarks.models.model import Model, Tree, f32
from benchmarks.models.recommenders import dlrm, xdl
from benchmarks.models.recurrent import nmt, rnnlm
from benchmarks.models.resnet import resnet
from benchmarks.models.squeezenet import squeezenet
from benchmarks.models.unrolled import rnnlm_unrolled
from benchmarks.models.vit import vit
from benchmarks.record import record, results, show

ROUNDS = 20
BUDGET = 40.0  # seconds of search
KERNEL = re.compile(r"^\s+(?:ROOT )?%?\S+ = .*? (fusion|custom-call|convolution|dot|reduce|sort|scatter|gather|copy|transpose)\(")


def blocked_attention(*, blocks: int = 32, size: int = 64, heads: int = 12, hidden: int = 768, batch: int = 8) -> Model:
    """A layer of BigBird's block-sparse attention: every block of queries reads its own block of keys and both beside it."""

    def loss(params: Tree, data: Tree) -> jax.Array:
        split = (batch, blocks, size, heads, hidden // heads)
        query, key, value = ((data["x"] @ params[name]["weight"]).reshape(split) for name in ("query", "key", "value"))
        keys, values = (jnp.concatenate([jnp.roll(x, k, 1) for k in (-1, 0, 1)], 2) for x in (key, value))
        scores = jnp.einsum("bnqhd,bnkhd->bnhqk", query, keys) * (hidden // heads) ** -0.5
        mixed = jnp.einsum("bnhqk,bnkhd->bnqhd", jax.nn.softmax(scores), values)
        return jnp.mean((mixed.reshape(data["x"].shape) @ params["out"]["weight"]) ** 2)

    params = {name: {"weight": f32(hidden, hidden)} for name in ("query", "key", "value", "out")}
    return Model("blocked attention", loss, params, {"x": f32(batch, blocks * size, hidden)}, {"x": 0})


def nas_cell(*, steps: int = 8, width: int = 512, batch: int = 512) -> Model:
    """A recurrent cell as architecture search found it: eight products of input and state, combined pairwise."""
    pairs = (jax.nn.sigmoid, jax.nn.relu, jax.nn.sigmoid, jnp.tanh, jax.nn.relu, jax.nn.sigmoid, jnp.tanh, jax.nn.sigmoid)

    def loss(params: Tree, data: Tree) -> jax.Array:
        h = data["h"]
        for t in range(steps):
            parts = [f(data["x"][t] @ p["in"]["weight"] + h @ p["state"]["weight"]) for f, p in zip(pairs, params, strict=True)]
            first = [jnp.tanh(parts[k] * parts[k + 1]) if k % 4 else parts[k] + parts[k + 1] for k in range(0, 8, 2)]
            h = jnp.tanh(jax.nn.sigmoid(first[0] + first[1]) * jnp.tanh(first[2] * first[3]))
        return jnp.mean(h**2)

    params = [{"in": {"weight": f32(width, width)}, "state": {"weight": f32(width, width)}} for _ in pairs]
    return Model("nas cell", loss, params, {"x": f32(steps, batch, width), "h": f32(batch, width)}, {"x": 0, "h": 0})


Case = tuple[Callable[..., Any], tuple[Any, ...], Callable[[], Any]]
"""A loss, its abstract arguments, and a function of none that draws real ones."""

TABLES = (1_000_000,) * 8
OWN: dict[str, Callable[[], Model]] = {
    "bert_unity": lambda: attention_stack(layers=4),
    "bert_large, 4 layers": lambda: bert(layers=4),
    "blocked attention": blocked_attention,
    "gpt2 small, 4 layers, bfloat16": lambda: gpt(layers=4, batch=8, compute="bfloat16"),
    "dlrm": lambda: dlrm(tables=TABLES, width=64, bottom=(16, 512, 256, 64), top=(1024, 512, 8), batch=2048),
    "xdl": xdl,
    "nas cell": nas_cell,
    "lstm, 8 steps unrolled": lambda: rnnlm_unrolled(steps=8, hidden=1024, vocab=4096, batch=128),
    "lstm, scanned": lambda: rnnlm(steps=20, hidden=1024, vocab=4096, batch=128),
    "inception_v3": lambda: inception_v3(batch=32),
    "resnext50": lambda: resnet(batch=32, groups=32, group_width=4),
    "squeezenet": squeezenet,
    "mixtral, 1 layer": lambda: mixtral(layers=1, hidden=1024, heads=16, feed_forward=3584, seq=1024, batch=8),
    "llama3_8b, 1 layer": lambda: llama(layers=1, vocab=32000, seq=2048, batch=2),
    "vit_large, 4 layers": lambda: vit(layers=4, batch=64),
    "nmt, scanned": nmt,
    "candle_uno": candle_uno,
}
PACKAGED = {
    f"{case.package}: {case.name}": case
    for case in packages.MODELS
    if case.name not in ("VGG16", "Llama-7B", "GPT-2", "RoBERTa") and find_spec(case.package.replace("-", "_"))
}
CASES = (*OWN, *PACKAGED)


def case_of(name: str) -> Case:
    """Return a case by its name."""
    if name in OWN:
        model = OWN[name]()
        return model.loss, (model.params, model.batch), lambda: concrete(model)
    fn, args = PACKAGED[name].build()

    def loss(*args: Any) -> jax.Array:
        value = fn(*args)
        return value[0] if isinstance(value, tuple) else value

    return loss, args, lambda: drawn(args)


def drawn(args: Any) -> Any:
    """Return arrays for abstract arguments: positive numbers, since some are variances, and indices that any table has."""
    rng = np.random.default_rng(0)

    def array(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.uniform(0.01, 0.05, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.integers(2, size=leaf.shape), leaf.dtype)

    return jax.tree.map(array, args)


def plan_of(name: str, path: Path) -> unity.Plan:
    """Return a case's plan, from its file where there is one."""
    loss, args, _ = case_of(name)
    if not path.exists():
        machine = unity.Machine.grid(1, 1, "h200")
        unity.optimize(loss, *args, machine=machine, seconds=BUDGET, progress=False).files.save(path)
    return unity.load(path, loss, *args)


def compiled(step: Callable[..., Any], args: Any) -> Any:
    """Compile for the GPU that JAX has, or for one that is not there."""
    if jax.default_backend() != "gpu":
        from benchmarks.absent_gpus import described

        placed = jax.sharding.SingleDeviceSharding(described(1)[0])
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), args)
    return jax.jit(step).lower(*args).compile()


def figures(program: Any) -> dict[str, float]:
    """Return a compiled program's flops and bytes accessed, and the number of its kernels."""
    cost, lines = program.cost_analysis(), program.as_text().splitlines()
    entry = next(k for k, line in enumerate(lines) if line.startswith("ENTRY"))
    return {
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "kernels": sum(KERNEL.match(line) is not None for line in lines[entry:]),
    }


def applied(plan: unity.Plan) -> str:
    """Return the rules that rewrote a plan's program, and how often."""
    return ", ".join(f"{times} × {rule}" for rule, times in plan.program.rewriting.applied) if plan.program.rewriting else ""


def case(name: str, plan: unity.Plan) -> dict[str, Any]:
    """Return one model's figures; ratios are the function's over the rewritten program's, so above 1 is a gain."""
    loss, args, real_args = case_of(name)
    row: dict[str, Any] = {
        "case": name,
        "predicted": 1.0,
        "search s": plan.inspect.search_seconds,
        "applied": applied(plan),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
    }
    if not applied(plan):
        return row
    captured = unity.optimize(loss, *args, machine=plan.inspect.machine, search="captured", progress=False)
    row["predicted"] = captured.time / plan.time
    real = real_args() if jax.default_backend() == "gpu" else args
    steps = {"function": jax.value_and_grad(loss), "rewritten": jax.value_and_grad(plan)}
    with ThreadPoolExecutor() as pool:
        programs = dict(zip(steps, pool.map(lambda step: compiled(step, real), steps.values()), strict=True))
    before, after = (figures(programs[which]) for which in steps)
    row |= {what: before[what] / after[what] for what in before}
    row |= {"kernels before": before["kernels"], "kernels after": after["kernels"]}
    row["real"] = row["bytes"] > 1
    if jax.default_backend() == "gpu":
        times = alternate({which: lambda program=program: program(*real) for which, program in programs.items()}, ROUNDS)
        row |= {"ms before": times["function"].median * 1e3, "ms after": times["rewritten"].median * 1e3}
        row |= {"ran": ratio(times["function"], times["rewritten"])["ratio"]}
        row["real"] = row["ran"] > 1
    return row


def mean(rows: list[dict[str, Any]], column: str) -> dict[str, float]:
    """Return the geometric mean of a ratio, and the number of models: those that have it, and those not rewritten, whose is 1."""
    ratios = [row.get(column, 1.0) for row in rows if column in row or not row["applied"]]
    return {"ratio": prod(ratios) ** (1 / max(1, len(ratios))), "models": len(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="some of the cases")
    parser.add_argument("--plans", type=Path, help="a folder in which plans are kept")
    parser.add_argument("--search", action="store_true", help="make the plans, and nothing else")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    names = options.cases or list(CASES)
    rows = {row["case"]: row for row in results("algebra")["rows"]}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        folder = options.plans or Path(cache)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            plan = plan_of(name, folder / f"{name.replace('/', ' ')}.json")
            print(f"{name}: {plan.time * 1e3:.3g} ms, {plan.inspect.search_seconds:.0f} s, {applied(plan)}", flush=True)
            if options.search:
                continue
            rows[name] = case(name, plan)
            recorded = [rows[known] for known in CASES if known in rows]
            record("algebra", recorded, means={column: mean(recorded, column) for column in ("predicted", "bytes", "ran")})
            print({k: v for k, v in rows[name].items() if k != "applied"}, flush=True)
    if not options.search:
        show("the function over the rewritten program", [{k: v for k, v in row.items() if k != "applied"} for row in rows.values()])


if __name__ == "__main__":
    main()
