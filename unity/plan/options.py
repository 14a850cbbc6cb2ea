"""Validation of the options of `unity.optimize`, and the messages for requests that have no feasible plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, inf, isfinite, prod
from numbers import Real
from typing import Any, NoReturn

from jax.sharding import AbstractMesh, Mesh

from unity.base.errors import OptionError
from unity.base.formatting import size, with_article
from unity.base.processes import several
from unity.constraints.bound_constraints import BoundConstraints
from unity.constraints.kinds import Across, Constraint, Pin, WithoutRules
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Tensor
from unity.pcg.parallel.stages import SCHEDULES, TWO_BW
from unity.pcg.types.accumulation import NARROW
from unity.plan.further_options import PipelineShape, Transforms
from unity.search.memory.lower_bound import LeastMemory
from unity.search.published import names
from unity.search.session import Candidate
from unity.transforms.pipelining.choose import ladders

OBJECTIVES = ("time", "devices", "memory")
SEARCHES = ("unity", "captured", "sequential", "unity-rules", *names())
CONSTRAINED = ("unity", "captured")  # searches that obey constraints, find pipelines, and know overlap=True


def refuse(objective: str, search: str, transforms: Transforms, constraints: Sequence[Constraint]) -> None:
    """Raise OptionError for values that an option does not have, and for options that exclude each other."""
    if objective not in OBJECTIVES:
        raise OptionError(f"objective={objective!r} is not known; one of {', '.join(map(repr, OBJECTIVES))}")
    if search not in SEARCHES:
        raise OptionError(f"search={search!r} is not available; one of {', '.join(map(repr, SEARCHES))}")
    if objective == "memory" and search in names():
        raise OptionError(f"search={search!r} has an objective of its own: objective= may be 'time' or 'devices'")
    refuse_switches({name: value for name, value in vars(transforms).items() if isinstance(getattr(Transforms, name), bool)})
    _refuse_pipeline(transforms, search, constraints)
    _refuse_branches(transforms, search, constraints)
    _refuse_micro_batches(transforms, search, constraints)


def refuse_switches(switches: Mapping[str, Any]) -> None:
    """Raise OptionError unless each of some options, by name, is True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}: expected True or False, got {type(value).__name__}")


def refuse_budget(budget: Any, seconds: Any, machine: Machine | None) -> None:
    """Raise OptionError unless `budget` or `seconds` or neither bounds the search, and all processes find the same plan."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise OptionError(
            f"budget={budget!r}: expected a number of programs, such as 500; a time limit is seconds=30 (docs: plan#options)"
        )
    if seconds is not None and not (_number(seconds) and seconds >= 0):
        raise OptionError(f"seconds={seconds!r}: expected a time limit that is not negative, such as 30")
    if budget is not None and seconds is not None:
        raise OptionError(f"budget={budget} and seconds={seconds} do not go together: leave one out")
    if machine is None and seconds is not None and several():
        raise OptionError(
            f"seconds={seconds} would find something else in every process: give a number of programs by budget="
            " (docs: hosts#the-same-everywhere)"
        )


def refuse_uncallable(fn: Any, expected: str) -> None:
    """Raise OptionError unless `fn` can be called. `expected` says what it is for."""
    if not callable(fn):
        raise OptionError(f"fn: expected a function {expected}, got {type(fn).__name__}")


def refuse_machine(machine: Any, memory_limit: Any, optimizer_slots: Any) -> None:
    """Raise OptionError unless the machine is one (or None), the limit is positive, and the slots are finite and not negative."""
    if machine is not None and not isinstance(machine, Machine):
        raise OptionError(
            f"machine={machine!r} is {with_article(type(machine).__name__)}: give a unity.Machine, such as"
            " unity.Machine.preset('dgx-h100') or unity.Machine.grid(1, 8, 'a100') (docs: machines)"
        )
    if memory_limit is not None and not (_number(memory_limit) and memory_limit > 0):
        raise OptionError(f"memory_limit={memory_limit!r}: expected bytes on one device, such as 16e9 (docs: memory)")
    if not (_number(optimizer_slots) and optimizer_slots >= 0 and isfinite(optimizer_slots)):
        raise OptionError(
            f"optimizer_slots={optimizer_slots!r}: expected how many values the optimizer keeps for each weight, such as 2 for Adam"
            " (docs: optax)"
        )


def refuse_optimizer(optimizer: Any, optimizer_slots: float | None) -> None:
    """Raise OptionError if both options about the optimizer's state are used."""
    if optimizer is not None and optimizer_slots is not None:
        raise OptionError(
            f"optimizer={optimizer!r} and optimizer_slots={optimizer_slots} do not go together, since the optimizer tells its"
            " state: leave one out (docs: memory#optimizer-state)"
        )


