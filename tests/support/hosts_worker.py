"""What each of several processes runs for tests/exec/test_hosts.py: `hosts_worker.py NAME ADDRESS PROCESSES PROCESS`.

Prints what happened as JSON, in its last line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import unity
from benchmarks import forked_layers
from benchmarks.processes import join
from unity.exec.hosts.arrays import place_parts
from unity.exec.measure import collective_curves as curves
from unity.exec.measure import machine as measure
from unity.exec.measure import trial

TABLE = np.linspace(-1, 1, 16, dtype=np.float32)  # closed over


def loss(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b"]) * jnp.asarray(TABLE)
    noise = jax.random.normal(batch["key"], hidden.shape) * batch["scale"]
    return (((hidden + noise) @ params["w2"] - batch["y"]) ** 2).mean()


def arguments(rows: int = 16) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(8, 16)), "b": rng.normal(size=16), "w2": rng.normal(size=(16, 4))}
    batch = {"x": rng.normal(size=(rows, 8)), "y": rng.normal(size=(rows, 4)), "scale": np.float32(0.1)}
    batch = jax.tree.map(lambda x: x.astype(np.float32), batch)
    return jax.tree.map(lambda x: x.astype(np.float32), params), batch | {"key": jax.random.key(3)}


def machine() -> unity.Machine:
    """Devices so slow that it pays to split small products, too."""
    device = unity.Device("slow", {"float32": 1e7}, 2**30, 1e7, 1.0, 0.0)
    return unity.Machine.grid(jax.process_count(), jax.local_device_count(), device, intra=(1e9, 1e-7), inter=(5e8, 1e-7))


def planned(**options: Any) -> unity.Plan:
    return unity.optimize(loss, *arguments(), machine=machine(), progress=False, **options)


def own(x: Any) -> Any:
    """This process's rows."""
    rows = len(x) // jax.process_count()
    return x[jax.process_index() * rows :][:rows]


def split(batch: Any) -> Any:
    return {**batch, "x": own(batch["x"]), "y": own(batch["y"])}


def said(call: Callable[[], Any]) -> str:
    """The error that a call ends with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def whole(tree: Any) -> Any:
    """Global arrays as lists, the same in all processes."""
    from jax.experimental import multihost_utils

    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)).tolist(), tree)


def values() -> dict[str, Any]:
    """One function in all ways to give it its arguments."""
    plan, (params, batch) = planned(), arguments()
    alone = jax.value_and_grad(loss)(params, batch)
    step = jax.jit(jax.value_and_grad(plan))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bare = float(plan(params, batch))
    placed = plan.shard(params, batch)
    local = plan.shard.local(split(batch))
    return {
        "alone": jax.tree.map(lambda x: np.asarray(x).tolist(), alone),
        "bare": bare,
        "warned": [str(w.message) for w in caught],
        "jitted": float(jax.jit(plan)(params, batch)),
        "whole": whole(step(*placed)),
        "parts": whole(step(placed[0], local)),
        "again": float(plan(*plan.shard(*placed))),
        "closing": float(closing(False)(np.ones((300, 300), np.float32))),
        "agrees": plan.check().agrees(),
        "specs": [str(s.spec) for s in jax.tree.leaves(plan.in_shardings[1])],
        "crossing": [
            sorted({d.process_index for d in row.flat}) for row in plan.inspect.mesh.devices.reshape(jax.process_count(), -1)
        ],
    }


def sent() -> list[bool]:
    """Rows that are wanted where they are not: in every process, or in another one."""
    mesh = planned().inspect.mesh
    (host, *inner), x = mesh.axis_names, np.arange(16.0 * 4, dtype=np.float32).reshape(16, 4)
    specs = [P(None, host), P((*inner, host)), P(), P(host), P((host, *inner)), P(inner[0])]
    placed = [place_parts([own(x)], [x.shape], [NamedSharding(mesh, spec)], ["x"], True)[0] for spec in specs]
    kept = [a.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2) for a, spec in zip(placed, specs, strict=True)]
    return [k and np.array_equal(whole(a), x) for k, a in zip(kept, placed, strict=True)]


def wrong() -> dict[str, str]:
    """What is said where the second process does something else, or all do what they cannot."""
    plan, (params, batch), odd = planned(), arguments(), jax.process_index() == 1
    flat, fewer = unity.Machine.grid(1, jax.device_count(), "a100"), unity.Machine.grid(1, 1, "a100")
    seeds = jax.tree.map(lambda x: x + odd, params)
    rows = {**split(batch), "x": own(batch["x"])[: 3 if odd else 8]}
    version = jax.__version__
    found = {
        "plan": said(lambda: min(planned().frontier, key=lambda p: p.memory if odd else p.time).inspect.mesh),
        "function": said(
            lambda: unity.optimize(loss, *arguments(32 if odd else 16), machine=machine(), progress=False).inspect.mesh
        ),
        "closed over": said(lambda: closing(odd).inspect.mesh),
        "flat": said(lambda: unity.optimize(loss, *arguments(), machine=flat, progress=False).inspect.mesh),
        "fewer": said(lambda: unity.optimize(loss, *arguments(), machine=fewer, progress=False).inspect.mesh),
        "seeds": said(lambda: planned().shard(seeds)),
        "unplaced": said(lambda: planned()(seeds, batch)),
        "part as whole": said(lambda: planned().shard(params, split(batch))),
        "rows": said(lambda: plan.shard.local(rows)),
        "argument": said(lambda: plan.shard.local(rows, argument=2)),
        "seconds": said(lambda: unity.optimize(loss, params, batch, seconds=1.0, progress=False)),
    }
    jax.__version__ = "0.0.1" if odd else version
    found["version"] = said(lambda: planned().inspect.mesh)
    found["version, local"] = said(unity.Machine.local)
    jax.__version__ = version
    return found | {
        "afterwards": said(lambda: planned().shard(params)),
        "own devices": said(lambda: alone(seeds, {**batch, "x": batch["x"] + odd})),
    }


def alone(params: Any, batch: Any) -> None:
    """Arguments that every process draws for itself, for its own devices: nothing is shared, so nothing is compared."""
    device = machine().device
    here = unity.Machine.grid(1, jax.local_device_count(), device, intra=(1e9, 1e-7), inter=(5e8, 1e-7))
    plan = unity.optimize(loss, params, batch, machine=here, progress=False).on(jax.local_devices())
    wanted = loss(params, batch)
    found = [plan(*plan.shard(params, batch)), plan(params, batch), plan(plan.shard(params), plan.shard.local(batch))]
    np.testing.assert_allclose(found, [wanted] * 3, rtol=1e-5)


def closing(odd: bool) -> unity.Plan:
    """A plan that takes what its function closes over as an argument, because it is large."""
    table = jnp.ones((300, 300)) * jnp.arange(300.0) + odd
    return unity.optimize(lambda w: (w * table).sum(), np.ones((300, 300), np.float32), machine=machine(), progress=False)


def uneven() -> dict[str, str]:
    """What is said where processes have different numbers of devices."""
    with_given = unity.Machine.grid(1, jax.device_count(), "a100")
    plan = unity.optimize(loss, *arguments(), machine=with_given, progress=False)
    return {"mesh": said(lambda: plan.inspect.mesh), "local": said(unity.Machine.local)}


def measured() -> dict[str, Any]:
    """The machine and the plan that come from measuring, where the second process's clock is wrong, and its cache then lost."""
    os.environ["XDG_CACHE_HOME"] += f"/{jax.process_index()}"
    if jax.process_index() == 1:
        clock, noise = time.perf_counter, np.random.default_rng(0)
        time.perf_counter = lambda: 3 * clock()
        trial.time = SimpleNamespace(perf_counter=noise.random)
    curves.COLLECTIVES = {(kind, turned): ways[:1] for (kind, turned), ways in curves.COLLECTIVES.items() if not turned}
    measure.curves = partial(measure.curves, sizes=(1 << 13,), rounds=1)
    here = unity.Machine.local()
    plans = []
    for _ in range(3):
        plans.append(unity.optimize(loss, *arguments(), measure=True, progress=False))
        if len(plans) == 2 and jax.process_index() == 1:
            shutil.rmtree(os.environ["XDG_CACHE_HOME"])
    fewest = unity.optimize(loss, *arguments(), objective="devices", progress=False)
    return {
        "machine": here.to_json(),
        "fewest": [fewest.inspect.machine.devices, said(lambda: fewest.inspect.mesh)],
        "again": unity.Machine.local() == here,
        "plans": [p.program.pcg.key for p in plans],
        "tried": [[t.measured for t in p.inspect.tried] for p in plans],
    }


