"""Runs cases in processes, one for each core, and keeps what every case gives in a file of its own, so that a run goes on after an
interruption where it was."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.seeds import studies
from benchmarks.seeds.age import stamp
from benchmarks.seeds.cases import IN_TENSOROPT, OWN, Case, groups
from benchmarks.seeds.dimensions import ABLATION, PIPELINE, space
from benchmarks.seeds.steps import SIMULATED, simulated
from benchmarks.seeds.table5 import PUBLISHED, as_published, layers
from unity.base.errors import UnityError
from unity.baselines.restricted import Structure
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.parallelize import parallelize
from unity.search.simulator import Topology, simulate
from unity.search.simulator.topology import bytes_sent
from unity.search.solver.problem import Point


@dataclass(frozen=True, eq=False)
class Task:
    """A model on a machine, captured once. Every algorithm starts with a search of its own, so that its seconds are all its own."""

    case: Case

    @cached_property
    def model(self) -> Model:
        return get(self.case.model, **self.case.sizes)

    @cached_property
    def captured(self) -> Any:
        from unity.pcg.capture.capture import capture

        return capture(self.model.loss, self.model.params, self.model.batch)

    def search(self) -> Any:
        from unity.search.cost.cost import Training
        from unity.search.cost.state_sizes import StateSizes
        from unity.search.session import Search

        training = Training(True, StateSizes(self.case.slots))
        return Search(self.captured.graph, self.captured.differentiated, self.case.machine, training)

    def figures(self, graph: PCG, memory: float, time: float) -> dict[str, Any]:
        """What a strategy costs: seconds, of them computing, bytes on a device, bytes that all devices send.

        `time`: what the search's price list says, which is the same for all. What is sent, and the time of computing, are of the
        graph that would run, where equal collectives are one (`search.predict`).
        """
        from unity.search.cost.prediction import predict

        machine = self.case.machine
        found, total = predict(graph, machine, self.captured.differentiated), 0.0
        for c in (term.collective for term in found.collectives):
            total += bytes_sent(c.kind, math.prod(machine.axes[k].size for k in c.axes), c.nbytes) * c.count * machine.devices
        compute = sum(t.forward + t.backward for t in found.operators)
        more: dict[str, Any] = {"layers": list(layers(graph))} if (self.case.part, self.case.model) == ("optcnn7", "vgg16") else {}
        if (self.case.part, self.case.machine.devices) == (studies.PART, studies.DEVICES) and self.case.model in studies.STUDIED:
            more |= studies.studied(graph, self.captured.differentiated, machine, found)
        if self.case.part.startswith("flexsteps"):
            differentiated, links = self.captured.differentiated, Topology.uniform(machine)
            more["simulated"] = simulate(graph, machine, differentiated).makespan
            more["on rings"] = simulate(graph, machine, differentiated, topology=links).makespan
        return {"time": time, "predicted": found.time, "compute": compute, "memory": memory, "sent": total} | more

    def strategy(self, search: Any, candidate: Any) -> dict[str, Any]:
        graph = parallelize(search.graph, candidate.assignment)
        return self.figures(graph, candidate.memory, candidate.time)


def measured(task: Task, case: Case) -> dict[str, Any]:
    """What one case gives: figures of a strategy or the points of a frontier, and seconds of the search."""
    from unity.search.published import algorithm, names

    if case.algorithm not in OWN and case.algorithm not in names():
        return {"missing": f"{case.algorithm}: not available"}
    search = task.search()
    started, own = time.perf_counter(), time.process_time()
    try:
        result = _own(task, case, search) if case.algorithm in OWN else _published(task, search, algorithm(case.algorithm), case)
    except UnityError as error:
        result = {"error": str(error)}
    clock = {"seconds": time.perf_counter() - started, "process seconds": time.process_time() - own}
    return clock | result


def _published(task: Task, search: Any, algorithm: Any, case: Case) -> dict[str, Any]:
    from unity.search.published import Asked

    started, own = time.perf_counter(), time.process_time()
    candidate = algorithm(search, Asked(case.limit, budget=case.budget))
    clock = {"seconds": time.perf_counter() - started, "process seconds": time.process_time() - own}
    return clock | _fits(task.strategy(search, candidate), case)


def _own(task: Task, case: Case, search: Any) -> dict[str, Any]:
    """This project's searches, and what is simulated alone. "captured" leaves the graph as it is; "sequential" rewrites it for one
    device first (Unity, 6.4)."""
    match case.algorithm:
        case "captured":
            candidate = search.under(case.limit) or search.leanest
            return _fits(task.strategy(search, candidate), case)
        case "unity" | "sequential":
            return _optimized(task, case, case.algorithm)
        case name if name == PIPELINE:
            return _optimized(task, case, "captured", pipelines=True)
        case "unity-rules":
            from unity.search.joint.joint import Budget
            from unity.search.substitution.fitting import CANDIDATES, fitting

            found = fitting(search, case.limit, Budget(CANDIDATES))
            return _fits(task.strategy(search, found.candidate), case)
        case "frontier":
            points, exact = search.frontier
            return {"exact": exact, "points": _unbeaten(task, search, points)}
        case "mesh-frontier":
            return _mesh(task, search)
        case name if name in SIMULATED:
            budget = None if case.budget is None else int(case.budget)
            return simulated(task.captured, case.machine, name, case.sizes["batch"], budget)
        case name if name == IN_TENSOROPT:
            return _fits(task.strategy(search, _optcnn_in_tensoropt(search)), case)
        case name if name == PUBLISHED:
            return task.strategy(search, as_published(search))
        case name if name in ABLATION:
            found = space(Structure(search), ABLATION[name]).under(search, case.limit)
            return {"error": "no strategy is left"} if found is None else _fits(task.strategy(search, found), case)
        case _:
            return _tracked(task, search, case.algorithm.removeprefix("tensoropt-"))


def _fits(figures: dict[str, Any], case: Case) -> dict[str, Any]:
    return figures | {"fits": figures["memory"] <= case.limit}


def _unbeaten(task: Task, search: Any, candidates: Iterable[Any]) -> list[list[float]]:
    """Bytes, seconds and seconds of computing of the strategies that no other beats, with what they hold for a moment."""
    from unity.search.session import unbeaten

    found = [task.strategy(search, c) for c in unbeaten(tuple(candidates))]
    return [[f["memory"], f["time"], f["compute"]] for f in found]


def _tracked(task: Task, search: Any, way: str) -> dict[str, Any]:
    """TensorOpt's frontier. Its seconds are those of frontier tracking; to list configurations and their costs, which the paper
    measures before, is told apart."""
    from unity.baselines.tensoropt import TensorOpt

    started, own = time.perf_counter(), time.process_time()
    found = TensorOpt(search, way="elimination" if way == "elimination" else "ldp")
    assert found.space.problem.sizes
    listed = time.perf_counter() - started
    started, own = time.perf_counter(), time.process_time()
    tracked = found.tracked
    clock = {"seconds": time.perf_counter() - started, "process seconds": time.process_time() - own}
    step = max(1, len(tracked.points) // 40)
    some = sorted({*range(0, len(tracked.points), step), len(tracked.points) - 1}) if tracked.points else []
    points = _unbeaten(task, search, [found.candidate(tracked.points[k]) for k in some])
    clock |= {"listing seconds": listed}
    return clock | {"fixed": len(tracked.fixed), "sums": _sums(tracked.points), "points": points}


def _optcnn_in_tensoropt(search: Any) -> Any:
    """What OptCNN's algorithm finds among TensorOpt's strategies."""
    from unity.baselines.optcnn import optimal, point_of
    from unity.baselines.optcnn_space import light
    from unity.baselines.tensoropt import TensorOpt

    tensoropt = TensorOpt(search)
    problem = tensoropt.space.problem
    found = optimal(problem, light(tensoropt.space.assembled.opened))
    return tensoropt.candidate(point_of(problem, found.values))


def _sums(points: Iterable[Point]) -> list[list[float]]:
    """Bytes and seconds of points as the search adds them up, without what is held for a moment."""
    return [[point.memory, point.time] for point in points]


def _mesh(task: Task, search: Any) -> dict[str, Any]:
    from unity.baselines.tofu import mesh_frontier
    from unity.search.solver.problem import nondominated

    every = [(space, point) for space, frontier in mesh_frontier(search) for point in frontier.points]
    kept = nondominated(point for _, point in every)
    best = set(map(id, kept))
    found = [search.candidate(space.assembled, space.strategy(point)) for space, point in every if id(point) in best]
    return {"sums": _sums(kept), "points": _unbeaten(task, search, found)}


def _optimized(task: Task, case: Case, search: str, pipelines: bool = False) -> dict[str, Any]:
    """`unity.optimize`: algebra and parallelization, together or one after the other; or this alone, and pipelines."""
    import unity

    model = task.model
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        limit = None if math.isinf(case.limit) else case.limit
        machine = case.machine.with_memory(10**15) if limit is None else case.machine
        started, own = time.perf_counter(), time.process_time()
        args = (model.params, model.batch)
        options = {"machine": machine, "memory_limit": limit, "optimizer_slots": case.slots, "search": search}
        plan = unity.optimize(model.loss, *args, **options, pipelines=pipelines, progress=False)
        clock = {"seconds": time.perf_counter() - started, "process seconds": time.process_time() - own}
    return clock | _fits(task.figures(plan.program.pcg, plan.memory, plan.time), case)


def group(some: list[Case], folder: str) -> list[str]:
    """Runs the cases of one group, and keeps each result as soon as it is there."""
    task, done = Task(some[0]), list[str]()
    for case in some:
        try:
            result = measured(task, case)
        except Exception as error:  # a case that fails must not take the others with it; the page shows it
            result = {"failed": f"{type(error).__name__}: {error}"}
        keep(Path(folder), case, result)
        done.append(case.name)
    return done


def keep(folder: Path, case: Case, result: dict[str, Any]) -> None:
    """A file is there as a whole, or not at all."""
    from unity.base.atomic_files import write

    about = {
        "case": case.name,
        "part": case.part,
        "model": case.model,
        "algorithm": case.algorithm,
        "devices": case.machine.devices,
        "machine": case.machine.name,
        "scale": case.scale,
        "batch": case.sizes.get("batch"),
        "limit": None if math.isinf(case.limit) else case.limit,
        **stamp(),
    }
    write(folder / f"{case.name}.json", json.dumps(about | result, default=float) + "\n")


def restore(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Puts recorded results back where they came from, if there is nothing newer."""
    from unity.base.atomic_files import write

    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        path = folder / f"{row['case']}.json"
        if not path.exists():
            write(path, json.dumps(row) + "\n")


def known(folder: Path, every: list[Case]) -> dict[str, dict[str, Any]]:
    """What was kept of these cases, by their names. What failed, or was missing, is run again."""
    found = {}
    for case in every:
        path = folder / f"{case.name}.json"
        if path.exists():
            found[case.name] = json.loads(path.read_text())
    return found


def left(folder: Path, every: list[Case]) -> list[Case]:
    """The cases that there is no result of."""
    before = known(folder, every)
    return [c for c in every if c.name not in before or {"missing", "failed"} & before[c.name].keys()]


def run(every: list[Case], folder: Path, processes: int) -> Iterator[list[str]]:
    """Runs cases that are left; gives the names of those that are done, group by group."""
    tasks = sorted(groups(left(folder, every)), key=lambda g: -sum(c.minutes for c in g))
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(group, some, str(folder)) for some in tasks]
        for future in as_completed(futures):
            yield future.result()
