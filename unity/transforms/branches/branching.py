"""The transformation that puts branches of a program on separate groups of devices, its plan-file form and its replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from unity.base.documents import Natural, Record
from unity.base.errors import PlanError
from unity.base.formatting import short
from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.capture.heavy_operators import Uses, constants
from unity.pcg.capture.packed_arguments import NOTHING
from unity.pcg.capture.value_numbering import deduplicated
from unity.pcg.ir.dead_code import extract, used
from unity.pcg.ir.graph import BRANCHES, PCG, Node, Value
from unity.pcg.ir.payloads import Branches, Input
from unity.pcg.ir.program import Body
from unity.pcg.parallel.branches import first_unreplicable
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.nested.scan_programs import SCANNED, ambiguous
from unity.pcg.types.axis import Axis
from unity.transforms.branches.packing import packed
from unity.transforms.branches.regions import Branch, BranchRegion, joins_sums, regions
from unity.transforms.pipelining import Pipelining
from unity.transforms.pipelining.micro_batches import WALK
from unity.transforms.pipelining.unlike.pipeline_operator import applied
from unity.transforms.splice import with_nodes, within
from unity.transforms.transformation import Transformation, TransformationRecord, TransformationSource, reserved_in_words


class Apart(Exception):
    """Raised for branches that cannot be put on separate groups of devices. The message tells which, where, and why."""


class Share(Record):
    """The assignment of one region's branches to groups of devices.

    Attributes:
        region: the region's number among a program's spots.
        groups: the group of every branch.
        weight: the time of the slowest group, as a share of the time of all branches.
    """

    region: Natural
    groups: tuple[Natural, ...]
    weight: float


class BranchingRecord(TransformationRecord, tag="branches"):
    """A `Branching` in a document: its axes, the groups of its branches, whether weights are packed, and which never are."""

    along: tuple[str, ...]
    shares: tuple[Share, ...]
    packed: bool
    whole: tuple[Natural, ...]

    def apply(self, source: TransformationSource) -> Branching:
        program = Forked.of(source.program, source.earlier)
        along = source.axes("groups of devices", self.along)
        try:
            return branched(program, along, self.shares, self.packed, self.whole)
        except Apart as reason:
            raise PlanError(f"the branches along {reserved_in_words(source.machine, along)} cannot be made: {reason}") from None


@dataclass(frozen=True)
class Ending:
    """The equations that join a region's branches, as a graph.

    Attributes:
        graph: the equations as a graph.
        inputs: the variables that it reads.
        outputs: the variables that the rest of the program reads.
        members: the equations by number.
        free: results of branches that it does not read.
    """

    graph: PCG
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    members: tuple[int, ...]
    free: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Spot:
    """A region and its program: the whole one, or a scan's body, which runs `times` times in all."""

    program: Forked
    region: BranchRegion
    times: int = 1


@dataclass(frozen=True, eq=False)
class ScanBody:
    """The body of equal scans as a program, and the number of times that it runs in all of them."""

    program: Forked
    times: int

    @property
    def key(self) -> str:
        """The content hash of the graph inside of these scans."""
        return self.program.captured.graph.key


