"""A chain in stages of different operators: the program in micro-batches, and that as a pipeline.

In the program each micro-batch goes through all stages, one after the other, and between two of them lies in buffers:

    scan(micro-batches:  buffers → first → buffers → second → buffers)

That is a program like any other. As a pipeline it is one step for every stage, which a device chooses by the stage that it is
(`unity.pcg.graph.STAGES`), and what is carried from step to step are the buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.exec.parallel import TIME
from unity.exec.walker import run_body
from unity.pcg.axis import Axis
from unity.pcg.body import Body, Tensor, close
from unity.pcg.capture import Captured, graph_of
from unity.pcg.graph import PCG, PIPELINE, STAGES, Node, Value
from unity.pcg.packed import NOTHING, Packing
from unity.pcg.slots import Leaf, Slots, part_of, slots_of
from unity.pcg.stages import Mixed, Schedule, staged
from unity.pipelining.balance import Cuts
from unity.pipelining.buffers import Layout, layouts
from unity.pipelining.chain import Chain, Part
from unity.pipelining.micro import WALK, joined, split
from unity.pipelining.named import named, with_nodes
from unity.pipelining.splice import spliced, within
from unity.search.segments import flows


@dataclass(frozen=True, eq=False)
class Staging:
    """A chain that is cut into stages, for micro-batches of which every stage is given so many."""

    captured: Captured
    chain: Chain
    cuts: Cuts
    rounds: int

    @cached_property
    def parts(self) -> list[Part]:
        """The stages' programs. Raises Mixed if one does not work on each sample by itself."""
        ends = [0, *self.cuts.places, len(self.chain)]
        return [self.chain.part(a, b) for a, b in pairwise(ends)]

    @cached_property
    def layouts(self) -> list[Layout]:
        """What lies in the buffers before each stage, and after the last."""
        ends = [0, *self.cuts.places, len(self.chain)]
        return layouts([self.chain.crossing(p) for p in ends], self.chain.body.tensors, self.chain.samples, self.chain.size)

    @cached_property
    def kinds(self) -> list[str]:
        """Of the buffers, those first in which something leaves the last stage."""
        return sorted(self.layouts[0].widths, key=lambda kind: kind not in self.leaving)

    @cached_property
    def leaving(self) -> list[str]:
        """Of the buffers in which something leaves the last stage."""
        return [kind for kind, own in self.layouts[-1].of_kind.items() if own]

    def buffer(self, kind: str) -> Tensor:
        """A buffer with one sample of each micro-batch that starts at the same time on all stages."""
        return Tensor((self.chain.size // self.rounds, self.layouts[0].widths[kind]), jnp.dtype(kind))

    def fixed(self, stage: int) -> list[int]:
        """What a stage reads without samples."""
        return [v for v in self.parts[stage].inputs if v not in self.chain.samples]

    @cached_property
    def everything(self) -> list[int]:
        """What any stage reads without samples."""
        return list(dict.fromkeys(v for k in range(len(self.parts)) for v in self.fixed(k)))

    @cached_property
    def still(self) -> bool:
        """Whether no gradient is wanted of what the first stage is given."""
        moving = flows(self.captured.body, self.captured.differentiated)
        return moving.isdisjoint(self.layouts[0].places)

    def unpack(self, stage: int, kind: str, rows: Any) -> list[Any]:
        """What a stage finds in a buffer."""
        return self.layouts[stage].unpacked(kind, lax.stop_gradient(rows) if stage == 0 and self.still else rows)

    def run(self, stage: int, given: Sequence[Any]) -> list[Any]:
        """A stage's program on a micro-batch, of its inputs."""
        part, chain = self.parts[stage], self.chain
        types, results = ([(s,) for s in chain.states(variables)] for variables in (part.inputs, part.outputs))
        return run_body(part.body, given, types, results, (Axis(TIME, self.rounds, 0),))

    def local(self, variable: int) -> jax.ShapeDtypeStruct:
        """A variable as a stage finds it in a micro-batch."""
        tensor, dim = self.chain.body.tensors[variable], self.chain.samples.get(variable)
        shape = tuple(n // self.rounds if k == dim else n for k, n in enumerate(tensor.shape))
        return jax.ShapeDtypeStruct(shape, tensor.dtype)

    def through(self, buffers: Sequence[Any], fixed: Mapping[int, Any]) -> list[Any]:
        """A micro-batch's buffers after all stages."""
        for k, part in enumerate(self.parts):
            before, after, values = self.layouts[k], self.layouts[k + 1], dict(fixed)
            for kind, rows in zip(self.kinds, buffers, strict=True):
                values.update(zip(before.of_kind[kind], self.unpack(k, kind, rows), strict=True))
            values.update(zip(part.outputs, self.run(k, [values[v] for v in part.inputs]), strict=True))
            pairs = zip(self.kinds, buffers, strict=True)
            buffers = [after.packed(kind, values) if self.changed(k, kind) else rows for kind, rows in pairs]
        return list(buffers)

    def changed(self, stage: int, kind: str) -> bool:
        """Whether a stage puts anything else in a buffer than it finds there."""
        before, after = self.layouts[stage : stage + 2]
        return bool(after.of_kind[kind]) and not before.alike(after, kind)

    def walked(self) -> Captured:
        """The program in micro-batches. Raises Mixed if an operator must know which it has."""
        chain, first, last = self.chain, self.layouts[0], self.layouts[-1]
        given = [*self.everything, *first.places]

        def whole(*operands: Any) -> list[Any]:
            values = dict(zip(given, operands, strict=True))
            stacks = [self.stack(kind, values) for kind in self.kinds]
            ends = lax.scan(lambda _, buffers: (None, self.through(buffers, values)[: len(self.leaving)]), None, stacks)[1]
            found: dict[int, Any] = {}
            for kind, rows in zip(self.leaving, ends, strict=True):
                found.update(zip(last.of_kind[kind], last.unpacked(kind, joined(rows, 0)), strict=True))
            return [found[v] for v in chain.results]

        program = traced(whole, [chain.body.tensors[v].struct for v in given])
        body = spliced(chain.body, chain.made, given, chain.results, program, chain.equations[-1], WALK)
        return self.captured.of(body, self.captured.bodies)

    def stack(self, kind: str, values: Mapping[int, Any]) -> Any:
        """A buffer of the first stage, those of all micro-batches stacked."""
        if self.layouts[0].of_kind[kind]:
            return split(self.layouts[0].packed(kind, values), 0, self.rounds)
        buffer = self.buffer(kind)
        return jnp.zeros((self.rounds, *buffer.shape), buffer.dtype)


def traced(run: Any, given: Sequence[jax.ShapeDtypeStruct]) -> Body:
    """A program of samples that do not know where they stand in the batch."""
    try:
        return close(jax.make_jaxpr(run)(*given))
    except NameError:  # of the axis of time: a local program asks where its piece lies
        why = "positions, or random numbers"
        raise Mixed(f"what the stages compute depends on where a sample stands in the batch ({why})") from None


def with_stages(graph: PCG, staging: Staging, walk: Captured, along: Sequence[Axis], pack: bool) -> tuple[PCG, Packing]:
    """A graph of the program in micro-batches, its walk a pipeline with stages along these axes; `pack`: with the stages' weights
    packed.

    Raises Mixed if an operator cannot be in a stage.
    """
    scan = next(n for n in graph.nodes if n.kind == "scan" and within(n.scope, WALK))
    equation = next(e for e in walk.body.equations if within(e.scope, WALK) and e.results and e.name == "scan")
    values = {v: w for v, w in zip(equation.operands, scan.operands, strict=True) if isinstance(v, int)}
    slots = _slots(graph, scan, staging, values, walk.differentiated) if pack else []
    gone = {leaf for s in slots for leaf in s.numbers}
    numbers = {v: k for k, v in enumerate(walk.body.inputs)}
    constants = [v for v in staging.everything if numbers.get(v, -1) not in gone]
    buffers, own = scan.operands[len(scan.operands) - len(staging.kinds) :], [Value(graph.inputs[s.first]) for s in slots]
    making = _Making(staging, constants, slots, {numbers[v]: v for v in staging.everything if v in numbers})
    made = making.pipeline(scan, (*(values[v] for v in constants), *buffers, *own), along)
    staged(made)
    inputs = _inputs(graph, slots)
    found = with_nodes(graph, {**inputs, id(scan): made})
    starts = tuple(inputs.get(id(n), n) for n in graph.inputs)
    return PCG(starts, found.outputs, graph.axes), Packing(tuple(slots)) if slots else NOTHING


def _slots(
    graph: PCG, scan: Node, staging: Staging, values: Mapping[int, Value], differentiated: Collection[int]
) -> list[Slots]:
    """Sets of weights that one stage reads, and nothing else does."""
    number = {id(n): k for k, n in enumerate(graph.inputs)}
    ends = {id(v.node) for v in graph.outputs}
    often = [v for k in range(len(staging.parts)) for v in staging.fixed(k)]
    groups = []
    for k in range(len(staging.parts)):
        leaves = []
        for v in staging.fixed(k):
            node = values[v].node
            alone = often.count(v) == 1 and len(graph.users.get(id(node), ())) == 1 and id(node) not in ends
            if alone and number.get(id(node), -1) in differentiated and node.tensors[0].floating:
                leaves.append(Leaf(number[id(node)], node.tensors[0]))
        groups.append(leaves)
    return list(slots_of(groups))


def _inputs(graph: PCG, slots: Sequence[Slots]) -> dict[int, Node]:
    """By id of an argument: what it becomes where it is packed."""
    found = {}
    for s in slots:
        dtype = graph.inputs[s.first].tensors[0].dtype
        for leaf in s.numbers:
            tensor = Tensor(s.stacked if leaf == s.first else (0,), dtype)
            found[id(graph.inputs[leaf])] = replace(graph.inputs[leaf], tensors=(tensor,))
    return found


@dataclass(frozen=True, eq=False)
class _Making:
    """Makes the pipeline of a staging. `leaves`: of those things without samples that are arguments' leaves, by their numbers."""

    staging: Staging
    constants: Sequence[int]
    slots: Sequence[Slots]
    leaves: Mapping[int, int]

    def pipeline(self, scan: Node, operands: tuple[Value, ...], along: Sequence[Axis]) -> Node:
        """The walk as a pipeline of these operands: constants, buffers and slots."""
        staging, c, k = self.staging, len(self.constants), len(self.staging.kinds)
        stages, names = len(staging.parts), " ".join(axis.name for axis in along)
        schedule = Schedule(stages, staging.rounds * stages, stages)
        starts = self.starts()
        inner = self.starts()
        ends = [self.stage(n, inner) for n in range(stages)]
        step = Node(
            STAGES, tuple(map(Value, starts)), tuple(staging.buffer(kind) for kind in staging.kinds), None,
            PCG(tuple(inner), tuple(_either([end[b] for end in ends], scan.source) for b in range(k))),
            {"along": names, "packed": "", "weight": staging.cuts.weight}, source=scan.source, scope=scan.scope,
        )  # fmt: skip
        attributes = {
            "consts": c, "read": 0, "carry": k, "unroll": 1, "along": names, "stages": stages,
            "micro_batches": schedule.micro_batches, "steps": stages, "length": schedule.runs, "samples": " ".join("0" * k),
            "entering": " ".join(str(b) for b, kind in enumerate(staging.kinds) if staging.layouts[0].of_kind[kind]),
            "leaving": " ".join(map(str, range(len(staging.leaving)))),
        }  # fmt: skip
        inside, stacks = PCG(tuple(starts), step.results), tuple(Tensor((staging.rounds, *t.shape), t.dtype) for t in step.tensors)
        return replace(scan, kind=PIPELINE, operands=operands, tensors=stacks, inside=inside, attributes=attributes)

    def starts(self) -> list[Node]:
        """What a step finds: constants, a micro-batch's buffers, and a stage's own slots."""
        tensors = [self.staging.chain.body.tensors[v] for v in self.constants]
        tensors += [self.staging.buffer(kind) for kind in self.staging.kinds]
        tensors += [Tensor(s.shape, self.staging.chain.body.tensors[self.leaves[s.first]].dtype) for s in self.slots]
        return [Node("input", (), (t,), attributes={"index": k, "name": f"operand {k}"}) for k, t in enumerate(tensors)]

    def stage(self, number: int, starts: Sequence[Node]) -> list[Value]:
        """The buffers after a stage, of what it finds."""
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
        program = traced(lambda *xs: staging.run(number, xs), [staging.local(v) for v in part.inputs])
        graph = named(graph_of(program, names, known), graph_of(part.body, names, known))
        values.update(zip(part.outputs, applied(graph, [values[v] for v in part.inputs], source), strict=True))
        found = []
        for kind, rows in zip(kinds, buffers, strict=True):
            if not staging.changed(number, kind):
                found.append(rows)
                continue
            own = after.of_kind[kind]
            program = traced(lambda *xs, kind=kind, own=own: [after.packed(kind, dict(zip(own, xs, strict=True)))],
                             [staging.local(v) for v in own])  # fmt: skip
            graph = graph_of(program, [f"operand {k}" for k in range(len(own))], known)
            found += applied(graph, [values[v] for v in own], source)
        return found


def _either(ends: Sequence[Value], source: str) -> Value:
    """What stands for the results of all stages, of which a device has its own: it never runs (`unity.pcg.branches.groups_of`)."""
    program = close(jax.make_jaxpr(lambda *xs: reduce(lax.add, xs))(*(v.tensor.struct for v in ends)))
    return Value(Node("either", tuple(ends), (ends[0].tensor,), program, source=source))


def applied(graph: PCG, values: Sequence[Value], source: str = "") -> list[Value]:
    """A graph's results, of these values; what has no line of the user's is put at one."""
    found: dict[Value, Value] = {Value(n): v for n, v in zip(graph.inputs, values, strict=True)}
    for node in graph.nodes:
        if node.kind != "input":
            made = replace(node, operands=tuple(found[v] for v in node.operands), source=node.source or source)
            found.update(zip(node.results, made.results, strict=True))
    return [found[v] for v in graph.outputs]
