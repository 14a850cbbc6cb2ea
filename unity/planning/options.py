"""The options of a call of `unity.optimize`, and their validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, NoReturn

from jax.sharding import AbstractMesh, Mesh

from unity.base.errors import OptionError
from unity.base.formatting import with_article
from unity.base.processes import several
from unity.constraints.bound_constraints import BoundConstraints
from unity.constraints.kinds import Across, Constraint, KeptShardings, Pin, WithoutRules
from unity.machine.machine import Machine
from unity.pcg.parallel.stages import SCHEDULES, TWO_BW
from unity.pcg.types.accumulation import NARROW
from unity.plan.further_options import FurtherOptions, PipelineShape, Transforms
from unity.search.cost.state_sizes import ADAM
from unity.search.published import names

OBJECTIVES = ("time", "devices", "memory")
SEARCHES = ("unity", "captured", "sequential", "unity-rules", *names())
CONSTRAINED = ("unity", "captured")  # searches that obey constraints, find pipelines, and know overlap=True


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The validated options of a call of `unity.optimize`, whose docstring describes them. Made by `checked`."""

    argnums: int | Sequence[int]
    training: bool
    machine: Machine | None
    mesh: Mesh | AbstractMesh | None
    objective: str
    memory_limit: float | None
    optimizer_slots: float | None
    optimizer: Any
    constraints: Sequence[Constraint]
    search: str
    budget: int | None
    progress: bool
    transforms: Transforms
    reduce_in: str | None = None
    rules: Any = None
    seconds: float | None = None
    overlap: bool = False
    measure: bool = False
    seed: int = 0

    @classmethod
    def checked(cls, further: FurtherOptions, **values: Any) -> Options:
        """Return the options of a call. Raises OptionError for values that an option does not have, and for conflicts."""
        remaining = {name: value for name, value in further.items() if name in cls.__dataclass_fields__}
        options = cls(transforms=Transforms.of(further), **remaining, **values)
        refuse_switches({name: getattr(options, name) for name in ("training", "overlap", "measure", "progress")})
        _refuse_search_and_transforms(options.objective, options.search, options.transforms, options.call_constraints)
        _refuse_optimizer(options.optimizer, options.optimizer_slots)
        _refuse_machine(options.machine, options.memory_limit, options.slots)
        _refuse_mesh(options.mesh, options.objective)
        _refuse_reduce_in(options.reduce_in)
        _refuse_budget(options.budget, options.seconds, options.machine)
        if options.keeps_shardings:
            _refuse_kept_shardings(options.objective)
        if options.measure:
            _refuse_measuring(options.machine, options.objective, options.transforms.pipeline)
        return options

    @property
    def slots(self) -> float:
        """The values that the optimizer keeps for each weight, assumed if no `optimizer` is given."""
        return ADAM.slots if self.optimizer_slots is None else self.optimizer_slots

    @property
    def search_bound(self) -> float | None:
        """The bound on the search: a number of programs (int), or seconds (float)."""
        return self.budget if self.seconds is None else float(self.seconds)

    @property
    def keeps_shardings(self) -> bool:
        """Whether the shardings that the function states are constraints (`unity.keep_shardings`)."""
        return any(isinstance(c, KeptShardings) for c in self.constraints)

    @property
    def call_constraints(self) -> tuple[Constraint, ...]:
        """The constraints of the call itself, without `unity.keep_shardings`."""
        return tuple(c for c in self.constraints if not isinstance(c, KeptShardings))


def _refuse_search_and_transforms(objective: str, search: str, transforms: Transforms, constraints: Sequence[Constraint]) -> None:
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


def _refuse_budget(budget: Any, seconds: Any, machine: Machine | None) -> None:
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


def _refuse_machine(machine: Any, memory_limit: Any, optimizer_slots: Any) -> None:
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


def _refuse_optimizer(optimizer: Any, optimizer_slots: float | None) -> None:
    """Raise OptionError if both options about the optimizer's state are used."""
    if optimizer is not None and optimizer_slots is not None:
        raise OptionError(
            f"optimizer={optimizer!r} and optimizer_slots={optimizer_slots} do not go together, since the optimizer tells its"
            " state: leave one out (docs: memory#optimizer-state)"
        )


def _refuse_measuring(machine: Machine | None, objective: str, pipeline: PipelineShape | None) -> None:
    """Raise OptionError unless plans with these options can be run here, and compared by their times."""
    if machine is not None or objective != "time":
        raise OptionError("measure=True runs plans on the devices of this process: leave machine= out, and objective= at 'time'")
    if pipeline is not None and pipeline.schedule == TWO_BW:
        raise OptionError("measure=True runs steps that drain, and 2BW has none: leave one of them out (docs: pipelines#2bw)")


def _refuse_mesh(mesh: Any, objective: str) -> None:
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


def _refuse_reduce_in(reduce_in: Any) -> None:
    """Raise OptionError unless `reduce_in` is None or names a type narrower than float32."""
    if reduce_in is not None and not (isinstance(reduce_in, str) and reduce_in in NARROW):
        raise OptionError(
            f"reduce_in={reduce_in!r}: expected None or one of {', '.join(map(repr, NARROW))} (docs: numerics#reduce_in)"
        )


def _refuse_kept_shardings(objective: str) -> None:
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


def obeyed(bound: BoundConstraints, search: str) -> BoundConstraints:
    """Return the constraints. Raises OptionError if there are any and the search does not obey constraints."""
    if bound.every and search not in CONSTRAINED:
        raise OptionError(
            f"search={search!r} knows no constraints, and would break {bound.every[0]}: leave them out, or use one of"
            f" {', '.join(map(repr, CONSTRAINED))}"
        )
    return bound
