"""A program some of whose branches lie on devices of their own: found, made, kept in files and made again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from unity.base.errors import DerivationError, PlanError
from unity.base.formatting import short
from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.capture.heavy_operators import Uses, constants, light
from unity.pcg.capture.packed_arguments import NOTHING, Packing
from unity.pcg.ir.dead_code import deduplicated, extract, used
from unity.pcg.ir.graph import BRANCHES, PCG, Node, Value
from unity.pcg.ir.program import Body
from unity.pcg.parallel.branches import confined
from unity.pcg.propagation.scan_programs import SCANNED
from unity.pcg.propagation.solver import nested_body
from unity.pcg.types.axis import Axis
from unity.transforms.branches.packing import packed
from unity.transforms.branches.regions import LINEAR, Branch, Region, regions
from unity.transforms.pipelining import Pipelining
from unity.transforms.pipelining.apart import applied
from unity.transforms.pipelining.micro import WALK
from unity.transforms.pipelining.named import with_nodes
from unity.transforms.pipelining.splice import within


class Apart(Exception):
    """Branches cannot lie on devices of their own. The message says which, where, and why."""


@dataclass(frozen=True)
class Share:
    """How the branches of one region are shared out: the region's number among a program's spots, the group of every branch, and
    what part of the time of all branches together the slowest group takes."""

    region: int
    groups: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class Ending:
    """What branches of a region end in, as a graph: the variables that are its inputs and its outputs, and its equations.

    `free`: the results of branches that it does not read.
    """

    graph: PCG
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    members: tuple[int, ...]
    free: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Spot:
    """A region, and the program that it is one of: a whole, or what scans of it repeat, so many times in all."""

    program: Forked
    region: Region
    times: int = 1


@dataclass(frozen=True, eq=False)
class Repeated:
    """What equal scans of a program repeat, so many times in all, as a program of its own."""

    program: Forked
    times: int

    @property
    def key(self) -> str:
        """Of the graph inside of these scans."""
        return self.program.captured.graph.key


@dataclass(frozen=True, eq=False)
class Forked:
    """A program, and the regions of it that have branches. `pipelining`: how some of it became a pipeline, whose stages are made
    last."""

    captured: Captured
    pipelining: Pipelining | None = None

    @classmethod
    def of(cls, before: Captured, pipelining: Pipelining | None) -> Forked:
        """A program, or what a pipeline made of it."""
        return cls(before) if pipelining is None else cls(pipelining.walk.captured, pipelining)

    @property
    def before(self) -> Captured:
        """The program without a pipeline."""
        return self.captured if self.pipelining is None else self.pipelining.before

    def staged(self, graph: PCG) -> PCG:
        """A graph of the program, its pipeline one."""
        return graph if self.pipelining is None else self.pipelining.walk.staged(graph)

    @cached_property
    def body(self) -> Body:
        """The program with equal light equations computed once."""
        return deduplicated(self.captured.body, light)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Its regions, in order, but for those inside of scans."""
        return tuple(regions(self.body))

    @cached_property
    def repeated(self) -> tuple[Repeated, ...]:
        """What its scans repeat, equal ones together. What a pipeline walks is in stages already, and no region lies in another."""
        found: dict[str, Repeated] = {}
        taken = {k for region in self.regions for branch in region.branches for k in branch.members}
        for k, e in enumerate(self.body.equations):
            if e.name in SCANNED and k not in taken and not within(e.scope, WALK):
                body = used(nested_body(e))
                graph = graph_of(body, [f"operand {k}" for k in range(len(body.inputs))], self.captured.bodies)
                weights = [k for k, n in enumerate(graph.inputs) if n.tensors[0].floating and self.captured.differentiated]
                captured = replace(self.captured, body=body, graph=graph, consts=(), differentiated=frozenset(weights))
                one = found.get(graph.key, Repeated(Forked(captured), 0))
                found[graph.key] = replace(one, times=one.times + int(e.params["length"]))
        return tuple(found.values())

    @cached_property
    def spots(self) -> tuple[Spot, ...]:
        """All regions: its own, and those inside of scans."""
        inner = ((r, spot) for r in self.repeated for spot in r.program.spots)
        return (*(Spot(self, region) for region in self.regions), *(replace(s, times=r.times * s.times) for r, s in inner))

    @cached_property
    def graphs(self) -> Mapping[Branch, tuple[PCG, tuple[int, ...]]]:
        """Every branch as a graph of its own, and the variables that are its inputs."""
        constant, found = constants(self.body), {}
        known = self.captured.bodies
        for branch in (b for region in self.regions for b in region.branches):
            part, order = extract(self.body, branch.members, [branch.output], constant)
            found[branch] = graph_of(part, [f"read {v}" for v in order], known), order
        return found

    def ending(self, region: Region) -> Ending:
        """The sums and concatenations that branches end in, apart from what follows, which partial sums may not pass."""
        body, found = self.body, set[int]()
        users = Uses(body).users
        for branch in region.branches:
            (user,) = set(users[branch.output])
            while user not in found and body.equations[user].name in LINEAR:
                found.add(user)
                if user == region.join:
                    break
                (user,) = set(users[body.equations[user].results[0]])
        made = [body.equations[k].results[0] for k in sorted(found)]
        outputs = tuple(v for v in made if v in body.outputs or not found.issuperset(users.get(v, ())))
        part, order = extract(body, found, outputs, constants(body))
        graph = graph_of(part, [f"read {v}" for v in order], self.captured.bodies)
        free = [b.output for b in region.branches if b.output not in order]
        return Ending(graph, order, outputs, tuple(sorted(found)), tuple(free))

    def where(self, region: Region) -> str:
        """The line at which branches are joined."""
        return short(self.body.equations[region.join].source) or "an unknown line"

    def alone(self, region: Region) -> Captured:
        """A region and its join as a program of their own. All that it reads but data is a weight there."""
        body, whole = self.body, self.captured
        join = body.equations[region.join]
        members = sorted({k for b in region.branches for k in b.members} | {region.join, *self.ending(region).members})
        part, order = extract(body, members, join.results, constants(body))
        number = {v: k for k, v in enumerate(body.inputs)}
        given = [k for k, v in enumerate(order) if body.tensors[v].floating and number.get(v, -1) in {-1, *whole.differentiated}]
        graph = graph_of(part, [f"read {v}" for v in order], whole.bodies)
        return replace(whole, body=part, graph=graph, consts=(), differentiated=frozenset(given if whole.differentiated else ()))

    def check(self, region: Region) -> None:
        """Raises Apart if not all branches of a region can be on some devices only."""
        for branch in region.branches:
            graph, _ = self.graphs[branch]
            node = confined(graph)
            if node is not None:
                line = short(node.source) or "an unknown line"
                raise Apart(f"the branches joined at {self.where(region)}: {node.kind} at {line} must run on all devices")
            if not graph.outputs[0].tensor.floating:
                made = graph.outputs[0].tensor
                raise Apart(f"the branches joined at {self.where(region)}: one makes {made}, which is no floating point number")


