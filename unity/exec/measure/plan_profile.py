"""Measurement of the operators of a plan, or of a search's domains, that are not in a profile yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from unity.exec.measure.operator_programs import LocalOperator
from unity.exec.measure.operators import CompiledOperator, Timing, measure, traced
from unity.machine.machine import Machine
from unity.machine.profiles.profile import Content, Measurement, Profile, Where
from unity.machine.profiles.store import Store
from unity.pcg.ir.gradient_flow import Gradients, gradients, with_gradient
from unity.pcg.ir.graph import PARALLELIZATION, PCG
from unity.search.cost.assembly import Assembled
from unity.search.cost.operator_seconds import single_piece
from unity.search.cost.prediction import work_share
from unity.search.cost.profile_lookup import kind_of
from unity.search.cost.roofline import dense_work
from unity.search.space.configurations import work_shares

ROOM = 8  # memory of a program that measures an operator, in multiples of the operator's bytes

# Raised where memory does not suffice, or the backend lacks an operation.
UNABLE = (jax.errors.JaxRuntimeError, NotImplementedError)

Tasks = dict[Content, "MeasurementTask"]  # operators to measure, equal ones once


@dataclass(frozen=True, eq=False)
class MeasurementTask:
    """An operator to measure, and the share of its work that one device does."""

    operator: LocalOperator
    share: float

    @property
    def content(self) -> Content:
        """The key of the measurement: program, local shapes, and which operands have gradients."""
        return self.operator.body.key, self.operator.shapes, self.operator.differentiated

    @property
    def nbytes(self) -> float:
        """Bytes of the operands and results on one device."""
        body = self.operator.body
        atoms = (*body.inputs, *body.outputs)
        return sum(prod(shape) * body.tensor(a).itemsize for a, shape in zip(atoms, self.operator.shapes, strict=True))

    @property
    def traffic(self) -> tuple[float, float]:
        """Bytes read or written on one device, and bytes of gradients that are zeroed there."""
        operator = self.operator
        piece = single_piece(operator.body, operator.shapes, self.share, operator.differentiated)
        return float(piece.touched[0]), float(piece.zeroed[0])


def tasks_of_graph(graph: PCG, differentiated: Collection[int]) -> Tasks:
    """Return the operators of a parallel graph."""
    return {t.content: t for t in _of_graph(graph, gradients(graph, differentiated))}


def _of_graph(graph: PCG, flow: Gradients) -> Iterator[MeasurementTask]:
    for node in graph.nodes:
        if node.inside is not None:
            yield from _of_graph(node.inside, flow)
        elif node.body is not None and node.body.equations and node.kind not in PARALLELIZATION:
            types = tuple(v.type for v in node.operands)
            operator = LocalOperator(node.body, types, node.types, with_gradient(node, flow), graph.axes)
            yield MeasurementTask(operator, work_share(node, node.body, graph))


def tasks_of_domains(assembled: Assembled, every: bool = False) -> Tasks:
    """Return the operators of a search's domains, split in one way along all axes, as by data parallelism, or in `every` way."""
    tasks: Tasks = {}
    visited: set[int] = set()
    for site, domain in zip(assembled.opened.sites, assembled.domains, strict=True):
        body = site.node.body if site.node is not None else None
        if body is None or not body.equations or id(domain) in visited:
            continue
        visited.add(id(domain))
        flows = assembled.training.backward and any(site.flows)
        flags, n = tuple(bool(flows and p.gradient) for p in site.ports), len(site.ports)
        shares = work_shares(domain.choices, domain.picks, assembled.machine.axes)
        chosen = np.arange(len(domain)) if every else np.flatnonzero((domain.picks == domain.picks[:, :1]).all(axis=1))
        for value in chosen.tolist():
            types = [domain.type_of(value, k) for k in range(n + len(site.results))]
            operator = LocalOperator(body, tuple(types[:n]), tuple(types[n:]), flags, assembled.machine.axes)
            task = MeasurementTask(operator, float(shares[value]))
            tasks.setdefault(task.content, task)
    return tasks


def missing(tasks: Tasks, profile: Profile | None, machine: Machine) -> tuple[list[MeasurementTask], int]:
    """Return the operators without a measurement, and the number of those that are too large to be measured alone.

    The smallest come first, so that an interrupted run has measured most of them.
    """
    rest = [t for content, t in tasks.items() if profile is None or content not in profile.exact]
    small = [t for t in rest if ROOM * t.nbytes <= machine.device.memory]
    return sorted(small, key=lambda t: (t.nbytes, t.content)), len(rest) - len(small)


def fill(
    tasks: Sequence[MeasurementTask], devices: Sequence[Any], store: Store, where: Where
) -> Iterator[tuple[MeasurementTask, str]]:
    """Measure one task after another, and store each at once. Yield every task and the reason it failed ("" if it did not).

    As many tasks are compiled at once as there are cores; nothing else runs while one is measured.
    """
    for start in range(0, len(tasks), where.cores):
        some = tasks[start : start + where.cores]
        with ThreadPoolExecutor(where.cores) as pool:
            programs = [_compiling(task, devices, pool) for task in some]
        for task, program in zip(some, programs, strict=True):
            try:
                store.put(where, measurement(task, measure(program.result())))
            except UNABLE as problem:
                yield task, str(problem).partition("\n")[0]
            else:
                yield task, ""


def _compiling(task: MeasurementTask, devices: Sequence[Any], pool: Executor) -> Future[CompiledOperator]:
    """Trace a task's programs, and start to compile them. Tracing stays in this thread, because JAX's settings are thread-local."""
    try:
        return pool.submit(traced(task.operator, devices).compile)
    except UNABLE as problem:
        failed: Future[CompiledOperator] = Future()
        failed.set_exception(problem)
        return failed


def measurement(task: MeasurementTask, timing: Timing) -> Measurement:
    """Return the measurement of a task, as profiles store it."""
    body = task.operator.body
    flops, dtype = dense_work(body)
    key, shapes, flags = task.content
    size = flops * task.share, dtype, *task.traffic
    return Measurement(key, kind_of(body), shapes, flags, *size, timing.forward, timing.backward, timing.spread)
