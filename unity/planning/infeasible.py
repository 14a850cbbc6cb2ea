"""The messages for requests that have no feasible plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, prod

from unity.base.formatting import size
from unity.machine.axis_ladders import axis_ladders
from unity.machine.machine import Machine
from unity.plan.further_options import PipelineShape
from unity.search.memory.lower_bound import LeastMemory
from unity.search.session import Candidate


def not_decomposed(count: int, reason: str) -> str:
    """Return the message for a number of micro-batches that a program does not allow, for a reason that names the operator."""
    return (
        f"micro_batches={count}: {reason}.\n    A loss must be a sum or a mean over its samples, or a function of such, and the"
        " micro-batches must share the samples evenly: leave the option out, or change that line."
        " (docs: memory#micro-batches)"
    )


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
    if stages not in {prod(axis.size for axis in axes) for row in axis_ladders(machine) for axes in row}:
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
    if groups not in {prod(axis.size for axis in axes) for row in axis_ladders(machine) for axes in row}:
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
