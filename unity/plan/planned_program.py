"""The program behind a plan: its graphs, the transformations between them, and the proof that they compute the user's function."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from unity.base.errors import DerivationError, ParallelTypeError
from unity.exec.tied_gradients import LATE_OVERHEAD
from unity.pcg.capture.packed_arguments import Packing
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.axis_names import AxisNames, names_in
from unity.pcg.parallel.check import check, check_by_names
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.serial_view import serial_graph
from unity.pcg.parallel.traffic import traffic
from unity.plan.plan_family import PlanFamily
from unity.plan.shardings.specs import Boundary
from unity.search.cost.cost import Training
from unity.search.cost.prediction import Prediction, predict
from unity.search.cost.state_sizes import NO_STATE
from unity.search.memory.backend import backend_of
from unity.search.memory.memory import MemoryPrediction, predict_memory
from unity.search.session import Candidate
from unity.search.substitution.trace import RuleApplication
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.derivation import RewriteStep
from unity.substitutions.language.parallel_derivation import Parallelization
from unity.substitutions.rewriting.parallel_recording import recorded
from unity.transforms.branches import Branching
from unity.transforms.loops import LoopRewriting
from unity.transforms.micro_batching import MicroBatching
from unity.transforms.packing import Joining
from unity.transforms.padding import Padding
from unity.transforms.pipelining import Pipelining
from unity.transforms.recomputing import Recomputing
from unity.transforms.rewriting import Rewriting
from unity.transforms.transformation import Transformation
from unity.verify.derivations.parallel import Replayed, check_parallelization


class PlannedProgram:
    """`plan.program`: the captured, the transformed and the parallel graph, and the derivation of each from the one before.

    Attributes:
        family: the function, its graph, its transformations and the search, which all plans of the frontier share.
        candidate: the plan's point of the frontier.
    """

    def __init__(self, family: PlanFamily, candidate: Candidate) -> None:
        self.family, self.candidate = family, candidate

    @property
    def original(self) -> PCG:
        """The serial graph as captured."""
        return self.family.original.graph

    @property
    def serial(self) -> PCG:
        """The serial graph that was parallelized: as captured, or transformed."""
        return self.family.captured.graph

    @cached_property
    def pcg(self) -> PCG:
        """The parallel graph: every tensor with its parallel type, and the operators that change types."""
        machine = self.family.search.machine
        graph = parallelize(self.serial, self.candidate.assignment)
        check_by_names(graph, AxisNames.of_every_axis(graph.axes, machine.named_levels))
        self.family.bound.check(self.serial, graph, machine)
        return graph

    def has_mesh(self, shape: Mapping[str, int]) -> bool:
        """Return whether a mesh of this shape has the axes that users see, on which `named_pcg` runs."""
        return tuple(shape.items()) == tuple(self.named_shape.items())

    @property
    def named_shape(self) -> dict[str, int]:
        """The names and sizes of the mesh axes of `named_pcg`, outermost first. One device is one axis of size 1."""
        machine = self.family.search.machine
        return dict(machine.mesh) or {axis.name: axis.size for axis in self.axis_names.shown} or self._single_axis

    @cached_property
    def prediction(self) -> Prediction:
        """The predicted seconds of a step, by operator, collective and transfer."""
        search = self.family.search
        return predict(self.pcg, search.machine, self.family.differentiated, search.training.state)

    @cached_property
    def memory(self) -> MemoryPrediction:
        """The predicted live buffers of one device at the peak of a step, by operator and line."""
        search = self.family.search
        return predict_memory(self.pcg, self.family.differentiated, search.training, backend_of(search.machine))

    @cached_property
    def named_pcg(self) -> PCG:
        """The parallel graph over the mesh axes that users see, as exported files and meshes of these axes run it."""
        graph = self.axis_names.run_graph(self.pcg)
        if graph is not self.pcg:
            check(graph)
        return graph

    @property
    def ties_gradients(self) -> bool:
        """Whether the gradients of a product are computed together on GPUs, as the plan might not fit otherwise."""
        return LATE_OVERHEAD * self.candidate.memory > self.memory_limit

    @property
    def memory_limit(self) -> float:
        """The bytes of a device that the plan may use."""
        return self.family.search.machine.device.memory if self.family.limit is None else self.family.limit

    @property
    def _single_axis(self) -> dict[str, int]:
        """The mesh axis of one device."""
        return {self.family.search.machine.levels[-1].name: 1}

    @property
    def transformations(self) -> tuple[Transformation, ...]:
        """The transformations of the captured program before it was parallelized, in order."""
        return self.family.transformations

    @property
    def rewriting(self) -> Rewriting:
        """The rewriting of the captured program before it was parallelized; false, and without rules, if there was none."""
        return self.family.transformation(Rewriting) or Rewriting.none(self.family.original)

    @property
    def loop_rewriting(self) -> LoopRewriting | None:
        """The rules of loops that were applied to the captured program, or None."""
        return self.family.transformation(LoopRewriting)

    @property
    def recomputing(self) -> Recomputing | None:
        """The layers that the backward pass recomputes so that the plan fits, or None."""
        return self.family.transformation(Recomputing)

    @property
    def micro_batching(self) -> MicroBatching | None:
        """The micro-batches that the loss is walked over, with their gradients added up, or None."""
        return self.family.transformation(MicroBatching)

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
        """The weights that `shard` joins once, which the program would join in every step. None unless packing was allowed."""
        return self.family.transformation(Joining)

    @property
    def padding(self) -> Padding | None:
        """The dimensions that were padded because the devices do not divide them, or None."""
        return self.family.transformation(Padding)

    @property
    def packing(self) -> Packing:
        """The packing of weights by all transformations; empty if none packs any."""
        return Packing(tuple(slot for t in self.transformations for slot in t.packing.slots))

    @property
    def applications(self) -> tuple[RuleApplication, ...]:
        """The rules that parallelized the graph, in order; empty except with `search="unity-rules"`."""
        return self.family.applications

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
        for transformation in self.transformations:
            transformation.check()
        check(self.pcg)
        if serial_graph(self.pcg).key != self.serial.key:
            raise DerivationError("the parallel graph without its parallelization operators is not the graph that was derived")
        self.check_parallelization()
        return self.rewriting.derivation.every

    @property
    def computed_dtypes(self) -> frozenset[str]:
        """The types of the values that the program computes, without those of its inputs."""
        return frozenset(str(v.tensor.dtype) for node, _ in self.serial.walk() if node.kind != "input" for v in node.results)

    @cached_property
    def axis_names(self) -> AxisNames:
        """The names of the mesh axes that users see, in specifications, texts and pictures."""
        levels = self.family.search.machine.named_levels
        number = {axis.name: k for k, axis in enumerate(self.pcg.axes)}
        over = [c.axes for c in traffic(self.pcg, self.family.differentiated)] if levels else []
        names = names_in(self.pcg, levels, [*over, *([number[name] for name in a.axes] for a in self.applications)])
        if names.joins_digits_in(self.pcg):  # an operator may have a factor for each digit; then users see every axis
            try:
                check(names.run_graph(self.pcg))
            except ParallelTypeError:
                return AxisNames.of_every_axis(self.pcg.axes, levels)
        return names

    @cached_property
    def boundary(self) -> Boundary:
        """The types of the leaves of the arguments, and of those of the results after them."""
        captured, machine = self.family.captured, self.family.search.machine
        values = [(node.types[0], node.tensors[0].shape) for node in self.pcg.inputs[: len(captured.paths)]]
        values += [(value.type, value.tensor.shape) for value in self.pcg.outputs[: captured.out_tree.num_leaves]]
        types, shapes = zip(*values, strict=True)
        return Boundary(self.axis_names, types, shapes, dict(machine.mesh) or self._single_axis)

    @property
    def hosted_state(self) -> tuple[bool, ...]:
        """For each leaf of the arguments, whether it is a weight whose optimizer's state lies in the memory of the host."""
        family, inputs = self.family, self.pcg.inputs[: len(self.family.captured.paths)]
        training, weights = family.search.training, family.differentiated
        return tuple(training.backward and k in weights and training.state.on_host(node) > 0 for k, node in enumerate(inputs))

    def training(self, gradient: bool | None) -> Training:
        """Return the training options of a step, with gradients if `gradient` is true, or by default if they were planned."""
        planned = self.family.search.training
        return Training(planned.backward if gradient is None else gradient, planned.state if planned.backward else NO_STATE)