@dataclass(frozen=True, eq=False)
class Forked:
    """A program and its regions of branches.

    If the program has a pipeline (`pipelining`), the pipeline's stages are put on after the branches.
    """

    captured: Captured
    pipelining: Pipelining | None = None

    @classmethod
    def of(cls, captured: Captured, earlier: Sequence[Transformation]) -> Forked:
        """Return a program, to which transformations were applied before, ready for branches."""
        pipelining = next((t for t in earlier if isinstance(t, Pipelining)), None)
        return cls(captured) if pipelining is None else cls(pipelining.walk.captured, pipelining)

    @property
    def before(self) -> Captured:
        """The program without a pipeline."""
        return self.captured if self.pipelining is None else self.pipelining.before

    def staged(self, graph: PCG) -> PCG:
        """Return a graph of the program with the pipeline's stages, if it has a pipeline."""
        return graph if self.pipelining is None else self.pipelining.walk.staged(graph)

    @cached_property
    def body(self) -> Body:
        """The program with equal equations computed once."""
        return deduplicated(self.captured.body)

    @cached_property
    def regions(self) -> tuple[BranchRegion, ...]:
        """The regions outside of scans, in order."""
        return tuple(regions(self.body))

    @cached_property
    def repeated(self) -> tuple[ScanBody, ...]:
        """The bodies of the program's scans, equal ones once, but no pipelines, scans in branches or ambiguous ones."""
        bodies: dict[str, ScanBody] = {}
        unclear = ambiguous(self.body)
        in_branches = {k for region in self.regions for branch in region.branches for k in branch.members}
        for k, e in enumerate(self.body.equations):
            if e.name in SCANNED and k not in in_branches and not within(e.scope, WALK) and nested_body(e).key not in unclear:
                body = used(nested_body(e))
                graph = graph_of(body, [f"operand {k}" for k in range(len(body.inputs))], self.captured.bodies)
                weights = [k for k, n in enumerate(graph.inputs) if n.tensors[0].floating and self.captured.differentiated]
                captured = replace(self.captured, body=body, graph=graph, consts=(), differentiated=frozenset(weights))
                one = bodies.get(graph.key, ScanBody(Forked(captured), 0))
                bodies[graph.key] = replace(one, times=one.times + int(e.params["length"]))
        return tuple(bodies.values())

    @cached_property
    def spots(self) -> tuple[Spot, ...]:
        """All regions: those outside of scans, and those of scan bodies."""
        inner = ((r, spot) for r in self.repeated for spot in r.program.spots)
        return (*(Spot(self, region) for region in self.regions), *(replace(s, times=r.times * s.times) for r, s in inner))

    @cached_property
    def graphs(self) -> Mapping[Branch, tuple[PCG, tuple[int, ...]]]:
        """Every branch as a graph, with the variables that are its inputs."""
        constant, graph_of_branch = constants(self.body), {}
        known = self.captured.bodies
        for branch in (b for region in self.regions for b in region.branches):
            part, order = extract(self.body, branch.members, [branch.output], constant)
            graph_of_branch[branch] = graph_of(part, [f"read {v}" for v in order], known), order
        return graph_of_branch

    def ending(self, region: BranchRegion) -> Ending:
        """Return the sums and concatenations that branches end in. Equations after them may not take partial sums."""
        body, joins = self.body, set[int]()
        users = Uses(body).users
        for branch in region.branches:
            (user,) = set(users[branch.output])
            while user not in joins and joins_sums(body, body.equations[user]):
                joins.add(user)
                if user == region.join:
                    break
                (user,) = set(users[body.equations[user].results[0]])
        joined = [body.equations[k].results[0] for k in sorted(joins)]
        outputs = tuple(v for v in joined if v in body.outputs or not joins.issuperset(users.get(v, ())))
        part, order = extract(body, joins, outputs, constants(body))
        graph = graph_of(part, [f"read {v}" for v in order], self.captured.bodies)
        free = [b.output for b in region.branches if b.output not in order]
        return Ending(graph, order, outputs, tuple(sorted(joins)), tuple(free))

    def where(self, region: BranchRegion) -> str:
        """Return the line at which branches are joined."""
        return short(self.body.equations[region.join].source) or "an unknown line"

    def alone(self, region: BranchRegion) -> Captured:
        """Return a region and its join as a separate program, in which everything that it reads except data is a weight."""
        body, whole = self.body, self.captured
        join = body.equations[region.join]
        members = sorted({k for b in region.branches for k in b.members} | {region.join, *self.ending(region).members})
        part, order = extract(body, members, join.results, constants(body))
        number = {v: k for k, v in enumerate(body.inputs)}
        weights = [k for k, v in enumerate(order) if body.tensors[v].floating and number.get(v, -1) in {-1, *whole.differentiated}]
        graph = graph_of(part, [f"read {v}" for v in order], whole.bodies)
        return replace(whole, body=part, graph=graph, consts=(), differentiated=frozenset(weights if whole.differentiated else ()))

    def check(self, region: BranchRegion) -> None:
        """Raises Apart if not all branches of a region can be on some devices only."""
        for branch in region.branches:
            graph, _ = self.graphs[branch]
            node = first_unreplicable(graph)
            if node is not None:
                line = short(node.source) or "an unknown line"
                raise Apart(f"the branches joined at {self.where(region)}: {node.kind} at {line} must run on all devices")
            if not graph.outputs[0].tensor.floating:
                result = graph.outputs[0].tensor
                raise Apart(f"the branches joined at {self.where(region)}: one makes {result}, which is no floating point number")


