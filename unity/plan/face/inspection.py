"""Figures and views of a plan beyond the everyday ones: machine and mesh, distance from the best, simulations, differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, Mesh

from unity.base.errors import PlanError
from unity.machine.machine import Machine
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.plan.device_mesh import mesh_for
from unity.plan.loop_options import loop_options
from unity.plan.plan_family import Tried
from unity.plan.shardings.logical_rules import LogicalRules, logical_rules
from unity.plan.shardings.specs import SpecRules, rules
from unity.plan.summary import captured_summary_of, summary_of
from unity.search.memory.backend import backend_of
from unity.search.memory.timeline import MemoryTimeline, memory_timeline
from unity.search.simulator import Simulation, simulate

if TYPE_CHECKING:
    from unity.diff import PlanDiff
    from unity.plan.plan import Plan


class Inspection:
    """`plan.inspect`: figures and views of a plan. Nothing here changes it, and only `mesh` needs its devices."""

    def __init__(self, plan: Plan, devices: Sequence[Any] | Mesh | None) -> None:
        self._plan, self._devices = plan, devices

    @property
    def machine(self) -> Machine:
        """The machine that the function was planned for."""
        return self._plan.program.family.search.machine

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh of prime axes, arranged so that the machine's levels are made of whole hosts; or the user's mesh.

        The user's is that of `mesh=`, or one with the axes of `plan.mesh_shape` that was given to `plan.on`.

        The first access compares the plans of several processes. Raises PlanError if there are fewer devices than planned for, if
        the hosts do not form the machine's levels, or if the processes have different plans.
        """
        return mesh_for(self._plan.program, self._devices)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh of `plan.in_specs`, without devices."""
        devices = self._devices
        if isinstance(devices, Mesh) and self._plan.program.has_mesh(devices.shape):
            return devices.abstract_mesh
        return self._plan.program.boundary.mesh

    def spec_rules(self, argument: int = 0) -> SpecRules:
        """Return the specifications of one argument's leaves as pairs (regular expression, `PartitionSpec`).

        Layers share a rule, as in the partition rules of code bases that look a parameter's path up by `re.search`, first match
        first.

        Args:
            argument: the argument's place among those of the function.

        Raises:
            PlanError: the function has no argument of that number, or two leaves have one path and different specifications.
        """
        return rules(self._specs(argument))

    def logical_rules(self, names: Any, argument: int = 0) -> LogicalRules:
        """Return the specifications of one argument's leaves as rules from logical axis names to mesh axes.

        They are those of `flax.linen.logical_axis_rules`, MaxText and t5x: `(("embed", None), ("mlp", "device"))`.

        Args:
            names: the logical names of each leaf's dimensions, in the argument's structure: tuples such as `("embed", "mlp")`, or
                the result of `flax.linen.get_partition_spec`. None is a dimension without a name.
            argument: the argument's place among those of the function.

        Raises:
            PlanError: the function has no argument of that number, `names` has another structure, or dimensions of one name are
                divided in ways that no list of rules tells apart.
        """
        return logical_rules(self._specs(argument), names)

    def _specs(self, argument: int) -> Any:
        """Return the specifications of an argument. Raises PlanError if the function has none of that number."""
        specs = self._plan.in_specs
        if not isinstance(argument, int) or not 0 <= argument < len(specs):
            raise PlanError(f"argument={argument!r}: expected the place of an argument, a number from 0 to {len(specs) - 1}")
        return specs[argument]

    @cached_property
    def bound(self) -> float | None:
        """Seconds that no sharding of the plan's program goes below, by the same costs and within the same memory limit.

        The program is `plan.program.serial`: other rewritings, pipelines, branches and recomputed layers are not covered. The first
        access takes about as long as the search of that program, also for a plan from a file or from the cache; `explain`,
        `files.report` and `files.save` access it. It is None on machines of many devices (docs: search#bound).
        """
        family = self._plan.program.family
        limit = math.inf if family.limit is None else family.limit
        with without_mesh():
            return family.search.least_time(self._plan.time, limit)

    @property
    def gap(self) -> float | None:
        """The part by which the plan is at most slower than the best sharding of its program, 0.014 for 1.4 %: `time / bound - 1`.

        It is None where `bound` is.
        """
        if self.bound is None:
            return None
        return self._plan.time / self.bound - 1 if self._plan.time > self.bound else 0.0

    @property
    def simulated_bound(self) -> float | None:
        """Seconds that no simulated step of any sharding of the plan's program goes below, whatever it hides and keeps in memory.

        A device computes as long at least. None where an operator can be divided in too many ways (docs: search#bound).
        """
        with without_mesh():
            return self._plan.program.family.search.least_computing

    @property
    def simulated_gap(self) -> float | None:
        """The part by which the plan's simulated step is at most longer than that of any sharding, like `gap`.

        It is None where `simulated_bound` is, and 0 for a program that computes nothing.
        """
        bound = self.simulated_bound
        if bound is None:
            return None
        return max(0.0, self.simulate().makespan / bound - 1) if bound else 0.0

    @property
    def search_seconds(self) -> float:
        """Seconds that the search took (near zero from the cache)."""
        return self._plan.program.family.seconds

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The plans that this one was chosen from by measuring, itself first; empty otherwise, and not saved in files."""
        return self._plan.program.family.tried

    def simulate(self) -> Simulation:
        """Simulate one step on every device and link, and return its schedule: the makespan, a trace, a picture."""
        program = self._plan.program
        return simulate(program.pcg, self.machine, program.family.differentiated, training=program.family.search.training)

    def compiler_options(self) -> dict[str, str | bool]:
        """Return the options of XLA with which the compiled plan hides more of its communication, for `jax.jit`.

        On GPUs, loops with collectives are double-buffered, so that two steps overlap, if the plan leaves the memory for that.
        Other plans have no options (docs: search#what-xla-hides).
        """
        return loop_options(self._plan.program)

    def memory_timeline(self, *, gradient: bool | None = None) -> MemoryTimeline:
        """Return the live bytes of one device during a step, and the buffers live at the peak, by operator and line.

        The timeline is that of the search's memory model, operator by operator. Nothing is compiled, and no devices are needed.

        Args:
            gradient: whether the step computes gradients too. By default it does if the function was planned for training.
        """
        program = self._plan.program
        differentiated = program.family.captured.differentiated
        return memory_timeline(program.pcg, differentiated, program.training(gradient), backend_of(self.machine))

    def diff(self, other: Plan | None = None) -> PlanDiff:
        """Return the differences between this plan and another, by default the captured program on one device.

        The other plan may be of another program, budget or machine. The result prints as text, and converts to Markdown, HTML, JSON
        and DOT.
        """
        from unity.diff import PlanDiff

        plan = self._plan
        if other is None:
            return PlanDiff(captured_summary_of(plan.program), summary_of(plan.program), same_source=True)
        if not isinstance(other, type(plan)):
            raise PlanError(f"other={other!r}: expected another Plan, got {type(other).__name__}; unity.load reads a file's.")
        is_same_source = plan.program.family.fn is other.program.family.fn
        sides = summary_of(plan.program), summary_of(other.program)
        return PlanDiff(*sides, same_source=is_same_source, captured=(plan.program.original, other.program.original))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as data for other tools: the parallel graph, the rules behind it, costs by line.

        This form cannot be run; `plan.files.save` writes a file that `unity.load` reads.
        """
        return summary_of(self._plan.program).to_json()
