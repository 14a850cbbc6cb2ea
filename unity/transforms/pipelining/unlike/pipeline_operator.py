"""A chain of stages of different operators as a pipeline, which is one operator of the graph; its tail is another.

The pipeline has one step for every stage, which a device selects by its own stage (`unity.pcg.ir.graph.STAGES`). Steps carry the
buffers in which stages forward the values that cross cuts (`unity.transforms.pipelining.unlike.staging`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from jax import lax

from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.capture.group_slots import Leaf, Slots, part_of, slots_of
from unity.pcg.capture.packed_arguments import NOTHING, Packing
from unity.pcg.ir.graph import PCG, PIPELINE, STAGES, TAIL, Node, Value
from unity.pcg.ir.payloads import Input, Pipeline, Scan, Stages
from unity.pcg.ir.program import Tensor, tensor_type
from unity.pcg.ir.tracing import trace
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, Schedule, staged
from unity.pcg.types.axis import Axis
from unity.transforms.pipelining.micro_batches import WALK
from unity.transforms.pipelining.pipeline_operator import following, with_exact_ends
from unity.transforms.pipelining.tails import Tail
from unity.transforms.pipelining.unlike.staging import Staging, traced
from unity.transforms.splice import named, with_nodes, within


def with_stages(
    graph: PCG, staging: Staging, walk: Captured, along: Sequence[Axis], packed: Collection[int]
) -> tuple[PCG, Packing]:
    """Return a graph whose loop over micro-batches is a pipeline along these axes, followed by its tail, and the weights' packing.

    Of the arguments `packed`, those that only one stage reads are packed. Raises Mixed if an operator cannot be in a stage.
    """
    (scan, values), *rest = _scans(graph, walk)
    slots = _slots(graph, scan, staging, values, packed)
    packed_leaves = {leaf for s in slots for leaf in s.numbers}
    numbers = {v: k for k, v in enumerate(walk.body.inputs)}
    constants = [v for v in staging.everything if numbers.get(v, -1) not in packed_leaves]
    buffers, own = scan.operands[len(scan.operands) - len(staging.kinds) :], [Value(graph.inputs[s.first]) for s in slots]
    builder = _PipelineBuilder(staging, constants, slots, {numbers[v]: v for v in staging.everything if v in numbers})
    pipeline = builder.pipeline(scan, (*(values[v] for v in constants), *buffers, *own), along)
    inputs = _inputs(graph, slots)
    changed = {**inputs, id(scan): pipeline}
    if staging.tail is not None:
        (added,) = [n for n in graph.nodes if n.kind == "remat" and within(n.scope, WALK)]
        changed[id(added)] = _tail(*rest[0], added, pipeline, staging, staging.tail)
    for node in changed.values():
        if node.inside is not None:
            staged(node)
    staged_graph = with_nodes(graph, changed)
    starts = tuple(inputs.get(id(n), n) for n in graph.inputs)
    return with_exact_ends(PCG(starts, staged_graph.outputs, graph.axes)), Packing(tuple(slots)) if slots else NOTHING


def _scans(graph: PCG, walk: Captured) -> list[tuple[Node, dict[int, Value]]]:
    """Return the loops over micro-batches, of the stages and of the tail, with their operands by variable."""
    nodes = [n for n in graph.nodes if n.kind == "scan" and within(n.scope, WALK)]
    equations = [e for e in walk.body.equations if within(e.scope, WALK) and e.results and e.name == "scan"]
    pairs = [(n, zip(e.operands, n.operands, strict=True)) for n, e in zip(nodes, equations, strict=True)]
    return [(n, {v: w for v, w in both if isinstance(v, int)}) for n, both in pairs]


def _slots(graph: PCG, scan: Node, staging: Staging, values: Mapping[int, Value], packed: Collection[int]) -> list[Slots]:
    """Return the packed arrays for weights that exactly one stage, and nothing else, reads."""
    number = {id(n): k for k, n in enumerate(graph.inputs)}
    ends = {id(v.node) for v in graph.outputs}
    reads = [v for k in range(len(staging.parts)) for v in staging.fixed(k)]
    groups = []
    for k in range(len(staging.parts)):
        leaves = []
        for v in staging.fixed(k):
            node = values[v].node
            alone = reads.count(v) == 1 and len(graph.users.get(id(node), ())) == 1 and id(node) not in ends
            if alone and number.get(id(node), -1) in packed and node.tensors[0].floating:
                leaves.append(Leaf(number[id(node)], node.tensors[0]))
        groups.append(leaves)
    return list(slots_of(groups))


def _inputs(graph: PCG, slots: Sequence[Slots]) -> dict[int, Node]:
    """Return the new input nodes of packed arguments, by id of the old ones."""
    inputs = {}
    for s in slots:
        dtype = graph.inputs[s.first].tensors[0].dtype
        for leaf in s.numbers:
            tensor = Tensor(s.stacked if leaf == s.first else (0,), dtype)
            inputs[id(graph.inputs[leaf])] = replace(graph.inputs[leaf], tensors=(tensor,))
    return inputs


@dataclass(frozen=True, eq=False)
class _PipelineBuilder:
    """Builds the pipeline of a staging.

    Attributes:
        staging: the stages.
        constants: variables without samples that are operands of the pipeline.
        slots: packed weights.
        leaves: the variables without samples that are arguments, by the argument's number.
    """

    staging: Staging
    constants: Sequence[int]
    slots: Sequence[Slots]
    leaves: Mapping[int, int]

    def pipeline(self, scan: Node, operands: tuple[Value, ...], along: Sequence[Axis]) -> Node:
        """Return the loop over micro-batches as a pipeline on constants, buffers and packed weights."""
        staging, c, k = self.staging, len(self.constants), len(self.staging.kinds)
        stages, names = len(staging.parts), tuple(axis.name for axis in along)
        kind = None if staging.tail is None else ONE_F_ONE_B
        schedule = Schedule(stages, staging.rounds * stages, stages, kind or GPIPE)
        starts = self.starts()
        inner = self.starts()
        ends = [self.stage(n, inner) for n in range(stages)]
        step = Node(
            STAGES, tuple(map(Value, starts)), tuple(staging.buffer(kind) for kind in staging.kinds), None,
            PCG(tuple(inner), tuple(_either([end[b] for end in ends], scan.source) for b in range(k))),
            Stages(names, (), staging.cuts.weight), source=scan.source, scope=scan.scope,
        )  # fmt: skip
        payload = Pipeline(
            consts=c,
            read=0,
            carry=k,
            unroll=1,
            along=names,
            stages=stages,
            micro_batches=schedule.micro_batches,
            steps=stages,
            length=schedule.runs,
            samples=(0,) * k,
            entering=tuple(b for b, buffer in enumerate(staging.kinds) if staging.layouts[0].of_kind[buffer]),
            leaving=tuple(range(len(staging.leaving))),
            schedule=kind,
        )
        inside, stacks = PCG(tuple(starts), step.results), tuple(Tensor((staging.rounds, *t.shape), t.dtype) for t in step.tensors)
        return replace(scan, kind=PIPELINE, operands=operands, tensors=stacks, inside=inside, payload=payload)

    def starts(self) -> list[Node]:
        """Return the inputs of a step: constants, a micro-batch's buffers, and the stage's slices of packed weights."""
        tensors = [self.staging.chain.body.tensors[v] for v in self.constants]
        tensors += [self.staging.buffer(kind) for kind in self.staging.kinds]
        tensors += [Tensor(s.shape, self.staging.chain.body.tensors[self.leaves[s.first]].dtype) for s in self.slots]
        return _starts(tensors)

    def stage(self, number: int, starts: Sequence[Node]) -> list[Value]:
        """Return the buffers after a stage, from a step's inputs."""
        staging, part = self.staging, self.staging.parts[number]
        source = next((e.source for e in reversed(part.body.equations) if e.source), "")
        before, after = staging.layouts[number : number + 2]
        known, kinds = staging.captured.bodies, staging.kinds
        values = {v: Value(n) for v, n in zip(self.constants, starts, strict=False)}
        buffers = [Value(n) for n in starts[len(self.constants) :][: len(kinds)]]
        for s, start in zip(self.slots, starts[len(self.constants) + len(kinds) :], strict=True):
            leaf = s.leaves[number]
            if leaf is not None:
                values[self.leaves[leaf]] = part_of(start, s.shapes[number], source)
        for kind, rows in zip(kinds, buffers, strict=True):
            program = traced(lambda x, kind=kind: staging.unpack(number, kind, x), [rows.tensor.struct])
            values.update(zip(before.of_kind[kind], applied(graph_of(program, ["rows"], known), [rows], source), strict=True))
        names = [f"operand {k}" for k in range(len(part.inputs))]
        program = traced(lambda *xs: staging.run(number, xs), [staging.local(v) for v in part.inputs], part.body.tensors.values())
        graph = named(graph_of(program, names, known), graph_of(part.body, names, known))
        values.update(zip(part.outputs, applied(graph, [values[v] for v in part.inputs], source), strict=True))
        results = []
        for kind, rows in zip(kinds, buffers, strict=True):
            if not staging.changed(number, kind):
                results.append(rows)
                continue
            own = after.of_kind[kind]
            program = traced(lambda *xs, kind=kind, own=own: [after.packed(kind, dict(zip(own, xs, strict=True)))],
                             [staging.local(v) for v in own])  # fmt: skip
            graph = graph_of(program, [f"operand {k}" for k in range(len(own))], known)
            results += applied(graph, [values[v] for v in own], source)
        return results


