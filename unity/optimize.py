"""`unity.optimize`, from a JAX function to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from unity.base.gc_pause import uncollected
from unity.base.processes import several
from unity.constraints.bound import bound
from unity.constraints.kinds import Constraint, WithoutRules
from unity.constraints.rules import without
from unity.constraints.stated import marking, pins
from unity.exec.hosts.arrangement import check_order
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.jaxprs.effects import warn
from unity.pcg.jaxprs.trace_contexts import unset
from unity.plan.effects import dropped_effects
from unity.plan.files import cache
from unity.plan.options import (
    obeyed,
    refuse,
    refuse_budget,
    refuse_machine,
    refuse_measuring,
    refuse_mesh,
    refuse_shardings,
    refuse_type,
    refuse_uncallable,
)
from unity.plan.plan import Plan
from unity.planning.task import Task, TransformationOptions
from unity.search.cost.cost import Training
from unity.search.substitution.fitting import CANDIDATES
from unity.transforms.rewriting import Rewriter, budget_of, library_of


def optimize(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    training: bool = True,
    machine: Machine | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    objective: str = "time",
    memory_limit: float | None = None,
    optimizer_slots: float = 2,
    search: str = "unity",
    budget: float | None = None,
    rules: Any = None,
    constraints: Constraint | Sequence[Constraint] = (),
    shardings: str = "free",
    seed: int = 0,
    measure: bool = False,
    pipelines: bool | tuple[int, int] | tuple[int, int, str] = True,
    branches: bool | int = True,
    pack: bool = False,
    recompute: bool = True,
    reduce_in: str | None = None,
    progress: bool = True,
) -> Plan:
    """Plan `fn` for the devices of a machine: find the best way to split every operator and to store every argument.

    Args:
        fn: any JAX function of pytrees of arrays.
        args: its arguments, or `jax.ShapeDtypeStruct`s in their place. Nothing is allocated.
        argnums: the arguments that are differentiated (the weights), as in `jax.grad`.
        training: whether to plan the backward pass too. Otherwise, and for functions of integer results, only the forward pass is
            planned.
        machine: the machine to plan for. By default it is the one that this process sees; a rewritten program is then also run on
            it, and used only if it is not slower than the captured one.
        mesh: a mesh of your own, whose axes the plan uses whole, by their names, in its types, specifications and messages; of a
            `jax.sharding.Mesh`, the plan runs on the devices. `machine` then says how fast each axis is: the devices of a node
            follow each other in the mesh. Without `machine`, the mesh is of devices of this process.
        objective: "time" for the fastest plan that fits, "devices" for the fewest devices that fit one, "memory" for the leanest
            plan.
        memory_limit: bytes on one device; by default the device's memory.
        optimizer_slots: the number of values that the optimizer keeps for each weight (Adam: 2), counted as memory, in the weights'
            type: 4 where Adam's moments of bfloat16 weights are float32. It may be a fraction.
        search: "unity" searches rewritings and parallelization together, over proved rules; "captured" leaves the graph as it is.
            For comparison, "sequential" rewrites for one device first and then parallelizes; "unity-rules" parallelizes by
            substitutions alone, as Unity published it; and the names in `unity.baselines` run other published algorithms, each
            with its own objective.
        budget: the budget for rewritings: a number of programs (int; the plan is then reproducible), or seconds (float). For a
            published algorithm, its own steps or seconds.
        rules: the rules that may be used: the path of a library or a loaded Library. The default is unity's own library.
        constraints: constraints that the plan must obey: `unity.pin`, `forbid`, `only`, `require`, `without_rules`, besides every
            `unity.constrain` in the function. Only the searches "unity" and "captured" support them.
        shardings: "free" lets the plan decide every sharding; "keep" makes constraints of those that the function states for a
            mesh that it sets: `jax.sharding.reshard`, `out_sharding=`, `with_sharding_constraint`, and the placement of arguments.
        measure: whether to simulate plans that are predicted to be nearly as fast as the fastest, to run the best of them on the
            devices of this process, and to choose the fastest of those. Needs `objective="time"` and no `machine`.
        pipelines: whether scans over layers may become pipelines, where that is better; or (stages, micro-batches) for a pipeline
            that the plan must have; or (stages, micro-batches, schedule) with "1f1b", "gpipe" or "2bw". Only the searches "unity"
            and "captured" find pipelines, and only without constraints other than pins of arguments, because those refer to the
            function as it is.
        branches: whether independent branches may run at the same time, on separate groups of devices, where that is better; or
            the number of groups on which the plan must have branches. Only the searches "unity" and "captured" find them, also
            beside a pipeline.
        pack: whether weights may be packed: those of such branches into arrays on the branches' devices only, and those that the
            program joins into arrays that are joined once. `plan.shard` then returns weights of other shapes, in the same tree,
            and `plan.unshard` restores the function's own.
        recompute: whether the backward pass may recompute layers from the values that cross their borders, as `jax.checkpoint`
            around them does, if nothing fits the memory limit otherwise. Only the searches "unity" and "captured" do so. A
            `jax.checkpoint` in the function always stays.
        reduce_in: a type narrower than float32, such as "bfloat16": partial sums and gradients of that type are rounded on every
            device and added in it, which sends fewer bytes. By default they are added in float32 and rounded once.
        progress: whether to show the current stage, on a terminal.

    Returns:
        A Plan, which is called like `fn`.

    Raises:
        CaptureError: the function cannot be traced, or an argument is not an array.
        InfeasibleError: no plan fits the memory limit, or obeys the constraints; the message names the smallest conflicting set.
        ConstraintError: a constraint names something that the program or the machine does not have.
        OptionError: an option is unknown, or excluded by another, or `fn` cannot be called. (It is a ValueError too.)
    """
    refuse_uncallable(fn, "to plan")
    constraints = (constraints,) if isinstance(constraints, Constraint) else tuple(constraints)
    refuse(objective, search, pipelines, branches, constraints)
    refuse_machine(machine, memory_limit, optimizer_slots)
    refuse_mesh(mesh, objective)
    refuse_type(reduce_in)
    refuse_shardings(shardings, objective)
    if measure:
        refuse_measuring(machine, objective, pipelines)
    refuse_budget(budget, machine)
    allowed = rules if search in ("unity", "sequential") else ()
    programs = CANDIDATES if budget is None and search == "unity-rules" else budget
    excluded = [c for c in constraints if isinstance(c, WithoutRules)]
    rewriter = Rewriter(None if allowed is None and not excluded else without(library_of(allowed), excluded), budget_of(programs))
    with _stages(progress) as say, uncollected():
        target = machine or _local(say, mesh)
        target = replace(target, reduce_in=reduce_in) if reduce_in else target
        if mesh is not None:
            target = target.with_mesh(mesh.shape)
        if isinstance(mesh, Mesh):
            check_order(target, mesh.devices.flat)
        say("capturing the graph")
        marks = marking(target) if shardings == "keep" else None
        captured = capture(fn, *args, argnums=argnums if training else (), clustering=cache.clustered, marking=marks)
        placed = pins(captured.paths, jax.tree.leaves(args), target) if marks else ()
        constrained = obeyed(bound((*constraints, *placed), captured, fn, argnums), search)
        task = Task(
            fn=fn,
            captured=captured,
            training=Training(training and bool(losses(captured.graph)), optimizer_slots),
            objective=objective,
            limit=target.device.memory if memory_limit is None else memory_limit,
            seed=seed,
            kind=search,
            budget=budget,
            rewriter=rewriter,
            # With several processes, some would have no device of a plan for fewer devices, and could not help to run it.
            local=machine is None and not (objective == "devices" and several()),
            measure=measure,
            say=say,
            bound=constrained,
            options=TransformationOptions(pipelines, branches, pack, recompute),
        )
        with unset():
            plan = task.plan_on_fewest(target) if objective == "devices" else task.plan_on(target)
            plan = plan.on(mesh) if isinstance(mesh, Mesh) else plan
            if constrained.every:
                _ = plan.pcg  # the first access checks it against the constraints
            if captured.observations:
                warn(dropped_effects(captured, plan.pcg))
        return plan


def _local(say: Callable[[str], None], mesh: Mesh | AbstractMesh | None) -> Machine:
    """Describe this process's devices, or those of a mesh."""
    say("looking at this machine (measured once, which takes a minute or two)")
    if mesh is None:
        return Machine.local()
    return Machine.local(list(mesh.devices.flat) if isinstance(mesh, Mesh) else jax.devices()[: mesh.size])


@contextmanager
def _stages(progress: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current stage with a spinner on a terminal, and does nothing elsewhere."""
    if not progress:
        yield lambda stage: None
        return
    from rich.console import Console  # takes a while to import

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("unity") as status:
        yield lambda stage: status.update(f"unity: {stage}")
