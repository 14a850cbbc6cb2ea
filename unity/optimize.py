"""`unity.optimize`, from a JAX function to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any, Unpack

import jax
from jax.sharding import AbstractMesh, Mesh

from unity.base.gc_pause import uncollected
from unity.base.processes import several
from unity.base.progress import stages
from unity.base.user_warnings import warn_user
from unity.constraints.bound_constraints import bind
from unity.constraints.excluded_rules import without
from unity.constraints.kinds import Constraint, WithoutRules
from unity.constraints.program_shardings import marking, pins
from unity.exec.hosts.device_order import check_order
from unity.exec.measure.local_machine import is_unmeasured
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.jaxprs.effects import warn
from unity.pcg.jaxprs.trace_contexts import unset
from unity.plan.effects import dropped_effects
from unity.plan.face.former_names import accepting_former_options
from unity.plan.files import cache
from unity.plan.further_options import FurtherOptions, refuse_unknown
from unity.plan.plan import Plan
from unity.plan.shardings.optimizer_state import placed_state, state_sizes
from unity.planning.options import CONSTRAINED, Options, obeyed, refuse_uncallable
from unity.planning.planner import plan_on, plan_on_fewest
from unity.planning.request import Request
from unity.planning.resembling_step import resembling_step
from unity.search.cost.cost import Training
from unity.search.cost.state_sizes import NO_STATE
from unity.search.substitution.fitting import CANDIDATES
from unity.transforms.rewriting import Rewriter, budget_of, library_of


@accepting_former_options
def optimize(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    training: bool = True,
    machine: Machine | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    objective: str = "time",
    memory_limit: float | None = None,
    optimizer_slots: float | None = None,
    optimizer: Any = None,
    constraints: Constraint | Sequence[Constraint] = (),
    search: str = "unity",
    budget: int | None = None,
    progress: bool = True,
    **options: Unpack[FurtherOptions],
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
        optimizer_slots: the number of values that the optimizer keeps for each weight, counted as memory, in the weights' type: 4
            where Adam's moments of bfloat16 weights are float32. It may be a fraction. Without an `optimizer`, it is 2 by default,
            as for Adam.
        optimizer: the optimizer, in the place of `optimizer_slots`, so that its state counts as it is: an object with a method
            `init` (`optax.adam(1e-3)`), a function from the weights to its state or to `jax.ShapeDtypeStruct`s, or a description
            such as `unity.OptimizerState(2, master="float32")`. Values for each weight count as stored where the weight is, and
            others, such as counts and factored moments, on every device.
        constraints: constraints that the plan must obey: `unity.pin`, `forbid`, `only`, `require`, `without_rules`,
            `keep_shardings`, besides every `unity.constrain` in the function. Only the searches "unity" and "captured" support
            them.
        search: "unity" searches rewritings and parallelization together, over proved rules; "captured" leaves the graph as it is.
            For comparison, "sequential" rewrites for one device first and then parallelizes; "unity-rules" parallelizes by
            substitutions alone, as Unity published it; and the names in `unity.baselines` run other published algorithms, each
            with its own objective.
        budget: the number of programs that rewritings may lead to; the plan is reproducible. For a published algorithm, its own
            steps.
        progress: whether to show the current stage, on a terminal; elsewhere, a line before devices are measured.
        options: those that few calls need, about transformations of the program and about the search: `unity.FurtherOptions` lists
            them.

    Returns:
        A Plan, which is called like `fn`.

    Raises:
        CaptureError: the function cannot be traced, or an argument is not an array.
        InfeasibleError: no plan fits the memory limit, or obeys the constraints; the message names the smallest conflicting set.
        ConstraintError: a constraint names something that the program or the machine does not have.
        OptionError: an option is unknown, or excluded by another, or `fn` cannot be called. (It is a ValueError too.)
    """
    refuse_uncallable(fn, "to plan")
    refuse_unknown(options, OPTION_NAMES, "unity.optimize", "plan#options")
    checked = Options.checked(
        options,
        argnums=argnums,
        training=training,
        machine=machine,
        mesh=mesh,
        objective=objective,
        memory_limit=memory_limit,
        optimizer_slots=optimizer_slots,
        optimizer=optimizer,
        constraints=(constraints,) if isinstance(constraints, Constraint) else tuple(constraints),
        search=search,
        budget=budget,
        progress=progress,
    )
    rewriter = _rewriter(checked)
    with stages(progress) as (say, announce), uncollected():
        target = _target(machine or _local(announce, mesh), checked)
        say("capturing the graph")
        request = _request(fn, args, checked, target, rewriter, say)
        with unset():
            plan = plan_on_fewest(request, target) if objective == "devices" else plan_on(request, target)
            plan = plan.on(mesh) if isinstance(mesh, Mesh) else plan
            if request.bound.every:
                _ = plan.program.pcg  # the first access checks it against the constraints
            if request.captured.observations:
                warn(dropped_effects(request.captured, plan.program.pcg))
        return plan