@dataclass(frozen=True, eq=False, repr=False)
class Branching(Transformation):
    """A program before and after some of its branches went to groups of devices along its axes.

    Attributes:
        program: the program before, without the stages of its pipeline.
        shares: for each region, the groups of its branches.
        whole: the arguments, by number, that are never packed.
    """

    kind = BRANCHES
    title = "On groups of devices"
    effect = "Branches that do not depend on each other run at the same time"

    program: Forked
    shares: tuple[Share, ...]
    whole: frozenset[int] = frozenset()

    @property
    def record(self) -> BranchingRecord:
        along = tuple(axis.name for axis in self.along)
        return BranchingRecord(along, tuple(self.shares), bool(self.packing), tuple(sorted(self.whole)))

    def check(self) -> None:
        self._check_same(branched(self.program, self.along, self.shares, bool(self.packing), self.whole))

    def __str__(self) -> str:
        count = prod(axis.size for axis in self.along)
        branches = sum(len(s.groups) for s in self.shares)
        places = f" in {len(self.shares)} places" if len(self.shares) > 1 else ""
        packs = f", {self.packing}" if self.packing else ""
        return f"{branches} branches{places} on {count} groups of devices{packs}"


def branched(program: Forked, along: Sequence[Axis], shares: Sequence[Share], pack: bool, whole: Collection[int] = ()) -> Branching:
    """Put the branches of a program on separate groups of devices.

    Args:
        program: the program.
        along: the mesh axes of the groups.
        shares: for each region, the groups of its branches.
        pack: whether the branches' weights are packed.
        whole: arguments that are not packed.

    Raises:
        Apart: the branches do not exist, or they cannot be separated.
    """
    count = prod(axis.size for axis in along)
    for share in shares:
        if not 0 <= share.region < len(program.spots):
            raise Apart(f"the program has no region {share.region} of branches")
        region, place = program.spots[share.region].region, program.spots[share.region].program
        if len(region.branches) != len(share.groups) or set(share.groups) != set(range(count)):
            raise Apart(f"{len(region.branches)} branches joined at {place.where(region)} do not fill {count} groups of devices")
        place.check(region)
    ordered, packing = tuple(sorted(shares, key=lambda s: s.region)), NOTHING
    graph = _stitched(program, tuple(along), ordered, 0)
    if pack:
        nodes = sorted((n for n in graph.nodes if n.kind == BRANCHES), key=lambda n: n.of(Branches).region)
        graph, packing = packed(graph, nodes, program.captured.differentiated.difference(whole))
    after = replace(program.captured, graph=program.staged(graph))
    before = program.captured if program.pipelining is None else program.pipelining.after
    return Branching(before, after, program, ordered, frozenset(whole), along=tuple(along), packing=packing)


def _stitched(program: Forked, along: tuple[Axis, ...], shares: Sequence[Share], first: int) -> PCG:
    """Return the graph of a program with its branches as operators. `first` is the number of its first spot."""

    def within_spots(start: int, end: int) -> list[Share]:
        return [s for s in shares if start <= s.region < end]

    start = first + len(program.regions)
    own, graph = within_spots(first, start), program.captured.graph
    if own:
        graph = _Stitching(program, along, own, first).graph()
    for inner in program.repeated:
        end = start + len(inner.program.spots)
        some = within_spots(start, end)
        if some:
            scans = [n for n in graph.nodes if n.kind == "scan" and n.inside is not None and n.inside.key == inner.key]
            assert scans, "a graph has the scans of its program"
            graph = with_nodes(graph, {id(n): replace(n, inside=_stitched(inner.program, along, some, start)) for n in scans})
        start = end
    return graph