@dataclass(frozen=True, eq=False)
class Branching:
    """A program before and after some of its branches went to devices of their own, and how weights are packed for that, if so.

    `whole`: the arguments, by number, that are packed in no case.
    """

    program: Forked
    after: Captured
    along: tuple[Axis, ...]
    shares: tuple[Share, ...]
    packing: Packing
    whole: frozenset[int] = frozenset()

    @property
    def before(self) -> Captured:
        """The program as it was captured, or rewritten."""
        return self.program.before

    def to_json(self) -> dict[str, Any]:
        """What is needed to make it again."""
        shares = [[s.region, list(s.groups), s.weight] for s in self.shares]
        packed = {"packed": bool(self.packing), "whole": sorted(self.whole)}
        return {"along": [axis.name for axis in self.along], "shares": shares, **packed}

    def check(self) -> None:
        """Makes it again, from the program before it. Raises DerivationError if something else comes out."""
        again = branched(self.program, self.along, self.shares, bool(self.packing), self.whole)
        if again.after.graph.key != self.after.graph.key:
            raise DerivationError("the branches, made again from the program before them, are others")

    def __str__(self) -> str:
        count, names = prod(axis.size for axis in self.along), " ".join(axis.name for axis in self.along)
        branches = sum(len(s.groups) for s in self.shares)
        places = f" in {len(self.shares)} places" if len(self.shares) > 1 else ""
        packs = f", {self.packing}" if self.packing else ""
        return f"{branches} branches{places} on {count} groups of devices along {names}{packs}"