def trained() -> dict[str, Any]:
    """Losses of some steps in float64, planned and on one device."""
    jax.config.update("jax_enable_x64", True)
    params, batch = jax.tree.map(lambda x: x.astype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else x, arguments())
    plan = unity.optimize(loss, params, batch, machine=machine(), progress=False)

    def losses(fn: Any, params: Any, batch: Any) -> list[float]:
        @jax.jit
        def step(params: Any, batch: Any) -> Any:
            value, gradient = jax.value_and_grad(fn)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

        found = []
        for _ in range(5):
            params, value = step(params, batch)
            found.append(float(value))
        return found

    together = losses(plan, plan.shard(params), plan.shard.local(split(batch)))
    alone = losses(loss, params, batch) if jax.process_index() == 0 else []
    return {"alone": alone, "together": together, "specs": [str(s.spec) for s in jax.tree.leaves(plan.in_shardings)]}


def both() -> dict[str, Any]:
    """Losses of some steps in float64 with a pipeline, branches on devices of their own and their weights packed, and alone."""
    jax.config.update("jax_enable_x64", True)
    weights = forked_layers.weights(np.float64)
    plan = forked_layers.planned(machine(), np.float64, pack=True)
    assert plan.program.branching is not None
    params = plan.shard(weights)
    parts = plan.shard.local(jax.tree.map(own, weights), argument=0)
    wholes = plan.shard.local(weights, argument=0)
    losses, after = forked_layers.losses(plan, parts, lambda b: plan.shard.local(jax.tree.map(own, b)), 5)
    alone, wanted = forked_layers.losses(forked_layers.loss, weights, lambda b: b, 5)  # in every process
    found = whole(plan.shard.unpack(after))
    back = plan.shard.state(plan.shard.unpack({"moments": (params,), "count": 3}))
    return {
        "branching": str(plan.program.branching),
        "pipelining": str(plan.program.pipelining),
        "together": losses,
        "alone": alone,
        "weights": max(float(np.abs(np.asarray(found[name]) - x).max()) for name, x in wanted.items()),
        "parts": whole(parts) == whole(wholes) == whole(params) == whole(back["moments"][0]),
        "unpacked": whole(plan.shard.unpack(params)) == jax.tree.map(lambda x: x.tolist(), weights),
        "placed": all(jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y.sharding, back["moments"][0], params))),
        "half": said(lambda: plan.shard.local({**weights, "u1": weights["u1"][:3]}, argument=0)),
    }


def main() -> None:
    join()
    print(json.dumps({name: globals()[name]() for name in sys.argv[1].split(",")}))


if __name__ == "__main__":
    main()
