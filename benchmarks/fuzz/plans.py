"""Plans of a program: random assignments, what searches choose, plans of rewritten programs, pipelines and branches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import unity
from benchmarks.fuzz.programs import Program
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.types.parallel_type import PARTIAL
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import Training
from unity.search.session import Candidate, Search
from unity.search.solver.problem import Alternatives, Point
from unity.search.space.configurations import Domain
from unity.substitutions.language.axioms import default_library
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.substitutions.rewriting.occurrences import occurrences, patterns
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.rewriting import rewritten

MACHINES = ((1, 2), (2, 1), (1, 4), (2, 2), (1, 6), (2, 3), (3, 2), (1, 8), (2, 4), (4, 2), (1, 12), (2, 6), (1, 3), (3, 4))
OFTEN = (40, 3, 6, 6, 8, 5, 3, 4, 4, 2, 2, 2, 3, 1)
TRIES = 30
FEWEST, MOST, WORK = 3, 64, 640  # plans of a program on one machine; pairs of equations that these may have together
EQUATIONS = 80  # of a rewritten program: some rewritings could go on for ever


@dataclass(frozen=True)
class Trial:
    """A plan to be run."""

    kind: str
    machine: unity.Machine
    plan: Plan
    note: str = ""


def machine_of(rng: random.Random) -> unity.Machine:
    nodes, devices = rng.choices(MACHINES, OFTEN)[0]
    return unity.Machine.grid(nodes, devices)


def random_point(assembled: Assembled, rng: random.Random) -> Point | None:
    """Legal values of all sites, drawn one after another; None at a dead end."""
    problem = assembled.problem
    n = len(problem.sizes)
    joined: list[list[Any]] = [[] for _ in range(n)]
    for edge in problem.edges:
        joined[edge.first].append((edge.second, edge, False))
        joined[edge.second].append((edge.first, edge, True))
    possible: dict[int, np.ndarray] = {id(e.cost): np.any(np.isfinite(e.cost.time), axis=0) for e in problem.edges}
    allowed = [np.isfinite(cost.time).any(0) for cost in problem.unary]
    values: list[int | None] = [None] * n
    taste = rng.choices(("any", "idle", "partial"), (5, 2, 3))[0]  # what most sites should be: left alone, or partial sums
    for s in range(n):
        options = np.flatnonzero(allowed[s]).tolist()
        if not options:
            return None
        rng.shuffle(options)
        if taste == "idle" and rng.random() < 0.7:
            options.sort()
        elif taste == "partial" and rng.random() < 0.8:
            options.sort(key=_partial_sums(assembled.domains[s]).__getitem__, reverse=True)
        for value in options:
            after, good = [], True
            for other, edge, second in joined[s]:
                table = possible[id(edge.cost)]
                column = table[:, value] if second else table[value]
                if values[other] is not None:
                    good = bool(column[values[other]])
                else:
                    left = allowed[other] & column
                    good = bool(left.any())
                    after.append((other, column))
                if not good:
                    break
            if good:
                values[s] = value
                for other, column in after:
                    allowed[other] = allowed[other] & column
                break
        if values[s] is None or not all(allowed[o].any() for o, _, _ in joined[s]):
            return None
    chosen = [v for v in values if v is not None]
    unary = [_alternative(cost.time[:, v], rng) for cost, v in zip(problem.unary, chosen, strict=True)]
    edges = [_alternative(e.cost.time[:, chosen[e.first], chosen[e.second]], rng) for e in problem.edges]
    return Point(0.0, 0.0, tuple(chosen), Alternatives(tuple(unary), tuple(edges)), False)


def _partial_sums(domain: Domain) -> list[int]:
    """For every value of a site, along how many axes its operands and results are partial sums."""
    of_choice = np.array([c.states.count(PARTIAL) for c in domain.choices])
    return of_choice[domain.picks].sum(1).tolist()


def _alternative(times: np.ndarray, rng: random.Random) -> int:
    options = np.flatnonzero(np.isfinite(times)).tolist()
    return options[0] if rng.random() < 0.6 else rng.choice(options)


def argnums_of(args: Any) -> tuple[int, ...]:
    """The arguments that have a gradient."""
    return tuple(k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact))


def captured_of(fn: Any, args: Any, weights: Sequence[int] | None = None) -> Captured:
    """The captured function, with the gradients of some arguments, by default of all that have one."""
    return capture(fn, *args, argnums=argnums_of(args) if weights is None else tuple(weights))


def count_of(captured: Captured, most: int = MOST) -> int:
    """Number of plans of a program: compiling one takes longer the larger it is, and small programs have faults as well."""
    return max(FEWEST, min(most, WORK // max(1, len(captured.body.equations)) ** 2))


def random_trials(
    rng: random.Random, fn: Any, captured: Captured, machine: unity.Machine, count: int, kind: str = "random", note: str = ""
) -> Iterator[Trial]:
    """Distinct parallel graphs of random assignments."""
    yield from assigned(rng, random_family(fn, captured, captured, machine), count, kind, note)


def random_family(fn: Any, captured: Captured, after: Captured, machine: unity.Machine) -> PlanFamily:
    """The plans of a program, `after`, that a function was transformed into."""
    training = Training(bool(after.differentiated and losses(after.graph)))
    return PlanFamily(fn, captured, Search(after.graph, after.differentiated, machine, training), 0.0)


def assigned(rng: random.Random, made: PlanFamily, count: int, kind: str, note: str = "") -> Iterator[Trial]:
    """Random assignments of a search's program."""
    seen: set[str] = set()
    assembled = made.search.assembled
    for _ in range(TRIES + count):
        if len(seen) >= count:
            return
        point = random_point(assembled, rng)
        if point is None:
            continue
        plan = Plan(made, Candidate(0.0, 0.0, assembled.assignment(point)))
        if plan.program.pcg.key not in seen:
            seen.add(plan.program.pcg.key)
            yield Trial(kind, made.search.machine, plan, note)


