"""Unity's plans against strategies written by hand: bytes sent, memory of a device, and the time of a step.

`python -m benchmarks.handwritten`. A step is the loss and all gradients, which lie where the parameters lie. Programs are compiled
for eight virtual CPU devices.

*Sent* bytes are read from the compiled program: for each collective what one device sends in a ring, of n bytes over k devices
2n(k-1)/k for an all-reduce, n(k-1)/k for an all-gather, a reduce-scatter or an all-to-all (n: of the full side). The *full sides*
alone, which is what a fused all-reduce and a reduce-scatter with an all-gather differ in, are given beside them. *Memory* is
arguments, results and temporaries of XLA's buffer assignment, without the CPU backend's two passes that keep what need not be kept
(`unity.exec.planned_step`). *Times* are of the program as XLA compiles it by default; the devices share the host's cores.

Plans are compared with the best of the hand-written strategies for the same objective: the fastest with the fastest, the leanest
with the leanest, and the fastest that takes no more memory than a strategy with that strategy. A plan for a preset is compiled at a
size that fits the preset, and not run.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

import unity
from benchmarks.alternate import Times, alternate, ratio
from benchmarks.baselines import (
    Contender,
    data_parallel,
    fsdp,
    fsdp_by_hand,
    gpt_block,
    megatron,
    megatron_by_hand,
    mesh_of,
)
from benchmarks.models import concrete
from benchmarks.models.mlp import mlp
from benchmarks.models.model import Model
from benchmarks.record import record, show
from unity.exec.compiled.hlo import CompiledCollective, collectives, memory
from unity.exec.planned_step import compiler_options
from unity.plan.plan import Plan
from unity.search.simulator import topology

DEVICES = 8
TIME = 1.05  # target: of the best by hand
ROUNDED = 1.02  # bytes and memory: what alignment and scalars may add


@dataclass(frozen=True)
class Case:
    """A model on a machine; `run`: it is small enough to be timed here."""

    model: Model
    heads: int
    machine: Callable[[], unity.Machine]
    run: bool

    @cached_property
    def by_hand(self) -> list[Contender]:
        """The hand-written strategies."""
        model, mesh = self.model, mesh_of(DEVICES)
        return [
            data_parallel(model, mesh),
            fsdp(model, mesh),
            fsdp_by_hand(model, mesh, self.heads),
            fsdp_by_hand(model, mesh, self.heads, again=True),
            megatron(model, mesh),
            megatron_by_hand(model, mesh, self.heads),
        ]


def _a100() -> unity.Machine:
    return unity.Machine.grid(1, DEVICES, "a100")


CASES = {
    "mlp, here": lambda: Case(mlp(layers=4, width=512, batch=512), 0, unity.Machine.local, True),
    "gpt block, here": lambda: Case(gpt_block(256, 8, 64, 16), 8, unity.Machine.local, True),
    "mlp, a100": lambda: Case(mlp(layers=4, width=8192, batch=8192), 0, _a100, False),
    "gpt block, a100": lambda: Case(gpt_block(4096, 32, 2048, 16), 32, _a100, False),
}


def sent(found: list[CompiledCollective]) -> float:
    """Bytes that one device sends in one step, in rings."""
    return sum(c.count * topology.bytes_sent(c.kind, len(c.groups[0]), c.nbytes) for c in found)


@dataclass(frozen=True)
class Program:
    """A compiled step: what it sends, and what it holds."""

    contender: Contender
    sent: float
    full: float
    memory: int
    kinds: Mapping[str, int]


def program(contender: Contender, model: Model) -> Program:
    """Compiles a step."""
    compiled = contender.step.lower(*contender.abstract(model)).compile(compiler_options=compiler_options())
    found = collectives(compiled.as_text())
    kinds: dict[str, int] = {}
    for c in found:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.count * c.nbytes
    return Program(contender, sent(found), sum(kinds.values()), memory(compiled).total, kinds)


def contender_of(plan: Plan, name: str) -> Contender:
    """A plan as a contender. Gradients lie as parameters do, without being told."""
    return Contender(name, jax.jit(jax.value_and_grad(plan)), plan.in_shardings)


def within(plan: Plan, limit: float, model: Model, known: dict[int, Program]) -> Program | None:
    """The fastest point of the frontier whose program holds at most `limit` bytes (memory falls along the frontier)."""

    def at(k: int) -> Program:
        if k not in known:
            known[k] = program(contender_of(plan.frontier[k], f"unity, point {k}"), model)
        return known[k]

    low, high = 0, len(plan.frontier) - 1
    if at(high).memory > limit:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle).memory <= limit else (middle + 1, high)
    return at(high)


def rows_of(name: str, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every strategy's figures, and the comparisons."""
    case = CASES[name]()
    model = case.model
    by_hand = [program(c, model) for c in case.by_hand]
    plan = unity.optimize(model.loss, model.params, model.batch, machine=case.machine(), progress=False)
    known: dict[int, Program] = {}
    fastest = known[0] = program(contender_of(plan.frontier[0], "unity, point 0"), model)
    last = len(plan.frontier) - 1
    leanest = known[last] = program(contender_of(plan.frontier[last], f"unity, point {last}"), model)
    matched = [(p, within(plan, p.memory, model, known)) for p in by_hand]
    chosen = {id(p): p for p in [fastest, leanest, *(q for _, q in matched if q is not None)]}
    programs = [*by_hand, *chosen.values()]
    times = _timed(programs, model, rounds) if case.run else {}

    def compared(objective: str, of: Program, to: Program) -> dict[str, Any]:
        row = {
            "model": name,
            "objective": objective,
            "by hand": to.contender.name,
            "unity": of.contender.name,
            "sent": of.sent / to.sent if to.sent else (0.0 if not of.sent else float("inf")),
            "memory": of.memory / to.memory,
        }
        if times:
            row |= {f"time {k}": v for k, v in ratio(times[of.contender.name], times[to.contender.name]).items()}
        return row

    def best(key: Callable[[Program], float]) -> Program:
        return min(by_hand, key=key)

    comparisons = [compared("least bytes", fastest, best(lambda p: p.sent))]
    if times:
        comparisons.append(compared("time", fastest, best(lambda p: times[p.contender.name].median)))
    comparisons.append(compared("memory", leanest, best(lambda p: p.memory)))
    comparisons += [compared("time within its memory", q, p) for p, q in matched if q is not None]
    figures = [
        {
            "model": name,
            "strategy": p.contender.name,
            "sent MB": p.sent / 1e6,
            "full sides MB": p.full / 1e6,
            "memory MB": p.memory / 1e6,
            "ms": times[p.contender.name].median * 1e3 if times else None,
            "kinds": p.kinds,
        }
        for p in programs
    ]
    return figures, comparisons


def _timed(programs: list[Program], model: Model, rounds: int) -> dict[str, Times]:
    params, batch = concrete(model)
    runs = {}
    for p in programs:
        c = p.contender
        args = tuple(jax.tree.map(jax.device_put, x, s) for x, s in zip((params, batch), c.shardings, strict=True))
        compiled = c.step.lower(*args).compile()
        runs[c.name] = lambda compiled=compiled, args=args: compiled(*args)
    return alternate(runs, rounds)


def main(rounds: int = 25) -> None:
    figures, comparisons = [], []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # this version's own plans, and the machine as it is today
        for name in CASES:
            one, other = rows_of(name, rounds)
            figures += one
            comparisons += other
    show("one step on one device", [{k: v for k, v in row.items() if k != "kinds"} for row in figures])
    show("unity / by hand", comparisons)
    record("handwritten", comparisons, strategies=figures, targets={"time": TIME, "bytes and memory": ROUNDED})


if __name__ == "__main__":
    main()
