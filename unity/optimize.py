"""`unity.optimize`: from a JAX function to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from unity.base.errors import OptionError
from unity.base.gc_pause import uncollected
from unity.base.processes import several
from unity.constraints.bound import bound
from unity.constraints.kinds import Constraint, WithoutRules
from unity.constraints.rules import without
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.jaxprs.mesh_context import apart
from unity.pcg.parallel.stages import TWO_BW
from unity.plan import cache
from unity.plan.options import obeyed, refuse, refuse_machine, refuse_type
from unity.plan.plan import Plan
from unity.planning.task import Task, Ways
from unity.search.cost.cost import Training
from unity.search.substitution.fitting import CANDIDATES
from unity.transforms.rewriting import Rewriter, budget_of, library_of


def optimize(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    training: bool = True,
    machine: Machine | None = None,
    objective: str = "time",
    memory_limit: float | None = None,
    optimizer_slots: int = 2,
    search: str = "unity",
    budget: float | None = None,
    rules: Any = None,
    constraints: Constraint | Sequence[Constraint] = (),
    seed: int = 0,
    measure: bool = False,
    pipelines: bool | tuple[int, int] | tuple[int, int, str] = True,
    branches: bool | int = True,
    pack: bool = False,
    reduce_in: str | None = None,
    progress: bool = True,
) -> Plan:
    """Plans `fn` for many devices: the best way to split every operator and store every argument.

    Args:
        fn: any JAX function of pytrees of arrays.
        args: its arguments, or `jax.ShapeDtypeStruct`s in their place: nothing is allocated.
        argnums: the arguments that are differentiated (the weights), as in `jax.grad`.
        training: whether the backward pass is planned too; otherwise the forward pass alone, as for results of integers.
        machine: what it will run on; the default is the machine that this process sees, on which a rewritten program is also
            run, and not taken if it is slower than the captured one.
        objective: "time": the fastest that fits; "devices": on the fewest devices that fit; "memory": the leanest.
        memory_limit: bytes on one device; the default is the device's own.
        optimizer_slots: values that the optimizer keeps for each weight (Adam: 2), counted as memory.
        search: "unity": algebra and parallelization together, over proved rules; "captured": the graph is left as it is. For
            comparison, "sequential": algebra first, for one device, then parallelization; "unity-rules": parallelization by
            substitutions alone, as Unity published it; and what else was published, by the names in `unity.baselines`,
            each with its own objective.
        budget: how long to look for rewritings: a number of programs (int; the same plan every time), or seconds (float). For a
            published algorithm, its own steps or seconds.
        rules: the rules that may be used: a library's path or a loaded Library; the default is the one that comes with unity.
        constraints: what the plan must obey: `unity.pin`, `forbid`, `only`, `require`, `without_rules`. What `unity.constrain`
            says in the function counts too. Only with the searches "unity" and "captured".
        measure: of the plans that are predicted to be nearly as fast as the fastest, simulate some, run the best of them on the
            devices of this process, and take what is fastest then. For `objective="time"` on the machine that is there.
        pipelines: whether scans over layers may become pipelines, where that is better; or (stages, micro-batches): one must; or
            (stages, micro-batches, schedule): "1f1b", "gpipe" or "2bw". With the searches "unity" and "captured"; not where there
            are constraints but pins of arguments, as they speak of the function as it is.
        branches: whether branches that do not need each other may run at the same time, on devices of their own, where that is
            better; or a number: on so many groups of devices they must. With the searches "unity" and "captured"; beside a
            pipeline, too.
        pack: whether weights may be packed: those of such branches in arrays that lie on the branches' devices only, and what
            the program joins of them in arrays that are joined once. `plan.shard` then gives weights of other shapes, in the
            same tree, and `plan.unshard` the function's own.
        reduce_in: a type narrower than float32, such as "bfloat16": partial sums and gradients of that type are rounded on every
            device and added in it, which sends less. By default they are added in float32 and rounded once.
        progress: whether to show what is being done, on a terminal.

    Returns:
        A Plan: call it as you would `fn`.

    Raises:
        CaptureError: the function cannot be traced, or an argument is no array.
        InfeasibleError: no plan fits the memory limit, or obeys the constraints; it names the smallest set that conflicts.
        ConstraintError: a constraint speaks of something that is not there.
        OptionError: an option is not known, or does not go with another. (It is a ValueError too.)
    """
    constraints = (constraints,) if isinstance(constraints, Constraint) else tuple(constraints)
    refuse(objective, search, pipelines, branches, constraints)
    refuse_machine(machine, memory_limit, optimizer_slots)
    refuse_type(reduce_in)
    if measure and (machine is not None or objective != "time"):
        raise OptionError("measure=True runs plans on the devices of this process: leave machine= out, and objective= at 'time'")
    if measure and isinstance(pipelines, tuple) and TWO_BW in pipelines[2:]:
        raise OptionError("measure=True runs steps that drain, and 2BW has none: leave one of them out (docs: pipelines#2bw)")
    if machine is None and isinstance(budget, float) and several():
        raise OptionError(
            f"budget={budget} seconds would find something else in every process: give a number of programs (an int)"
            " (docs: hosts#the-same-everywhere)"
        )
    allowed = rules if search in ("unity", "sequential") else ()
    wanted = CANDIDATES if budget is None and search == "unity-rules" else budget
    excluded = [c for c in constraints if isinstance(c, WithoutRules)]
    rewriter = Rewriter(None if allowed is None and not excluded else without(library_of(allowed), excluded), budget_of(wanted))
    with _stages(progress) as say, uncollected():
        chosen = machine or _local(say)
        chosen = replace(chosen, reduce_in=reduce_in) if reduce_in else chosen
        say("capturing the graph")
        captured = capture(fn, *args, argnums=argnums if training else (), clustering=cache.clustered)
        wishes = obeyed(bound(constraints, captured, fn, argnums), search)
        limit = chosen.device.memory if memory_limit is None else memory_limit
        asked = Training(training and bool(losses(captured.graph)), optimizer_slots)
        # Of several processes, some would have no part in running a plan for fewer devices.
        here = machine is None and not (objective == "devices" and several())
        ways = Ways(pipelines, branches, pack)
        task = Task(fn, captured, asked, objective, limit, seed, search, budget, rewriter, here, measure, say, wishes, ways)
        with apart():
            plan = task.fewest(chosen) if objective == "devices" else task.on(chosen)
            if wishes.every:
                _ = plan.pcg  # which is held against the constraints when it is made
        return plan


def _local(say: Callable[[str], None]) -> Machine:
    say("looking at this machine (measured once, which takes a minute or two)")
    return Machine.local()


@contextmanager
def _stages(progress: bool) -> Iterator[Callable[[str], None]]:
    """Shows the current stage with a spinner, on a terminal; says nothing into a pipe."""
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
