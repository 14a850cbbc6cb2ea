"""Choice of the branches that go on separate groups of devices, and of the groups' axes: each candidate is searched exactly.

A region's branches are assigned to groups by their time on one device, longest first, always to the group with the least load. The
cost of branches is weighted by the share of the slowest group, so that parallelism inside and outside of branches is chosen
together with it. If a candidate has to beat a plan, regions are first priced alone: those that gain are tried together, along the
axes along which they gain most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeAlias

from unity.base.errors import ConstraintError, InfeasibleError
from unity.machine.axis_ladders import axis_ladders
from unity.machine.collectives import collective
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.graph import BRANCHES, PCG
from unity.pcg.ir.payloads import Branches
from unity.pcg.parallel.branches import groups_of, packed_of, weight_of
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.types.axis import Axis
from unity.search.cost.assembly import Listed
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.request import Wish
from unity.search.session import Search
from unity.transforms.branches.branching import Apart, Branching, Forked, Share, Spot, branched
from unity.transforms.transformation import TransformationCandidate

PROMISE = 0.02  # share of a step's time that regions, each alone, must gain before the whole program is searched with them
NEAR = 0.01  # relative error of the slowest group's share that is tolerated
WORTH = 0.1  # share of the whole work that regions must have, unless branches are asked for


BranchCandidate: TypeAlias = TransformationCandidate[Branching]


@dataclass(frozen=True, eq=False)
class BranchesWish(Wish):
    """A request for branches on separate groups of devices."""

    exactly: int | None = None  # the number of groups, if it is given
    pack: bool = False  # whether weights are packed, so that only the branches' devices store them
    whole: frozenset[int] = frozenset()  # arguments that are not packed


@dataclass(frozen=True, eq=False)
class _Alone:
    """A region as a separate program: its number there, and its seconds by a first search."""

    program: Forked
    number: int
    time: float


@dataclass(eq=False)
class _Choosing:
    """The state of one choice: the best candidate so far, and the reasons why others were refused."""

    program: Forked
    machine: Machine
    training: Training
    wish: BranchesWish
    chosen: BranchCandidate | None = None
    refused: list[str] = field(default_factory=list)
    loads: dict[str, float] = field(default_factory=dict)  # seconds of a branch on one device, by its graph
    listed: Listed = field(default_factory=Listed)
    parts: dict[tuple[str, ...], _Alone | None] = field(default_factory=dict)  # by kind
    gained: dict[tuple[tuple[str, ...], tuple[Axis, ...]], float] = field(default_factory=dict)  # by kind and axes

    @cached_property
    def alone(self) -> Machine:
        """The machine of one device, on which whole branches are priced."""
        return self.machine.alone

    def load(self, graph: PCG) -> float:
        """Return the seconds of a branch on one device."""
        if graph.key not in self.loads:
            floating = frozenset(k for k, n in enumerate(graph.inputs) if n.tensors[0].floating)
            self.loads[graph.key] = Search(graph, floating, self.alone, self.training).least_operator_seconds
        return self.loads[graph.key]

    def loads_of(self, spot: Spot) -> list[float]:
        """Return the seconds of each branch of a region in a step, on one device."""
        return [spot.times * self.load(spot.program.graphs[b][0]) for b in spot.region.branches]

    @cached_property
    def spots(self) -> list[tuple[int, Spot]]:
        """The regions that may be tried, with their numbers."""
        allowed = []
        for number, spot in enumerate(self.program.spots):
            try:
                spot.program.check(spot.region)
                allowed.append((number, spot))
            except Apart as reason:
                self.refused.append(str(reason))
        if self.wish.exactly is not None or not allowed:
            return allowed
        captured = self.program.before
        total = Search(captured.graph, captured.differentiated, self.alone, self.training).least_operator_seconds
        return allowed if sum(sum(self.loads_of(spot)) for _, spot in allowed) >= WORTH * total else []

    def gain(self, number: int, axes: tuple[Axis, ...]) -> float:
        """Return the seconds that a region alone, with free boundary types, gains by its branches on separate groups."""
        alone, key = self.alone_of(number), (self.kind(number), axes)
        if alone is None:
            return 0.0
        if key not in self.gained:
            pack = self.wish.pack and self.program.spots[number].program is self.program  # operands of scans are not packed
            after = self.search(branched(alone.program, axes, self.shares(alone.program, [alone.number], axes), pack).after)
            self.gained[key] = alone.time - after.minimizer.at([0.0])[0].time if after.least_operator_seconds < alone.time else 0.0
        return self.program.spots[number].times * self.gained[key]

    def kind(self, number: int) -> tuple[str, ...]:
        """Return a key that is equal for equal regions."""
        spot = self.program.spots[number]
        return tuple(spot.program.graphs[b][0].key for b in spot.region.branches)

    def alone_of(self, number: int) -> _Alone | None:
        """Return a region as a separate program; None if it does not form a region there."""
        kind = self.kind(number)
        if kind not in self.parts:
            spot = self.program.spots[number]
            part = Forked(spot.program.alone(spot.region))
            same = [k for k, r in enumerate(part.regions) if len(r.branches) == len(spot.region.branches)]
            search = self.search(part.captured)
            self.parts[kind] = _Alone(part, same[0], search.minimizer.at([0.0])[0].time) if same else None
        return self.parts[kind]

    def search(self, captured: Captured) -> Search:
        """Return the search of a part of the program."""
        return Search(captured.graph, captured.differentiated, self.machine, self.training, listed=self.listed)

    @cached_property
    def promising(self) -> bool:
        """Whether regions are slower, by the required gain at least, than with evenly shared work."""
        if self.wish.than is None:
            return True
        lost = 0.0
        for number, spot in self.spots:
            work, alone = sum(self.loads_of(spot)), self.alone_of(number)
            lost += max(0.0, spot.times * alone.time - work / self.machine.devices) if alone is not None else 0.0
        return lost >= PROMISE * self.wish.than[1].time

    def branching(self, numbers: Sequence[int], axes: tuple[Axis, ...]) -> Branching:
        """Return the program with the branches of these regions assigned to groups along these axes."""
        return branched(self.program, axes, self.shares(self.program, numbers, axes), self.wish.pack, self.wish.whole)

    def shares(self, program: Forked, numbers: Sequence[int], axes: tuple[Axis, ...]) -> list[Share]:
        """Return the assignments of regions' branches to groups along these axes."""
        return [dealt(k, self.loads_of(program.spots[k]), prod(axis.size for axis in axes)) for k in numbers]

    def everything(self, ladder: Sequence[tuple[Axis, ...]]) -> None:
        """Try all regions along every set of axes that is asked for."""
        for axes in ladder:
            count = prod(axis.size for axis in axes)
            if self.wish.exactly in (None, count):
                wide = self.wide(axes)
                if wide:
                    self.consider(self.branching(wide, axes))
                else:
                    lines = ", ".join(spot.program.where(spot.region) for _, spot in self.spots)
                    self.refused.append(f"the branches joined at {lines} are fewer than {count}")

    def promised(self, ladder: Sequence[tuple[Axis, ...]]) -> tuple[float, list[int], tuple[Axis, ...]]:
        """Return the most seconds that regions gain alone, the regions, and the axes, for ever more groups while the gain grows."""
        best: tuple[float, list[int], tuple[Axis, ...]] = 0.0, [], ()
        for axes in ladder:
            gains = {k: self.gain(k, axes) for k in self.wide(axes)}
            wide = [k for k, gain in gains.items() if gain > 0]
            if best[0] > 0 and sum(gains[k] for k in wide) <= best[0]:
                break
            best = max(best, (sum(gains[k] for k in wide), wide, axes), key=lambda b: b[0])
        return best

    def wide(self, axes: tuple[Axis, ...]) -> list[int]:
        """Return the regions that have at least one branch for each group."""
        return [number for number, spot in self.spots if len(spot.region.branches) >= prod(axis.size for axis in axes)]

    def consider(self, branching: Branching) -> None:
        """Search a program, unless it cannot be better than the plan to beat."""
        than, groups = self.wish.than, prod(axis.size for axis in branching.along)
        self.wish.say(f"branches on {groups} groups of devices")
        try:
            search = self.wish.search(branching.after)
            if than is not None:  # the leanest plan, from which the rate follows, is hard to find with packed weights
                search = replace(search, guessed=than[0].rate)
            if than is not None and search.least_operator_seconds + least_summing(branching, self.machine) >= than[1].time:
                return
            candidate = self.wish.choose(search)
        except (InfeasibleError, ConstraintError) as reason:  # a constraint may exclude the types that branches need
            self.refused.append(str(reason))
            return
        if candidate is None or (self.chosen is not None and self.wish.worth(self.chosen.candidate) <= self.wish.worth(candidate)):
            return
        self.chosen = BranchCandidate(branching, search, candidate)

    def corrected(self, original: BranchCandidate) -> BranchCandidate:
        """Search once more with the slowest group's actual share, which the split of branches determines."""
        parts = parts_of(original, self.machine, self.training)
        branching = original.transformation
        if all(abs(parts[s.region] - s.weight) <= NEAR * s.weight for s in branching.shares):
            return original
        shares = [Share(s.region, s.groups, parts[s.region]) for s in branching.shares]
        again = branched(self.program, branching.along, shares, self.wish.pack, self.wish.whole)
        search = replace(self.wish.search(again.after), guessed=original.search.guessed or original.search.rate)
        candidate = self.wish.choose(search)
        return original if candidate is None else BranchCandidate(again, search, candidate)


