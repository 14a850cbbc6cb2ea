"""Values that the steps of loops stack: residuals and results of a step forward, gradients of slices backward.

JAX keeps each in an array with a row for every step. XLA writes rows in a kernel for each array, once a round, and a round is
`unroll` steps: for an LSTM 13 kernels forward and one backward in every step, or in four steps (compiled for an H200, `python -m
benchmarks.unrolled_loops`). The arrays of a loop in a loop's step are rows of the outer loop, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from unity.pcg.analysis.rematerialization import Recomputation
from unity.pcg.analysis.residuals import residuals
from unity.pcg.ir.dead_code import descendants
from unity.pcg.ir.gradient_flow import Gradients, with_gradient
from unity.pcg.ir.graph import LOOPS, PCG, TAIL, UNCHANGED, Node, Value, accumulated_loss, carried_by, times_inside
from unity.pcg.ir.payloads import Scan


@dataclass(frozen=True)
class StackingKernels:
    """Kernels that write rows of stacked values for an operator, for each backward run: a fraction each if its loop is unrolled."""

    forward: float = 0.0
    backward: float = 0.0

    def seconds(self, launch: float) -> tuple[float, float]:
        """Return the seconds forward and backward if each launch takes `launch` seconds."""
        return self.forward * launch, self.backward * launch

    def __add__(self, other: StackingKernels) -> StackingKernels:
        return StackingKernels(self.forward + other.forward, self.backward + other.backward)


NO_KERNELS = StackingKernels()


def stacking_kernels(
    graph: PCG, flow: Gradients, hoisted: Mapping[int, int], recomputation: Recomputation
) -> Mapping[int, StackingKernels]:
    """Return the kernels by id(node), for the operators that have any.

    A residual counts for the first operator whose gradient reads it, even if the backward pass computes it again. An operand of a
    checkpoint counts for the first operator there, what a policy saves and a result of the loop for the operator that computes
    it, and a gradient of a slice for the first operator that reads the slice.

    Args:
        graph: a graph, serial or parallel.
        flow: where gradients flow.
        hoisted: the factors by which nodes run less often than their graph (`pcg.analysis.hoisting`).
        recomputation: the recomputation in checkpoints, with the values that their policies save.
    """
    counter = _Counter(flow, hoisted, recomputation)
    counter.count(graph, None)
    return counter.kernels


class _Counter:
    """A walk over a graph that counts the kernels of its operators.

    Attributes:
        kernels: those that are counted so far, by id(node).
    """

    def __init__(self, flow: Gradients, hoisted: Mapping[int, int], recomputation: Recomputation) -> None:
        self.flow, self.hoisted, self.recomputation = flow, hoisted, recomputation
        self.kernels: dict[int, StackingKernels] = {}

    def add(self, node: Node, forward: float = 0.0, backward: float = 0.0) -> None:
        """Count kernels for an operator."""
        if forward or backward:
            self.kernels[id(node)] = self.kernels.get(id(node), NO_KERNELS) + StackingKernels(forward, backward)

    def count(self, graph: PCG, step: _Step | None, remats: int = 0) -> None:
        """Count the kernels of a graph's operators.

        Args:
            graph: the graph.
            step: the step that the graph is; None outside of loops, and in a checkpoint, which stacks nothing.
            remats: the number of checkpoints around the graph.
        """
        for node in graph.nodes:
            if step is not None and node.kind in UNCHANGED:
                step.origins[Value(node)] = step.origin(node.operands[0])
            elif step is not None and node.body is not None:
                self.count_operator(node, step)
            elif node.inside is not None:
                if step is not None and (node.kind == "remat" or node.kind in LOOPS) and any(map(self.flow, node.results)):
                    self.count_operands(node, step)
                if step is not None and node.kind == "remat":
                    self.count_saved(node, step, remats + 1)
                inner = _Step(node, step, self.hoisted) if self.stacks(node) else None
                self.count(node.inside, inner, remats + (node.kind == "remat"))
                if inner is not None:
                    self.count_results(node, inner)

    def stacks(self, node: Node) -> bool:
        """Return whether a node is a loop whose steps stack what their derivative reads; a loop over micro-batches does not."""
        loss = accumulated_loss(node)
        return node.kind in LOOPS and node.kind != TAIL and (loss is None or not self.flow(loss))

    def count_operator(self, node: Node, step: _Step) -> None:
        """Count the kernels of an operator in a step."""
        assert node.body is not None
        flags = with_gradient(node, self.flow)
        self.add(node, backward=step.gradients(v for v, flag in zip(node.operands, flags, strict=True) if flag))
        if not any(flags) or self.hoisted.get(id(node), 1) > 1:
            return
        needed = residuals(node.body, flags, stacked=True)
        values = zip((*node.operands, *node.results), (*needed.operands, *needed.results), strict=True)
        varying = step.varying(node)
        inner = step.weight * sum(v in varying for v, _ in needed.inner)
        self.add(node, inner + sum(step.rows(v) for v, flag in values if flag))

    def count_operands(self, node: Node, step: _Step) -> None:
        """Count the kernels for the operands of a checkpoint or a loop, and for their gradients, for its first operator."""
        first, times = next(_operators(node), (None, 1))
        if first is not None:
            read = [v for p, v in enumerate(node.operands) if not self.recomputation.is_unread(node, p)]
            rows = sum(map(step.rows, read)) if node.kind == "remat" else 0.0
            self.add(first, rows / times, step.gradients(filter(self.flow, node.operands)) / times)

    def count_saved(self, remat: Node, step: _Step, depth: int) -> None:
        """Count the kernels for what the policy of a checkpoint saves, of an operator or of a change of its result's type."""
        assert remat.inside is not None
        for node, times in remat.inside.walk():
            every = (*self.recomputation.saved_of(node), *self.recomputation.offloaded_of(node))
            saved = sum(outermost <= depth for _, outermost in every)
            operator, _ = _producer(Value(node))
            if saved and operator is not None:
                self.add(operator, saved * step.weight / times)

    def count_results(self, loop: Node, step: _Step) -> None:
        """Count the kernels for the results of a loop that its steps stack."""
        assert loop.inside is not None
        for v in dict.fromkeys(map(step.origin, loop.inside.outputs[len(carried_by(loop)) :])):
            operator, times = _producer(v)
            if operator is not None:
                self.add(operator, 1 / step.unroll / times)


