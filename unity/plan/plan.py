"""A plan: the user's function, on all devices. A drop-in that can be called, differentiated, jitted, read and saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.base.errors import PlanError
from unity.exec.compiled.entangled import refuse_entangled
from unity.exec.hosts.arrays import place
from unity.exec.lowering import program, spec_of
from unity.machine.machine import Machine
from unity.pcg.capture.capture import weak_results
from unity.pcg.capture.packed_arguments import Packing
from unity.pcg.ir.graph import PCG
from unity.pcg.jaxprs.weak_types import is_weak, with_weak_type
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.plan.call_arguments import by_position, checked, in_reverse, refuse_weak
from unity.plan.devices import mesh_for
from unity.plan.frontier import Frontier
from unity.plan.placement import Placement
from unity.plan.plan_family import PlanFamily, Tried
from unity.plan.step import step_of
from unity.search.cost.cost import Training
from unity.search.memory.backend import backend_of
from unity.search.memory.timeline import MemoryTimeline, memory_timeline
from unity.search.session import Candidate
from unity.search.substitution.trace import RuleApplication
from unity.transforms.branches import Branching
from unity.transforms.packing import Joining
from unity.transforms.pipelining import Pipelining
from unity.transforms.rewriting import Rewriting

if TYPE_CHECKING:
    from unity.diff import PlanDiff
    from unity.exec.compiled.check import Check
    from unity.plan.stream import Stream
    from unity.search.simulator import Simulation
    from unity.substitutions.language.derivation import Step
    from unity.substitutions.language.parallel_derivation import Parallelization
    from unity.verify.derivations.parallel import Replayed


class Plan:
    """Computes what the planned function computes, on all devices of the machine it was planned for.

    Made by `unity.optimize` and `unity.load`. Works inside `jax.jit`, `jax.grad` and `jax.value_and_grad`; the result and
    the gradients are ordinary arrays.
    """

    def __init__(self, made: PlanFamily, candidate: Candidate, devices: Sequence[Any] | None = None) -> None:
        self._made, self._candidate, self._devices = made, candidate, devices
        self.__name__ = getattr(made.fn, "__name__", "plan")
        self.__doc__ = made.fn.__doc__
        self._weak: dict[tuple[bool, ...], tuple[bool, ...]] = {}  # `_weak_results`

    @property
    def candidate(self) -> Candidate:
        """The point of the frontier that this plan is."""
        return self._candidate

    @property
    def machine(self) -> Machine:
        """The machine that it was planned for."""
        return self._made.search.machine

    @property
    def time(self) -> float:
        """Predicted seconds of one step."""
        return self.candidate.time

    @property
    def memory(self) -> float:
        """Predicted bytes on one device when most is held: weights, gradients, optimizer slots, what is kept, what is worked on."""
        return self.candidate.memory

    @property
    def search_seconds(self) -> float:
        """How long the search took (near zero from the cache)."""
        return self._made.seconds

    @property
    def original(self) -> PCG:
        """The graph as captured, serial."""
        return self._made.original.graph

    @property
    def serial(self) -> PCG:
        """The graph that was parallelized: as captured, or rewritten."""
        return self._made.captured.graph

    @property
    def rewriting(self) -> Rewriting:
        """How the captured program was rewritten before it was parallelized; false, and without rules, if it was not."""
        return self._made.rewriting or Rewriting.none(self._made.original)

    @property
    def pipelining(self) -> Pipelining | None:
        """Which scan became a pipeline, and how; nothing if none did."""
        return self._made.pipelining

    @property
    def branching(self) -> Branching | None:
        """Which branches are on devices of their own, and which weights are packed for it; nothing if none are."""
        return self._made.branching

    @property
    def joining(self) -> Joining | None:
        """Which weights `shard` joins once, as the program would in every step; nothing without `pack=True`."""
        return self._made.joining

    @property
    def applications(self) -> tuple[RuleApplication, ...]:
        """The rules that parallelized it, in order; nothing but with `search="unity-rules"`."""
        return self._made.applications

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The plans that it was chosen from, itself first; nothing but with `measure=True`, and not kept in files."""
        return self._made.tried

    def simulate(self) -> Simulation:
        """When everything of one step runs, on every device and link: its makespan, what is busy when, a trace, a picture."""
        from unity.search.simulator import simulate

        differentiated = self._made.captured.differentiated if self._made.search.training.backward else ()
        return simulate(self.pcg, self.machine, differentiated, training=self._made.search.training)

    @cached_property
    def pcg(self) -> PCG:
        """The parallel graph: what every device holds of everything, and every change of it."""
        graph = parallelize(self.serial, self.candidate.assignment)
        check(graph)
        self._made.bound.check(self.serial, graph, self.machine)
        return graph

    @cached_property
    def frontier(self) -> Frontier:
        """The trade-off between time and memory; its points are plans too."""
        return Frontier(self._made, self._candidate, partial(Plan, self._made))

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh of prime axes, whole hosts as units of its levels.

        Raises PlanError if there are fewer than planned for, or other hosts. Several processes compare their plans here.
        """
        return mesh_for(self, self._devices)

    @cached_property
    def _shardings(self) -> tuple[NamedSharding, ...]:
        nodes = self.pcg.inputs
        return tuple(NamedSharding(self.mesh, spec_of(n.types[0], self.pcg.axes, n.tensors[0].ndim)) for n in nodes)

    @property
    def in_shardings(self) -> Any:
        """Where the plan wants its arguments: a tuple of pytrees of `NamedSharding`, one for each argument."""
        return self._placement.arguments

    @cached_property
    def _placement(self) -> Placement:
        captured = self._made.captured
        n = len(captured.paths)  # what the function closes over comes after
        shapes = tuple(node.tensors[0].shape for node in self.serial.inputs[:n])
        return Placement(self.__name__, captured.in_tree, captured.paths, shapes, self._shardings[:n], self._packing)

    @overload
    def shard(self, arg: Any, /) -> Any: ...
    @overload
    def shard(self, *args: Any, **named: Any) -> tuple[Any, ...]: ...
    def shard(self, *args: Any, **named: Any) -> Any:
        """The arguments, placed as the plan wants them. Fewer than all may be given: the first ones. One gives one back.
        All may be given by name, as the function's; they come back in their positions.

        Of several processes each gives the whole arguments; `shard_local` takes what is read in parts. With `pack=True` weights of
        branches, and weights that the program joins, come back packed (`unshard`).
        """
        args = by_position(self._made.fn, args, named) if named else args
        args = jax.tree.unflatten(jax.tree.structure(args), self._packing.pack(jax.tree.leaves(args)))
        placed = self._placement.whole(args)
        return placed[0] if len(args) == 1 else placed

    def unshard(self, tree: Any, argument: int = 0) -> Any:
        """A tree of weights, or of gradients, as the function has it: what `shard` packed is unpacked, as for checkpoints.

        Every part of the tree that has the argument's structure is taken for one, so an optimizer's state may be given, too.

        Args:
            tree: an argument, its gradients, or something that holds such trees.
            argument: the argument's place among those of the function.
        """
        return self._placement.unpacked(tree, argument)

    def shard_state(self, tree: Any, argument: int = 0) -> Any:
        """A tree as `unshard` gives it, of weights, gradients or what follows them, placed as the plan wants it: weights that are
        packed, as `shard` gives them. What is no part of such a tree is on every device.

        Args:
            tree: something that holds trees of an argument's structure, such as an optimizer's state from a checkpoint.
            argument: the argument's place among those of the function.
        """
        placed = self._placement.packed(tree, argument)
        return jax.tree.map(place, placed, self.shardings_like(placed))

    @property
    def _packing(self) -> Packing:
        """How weights are packed, if they are."""
        found = (self.branching, self.joining, self.pipelining)  # no weight is packed by two of them
        return Packing(tuple(s for made in found if made is not None for s in made.packing.slots))

    def shard_local(self, part: Any, argument: int = 1) -> Any:
        """One argument, usually the batch, of which this process has its part, placed as the plan wants it.

        Every process has an equal part of each array's rows (dimension 0), in the order of processes: what a data loader reads that
        is told `jax.process_index()` and `jax.process_count()`. Arrays of the planned shape are whole in every process. Weights
        of branches come back packed, as those of `shard`.

        Args:
            part: this process's part of the argument.
            argument: the argument's place among those of the function.
        """
        return self._placement.part(part, argument)

    def shardings_like(self, tree: Any) -> Any:
        """Shardings for a tree whose leaves follow the weights, such as an optimizer's state: moments lie as their weights do.

        A leaf follows the weight that its path ends with, if it has its shape; all others are on every device.

        Args:
            tree: arrays or `jax.ShapeDtypeStruct`s, such as `jax.eval_shape(optimizer.init, params)`.
        """
        from unity.plan.following_shardings import following, weights_of

        weights = weights_of(self.in_shardings, self._placement.shapes, self._made.captured.differentiated)
        return following(tree, weights, NamedSharding(self.mesh, PartitionSpec()))

    @cached_property
    def _program(self) -> Callable[..., tuple]:
        """The lowered function of all leaves; jitted, for calls outside of any jit."""
        return jax.jit(program(self.pcg, self.mesh))

    @cached_property
    def _running(self) -> Callable[..., tuple]:
        """The same, where the runtime of the devices can run it."""
        refuse_entangled(self.pcg, self.mesh)
        return self._program

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What the planned function gives for arguments of the shapes that it was planned for, by position or by name.

        Raises:
            PlanError: these are others; or it is differentiated forward, where a derivative rule is for reverse only (docs:
                plan#derivatives); or on CPU devices their runtime would mix up what branches send (docs:
                branches#on-virtual-devices).
        """
        captured = self._made.captured
        args = by_position(self._made.fn, args, named) if named else args
        leaves = self._placement.leaves(self._checked(args))
        weak = self._weak_results(tuple(map(is_weak, jax.tree.leaves(args))))
        with in_reverse(self.__name__):
            # a gradient is weakly typed as its argument is, which JAX knows where that is converted
            results = self._running(*(with_weak_type(x, False) for x in leaves), *captured.consts)
        return jax.tree.unflatten(captured.out_tree, map(with_weak_type, results, weak))

    def _weak_results(self, weak: tuple[bool, ...]) -> tuple[bool, ...]:
        """Returns which results are weakly typed, given which leaves of the arguments are.

        Raises PlanError where the function then computes in other types than were planned.
        """
        original = self._made.original
        if weak not in self._weak:
            planned = original.weak
            found = planned[1] if weak == planned[0] else weak_results(self._made.fn, original, weak)
            if found is None:
                refuse_weak(self.__name__, original, weak)
            self._weak[weak] = found or ()
        return self._weak[weak]

    @cached_property
    def stream(self) -> Stream:
        """Its steps where the pipeline does not drain between them: of a plan with `pipelines=(stages, micro-batches, "2bw")`.

        Gradients are then of the batch before, at weights one version older. Raises PlanError if the plan has no such pipeline.
        """
        from unity.plan.stream import Stream

        return Stream(self)

    def _checked(self, args: tuple[Any, ...]) -> list[Any]:
        """The leaves of a call's arguments, packed as `shard` packs them."""
        return checked(self.__name__, self._made.captured, self._packing, args)

    def explain(self, path: Any = None, *, file: Any = None) -> None:
        """Prints what was decided: every operator's parallelization and cost, every collective, what could not be split.

        With a path, why one thing is as it is: an argument ("params['w']", as `explain()` prints them), the operators of a kind
        ("dot_general") or of a line ("model.py:42"). What is it, what does it cost, and what would the whole plan cost with the
        next best types of it? `*` stands for anything in one pair of brackets, `**` for anything at all.

        Args:
            path: what is to be explained. An open file alone is taken for `file`.
            file: where it is printed, if not on standard output.
        """
        if path is not None and not isinstance(path, str):
            if file is not None or not hasattr(path, "write"):
                raise PlanError(
                    f"path={path!r}: expected what is to be explained, such as \"params['w']\" or 'dot_general', got"
                    f" {type(path).__name__}; a file is given as file=. (docs: constraints#why)"
                )
            path, file = None, path  # a file alone
        if file is not None and not hasattr(file, "write"):
            raise PlanError(f"file={file!r}: expected an open file, with a method `write`, got {type(file).__name__}.")
        if path is not None:
            from unity.explain.why import why

            return why(self, path, file)
        from unity.explain.tables import explain  # rich is imported only when something is shown

        explain(self, file)

    def diff(self, other: Plan | None = None) -> PlanDiff:
        """What is different: between the program as captured, on one device, and this plan; or between this plan and another.

        The other may be of another program, budget or machine. Printed it is text; it can be Markdown, HTML, JSON and DOT too.
        """
        from unity.diff import PlanDiff
        from unity.plan.summary import captured_summary_of, summary_of

        if other is not None and not isinstance(other, Plan):
            raise PlanError(f"other={other!r}: expected another Plan, got {type(other).__name__}; unity.load reads a file's.")
        if other is None:
            return PlanDiff(captured_summary_of(self), summary_of(self))
        return PlanDiff(summary_of(self), summary_of(other))

    def to_json(self) -> dict[str, Any]:
        """The plan as data for other tools: the parallel graph, the rules behind it, costs by line. (`save` keeps what can run.)"""
        from unity.plan.summary import summary_of

        return summary_of(self).to_json()

    def memory_timeline(self, *, gradient: bool | None = None) -> MemoryTimeline:
        """What one device holds while a step runs: the bytes over time, the peak and what holds it, by operator and line.

        The timeline is the search's own memory model, turn by turn. Nothing is compiled, and no devices are needed.
        """
        training = self._training(gradient)
        return memory_timeline(self.pcg, self._made.captured.differentiated, training, backend_of(self.machine))

    def _training(self, gradient: bool | None) -> Training:
        """What a step of the plan computes and holds: with gradients or without, as it was planned unless `gradient` is given."""
        planned = self._made.search.training
        return Training(planned.backward if gradient is None else gradient, planned.optimizer_slots if planned.backward else 0)

    def check(self, *, gradient: bool | None = None, devices: Sequence[Any] | None = None) -> Check:
        """Compiles the plan and compares the program's collectives and memory with the prediction, line by line.

        Args:
            gradient: whether the gradients are computed too. Default: if it was planned for training.
            devices: what the program is compiled for, if not for the devices of this process: those of a topology
                (`jax.experimental.topologies`), which need not be there (docs: plan#check). Nothing is run.

        Raises PlanError if there are fewer than planned for.
        """
        from unity.exec.compiled.check import compare

        plan = self if devices is None else Plan(self._made, self._candidate, devices)
        return compare(step_of(plan, self._training(gradient)))

    @cached_property
    def parallelization(self) -> Parallelization:
        """The rules that lead from the serial graph to the parallel one: one an operator and axis, and all changes of type."""
        from unity.substitutions.language.axioms import default_library
        from unity.substitutions.rewriting.parallel_recording import recorded

        return recorded(self.serial, self.pcg, default_library())

    def check_parallelization(self) -> Replayed:
        """Makes the parallel graph again from the serial one by its rules, with none of the search's code, and counts them.

        Printed it says how many are proved, by which rules of the library or by the proofs of the operator table, and which are
        not. Raises DerivationError, naming the operator, where a rule does not say what was done.
        """
        from unity.substitutions.language.axioms import default_library
        from unity.verify.derivations.parallel import check_parallelization

        return check_parallelization(self.serial, self.pcg, self.parallelization, default_library())

    def check_derivation(self) -> tuple[Step, ...]:
        """Replays how the captured program was rewritten, step by step, with none of the search's code, and gives the steps.

        Each step must be a rule of the library (by its hash), applied where its conditions and types hold, and the last one must
        lead to the program that is run. That program must become the parallel graph by rules (`check_parallelization`), which must
        be well-typed operator by operator, and without its parallelization operators it must be what was derived. Raises
        DerivationError, naming the step that is wrong.
        """
        from unity.plan.derivation_check import check_derivation

        return check_derivation(self)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, with its frontier if that is known, else some points of it. (docs: plan#the-frontier)

        A crash while saving leaves an old file whole.
        """
        from unity.plan.plan_file import save

        save(path, self._made, self._candidate)

    def report(self, path: str | Path) -> None:
        """Writes all of it as one HTML page that needs nothing else: graph, steps, frontier, timeline, memory, who holds what.

        Needs jinja2 (the extra `html`). Of the frontier it shows some points, and all of it after `plan.frontier`.
        """
        from unity.report import content, of_plan, save

        save(content(of_plan(self)), path)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from unity.report.notebook import summary

        return summary(self)

    def export(self, path: str | Path) -> None:
        """Writes the plan as a Python file of plain JAX, every collective written out: nothing in it needs this library.

        Raises ExportError, naming the operator and the line, if something has no counterpart in public JAX. (docs: export)
        """
        from unity.export import write

        write(self, path)

    def __deepcopy__(self, memo: Any = None) -> Plan:
        return self  # nothing of it changes

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        raise PlanError(f"{self!r} cannot be pickled: save it by plan.save(path), and read it by unity.load(path, function, ...).")

    def __repr__(self) -> str:
        return f"<Plan of {self.__name__} on {self.machine.name}: {self.time * 1e3:.3g} ms, {self.memory / 1e6:.4g} MB per device>"
