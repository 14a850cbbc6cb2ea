"""`Plan`, a drop-in for the user's function that runs on all devices: called, differentiated, jitted, inspected and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from html import escape
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from unity.base.errors import PlanError
from unity.exec.compiled.entangled import refuse_entangled
from unity.exec.context import automatic
from unity.exec.lowering import partitioned_program, program
from unity.pcg.ir.graph import PCG
from unity.plan.device_mesh import graph_on, refuse_devices
from unity.plan.effects import with_effects
from unity.plan.face.former_names import former_member
from unity.plan.face.inspection import Inspection
from unity.plan.face.plan_files import PlanFiles
from unity.plan.face.sharder import Sharder
from unity.plan.frontier import Frontier
from unity.plan.plan_family import PlanFamily
from unity.plan.planned_call import PlannedCall
from unity.plan.planned_program import PlannedProgram
from unity.plan.step import step_of
from unity.search.session import Candidate

if TYPE_CHECKING:
    from unity.exec.compiled.check import Check


class Plan:
    """The planned function, run on all devices of the machine that it was planned for.

    `unity.optimize` and `unity.load` return plans. A plan works inside `jax.jit`, `jax.grad` and `jax.value_and_grad`; its results
    and gradients are ordinary arrays.

    Attributes:
        program: the graphs of the program, and its derivation from the function.
    """

    def __init__(self, family: PlanFamily, candidate: Candidate, devices: Sequence[Any] | Mesh | None = None) -> None:
        self.program = PlannedProgram(family, candidate)
        self._devices = devices
        self.__name__ = family.name
        self.__doc__ = family.fn.__doc__

    @property
    def time(self) -> float:
        """Predicted seconds of one step."""
        return self.program.candidate.time

    @property
    def memory(self) -> float:
        """Predicted peak bytes on one device: weights, gradients, optimizer slots, residuals and temporaries."""
        return self.program.candidate.memory

    @cached_property
    def frontier(self) -> Frontier:
        """The Pareto frontier of time and memory, whose points are plans for the same devices."""
        family = self.program.family
        return Frontier(family, self.program.candidate, partial(Plan, family, devices=self._devices))

    @cached_property
    def inspect(self) -> Inspection:
        """Figures and views of the plan: its machine and mesh, its distance from the best, simulations, differences."""
        return Inspection(self, self._devices)

    @cached_property
    def files(self) -> PlanFiles:
        """Files of the plan: `save`, `report`, `export`, `annotate`."""
        return PlanFiles(self)

    @cached_property
    def shard(self) -> Sharder:
        """Place arguments: `plan.shard(params, batch)`; `local`, `state`, `unpack` and `shardings` are further forms."""
        return Sharder(self.program, self.inspect)

    @property
    def in_specs(self) -> tuple[Any, ...]:
        """The partition specifications of the arguments, over `mesh_shape`: a pytree for each argument. Needs no devices."""
        captured = self.program.family.captured
        return jax.tree.unflatten(captured.in_tree, self.program.boundary.specs[: len(captured.paths)])

    @property
    def out_specs(self) -> Any:
        """The partition specifications of the results, over `mesh_shape`: a pytree as the function returns it."""
        captured = self.program.family.captured
        return jax.tree.unflatten(captured.out_tree, self.program.boundary.specs[len(captured.paths) :])

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The names and sizes of the mesh axes of `in_specs`, outermost first: those of a mesh of the user's, if planned with one.

        Otherwise, each is a level of the machine, or one of several parts that divide different dimensions.
        """
        return self.program.boundary.mesh_shape

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arguments: a tuple of pytrees of `NamedSharding`, one for each argument.

        Their mesh is `inspect.mesh`, in which a level of the machine is several axes of prime size, unlike in `mesh_shape`, so that
        all plans for a machine share it (docs: plan#placement). After `plan.on(mesh)` with a mesh of the axes of `mesh_shape`, they
        are `in_specs` on that mesh, unless collectives need finer axes. While a mesh with explicit axes is set, they are of that
        mesh (docs: moving#under-a-mesh-of-your-own).
        """
        return self.shard.placement.arguments

    def on(self, devices: Sequence[Any] | Mesh) -> Plan:
        """Return this plan for other devices than JAX's first ones, in their order. To be compiled for, they need not be present.

        Args:
            devices: the devices, or a mesh of them. The mesh that the function was planned for, or one with the axes of
                `mesh_shape`, becomes the plan's mesh, unless collectives need finer axes. Of any other mesh, a plan without a mesh
                of the user's takes the devices.

        Raises:
            PlanError: `devices` is not a list of devices or a mesh, has too few or one twice, or is a mesh of other axes than those
                planned for.
        """
        family, candidate, machine = self.program.family, self.program.candidate, self.inspect.machine
        chosen = devices if isinstance(devices, Mesh) else tuple(devices) if isinstance(devices, Iterable) else (None,)
        if not isinstance(chosen, Mesh) and not all(hasattr(device, "process_index") for device in chosen):
            raise PlanError(
                f"devices={devices!r}: expected a list of devices, such as jax.devices(), or a jax.sharding.Mesh of them, got"
                f" {type(devices).__name__}. (docs: plan#devices)"
            )
        refuse_devices(machine, chosen)
        return Plan(family, candidate, chosen)

    if not TYPE_CHECKING:  # former names are no attributes to a type checker

        def __getattr__(self, name: str) -> Any:
            return former_member(self, "plan", name)

    def _with_effects(self, lower: Callable[[PCG, Mesh], Callable[..., tuple]]) -> Callable[..., tuple]:
        """Return the program that `lower` makes of the parallel graph on the plan's mesh, with the effects of the function."""
        graph, mesh = graph_on(self.program, self.inspect.mesh), automatic(self.inspect.mesh)
        return with_effects(lower(graph, mesh), self.program.family.captured, graph, mesh)

    @cached_property
    def _program(self) -> Callable[..., tuple]:
        """The lowered function of all leaves, with its effects, jitted for calls outside of any jit."""
        return jax.jit(self._with_effects(partial(program, ties=self.program.ties_gradients)))

    @cached_property
    def _runnable_program(self) -> Callable[..., tuple]:
        """The lowered function. Raises PlanError if the runtime of the devices cannot run it."""
        refuse_entangled(self.program.pcg, automatic(self.inspect.mesh), lambda: self.program.axis_names)
        return self._program

    @cached_property
    def _planned_call(self) -> PlannedCall:
        return PlannedCall(self.program, self.shard, lambda: self._runnable_program)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Compute the planned function of arguments with the planned shapes and types, passed by position or by name.

        Raises:
            PlanError: the arguments have other structures, shapes or types; or the plan is differentiated forward, and a derivative
                rule in it is for reverse only (docs: plan#derivatives); or the devices are CPU devices, whose runtime would mix up
                the messages of branches (docs: branches#on-virtual-devices).
        """
        return self._planned_call(args, named)

    def constrained(self) -> Callable[..., Any]:
        """Return the planned program for XLA's partitioner: on whole arrays, with sharding constraints where types change.

        It is called, jitted and differentiated in reverse like the plan. XLA chooses the collectives, which may be others than
        planned: `check(partitioned=True)` lists them.

        Raises:
            PlanError: the plan has a pipeline, or branches on groups of devices.
        """
        partitioned = jax.jit(self._with_effects(partitioned_program))
        planned_call = PlannedCall(self.program, self.shard, lambda: partitioned)

        def call(*args: Any, **named: Any) -> Any:
            return planned_call(args, named)

        return call

    def explain(self, path: Any = None, *, file: Any = None) -> None:
        """Print the plan's decisions: every operator's parallelization and cost, every collective, what could not be split.

        With a path, print the types and the cost of one argument ("params['w']", as `explain()` prints them), of the operators of a
        kind ("dot_general") or of those of a line ("model.py:42"), and what the whole plan would cost with the next best types.
        `*` matches anything in one pair of brackets, `**` anything at all.

        Args:
            path: the argument, kind or line to explain. An open file alone is taken for `file`.
            file: an open file to print to instead of standard output.
        """
        if path is not None and not isinstance(path, str):
            if file is not None or not hasattr(path, "write"):
                raise PlanError(
                    f"path={path!r}: expected what is to be explained, such as \"params['w']\" or 'dot_general', got"
                    f" {type(path).__name__}; a file is given as file=. (docs: constraints#why)"
                )
            path, file = None, path  # the only argument is a file
        if file is not None and not hasattr(file, "write"):
            raise PlanError(f"file={file!r}: expected an open file, with a method `write`, got {type(file).__name__}.")
        if path is not None:
            from unity.explain.why import why

            return why(self, path, file)
        from unity.explain.tables import explain  # rich is imported only when something is shown

        explain(self, file)

    def check(
        self,
        *,
        gradient: bool | None = None,
        devices: Sequence[Any] | Mesh | None = None,
        partitioned: bool = False,
        compiler_options: Mapping[str, str | bool] | None = None,
    ) -> Check:
        """Compile the plan and compare the program's collectives and memory with the prediction, line by line. Nothing is run.

        Args:
            gradient: whether the step computes gradients too. By default it does if the function was planned for training.
            devices: devices to compile for, or a mesh of them, instead of those of this process. They may be those of a topology
                (`jax.experimental.topologies`) that is not present (docs: plan#check).
            partitioned: whether to compile `constrained()`, whose collectives XLA's partitioner chooses.
            compiler_options: further options of XLA, as `jax.jit` takes them (docs: memory#late-gradients-on-gpus).

        Raises:
            PlanError: there are fewer devices than planned for.
        """
        from unity.exec.compiled.check import compare

        plan = self if devices is None else self.on(devices)
        step = replace(step_of(plan, self.program.training(gradient)), partitioned=partitioned)
        return compare(step, step.compile(compiler_options))

    def _repr_html_(self) -> str:
        """Show the plan's decisions in a notebook."""
        return f"<pre>{escape(repr(self))}</pre>"

    def __deepcopy__(self, memo: Any = None) -> Plan:
        return self  # plans are immutable

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        raise PlanError(
            f"the plan of {self.__name__} cannot be pickled: save it by plan.files.save(path), and read it by"
            " unity.load(path, function, ...)."
        )

    def __repr__(self) -> str:
        """Return the plan's decisions in about six lines."""
        from unity.explain.brief import brief

        return brief(self)
