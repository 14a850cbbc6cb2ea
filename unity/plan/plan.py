"""`Plan`, a drop-in for the user's function that runs on all devices: called, differentiated, jitted, inspected and saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from unity.base.errors import PlanError
from unity.exec.compiled.entangled import refuse_entangled
from unity.exec.context import automatic, on_mesh, typed_mesh
from unity.exec.hosts.arrays import place
from unity.exec.lowering import partitioned_program, program, spec_of
from unity.machine.machine import Machine
from unity.pcg.capture.packed_arguments import Packing
from unity.pcg.ir.graph import PCG
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.plan.call_arguments import by_position
from unity.plan.derivation_check import check_derivation
from unity.plan.effects import with_effects
from unity.plan.frontier import Frontier
from unity.plan.plan_family import PlanFamily, Tried
from unity.plan.planned_call import PlannedCall
from unity.plan.shardings.devices import mesh_for
from unity.plan.shardings.following_shardings import following, weights_of
from unity.plan.shardings.placement import Placement
from unity.plan.shardings.specs import Boundary, SpecRules, rules
from unity.plan.step import step_of
from unity.plan.stream import Stream
from unity.plan.summary import captured_summary_of, differentiated_in, summary_of
from unity.search.cost.cost import Training
from unity.search.memory.backend import backend_of
from unity.search.memory.timeline import MemoryTimeline, memory_timeline
from unity.search.session import Candidate
from unity.search.substitution.trace import RuleApplication
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.derivation import RewriteStep
from unity.substitutions.language.parallel_derivation import Parallelization
from unity.substitutions.rewriting.parallel_recording import recorded
from unity.transforms.branches import Branching
from unity.transforms.packing import Joining
from unity.transforms.pipelining import Pipelining
from unity.transforms.recomputing import Recomputing
from unity.transforms.rewriting import Rewriting
from unity.transforms.transformation import Transformation
from unity.verify.derivations.parallel import Replayed, check_parallelization

if TYPE_CHECKING:
    from unity.diff import PlanDiff
    from unity.exec.compiled.check import Check
    from unity.search.simulator import Simulation


class Plan:
    """The planned function, run on all devices of the machine that it was planned for.

    `unity.optimize` and `unity.load` return plans. A plan works inside `jax.jit`, `jax.grad` and `jax.value_and_grad`; its results
    and gradients are ordinary arrays.

    Attributes:
        family: the function, its graph, its transformations and the search, which all plans of the frontier share.
        candidate: the plan's point of the frontier.
    """

    def __init__(self, family: PlanFamily, candidate: Candidate, devices: Sequence[Any] | Mesh | None = None) -> None:
        self.family, self.candidate, self._devices = family, candidate, devices
        self.__name__ = getattr(family.fn, "__name__", "plan")
        self.__doc__ = family.fn.__doc__
        self._placements: dict[Mesh | None, Placement] = {}  # by the user's mesh

    @property
    def machine(self) -> Machine:
        """The machine that the function was planned for."""
        return self.family.search.machine

    @property
    def time(self) -> float:
        """Predicted seconds of one step."""
        return self.candidate.time

    @property
    def memory(self) -> float:
        """Predicted peak bytes on one device: weights, gradients, optimizer slots, residuals and temporaries."""
        return self.candidate.memory

    @cached_property
    def bound(self) -> float | None:
        """Seconds that no sharding of the plan's program goes below, by the same costs and within the same memory limit.

        The program is `serial`: other rewritings, pipelines, branches and recomputed layers are not covered. The first access
        takes about as long as the search of that program, also for a plan from a file or from the cache; `explain`, `report` and
        `save` access it. It is None on machines of many devices (docs: search#bound).
        """
        limit = math.inf if self.family.limit is None else self.family.limit
        with without_mesh():
            return self.family.search.least_time(self.time, limit)

    @property
    def gap(self) -> float | None:
        """The part by which the plan is at most slower than the best sharding of its program, 0.014 for 1.4 %: `time / bound - 1`.

        It is None where `bound` is.
        """
        if self.bound is None:
            return None
        return self.time / self.bound - 1 if self.time > self.bound else 0.0

    @property
    def search_seconds(self) -> float:
        """Seconds that the search took (near zero from the cache)."""
        return self.family.seconds

    @property
    def original(self) -> PCG:
        """The serial graph as captured."""
        return self.family.original.graph

    @property
    def serial(self) -> PCG:
        """The serial graph that was parallelized: as captured, or transformed."""
        return self.family.captured.graph

    @property
    def transformations(self) -> tuple[Transformation, ...]:
        """The transformations of the captured program before it was parallelized, in order."""
        return self.family.transformations

    @property
    def recomputing(self) -> Recomputing | None:
        """The layers that the backward pass recomputes so that the plan fits, or None."""
        return self.family.transformation(Recomputing)

    @property
    def rewriting(self) -> Rewriting:
        """The rewriting of the captured program before it was parallelized; false, and without rules, if there was none."""
        return self.family.transformation(Rewriting) or Rewriting.none(self.family.original)

    @property
    def pipelining(self) -> Pipelining | None:
        """The pipeline that a scan was made into, or None."""
        return self.family.transformation(Pipelining)

    @property
    def branching(self) -> Branching | None:
        """The branches that run on separate groups of devices, and the weights packed for them, or None."""
        return self.family.transformation(Branching)

    @property
    def joining(self) -> Joining | None:
        """The weights that `shard` joins once, which the program would join in every step. None without `pack=True`."""
        return self.family.transformation(Joining)

    @property
    def applications(self) -> tuple[RuleApplication, ...]:
        """The rules that parallelized the graph, in order; empty except with `search="unity-rules"`."""
        return self.family.applications

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The plans that this one was chosen from, itself first; empty except with `measure=True`, and not saved in files."""
        return self.family.tried

    def simulate(self) -> Simulation:
        """Simulate one step on every device and link, and return its schedule: the makespan, a trace, a picture."""
        from unity.search.simulator import simulate

        return simulate(self.pcg, self.machine, differentiated_in(self), training=self.family.search.training)

    @cached_property
    def pcg(self) -> PCG:
        """The parallel graph: every tensor with its parallel type, and the operators that change types."""
        graph = parallelize(self.serial, self.candidate.assignment)
        check(graph)
        self.family.bound.check(self.serial, graph, self.machine)
        return graph

    @cached_property
    def frontier(self) -> Frontier:
        """The Pareto frontier of time and memory, whose points are plans for the same devices."""
        return Frontier(self.family, self.candidate, partial(Plan, self.family, devices=self._devices))

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh of prime axes, arranged so that the machine's levels are made of whole hosts; or the user's mesh.

        The first access compares the plans of several processes. Raises PlanError if there are fewer devices than planned for, if
        the hosts do not form the machine's levels, or if the processes have different plans.
        """
        return mesh_for(self, self._devices)

    @cached_property
    def _compiled_mesh(self) -> Mesh:
        return automatic(self.mesh)

    @cached_property
    def _shardings(self) -> tuple[NamedSharding, ...]:
        nodes = self.pcg.inputs
        return tuple(NamedSharding(self._compiled_mesh, spec_of(n.types[0], self.pcg.axes, n.tensors[0].ndim)) for n in nodes)

    @cached_property
    def _boundary(self) -> Boundary:
        """The types of the leaves of the arguments, and of those of the results after them."""
        captured = self.family.captured
        values = [(node.types[0], node.tensors[0].shape) for node in self.pcg.inputs[: len(captured.paths)]]
        values += [(value.type, value.tensor.shape) for value in self.pcg.outputs[: captured.out_tree.num_leaves]]
        types, shapes = zip(*values, strict=True)
        levels = tuple(level.name for level in self.machine.levels)
        return Boundary(self.pcg.axes, levels, types, shapes, dict(self.machine.mesh))

    @property
    def in_specs(self) -> tuple[Any, ...]:
        """The partition specifications of the arguments, over `mesh_shape`: a pytree for each argument. Needs no devices."""
        return jax.tree.unflatten(self.family.captured.in_tree, self._boundary.specs[: len(self.family.captured.paths)])

    @property
    def out_specs(self) -> Any:
        """The partition specifications of the results, over `mesh_shape`: a pytree as the function returns it."""
        return jax.tree.unflatten(self.family.captured.out_tree, self._boundary.specs[len(self.family.captured.paths) :])

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The names and sizes of the mesh axes of `in_specs`, outermost first: those of a mesh of the user's, if planned with one.

        Otherwise, each is a level of the machine, or one of several parts that divide different dimensions.
        """
        return self._boundary.mesh_shape

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh of `in_specs`, without devices."""
        devices = self._devices
        if isinstance(devices, Mesh) and self.machine.has_mesh(devices.shape):
            return devices.abstract_mesh
        return self._boundary.mesh

    def spec_rules(self, argument: int = 0) -> SpecRules:
        """Return the specifications of one argument's leaves as pairs (regular expression, `PartitionSpec`).

        Layers share a rule, as in the partition rules of code bases that look a parameter's path up by `re.search`, first match
        first.

        Args:
            argument: the argument's place among those of the function.
        """
        return rules(self.in_specs[argument])

    def on(self, devices: Sequence[Any] | Mesh) -> Plan:
        """Return this plan for other devices than JAX's first ones, in their order. To be compiled for, they need not be present.

        Args:
            devices: the devices, or a mesh of them. The mesh that the function was planned for, or one of equal axes,
                becomes the plan's mesh; the axes of others do not matter.

        Raises:
            PlanError: `devices` is not a list of devices or a mesh.
        """
        if isinstance(devices, Mesh):
            return Plan(self.family, self.candidate, devices)
        listed = tuple(devices) if isinstance(devices, Iterable) else (None,)
        if not all(hasattr(device, "process_index") for device in listed):
            raise PlanError(
                f"devices={devices!r}: expected a list of devices, such as jax.devices(), or a jax.sharding.Mesh of them, got"
                f" {type(devices).__name__}. (docs: plan#devices)"
            )
        return Plan(self.family, self.candidate, listed)

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arguments: a tuple of pytrees of `NamedSharding`, one for each argument.

        While a mesh with explicit axes is set, they are of that mesh (docs: moving#under-a-mesh-of-your-own).
        """
        return self.placement.arguments

    @property
    def placement(self) -> Placement:
        """The shardings of the arguments, on the user's mesh while one with explicit axes is set."""
        return self.placement_on(typed_mesh(self.mesh))

    def placement_on(self, mesh: Mesh | None) -> Placement:
        """Return the shardings of the arguments on a mesh of the user's, or on the plan's."""
        if mesh not in self._placements:
            captured = self.family.captured
            n = len(captured.paths)  # the inputs after these are the function's constants
            shapes = tuple(node.tensors[0].shape for node in self.serial.inputs[:n])
            own = self._shardings[:n]
            shardings = own if mesh is None else tuple(on_mesh(s, mesh, self.machine.axes) for s in own)
            self._placements[mesh] = Placement(self.__name__, captured.in_tree, captured.paths, shapes, shardings, self.packing)
        return self._placements[mesh]

    @overload
    def shard(self, arg: Any, /) -> Any: ...
    @overload
    def shard(self, *args: Any, **named: Any) -> tuple[Any, ...]: ...
    def shard(self, *args: Any, **named: Any) -> Any:
        """Place arguments on the devices as the plan needs them.

        Pass all arguments, by position or by name, or only the first ones. Several are returned as a tuple, in their positions; a
        single argument is returned alone.

        With several processes, each passes whole arrays; `shard_local` takes each process's part. With `pack=True`, weights of
        branches, and weights that the program joins, are returned packed (`unshard` unpacks them).
        """
        args = by_position(self.family.fn, args, named)
        args = jax.tree.unflatten(jax.tree.structure(args), self.packing.pack(jax.tree.leaves(args)))
        placed = self.placement.whole(args)
        return placed[0] if len(args) == 1 else placed

    def unshard(self, tree: Any, argument: int = 0) -> Any:
        """Unpack the weights or gradients that `shard` packed, into the function's own shapes, as for checkpoints.

        Every subtree with the argument's structure is unpacked, so that `tree` may also be an optimizer's state.

        Args:
            tree: an argument, its gradients, or a tree that contains such trees.
            argument: the argument's place among those of the function.
        """
        return self.placement.unpacked(tree, argument)

    def shard_state(self, tree: Any, argument: int = 0) -> Any:
        """Place a tree that mirrors the weights, such as an optimizer's state from a checkpoint, as the plan needs it.

        This is the inverse of `unshard`: weights are packed as `shard` packs them. Leaves outside of subtrees with the argument's
        structure are replicated on all devices.

        Args:
            tree: a tree that contains trees of the argument's structure.
            argument: the argument's place among those of the function.
        """
        placed = self.placement.packed(tree, argument)
        return jax.tree.map(place, placed, self.shardings_like(placed))

    @property
    def packing(self) -> Packing:
        """The packing of weights by all transformations; empty if none packs any."""
        return Packing(tuple(slot for t in self.transformations for slot in t.packing.slots))  # no two pack the same weight

    def shard_local(self, part: Any, argument: int = 1) -> Any:
        """Place one argument, usually the batch, of which each process has a part.

        Every process passes an equal part of each array's rows (dimension 0), in the order of processes, as a data loader reads
        them that uses `jax.process_index()` and `jax.process_count()`. Arrays of the planned shape are taken to be whole in every
        process. Weights of branches are returned packed, as by `shard`.

        Args:
            part: this process's part of the argument.
            argument: the argument's place among those of the function.
        """
        return self.placement.part(part, argument)

    def shardings_like(self, tree: Any) -> Any:
        """Return shardings for a tree that mirrors the weights, such as an optimizer's state, whose moments follow their weights.

        A leaf follows the weight whose path its own path ends with, if their shapes are equal. All other leaves are replicated.

        Args:
            tree: arrays or `jax.ShapeDtypeStruct`s, such as `jax.eval_shape(optimizer.init, params)`.
        """
        weights = weights_of(self.in_shardings, self.placement.shapes, self.family.captured.differentiated)
        return following(tree, weights, NamedSharding(typed_mesh(self.mesh) or self.mesh, PartitionSpec()))

    @cached_property
    def _program(self) -> Callable[..., tuple]:
        """The lowered function of all leaves, with its effects, jitted for calls outside of any jit."""
        return jax.jit(with_effects(program(self.pcg, self._compiled_mesh), self.family.captured, self.pcg, self._compiled_mesh))

    @cached_property
    def _runnable_program(self) -> Callable[..., tuple]:
        """The lowered function. Raises PlanError if the runtime of the devices cannot run it."""
        refuse_entangled(self.pcg, self._compiled_mesh)
        return self._program

    @cached_property
    def _planned_call(self) -> PlannedCall:
        return PlannedCall(self, lambda: self._runnable_program)

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
        mesh = self._compiled_mesh
        partitioned = jax.jit(with_effects(partitioned_program(self.pcg, mesh), self.family.captured, self.pcg, mesh))
        planned_call = PlannedCall(self, lambda: partitioned)

        def call(*args: Any, **named: Any) -> Any:
            return planned_call(args, named)

        return call

    @cached_property
    def stream(self) -> Stream:
        """The steps of a plan with `pipelines=(stages, micro-batches, "2bw")`, whose pipeline does not drain between them.

        A step returns the gradients of the previous batch, at weights one version older. Raises PlanError if the plan has no such
        pipeline.
        """
        return Stream(self)

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

    def diff(self, other: Plan | None = None) -> PlanDiff:
        """Return the differences between this plan and another, by default the captured program on one device.

        The other plan may be of another program, budget or machine. The result prints as text, and converts to Markdown, HTML, JSON
        and DOT.
        """
        from unity.diff import PlanDiff

        if other is not None and not isinstance(other, Plan):
            raise PlanError(f"other={other!r}: expected another Plan, got {type(other).__name__}; unity.load reads a file's.")
        if other is None:
            return PlanDiff(captured_summary_of(self), summary_of(self), same_source=True)
        return PlanDiff(summary_of(self), summary_of(other), same_source=self.family.fn is other.family.fn)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as data for other tools: the parallel graph, the rules behind it, costs by line.

        This form cannot be run; `save` writes a file that `unity.load` reads.
        """
        return summary_of(self).to_json()

    def memory_timeline(self, *, gradient: bool | None = None) -> MemoryTimeline:
        """Return the live bytes of one device during a step, and the buffers live at the peak, by operator and line.

        The timeline is that of the search's memory model, operator by operator. Nothing is compiled, and no devices are needed.
        """
        training = self._training(gradient)
        return memory_timeline(self.pcg, self.family.captured.differentiated, training, backend_of(self.machine))

    def _training(self, gradient: bool | None) -> Training:
        """Return the training options of a step, with gradients if `gradient` is true, or by default if they were planned."""
        planned = self.family.search.training
        return Training(planned.backward if gradient is None else gradient, planned.optimizer_slots if planned.backward else 0)

    def check(
        self, *, gradient: bool | None = None, devices: Sequence[Any] | Mesh | None = None, partitioned: bool = False
    ) -> Check:
        """Compile the plan and compare the program's collectives and memory with the prediction, line by line. Nothing is run.

        Args:
            gradient: whether the step computes gradients too. By default it does if the function was planned for training.
            devices: devices to compile for, or a mesh of them, instead of those of this process. They may be those of a topology
                (`jax.experimental.topologies`) that is not present (docs: plan#check).
            partitioned: whether to compile `constrained()`, whose collectives XLA's partitioner chooses.

        Raises:
            PlanError: there are fewer devices than planned for.
        """
        from unity.exec.compiled.check import compare

        plan = self if devices is None else self.on(devices)
        return compare(replace(step_of(plan, self._training(gradient)), partitioned=partitioned))

    @cached_property
    def parallelization(self) -> Parallelization:
        """The rules that derive the parallel graph from the serial one: one for each operator and axis, and all type changes."""
        return recorded(self.serial, self.pcg, default_library())

    def check_parallelization(self) -> Replayed:
        """Derive the parallel graph again from the serial one by its rules, without the search's code, and count the rules.

        The result prints how many applications are proved, by rules of the library or by the proofs of the operator table, and
        which are not. Raises DerivationError, naming the operator, where the recorded rules do not yield the plan's graph.
        """
        return check_parallelization(self.serial, self.pcg, self.parallelization, default_library())

    def check_derivation(self) -> tuple[RewriteStep, ...]:
        """Replay the rewriting of the captured program, step by step and without the search's code, and return the steps.

        Each step must be a rule of the library (by its hash), applied where its conditions and types hold, and the last one must
        yield the program that was parallelized. `check_parallelization` must derive the parallel graph from that program. The
        parallel graph must be well-typed operator by operator, and equal to that program once its parallelization operators are
        removed. Raises DerivationError, naming the step that is wrong.
        """
        return check_derivation(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with its frontier if that is known, or else some points of it (docs: plan#the-frontier).

        The file has the text of the report, which includes `bound`. A crash while saving leaves an old file intact.
        """
        from unity.plan.files.plan_file import save

        save(path, self)

    def report(self, path: str | Path) -> None:
        """Write a self-contained HTML page: graph, steps, frontier, timeline, memory, and each device's part of every tensor.

        Needs jinja2 (the extra `html`). The page shows some points of the frontier, or all of it if `plan.frontier` was accessed,
        and computes `bound`.
        """
        from unity.report import content, of_plan, save

        save(content(of_plan(self)), path)

    def _repr_html_(self) -> str:
        """Show the plan's decisions in a notebook."""
        return f"<pre>{escape(repr(self))}</pre>"

    def export(self, path: str | Path) -> None:
        """Write the plan as a Python file of plain JAX, with every collective written out, that does not need this library.

        Raises ExportError, naming the operator and the line, if an operator has no counterpart in public JAX (docs: export).
        """
        from unity.export import write

        write(self, path)

    def __deepcopy__(self, memo: Any = None) -> Plan:
        return self  # plans are immutable

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        raise PlanError(
            f"the plan of {self.__name__} cannot be pickled: save it by plan.save(path), and read it by"
            " unity.load(path, function, ...)."
        )

    def __repr__(self) -> str:
        """Return the plan's decisions in about six lines."""
        from unity.explain.brief import brief

        return brief(self)