class _Stitching:
    """Builds the graph of a program with branches as operators: the rest of the program is made a graph, and joined with them."""

    def __init__(self, program: Forked, along: tuple[Axis, ...], shares: Sequence[Share], first: int) -> None:
        self.program, self.along, self.shares, self.first = program, along, shares, first
        self.new: dict[int, Node] = {}  # by id of a node of the rest: its new node
        self.branch_results: dict[int, Value] = {}  # by id of an input of the rest: the branch's result in its place

    def graph(self) -> PCG:
        """Return the whole graph."""
        body, captured, regions = self.program.body, self.program.captured, self.program.regions
        chosen = [regions[s.region - self.first] for s in self.shares]
        endings = [self.program.ending(region) for region in chosen]
        branches = [b for region in chosen for b in region.branches]
        gone = {k for b in branches for k in b.members} | {k for ending in endings for k in ending.members}
        ends = [v for ending in endings for v in (*ending.free, *ending.outputs)]
        reads = [self.reads(region, ending) for region, ending in zip(chosen, endings, strict=True)]
        outputs_of_rest = (*body.outputs, *(v for some in reads for v in some))
        remaining = tuple(e for k, e in enumerate(body.equations) if k not in gone)
        rest = Body((*body.inputs, *ends), outputs_of_rest, remaining, body.tensors)
        names = [*(n.name for n in captured.graph.inputs), *(f"branch {k}" for k in range(len(ends)))]
        outside = graph_of(rest, names, captured.bodies)
        outputs, starts = iter(outside.outputs), dict(zip(ends, outside.inputs[len(body.inputs) :], strict=True))
        results = [next(outputs) for _ in body.outputs]
        for region, share, ending, read in zip(chosen, self.shares, endings, reads, strict=True):
            values = dict(zip(read, self.rebuilt([next(outputs) for _ in read]), strict=True))
            node = self.operator(region, share, values)
            values.update((b.output, v) for b, v in zip(region.branches, node.results, strict=True))
            values.update(zip(ending.outputs, applied(ending.graph, [values[v] for v in ending.inputs]), strict=True))
            self.branch_results.update((id(starts[v]), values[v]) for v in (*ending.free, *ending.outputs))
        inputs = outside.inputs[: len(body.inputs)]
        return PCG(inputs, tuple(self.rebuilt(results)), outside.axes)

    def reads(self, region: BranchRegion, ending: Ending) -> list[int]:
        """Return the variables of the rest that branches and their ending read."""
        own = {b.output for b in region.branches}
        operands = [v for b in region.branches for v in self.program.graphs[b][1]]
        return list(dict.fromkeys([*operands, *(v for v in ending.inputs if v not in own)]))

    def rebuilt(self, values: Sequence[Value]) -> list[Value]:
        """Return values of the rest as values of the whole graph."""
        for node in PCG((), tuple(values)).nodes:
            if id(node) not in self.new and id(node) not in self.branch_results:
                operands = tuple(map(self.value, node.operands))
                same = all(v.node is w.node for v, w in zip(operands, node.operands, strict=True))
                self.new[id(node)] = node if same else replace(node, operands=operands)
        return [self.value(v) for v in values]

    def value(self, v: Value) -> Value:
        return self.branch_results[id(v.node)] if id(v.node) in self.branch_results else Value(self.new[id(v.node)], v.index)

    def operator(self, region: BranchRegion, share: Share, values: Mapping[int, Value]) -> Node:
        """Return the branches of a region as one operator on `values`."""
        read = dict.fromkeys(v for b in region.branches for v in self.program.graphs[b][1])
        operands_by_variable = {v: values[v] for v in read}
        inputs = {v: Node("input", (), (value.tensor,), payload=Input(k, f"operand {k}"))
                  for k, (v, value) in enumerate(operands_by_variable.items())}  # fmt: skip
        outputs = []
        for branch in region.branches:
            graph, order = self.program.graphs[branch]
            outputs += applied(graph, [Value(inputs[v]) for v in order])
        inside = PCG(tuple(inputs.values()), tuple(outputs))
        payload = Branches(tuple(axis.name for axis in self.along), share.groups, (), share.weight, share.region)
        join, tensors = self.program.body.equations[region.join], tuple(v.tensor for v in outputs)
        operands = tuple(operands_by_variable.values())
        return Node(BRANCHES, operands, tensors, None, inside, payload, source=join.source, scope=join.scope)