def branched(program: Forked, along: Sequence[Axis], shares: Sequence[Share], pack: bool, whole: Collection[int] = ()) -> Branching:
    """The program with these shares of its branches on devices of their own; `pack`: with their weights packed, but for those
    arguments that stay `whole`.

    Raises Apart if there are no such branches, or they cannot be apart.
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
        nodes = sorted((n for n in graph.nodes if n.kind == BRANCHES), key=lambda n: int(n.attributes["region"]))
        graph, packing = packed(graph, nodes, program.captured.differentiated.difference(whole))
    after = replace(program.captured, graph=program.staged(graph))
    return Branching(program, after, tuple(along), ordered, packing, frozenset(whole))


def _stitched(program: Forked, along: tuple[Axis, ...], shares: Sequence[Share], first: int) -> PCG:
    """The graph of a program with these shares of its branches on devices of their own; `first`: the number of its first spot."""

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


def from_json(program: Forked, data: dict[str, Any], axes: Sequence[Axis]) -> Branching:
    """The branches of a file, made again. Raises PlanError if the program or the machine does not allow it."""
    names = list(data["along"])
    along = [axis for axis in axes if axis.name in names]
    if len(along) != len(names):
        raise PlanError(f"branches along {' '.join(names)} are none of a machine with axes {' '.join(a.name for a in axes)}")
    shares = [Share(int(region), tuple(map(int, groups)), float(weight)) for region, groups, weight in data["shares"]]
    try:
        return branched(program, along, shares, bool(data["packed"]), [int(k) for k in data["whole"]])
    except Apart as reason:
        raise PlanError(f"the branches along {' '.join(names)} cannot be made: {reason}") from None


class _Stitching:
    """Puts a program together again: what is left of it without branches, as a graph, and the branches as operators in it."""

    def __init__(self, program: Forked, along: tuple[Axis, ...], shares: Sequence[Share], first: int) -> None:
        self.program, self.along, self.shares, self.first = program, along, shares, first
        self.new: dict[int, Node] = {}  # by id of a node of the rest: what came of it
        self.made: dict[int, Value] = {}  # by id of an input of the rest: the result of a branch that it is

    def graph(self) -> PCG:
        """The whole graph."""
        body, captured, regions = self.program.body, self.program.captured, self.program.regions
        chosen = [regions[s.region - self.first] for s in self.shares]
        endings = [self.program.ending(region) for region in chosen]
        branches = [b for region in chosen for b in region.branches]
        gone = {k for b in branches for k in b.members} | {k for ending in endings for k in ending.members}
        ends = [v for ending in endings for v in (*ending.free, *ending.outputs)]
        reads = [self.reads(region, ending) for region, ending in zip(chosen, endings, strict=True)]
        wanted = (*body.outputs, *(v for some in reads for v in some))
        kept = tuple(e for k, e in enumerate(body.equations) if k not in gone)
        rest = Body((*body.inputs, *ends), wanted, kept, body.tensors)
        names = [*(str(n.attributes["name"]) for n in captured.graph.inputs), *(f"branch {k}" for k in range(len(ends)))]
        outside = graph_of(rest, names, captured.bodies)
        outputs, starts = iter(outside.outputs), dict(zip(ends, outside.inputs[len(body.inputs) :], strict=True))
        results = [next(outputs) for _ in body.outputs]
        for region, share, ending, read in zip(chosen, self.shares, endings, reads, strict=True):
            values = dict(zip(read, self.rebuilt([next(outputs) for _ in read]), strict=True))
            node = self.operator(region, share, values)
            values.update((b.output, v) for b, v in zip(region.branches, node.results, strict=True))
            values.update(zip(ending.outputs, applied(ending.graph, [values[v] for v in ending.inputs]), strict=True))
            self.made.update((id(starts[v]), values[v]) for v in (*ending.free, *ending.outputs))
        inputs = outside.inputs[: len(body.inputs)]
        return PCG(inputs, tuple(self.rebuilt(results)), outside.axes)

    def reads(self, region: Region, ending: Ending) -> list[int]:
        """What branches and their ending read of the rest."""
        own = {b.output for b in region.branches}
        found = [v for b in region.branches for v in self.program.graphs[b][1]]
        return list(dict.fromkeys([*found, *(v for v in ending.inputs if v not in own)]))

    def rebuilt(self, values: Sequence[Value]) -> list[Value]:
        """Values of the rest, as they are in the whole."""
        for node in PCG((), tuple(values)).nodes:
            if id(node) not in self.new and id(node) not in self.made:
                operands = tuple(map(self.value, node.operands))
                same = all(v.node is w.node for v, w in zip(operands, node.operands, strict=True))
                self.new[id(node)] = node if same else replace(node, operands=operands)
        return [self.value(v) for v in values]

    def value(self, v: Value) -> Value:
        return self.made[id(v.node)] if id(v.node) in self.made else Value(self.new[id(v.node)], v.index)

    def operator(self, region: Region, share: Share, values: Mapping[int, Value]) -> Node:
        """The branches of a region as one operator, of these values."""
        read = dict.fromkeys(v for b in region.branches for v in self.program.graphs[b][1])
        given = {v: values[v] for v in read}
        inputs = {v: Node("input", (), (value.tensor,), attributes={"index": k, "name": f"operand {k}"})
                  for k, (v, value) in enumerate(given.items())}  # fmt: skip
        outputs = []
        for branch in region.branches:
            graph, order = self.program.graphs[branch]
            outputs += applied(graph, [Value(inputs[v]) for v in order])
        inside = PCG(tuple(inputs.values()), tuple(outputs))
        attributes = {
            "along": " ".join(axis.name for axis in self.along), "groups": " ".join(map(str, share.groups)), "packed": "",
            "weight": share.weight, "region": share.region,
        }  # fmt: skip
        join, tensors = self.program.body.equations[region.join], tuple(v.tensor for v in outputs)
        operands = tuple(given.values())
        return Node(BRANCHES, operands, tensors, None, inside, attributes, source=join.source, scope=join.scope)
