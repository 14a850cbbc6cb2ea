"""Plans of programs after transformations that no price chose (rules of loops, padding, …), on meshes, and by options."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import unity
from benchmarks.fuzz.plans import FEWEST, Trial, asked, assigned, count_of, random_family
from benchmarks.fuzz.programs import Program
from unity.base.errors import OptionError
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body
from unity.pcg.parallel.stages import Mixed
from unity.substitutions.language.loop_rules import LOOP_RULES
from unity.transforms.loops import applicable, loop_rewriting
from unity.transforms.loops.loop_rewriting import apply
from unity.transforms.micro_batching import micro_batched
from unity.transforms.micro_batching.sample_dimensions import divisors
from unity.transforms.packing import joining_of
from unity.transforms.padding import padding
from unity.transforms.padding.choose import MOST, padded_size
from unity.transforms.recomputing import recomputing
from unity.transforms.recomputing.layers import Span, equations_in_layers
from unity.transforms.recomputing.recomputing import Policy, steps
from unity.transforms.transformation import Transformation

FEW = 6  # plans of one transformed program, or on one mesh: another transformation finds more than further assignments
POLICIES: tuple[Policy, ...] = get_args(Policy)
Transform = Callable[[random.Random, Captured, unity.Machine], Transformation | None]


def loops(rng: random.Random, captured: Captured, machine: unity.Machine) -> Transformation | None:
    """Apply rules of loops, one after another."""
    path, body = [], captured.body
    for _ in range(rng.choice((1, 1, 2, 3, 9))):
        options = [application for rule in LOOP_RULES.values() for application in applicable(body, rule)]
        if not options:
            break
        path.append(rng.choice(options))
        body = apply(body, path[-1])
    return loop_rewriting(captured, path) if path else None


def padded(rng: random.Random, captured: Captured, machine: unity.Machine) -> Transformation | None:
    """Pad some sizes, as the devices need it or by any number."""
    body = captured.body
    sizes = sorted({n for v in body.inputs for n in body.tensors[v].shape if n > 1})
    most = rng.choice((1, 2, len(sizes)))
    chosen = {}
    for n in rng.sample(sizes, min(most, len(sizes))):
        larger = padded_size(n, machine.devices) if rng.random() < 0.6 else rng.randint(n + 1, max(n + 1, int(MOST * n)))
        if larger is not None:
            chosen[n] = larger
    return padding(captured, chosen, stored=rng.random() < 0.5) if chosen else None


def recomputed(rng: random.Random, captured: Captured, machine: unity.Machine) -> Transformation | None:
    """Put parts of the program, and of the steps of its scans, into checkpoints."""
    spans = {}
    for body in _with_steps(captured.body):
        own = _spans(rng, len(equations_in_layers(body)))
        if own and (body is not captured.body or rng.random() < 0.8):
            spans[body.key] = own
    return recomputing(captured, spans, rng.choice(POLICIES)) if spans else None


def _with_steps(body: Body) -> Iterator[Body]:
    yield body
    for step in steps(body.equations):
        yield from _with_steps(step)


def _spans(rng: random.Random, length: int) -> tuple[Span, ...]:
    """Return disjoint parts of a sequence of some length."""
    ends = sorted(rng.sample(range(length + 1), min(length + 1, 2 * rng.randint(1, 3))))
    return tuple(zip(ends[::2], ends[1::2], strict=False))


def accumulated(rng: random.Random, captured: Captured, machine: unity.Machine) -> Transformation | None:
    """Run the loss over micro-batches. Raises OptionError if it does not add up over samples."""
    data = [captured.body.tensors[v].shape for k, v in enumerate(captured.body.inputs) if k not in captured.differentiated]
    sizes = [shape[0] for shape in data if shape and shape[0] > 1]
    if not sizes:
        return None
    try:
        return micro_batched(captured, rng.choice(divisors(max(sizes, key=sizes.count))))
    except Mixed as reason:
        raise OptionError(f"no micro-batches: {reason}") from None


def joined(rng: random.Random, captured: Captured, machine: unity.Machine) -> Transformation | None:
    """Join the weights that the program joins once."""
    return joining_of(captured, machine.devices)


TRANSFORMS: Mapping[str, Transform] = {  # in the order in which a search applies them
    "loops": loops,
    "joined weights": joined,
    "padding": padded,
    "recomputation": recomputed,
    "micro-batches": accumulated,
}


def transformed_trials(
    rng: random.Random, program: Program, captured: Captured, machine: unity.Machine, kind: str
) -> Iterator[Trial]:
    """Random assignments of a program after the transformation of one kind, and sometimes after others; "chain" is of any."""
    names = [n for n in TRANSFORMS if n == kind or rng.random() < (0.6 if kind == "chain" else 0.15)]
    if not program.weights and "micro-batches" in names and kind != "micro-batches":
        names.remove("micro-batches")
    transformations, after = list[Transformation](), captured
    for name in names:
        transformation = TRANSFORMS[name](rng, after, machine)
        if transformation is not None:
            transformations.append(transformation)
            after = transformation.after
        elif name == kind:
            return
    if transformations:
        family = random_family(program.function, captured, after, machine)
        family = replace(family, transformations=tuple(transformations))
        yield from assigned(rng, family, count_of(after, FEW), kind, "; ".join(map(str, transformations)))


# Meshes of the user's


def mesh_trials(rng: random.Random, program: Program, captured: Captured, machine: unity.Machine) -> Iterator[Trial]:
    """Random assignments over the axes of a mesh, on its devices; of plans without one, on meshes and devices of their own."""
    devices = np.array(jax.devices()[: machine.devices])
    if rng.random() < 0.5:
        order = list(range(machine.devices))
        rng.shuffle(order)
        devices = devices[order]
    if rng.random() < 0.7:
        shape = _mesh_shape(rng, machine)
        axis_type = AxisType.Explicit if rng.random() < 0.5 else AxisType.Auto
        mesh = Mesh(devices.reshape(tuple(shape.values())), tuple(shape), axis_types=(axis_type,) * len(shape))
        family = random_family(program.function, captured, captured, machine.with_mesh(shape))
        for trial in assigned(rng, family, count_of(captured, FEW), "mesh", str(shape)):
            yield replace(trial, plan=trial.plan.on(mesh))
        return
    family = random_family(program.function, captured, captured, machine)
    for trial in assigned(rng, family, count_of(captured, FEWEST), "mesh", "on a mesh or devices"):
        shape = trial.plan.mesh_shape
        own: Any = Mesh(devices.reshape(tuple(shape.values())), tuple(shape)) if rng.random() < 0.5 and shape else list(devices)
        yield replace(trial, plan=trial.plan.on(own))


def _mesh_shape(rng: random.Random, machine: unity.Machine) -> dict[str, int]:
    """Return the sizes of axes by name, outermost first: parts of the levels, some of them joined."""
    sizes = [n for level in machine.levels for n in _factors(rng, level.size)]
    joined = list[int]()
    for n in sizes:
        if joined and rng.random() < 0.3:
            joined[-1] *= n
        else:
            joined.append(n)
    names = rng.sample(("data", "tensor", "x", "y", "z", "fsdp", "expert"), len(joined))
    return dict(zip(names, joined, strict=True))


def _factors(rng: random.Random, n: int) -> list[int]:
    """Return factors of a number, one of them or several; that of 1 is itself, or left out."""
    first = rng.choice([k for k in range(1, n + 1) if n % k == 0])
    parts = [k for k in (first, n // first) if k > 1]
    return parts or ([1] if rng.random() < 0.3 else [])


# Options


def optional_trials(rng: random.Random, program: Program, args: Sequence[Any], machine: unity.Machine) -> Iterator[Trial]:
    """Plans of searches with options about transformations, mostly with little memory, and random assignments of their programs."""
    options: dict[str, Any] = {}
    for name in rng.sample(("padding", "pack", "offload", "overlap", "micro_batches", "mesh"), rng.choice((1, 2, 2, 3))):
        options[name] = True
    if "mesh" in options:
        shape = _mesh_shape(rng, machine)
        options["mesh"] = Mesh(np.array(jax.devices()[: machine.devices]).reshape(tuple(shape.values())), tuple(shape))
    if "pack" in options:
        options["padding"] = True
    if "micro_batches" in options:
        options["micro_batches"] = rng.choice((True, 2, 4)) if program.weights else True
    if rng.random() < 0.7:
        leanest = asked(rng, program, args, machine, objective="memory", recompute=False, budget=0)
        options["memory_limit"] = math.ceil(leanest.memory * rng.uniform(0.5, 1.2))
    if rng.random() < 0.3:
        options |= {"pipelines": True, "branches": True}
    plan = asked(rng, program, args, machine, **options)
    note = ", ".join([*map(str, options), *map(str, plan.program.family.transformations)])
    yield Trial("options", machine, plan, note)
    points = plan.frontier
    yield Trial("options", machine, points[rng.randrange(len(points))], note)
    family = plan.program.family
    for trial in assigned(rng, family, count_of(family.captured, FEWEST), "options", note):
        yield replace(trial, plan=trial.plan.on(options["mesh"]) if "mesh" in options else trial.plan)