def _tail(walk: Node, values: Mapping[int, Value], added: Node, pipeline: Node, staging: Staging, tail: Tail) -> Node:
    """Return the tail of a pipeline: a loop over micro-batches on `values`, by variable, together with the sum of its results."""
    constants, known = [values[v] for v in tail.constants], staging.captured.bodies
    tensors = [v.tensor.struct for v in constants] + [staging.local(v, d) for v, d in tail.read]
    tensors += [staging.buffer(kind).struct for kind in staging.leaving]
    starts = _starts([tensor_type(t.shape, t.dtype) for t in tensors])
    source = next((e.source for e in reversed(tail.body.equations) if e.source), "")
    inputs, first = list(map(Value, starts)), tail.own
    names = [f"operand {k}" for k in range(len(tail.body.inputs))]
    program = traced(lambda *rows: staging.left(rows), tensors[first:])
    arrived = applied(graph_of(program, names[: len(tensors) - first], known), inputs[first:], source)
    operands = [v.tensor.struct for v in (*inputs[:first], *arrived)]
    program = traced(lambda *xs: staging.summed(tail, xs), operands, tail.body.tensors.values())
    graph = named(graph_of(program, names, known), graph_of(tail.body, names, known))
    inside = PCG(tuple(starts), tuple(applied(graph, [*inputs[:first], *arrived], source)))
    operands = (*constants, *walk.operands[walk.of(Scan).consts :])
    payload = following(pipeline, tail, len(constants), [0] * len(staging.leaving))
    return replace(walk, kind=TAIL, operands=operands, tensors=added.tensors, inside=inside, payload=payload)


def _starts(tensors: Iterable[Tensor]) -> list[Node]:
    return [Node("input", (), (t,), payload=Input(k, f"operand {k}")) for k, t in enumerate(tensors)]


def _either(ends: Sequence[Value], source: str) -> Value:
    """Return a placeholder for the result of a device's own stage. It never runs (`unity.pcg.parallel.branches.groups_of`)."""
    program = trace(lambda *xs: reduce(lax.add, xs), (v.tensor.struct for v in ends))
    return Value(Node("either", tuple(ends), (ends[0].tensor,), program, source=source))


def applied(graph: PCG, values: Sequence[Value], source: str = "") -> list[Value]:
    """Apply a graph to values, and return its results. Operators without a user's line get `source`."""
    values_of: dict[Value, Value] = {Value(n): v for n, v in zip(graph.inputs, values, strict=True)}
    for node in graph.nodes:
        if node.kind != "input":
            copy = replace(node, operands=tuple(values_of[v] for v in node.operands), source=node.source or source)
            values_of.update(zip(node.results, copy.results, strict=True))
    return [values_of[v] for v in graph.outputs]