class _Step:
    """The step of a loop: which of its values have rows already, and how many kernels write those of others.

    Attributes:
        unroll: the number of steps in a round.
        weight: the kernels for a value that varies from step to step, for each step: one a round, and one for each step of the loop
            around this one, of which the array of all steps is a row.
        origins: by the result of a change of type, the value before it.
    """

    def __init__(self, loop: Node, outer: _Step | None, hoisted: Mapping[int, int]) -> None:
        assert loop.inside is not None
        carried, inputs = carried_by(loop), [Value(n) for n in loop.inside.inputs]
        self.outer, self.hoisted = outer, hoisted
        self.length = max(times_inside(loop), 1)
        self.unroll = loop.payload.unroll if isinstance(loop.payload, Scan) else 1
        self.weight = 1 / self.unroll + (outer.weight / self.length if outer is not None else 0.0)
        self.around = {v: w for k, (v, w) in enumerate(zip(inputs, loop.operands, strict=True)) if k not in carried}
        self.constants, self.slices = set(inputs[: carried.start]), set(inputs[carried.stop :])
        self.known: set[Value] = set()
        self.origins: dict[Value, Value] = {}

    def origin(self, v: Value) -> Value:
        """Return the value before all changes of type."""
        return self.origins.get(v, v)

    def is_constant(self, v: Value) -> bool:
        """Return whether a value is the same in all steps."""
        v = self.origin(v)
        return v in self.constants or self.hoisted.get(id(v.node), 1) > 1

    def rows(self, v: Value) -> float:
        """Return the kernels, for each step, that write a residual's rows: 0 if something has written them already.

        Rows of a slice are there, and a constant has none; in a loop's step, they are values of the step.
        """
        v = self.origin(v)
        if v in self.known:
            return 0.0
        self.known.add(v)
        if v in self.around:
            return self.outer.rows(self.around[v]) / self.length if self.outer is not None else 0.0
        if self.is_constant(v):
            leaves_outer = self.outer is None or self.hoisted.get(id(v.node), 1) > self.length
            return 0.0 if leaves_outer else self.weight - 1 / self.unroll
        return self.weight

    def gradients(self, values: Iterable[Value]) -> float:
        """Return the kernels, for each step, that write the gradients of those slices among some values that have none yet."""
        read = set(map(self.origin, values)) & self.slices
        self.slices -= read
        return len(read) / self.unroll

    def varying(self, node: Node) -> set[int]:
        """Return the variables of an operator's program that are not the same in all steps."""
        assert node.body is not None
        return descendants(node.body, (a for a, v in zip(node.body.inputs, node.operands, strict=True) if not self.is_constant(v)))


def _operators(node: Node) -> Iterator[tuple[Node, int]]:
    """Yield the operators in the graph of a node, each with the number of its runs for each run of the node."""
    assert node.inside is not None
    for inner, times in node.inside.walk():
        if inner.body is not None and inner.kind not in UNCHANGED:
            yield inner, times * times_inside(node)


def _producer(v: Value) -> tuple[Node | None, int]:
    """Return the operator that computes a value, or None, and the number of its runs for each run of the value's node."""
    node, runs = v.node, 1
    while node.body is None or node.kind in UNCHANGED:
        if node.kind in UNCHANGED:
            v = node.operands[0]
        elif node.kind in ("remat", "scan") and node.inside is not None:
            v, runs = node.inside.outputs[v.index], runs * times_inside(node)
        else:
            return None, runs
        node = v.node
    return node, runs