def rewritten_trials(rng: random.Random, fn: Any, captured: Captured, machine: unity.Machine) -> Iterator[Trial]:
    """Random assignments of programs that rules of the library lead to, one to three steps away."""
    body, rules = search_form(captured.body), list[str]()
    for _ in range(rng.randint(1, 3)):
        reading = Reading(body)
        options = [(o, p) for p in patterns(default_library().rules) for o in occurrences(reading, p)]
        rng.shuffle(options)
        for occurrence, pattern in options[:6]:
            new = rewritten(body, occurrence)
            if new is not None and len(new.equations) <= EQUATIONS:
                body = new
                rules.append(str(pattern))
                break
    if rules:
        yield from random_trials(
            rng, fn, captured.of(planning_form(body)), machine, count_of(captured), "rewritten", "; ".join(rules)
        )


def asked(rng: random.Random, drawing: Program, args: Sequence[Any], machine: unity.Machine, **options: Any) -> Plan:
    """`unity.optimize` with what a search may be told at random."""
    options = {
        "budget": rng.choice((0, 5)),
        "objective": rng.choice(("time", "time", "memory")),
        "pipelines": "pipeline" in options,
        "branches": "branch_groups" in options,
    } | options
    if not any(jnp.issubdtype(x.dtype, jnp.floating) for x in args):
        options["training"] = False
    argnums = drawing.differentiated or 0
    return unity.optimize(drawing.function, *args, argnums=argnums, machine=machine, progress=False, **options)


def searched_trials(rng: random.Random, drawing: Program, args: Sequence[Any], machine: unity.Machine) -> Iterator[Trial]:
    """The best, the leanest, points of the frontier; under pins and memory limits."""
    more: dict[str, Any] = {"pipelines": True, "branches": True} if rng.random() < 0.5 else {}
    plan = asked(rng, drawing, args, machine, **more)
    yield Trial("searched", machine, plan)
    points = plan.frontier
    for k in {0, len(points) - 1, rng.randrange(len(points))}:
        yield Trial("frontier", machine, points[k], str(k))
    if rng.random() < 0.5:
        lean, fast = points[len(points) - 1].memory, points[0].memory
        limit = lean + rng.random() * max(fast - lean, 0)
        yield Trial("memory limit", machine, asked(rng, drawing, args, machine, memory_limit=limit, objective="time"))
    ranked = [a for a in drawing.arguments if a.shape]
    if ranked and rng.random() < 0.7:
        a = rng.choice(ranked)
        axes: list[str | None] = [None] * len(a.shape)
        axes[rng.randrange(len(a.shape))] = rng.choice(("device", "device", "node"))
        pin = unity.pin(a.name, PartitionSpec(*axes))
        yield Trial("pinned", machine, asked(rng, drawing, args, machine, constraints=[pin]), str(pin))


def pipelined_trials(
    rng: random.Random, drawing: Program, args: Sequence[Any], machine: unity.Machine, schedule: str
) -> Iterator[Trial]:
    """A pipeline of a scan, and random assignments of it."""
    stages = rng.choice([n for n in (2, 3, 4) if machine.devices % n == 0])
    plan = asked(rng, drawing, args, machine, pipeline=unity.PipelineShape(stages, rng.choice((2, 4)), schedule))
    kind = f"pipeline {schedule}"
    yield Trial(kind, machine, plan)
    yield from assigned(rng, plan.program.family, count_of(plan.program.family.captured), kind)


def branched_trials(rng: random.Random, drawing: Program, args: Sequence[Any], machine: unity.Machine) -> Iterator[Trial]:
    """Branches on groups of devices, and random assignments of them."""
    plan = asked(rng, drawing, args, machine, branch_groups=rng.choice([n for n in (2, 3, 4) if machine.devices % n == 0]))
    yield Trial("branches", machine, plan)
    yield from assigned(rng, plan.program.family, count_of(plan.program.family.captured), "branches")