def best(program: Forked, machine: Machine, training: Training, wish: BranchesWish) -> tuple[BranchCandidate | None, list[str]]:
    """Return the best candidate with branches on separate groups, and the reasons why others were refused."""
    choosing = _Choosing(program, machine, training, wish)
    rows = list(axis_ladders(machine)) if choosing.spots else []
    if wish.than is None:
        for row in rows:
            choosing.everything(row)
    elif choosing.promising:
        gain, wide, axes = max(map(choosing.promised, rows), key=lambda promise: promise[0], default=(0.0, [], ()))
        if gain >= PROMISE * wish.than[1].time:
            choosing.consider(choosing.branching(wide, axes))
    refused = list(dict.fromkeys(choosing.refused))
    if not choosing.program.spots:
        refused = ["the program has no branches: nothing in it joins several parts that have work of their own"]
    return choosing.chosen and choosing.corrected(choosing.chosen), refused


def parts_of(chosen: BranchCandidate, machine: Machine, training: Training) -> dict[int, float]:
    """Return the slowest group's share of the time of all branches, for every region by number."""
    after = chosen.transformation.after
    graph = parallelize(after.graph, chosen.candidate.assignment)
    costs = predict(graph, machine, after.differentiated if training.backward else ())
    seconds: dict[int, float] = {}  # by id of a node inside: seconds of one group's
    for term in costs.operators:
        seconds[id(term.node)] = seconds.get(id(term.node), 0.0) + term.forward + term.backward
    for term in costs.collectives:
        seconds[id(term.collective.node)] = seconds.get(id(term.collective.node), 0.0) + term.seconds
    parts = {}
    for node, _ in graph.walk():
        if node.kind == BRANCHES:
            loads = [sum(seconds.get(id(n), 0.0) for n, _ in group.graph.walk()) for group in groups_of(node)]
            parts[node.of(Branches).region] = max(loads) / sum(loads) if sum(loads) else weight_of(node)
    return parts


def least_summing(branching: Branching, machine: Machine) -> float:
    """Return a lower bound on the seconds of summing gradients over groups: those of weights that are not packed."""
    nodes = [node for node in branching.after.graph.nodes if node.kind == BRANCHES]
    read = {id(v.node): v for node in nodes for p, v in enumerate(node.operands) if p not in packed_of(node)}
    weights = [branching.after.graph.inputs[k] for k in branching.after.differentiated]
    nbytes = sum(n.tensors[0].nbytes for n in weights if id(n) in read and n.tensors[0].floating)
    others = machine.devices // prod(axis.size for axis in branching.along)
    return collective(machine, "all-reduce", branching.along).beta * nbytes / others


def dealt(number: int, loads: Sequence[float], groups: int) -> Share:
    """Assign branches to groups by their loads."""
    total, of = [0.0] * groups, [0] * len(loads)
    counts = [0] * groups
    for k in sorted(range(len(loads)), key=lambda k: (-loads[k], k)):
        group = min(range(groups), key=lambda g: (total[g], counts[g], g))
        of[k], total[group], counts[group] = group, total[group] + loads[k], counts[group] + 1
    weight = max(total) / sum(total) if sum(total) else 1 / groups
    return Share(number, tuple(of), weight)