def refuse_measuring(machine: Machine | None, objective: str, pipeline: PipelineShape | None) -> None:
    """Raise OptionError unless plans with these options can be run here, and compared by their times."""
    if machine is not None or objective != "time":
        raise OptionError("measure=True runs plans on the devices of this process: leave machine= out, and objective= at 'time'")
    if pipeline is not None and pipeline.schedule == TWO_BW:
        raise OptionError("measure=True runs steps that drain, and 2BW has none: leave one of them out (docs: pipelines#2bw)")


def refuse_mesh(mesh: Any, objective: str) -> None:
    """Raise OptionError unless the mesh is one (or None), has an axis, and goes with the objective."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh | AbstractMesh) or not mesh.shape:
        raise OptionError(
            f"mesh={mesh!r}: expected a jax.sharding.Mesh or AbstractMesh with named axes, got {type(mesh).__name__}, such as"
            " jax.make_mesh((2, 4), ('data', 'tensor')) (docs: moving#plan-for-a-mesh-of-your-own)"
        )
    if objective == "devices":
        raise OptionError(
            "mesh= and objective='devices' do not go together, since a mesh has one number of devices (docs:"
            " moving#plan-for-a-mesh-of-your-own)"
        )


def refuse_type(reduce_in: Any) -> None:
    """Raise OptionError unless `reduce_in` is None or names a type narrower than float32."""
    if reduce_in is not None and not (isinstance(reduce_in, str) and reduce_in in NARROW):
        raise OptionError(
            f"reduce_in={reduce_in!r}: expected None or one of {', '.join(map(repr, NARROW))} (docs: numerics#reduce_in)"
        )


def refuse_kept_shardings(objective: str) -> None:
    """Raise OptionError unless the objective goes with the shardings that the function states."""
    if objective == "devices":
        raise OptionError(
            "unity.keep_shardings() and objective='devices' do not go together, since stated shardings name a mesh of one size"
            " (docs: constraints#shardings-of-your-own)"
        )


def _number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _refuse_pipeline(transforms: Transforms, search: str, constraints: Sequence[Constraint]) -> None:
    """Raise OptionError for a required pipeline that is malformed, or that other options exclude."""
    pipeline = transforms.pipeline
    if pipeline is None:
        return
    if not isinstance(pipeline, PipelineShape):
        raise OptionError(f"pipeline={pipeline!r}: expected stages and micro-batches, such as unity.PipelineShape(4, 16)")
    if not all(isinstance(n, int) and n > 0 for n in (pipeline.stages, pipeline.micro_batches)):
        raise OptionError(f"{pipeline!r}: expected numbers of stages and micro-batches, such as unity.PipelineShape(4, 16)")
    if pipeline.schedule is not None and pipeline.schedule not in SCHEDULES:
        schedules = " or ".join(f"'{kind}'" for kind in SCHEDULES)
        raise OptionError(f"{pipeline!r}: the schedule may be {schedules}, as in unity.PipelineShape(4, 16, 'gpipe')")
    if not transforms.pipelines:
        _refuse_together("pipelines=False", f"pipeline={pipeline!r}", "pipelines#which")
    _refuse_search(f"pipeline={pipeline!r}", search, "pipelines#which")
    other = next((c for c in constraints if not isinstance(c, (WithoutRules, Pin))), None)
    if other is not None:
        _refuse_together(f"pipeline={pipeline!r}", other, "pipelines#which")


def _refuse_search(option: str, search: str, docs: str) -> None:
    """Raise OptionError if a search does not find the plans that an option asks for."""
    if search not in CONSTRAINED:
        searches = ", ".join(map(repr, CONSTRAINED))
        raise OptionError(f"{option}: search={search!r} finds none, use one of {searches} (docs: {docs})")


def _refuse_together(option: str, other: object, docs: str, reason: str = "") -> NoReturn:
    raise OptionError(f"{option} and {other} do not go together: leave one out{reason} (docs: {docs})")


def _refuse_branches(transforms: Transforms, search: str, constraints: Sequence[Constraint]) -> None:
    """Raise OptionError for a required number of groups that is malformed, or that other options exclude."""
    groups = transforms.branch_groups
    if groups is None:
        return
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 2:
        raise OptionError(f"branch_groups={groups!r}: expected a number of groups of devices, such as 2 (docs: branches#which)")
    if not transforms.branches:
        _refuse_together("branches=False", f"branch_groups={groups}", "branches#which")
    _refuse_search(f"branch_groups={groups}", search, "branches#which")
    other = next((c for c in constraints if isinstance(c, Across) and c.word == "only"), None)
    if other is not None:
        _refuse_together(f"branch_groups={groups}", other, "branches#which")


def _refuse_micro_batches(transforms: Transforms, search: str, constraints: Sequence[Constraint]) -> None:
    """Raise OptionError for a number of micro-batches that is malformed, or that other options exclude."""
    count = transforms.micro_batches
    if count is None or count is False:
        return
    if not isinstance(count, int):
        raise OptionError(
            f"micro_batches={count!r}: expected a number of micro-batches, such as 4, or True to choose it, got"
            f" {type(count).__name__} (docs: memory#micro-batches)"
        )
    if count is not True and count < 2:
        raise OptionError(
            f"micro_batches={count}: expected at least 2, or True to choose their number. Leave the option out to keep the samples"
            " together (docs: memory#micro-batches)"
        )
    option, docs = f"micro_batches={count}", "memory#micro-batches"
    _refuse_search(option, search, docs)
    constraint = next((c for c in constraints if not isinstance(c, (WithoutRules, Pin))), None)
    if constraint is not None:
        _refuse_together(option, constraint, docs)
    if transforms.pipeline is not None:
        _refuse_together(option, f"pipeline={transforms.pipeline!r}", docs, ", as a pipeline has micro-batches of its own")
    if transforms.branch_groups is not None:
        _refuse_together(option, f"branch_groups={transforms.branch_groups}", docs)


def not_decomposed(count: int, reason: str) -> str:
    """Return the message for a number of micro-batches that a program does not allow, for a reason that names the operator."""
    return (
        f"micro_batches={count}: {reason}.\n    A loss must be a sum or a mean over its samples, or a function of such, and the"
        " micro-batches must share the samples evenly: leave the option out, or change that line."
        " (docs: memory#micro-batches)"
    )


def obeyed(bound: BoundConstraints, search: str) -> BoundConstraints:
    """Return the constraints. Raises OptionError if there are any and the search does not obey constraints."""
    if bound.every and search not in CONSTRAINED:
        raise OptionError(
            f"search={search!r} knows no constraints, and would break {bound.every[0]}: leave them out, or use one of"
            f" {', '.join(map(repr, CONSTRAINED))}"
        )
    return bound


def resembling_step(name: str, captured: Captured) -> str | None:
    """Return a warning if a function that is planned for training returns arrays like those of a differentiated argument.

    Such a function is likely a training step or a gradient, and nobody wants its gradient. An argument of a single array may have
    the shape of a result by chance, and causes no warning. Nor does one whose arrays are like those of an argument without a
    gradient, if they are returned once for each of these: a loss may return the next weights of a teacher, or of an average.
    """
    inputs, outputs = captured.graph.inputs, [v.tensor for v in captured.graph.outputs]
    counts = [argument.num_leaves for argument in captured.in_tree.children()]
    leaves = [range(start, start + count) for start, count in zip(accumulate(counts, initial=0), counts, strict=False)]
    arrays = [[inputs[k].tensors[0] for k in own] for own in leaves]
    averages = [alike for own, alike in zip(leaves, arrays, strict=True) if captured.differentiated.isdisjoint(own)]
    for number, (own, alike) in enumerate(zip(leaves, arrays, strict=True)):
        is_weights = len(alike) > 1 and not captured.differentiated.isdisjoint(own)
        if is_weights and _occurrences(outputs, alike) > averages.count(alike):
            return (
                f"{name} returns arrays like those of argument {number}, as a training step or a gradient does, and is planned with"
                " a backward pass of its own. Plan the loss, use unity.step for a training step, or give training=False. (docs:"
                " training)"
            )
    return None


def _occurrences(tensors: Sequence[Tensor], part: Sequence[Tensor]) -> int:
    """Return how often a sequence holds another, without overlap."""
    count = start = 0
    while start + len(part) <= len(tensors):
        is_here = list(tensors[start : start + len(part)]) == list(part)
        count, start = count + is_here, start + (len(part) if is_here else 1)
    return count


def no_pipeline(machine: Machine, required: PipelineShape, refused: Sequence[str], limit: str) -> str:
    """Return the message for a requested pipeline that is infeasible.

    Args:
        machine: the machine that was planned for.
        required: the pipeline.
        refused: the reason for each pipeline that was tried and refused.
        limit: the memory limit as text.
    """
    stages, micro_batches = required.stages, required.micro_batches
    reasons = list(dict.fromkeys(refused)) or [f"what there is needs more than {limit} on each device"]
    if stages not in {prod(axis.size for axis in axes) for row in ladders(machine) for axes in row}:
        reasons = [f"no axes of {machine.name} make {stages} stages"]
    elif micro_batches % stages:
        reasons = [f"{micro_batches} micro-batches are no multiple of {stages} stages"]
    return (
        f"infeasible: no pipeline of {stages} stages and {micro_batches} micro-batches:\n    "
        + "\n    ".join(reasons)
        + "\n    Without pipeline= the plan may have none. (docs: pipelines#which)"
    )


def no_branches(machine: Machine, groups: int, refused: Sequence[str], limit: str) -> str:
    """Return the message for a requested number of groups of devices that is infeasible, with arguments as for `no_pipeline`."""
    reasons = refused or [f"what there is needs more than {limit} on each device"]
    if groups not in {prod(axis.size for axis in axes) for row in ladders(machine) for axes in row}:
        reasons = [f"no axes of {machine.name} make {groups} groups"]
    return (
        f"infeasible: no branches on {groups} groups of devices:\n    "
        + "\n    ".join(reasons)
        + "\n    Without branch_groups= the plan may have none. (docs: branches#which)"
    )


def shortfall(
    machine: Machine, leanest: Candidate, limit: float, what: str = "the leanest plan", way: str = "", undivided: float = 0.0
) -> str:
    """Return the message for a memory limit that even the leanest plan exceeds.

    Args:
        machine: the machine that was planned for.
        leanest: the leanest plan.
        limit: the memory limit, in bytes on one device.
        what: the plan in words.
        way: a way out besides a larger limit and more devices.
        undivided: the bytes that each device stores, however many there are.
    """
    needed = size(leanest.memory)
    factor = (leanest.memory - undivided) / (limit - undivided) if undivided < limit else inf
    larger = f"{needed} at {leanest.time * 1e3:.3g} ms a step (memory_limit={int(leanest.memory) + 1})"
    more = f", or at least {_more_devices(factor)}" if factor < inf else ""
    return (
        f"infeasible: on {machine.name} {what} needs {needed} on each device, the limit is {size(limit)}.\n"
        f"    Nearest: {way}{larger}{more}. (docs: memory#infeasible)"
    )


def _more_devices(factor: float) -> str:
    """Return a factor of devices above 1 in words, rounded up."""
    return f"{ceil(factor * 10) / 10:.1f} times as many devices"


def out_of_reach(machine: Machine, least: LeastMemory, limit: float, way: str = "", what: str = "the leanest plan") -> str:
    """Return the message for a memory limit, in bytes on one device, that a lower bound on the memory of plans exceeds.

    Args:
        machine: the machine that was planned for.
        least: the lower bound.
        limit: the memory limit.
        way: a way out besides fewer samples and more devices.
        what: the plan that needs the least, of those that are bounded.
    """
    fewer = ""
    if max(least.state, least.throughout) < limit < least.total:  # the rest is of the samples
        fewer = f"at most 1/{ceil(least.turn / (limit - least.throughout))} of the samples in a step, or "
    part = "All of it" if least.total == least.state else f"{size(least.state)} of it"
    factor = least.growth(limit)
    more = f"at least {_more_devices(factor)}, or " if factor < inf else ""
    return (
        f"infeasible: on {machine.name} {what} needs at least {size(least.total)} on each device, the limit is {size(limit)}.\n"
        f"    Nearest: {fewer}{way}{more}memory_limit={ceil(least.total)} at least.\n"
        f"    {part} are arguments, gradients and optimizer slots. (docs: memory#infeasible)"
    )