OPTION_NAMES = FurtherOptions.__optional_keys__ | {
    name for name, p in signature(optimize).parameters.items() if p.kind == Parameter.KEYWORD_ONLY
}


def _request(
    fn: Callable[..., Any], args: Sequence[Any], options: Options, target: Machine, rewriter: Rewriter, say: Callable[[str], None]
) -> Request:
    """Capture a function, and return the request for its plan."""
    marks = marking(target) if options.keeps_shardings else None
    differentiated = options.argnums if options.training else ()
    captured = capture(fn, *args, argnums=differentiated, clustering=cache.clustered, marking=marks)
    if options.training and (warning := resembling_step(getattr(fn, "__name__", "fn"), captured)):
        warn_user(warning)
    state = NO_STATE
    if options.training:
        state = state_sizes(options.optimizer, options.slots, captured, args, options.argnums)
    state = placed_state(state, target, options.transforms.offload and options.search in CONSTRAINED)
    kept_shardings = pins(captured.paths, jax.tree.leaves(args), target) if marks else ()
    bound = bind((*options.call_constraints, *kept_shardings), captured, fn, options.argnums)
    return Request(
        fn=fn,
        captured=captured,
        training=Training(options.training and bool(losses(captured.graph)), state),
        objective=options.objective,
        limit=target.device.memory if options.memory_limit is None else options.memory_limit,
        seed=options.seed,
        kind=options.search,
        budget=options.search_bound,
        rewriter=rewriter,
        # With several processes, some would have no device of a plan for fewer devices, and could not help to run it.
        local=options.machine is None and not (options.objective == "devices" and several()),
        overlap=options.overlap,
        measure=options.measure,
        say=say,
        bound=obeyed(bound, options.search),
        transforms=options.transforms,
    )


def _rewriter(options: Options) -> Rewriter:
    """Return the rewriter with the rules that a search may use, bounded by a number of programs (int) or by seconds (float)."""
    allowed = options.rules if options.search in ("unity", "sequential") else ()
    excluded = [c for c in options.call_constraints if isinstance(c, WithoutRules)]
    library = None if allowed is None and not excluded else without(library_of(allowed), excluded)
    return Rewriter(
        library, budget_of(CANDIDATES if options.search_bound is None and options.search == "unity-rules" else options.search_bound)
    )


def _target(machine: Machine, options: Options) -> Machine:
    """Return a machine with the axes of a mesh, and with the type in which partial sums are added.

    Raises PlanError unless the devices of each host follow each other in the mesh.
    """
    target = replace(machine, reduce_in=options.reduce_in) if options.reduce_in else machine
    if options.mesh is not None:
        target = target.with_mesh(options.mesh.shape)
    if isinstance(options.mesh, Mesh):
        check_order(target, options.mesh.devices.flat)
    return target


def _local(announce: Callable[[str], None], mesh: Mesh | AbstractMesh | None) -> Machine:
    """Describe this process's devices, or those of a mesh."""
    devices = jax.devices()
    if mesh is not None:
        devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else devices[: mesh.size]
    if is_unmeasured(devices):
        announce("measuring this machine's devices (once, for a minute or two; machine= needs no measurement)")
    return Machine.local() if mesh is None else Machine.local(devices)
