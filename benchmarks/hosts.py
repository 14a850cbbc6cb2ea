"""Several hosts: the losses of a small GPT as several processes, as one process with as many devices, and as one device; and what
happens when a process is killed in the middle of a training. `together`: two towers on devices of their own, their weights packed,
and after them layers in stages, all in one plan.

`python -m benchmarks.hosts`; `losses`, `together` or `killed` runs one of them and records nothing. Processes are on this machine
and meet over loopback (`benchmarks/processes.py`). `measured` is what `Machine.local()` says of them, measured by all together.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import unity
from benchmarks import forked_layers
from benchmarks.descent import step_of
from benchmarks.models import concrete
from benchmarks.models.gpt import gpt
from benchmarks.processes import Ended, ended, join, start
from benchmarks.record import asked, record, show

STEPS, RATE = 50, 0.1
LAYOUTS = ((1,), (4,), (2, 2), (8,), (2, 2, 2, 2))  # devices of each process
KILLED, HEARTBEAT = 12, 10  # the step after which one process is killed; seconds until the runtime counts it as dead
DEVICE = unity.Device("processor", {"float32": 1e9}, 2**32, 1e9, 1.0, 1e-6)  # slow, so that it pays to split a small model
SECONDS = 1200


def model() -> tuple[Any, Any, Any]:
    found = gpt(layers=2, hidden=64, heads=4, vocab=96, seq=32, batch=16)
    params, batch = concrete(found)
    return found.loss, params, batch


def worker() -> None:
    """Trains as one of several processes. Prints losses as JSON; with a folder, saves after every step and says so."""
    folder = Path(sys.argv[2]) if sys.argv[2] else None
    join(HEARTBEAT)
    loss, params, batch = model()
    nodes, devices = jax.process_count(), jax.local_device_count()
    machine = unity.Machine.grid(nodes, devices, DEVICE, intra=(1e9, 1e-6), inter=(2e8, 1e-5))
    plan = unity.optimize(loss, params, batch, machine=machine, progress=False)

    step = step_of(plan, RATE)
    params, losses, seconds = plan.shard(params), [], []
    rows = 16 // nodes
    for k in range(STEPS):
        part = {name: np.roll(x, k, axis=0)[jax.process_index() * rows :][:rows] for name, x in batch.items()}
        started = time.perf_counter()
        params, value = step(params, plan.shard.local(part))
        losses.append(float(value))
        seconds.append(time.perf_counter() - started)
        if folder is not None:
            save(folder / f"step-{k}", params)
            print(f"saved {k}", flush=True)
    split = sum(any(s.spec) for s in jax.tree.leaves(plan.in_shardings[0]))
    print(
        json.dumps({"losses": losses, "seconds": float(np.median(seconds)), "weights split": split, "plan": plan.program.pcg.key})
    )


def together_worker() -> None:
    """Trains with branches and a pipeline in one plan, as one of several processes; one device trains without a plan."""
    join()
    if jax.device_count() == 1:
        found, _ = forked_layers.losses(forked_layers.loss, forked_layers.weights(), lambda b: b, STEPS)
        return print(json.dumps({"losses": found}))
    count, index = jax.process_count(), jax.process_index()
    nodes, rows = max(2, count), forked_layers.ROWS // count
    machine = unity.Machine.grid(nodes, jax.device_count() // nodes, DEVICE, intra=(1e9, 1e-6), inter=(2e8, 1e-5))
    plan = forked_layers.planned(machine, pipeline=unity.PipelineShape(2, 8), pack=True)

    def place(batch: Any) -> Any:
        return plan.shard.local({name: x[index * rows :][:rows] for name, x in batch.items()})

    found, _ = forked_layers.losses(plan, plan.shard(forked_layers.weights()), place, STEPS)
    print(json.dumps({"losses": found, "branching": str(plan.program.branching), "pipelining": str(plan.program.pipelining)}))


def together() -> list[dict[str, Any]]:
    """Rows: one for each layout, with the largest relative difference of any loss from one device's, which has no plan."""
    rows, alone = [], np.zeros(STEPS)
    for devices in ((1,), (8,), (4, 4), (2, 2, 2, 2)):
        with tempfile.TemporaryDirectory() as cache:
            found = [said(one) for one in ended(start(["-m", "benchmarks.hosts", "both"], devices, Path(cache)), SECONDS)]
        assert all(one == found[0] for one in found), "processes have different losses, or plans"
        values = np.array(found[0].pop("losses"))
        alone = values if devices == (1,) else alone
        rows.append({
            "case": "together", "processes": len(devices), "devices of each": devices[0], "steps": STEPS, **found[0],
            "first loss": float(values[0]), "last loss": float(values[-1]),
            "largest relative difference": float(np.abs(values / alone - 1).max()),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def save(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def run(devices: Sequence[int], folder: str = "") -> tuple[list[Any], tempfile.TemporaryDirectory[str]]:
    cache = tempfile.TemporaryDirectory()
    return start(["-m", "benchmarks.hosts", "worker", folder], devices, Path(cache.name)), cache


def losses() -> list[dict[str, Any]]:
    """Rows: one for each layout, with the largest relative difference of any loss from one device's."""
    rows, alone = [], np.zeros(STEPS)
    for devices in LAYOUTS:
        processes, cache = run(devices)
        with cache:
            found = [said(one) for one in ended(processes, SECONDS)]
        assert all(one["losses"] == found[0]["losses"] for one in found), "processes have different losses"
        together = np.array(found[0]["losses"])
        alone = together if devices == (1,) else alone
        off = np.abs(together / alone - 1).max()
        rows.append({
            "case": "losses", "processes": len(devices), "devices of each": devices[0], "steps": STEPS,
            "first loss": float(together[0]), "last loss": float(together[-1]), "largest relative difference": float(off),
            "weights split": found[0]["weights split"], "ms a step": 1e3 * found[0]["seconds"],
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def said(one: Ended) -> dict[str, Any]:
    assert one.code == 0, one.err
    return json.loads(one.out.splitlines()[-1])


def killed() -> list[dict[str, Any]]:
    """The second of two processes is killed after a step; the first must end with an error, and what was saved be whole."""
    import orbax.checkpoint as ocp

    with tempfile.TemporaryDirectory() as folder:
        processes, cache = run((2, 2), folder)
        with cache:
            for line in processes[1].stdout:
                if line.startswith(f"saved {KILLED}"):
                    break
            processes[1].kill()
            began = time.monotonic()
            first, _ = ended(processes, SECONDS)
            seconds = time.monotonic() - began
        assert first.code != 0, "the other process went on alone"
        last = max(int(m[1]) for m in re.finditer(r"^saved (\d+)$", first.out, re.MULTILINE))
        wanted, here = undisturbed(last), SingleDeviceSharding(jax.devices()[0])
        with ocp.StandardCheckpointer() as checkpointer:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), wanted)
            kept = checkpointer.restore(Path(folder) / f"step-{last}", shapes)
        off = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), kept, wanted)
        unfinished = [p.name for p in Path(folder).iterdir() if not re.fullmatch(r"step-\d+", p.name)]
    error = next((line for line in first.err.splitlines() if "Error" in line or "error" in line), "")
    return [{
        "case": "killed", "processes": 2, "devices of each": 2, "killed after step": KILLED, "heartbeat, s": HEARTBEAT,
        "the other ended after, s": seconds, "exit code": first.code, "last checkpoint": last,
        "largest relative difference of its weights": float(max(jax.tree.leaves(off))),
        "unfinished": ", ".join(unfinished), "error": error[:300],
    }]  # fmt: skip


def undisturbed(last: int) -> Any:
    """The weights after a step of the same training, on one device."""
    loss, params, batch = model()
    step = step_of(loss, RATE)
    for k in range(last + 1):
        params, _ = step(params, {name: np.roll(x, k, axis=0) for name, x in batch.items()})
    return jax.device_get(params)


def measured() -> list[dict[str, Any]]:
    """What two processes measure of themselves, which must be the same in both."""
    cache = tempfile.TemporaryDirectory()
    with cache:
        started = time.monotonic()
        found = ended(start(["-m", "benchmarks.hosts", "local"], (2, 2), Path(cache.name)), SECONDS)
    assert all(one.code == 0 for one in found), "\n".join(one.err for one in found)
    assert len({one.out.splitlines()[-1] for one in found}) == 1, "processes have different machines"
    return [{"case": "measured", "processes": 2, "devices of each": 2, "seconds": time.monotonic() - started,
             "machine": found[0].out.splitlines()[-1]}]  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        return worker()
    if sys.argv[1:2] == ["both"]:
        return together_worker()
    if sys.argv[1:2] == ["local"]:
        join()
        return print(unity.Machine.local())
    cases = {"losses": losses, "together": together, "killed": killed, "measured": measured}
    chosen, everything = asked(__doc__, cases)
    rows = [row for name in chosen for row in cases[name]()]
    for name in chosen:
        show(name, [row for row in rows if row["case"] == name])
    if everything:
        record("hosts", rows)


if __name__ == "__main__":
    main()
