"""Whether branches should be on devices of their own, which, and along which axes: each is a graph of its own, searched exactly.

A region's branches are dealt out to groups by the time that each takes on one device, the longest first, always to the group that
has least to do. Costs count of all branches the part that the slowest group has; so parallelism inside of branches, and what is
outside of them, are chosen together with it. Where it should beat something, regions are first priced alone: those are tried
together that would be faster, along the axes along which they would be most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from unity.base.errors import ConstraintError, InfeasibleError
from unity.machine.collectives import collective
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.graph import BRANCHES, PCG
from unity.pcg.parallel.branches import groups_of, packed_of, weight_of
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.types.axis import Axis
from unity.search.cost.assembly import Listed
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.request import Wish
from unity.search.session import Candidate, Search
from unity.transforms.branches.branching import Apart, Branching, Forked, Share, Spot, branched
from unity.transforms.pipelining.choose import ladders, least

PROMISE = 0.02  # of a step's time that regions, each alone, must gain, for the whole to be searched with them
NEAR = 0.01  # how far off, relatively, the part of the slowest group may be
WORTH = 0.1  # of the work of all that is differentiated: with smaller regions nothing is tried unless it is asked for


@dataclass(frozen=True, eq=False)
class Found:
    """Branches on devices of their own, their search, and the best of that."""

    branching: Branching
    search: Search
    candidate: Candidate


@dataclass(frozen=True, eq=False)
class BranchesWish(Wish):
    """A wish for branches on devices of their own."""

    exactly: int | None = None  # so many groups of devices
    pack: bool = False  # weights in arrays that lie on the branches' devices only
    whole: frozenset[int] = frozenset()  # but not these arguments


@dataclass(frozen=True, eq=False)
class _Alone:
    """A region as a program of its own: its number there, and its seconds as a first search finds them."""

    program: Forked
    number: int
    time: float


@dataclass(eq=False)
class _Choosing:
    """One choice: what was found so far, and why the rest was refused."""

    program: Forked
    machine: Machine
    training: Training
    wish: BranchesWish
    found: list[Found] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    loads: dict[str, float] = field(default_factory=dict)  # seconds of a branch on one device, by its graph
    listed: Listed = field(default_factory=Listed)
    parts: dict[tuple[str, ...], _Alone | None] = field(default_factory=dict)  # by kind
    gained: dict[tuple[tuple[str, ...], tuple[Axis, ...]], float] = field(default_factory=dict)  # by kind and axes

    @cached_property
    def alone(self) -> Machine:
        """One device, which takes all that a branch has."""
        return self.machine.alone

    def load(self, graph: PCG) -> float:
        """Seconds of a branch on one device."""
        if graph.key not in self.loads:
            given = frozenset(k for k, n in enumerate(graph.inputs) if n.tensors[0].floating)
            self.loads[graph.key] = least(Search(graph, given, self.alone, self.training))
        return self.loads[graph.key]

    def loads_of(self, spot: Spot) -> list[float]:
        """Seconds of each branch of a region on one device, in a step."""
        return [spot.times * self.load(spot.program.graphs[b][0]) for b in spot.region.branches]

    @cached_property
    def spots(self) -> list[tuple[int, Spot]]:
        """The regions that may be tried, with their numbers."""
        found = []
        for number, spot in enumerate(self.program.spots):
            try:
                spot.program.check(spot.region)
                found.append((number, spot))
            except Apart as reason:
                self.refused.append(str(reason))
        if self.wish.exactly is not None or not found:
            return found
        captured = self.program.before
        total = least(Search(captured.graph, captured.differentiated, self.alone, self.training))
        return found if sum(sum(self.loads_of(spot)) for _, spot in found) >= WORTH * total else []

    def gain(self, number: int, axes: tuple[Axis, ...]) -> float:
        """Seconds by which a region alone, with what it reads and makes as it likes, is faster with its branches apart."""
        alone, key = self.alone_of(number), (self.kind(number), axes)
        if alone is None:
            return 0.0
        if key not in self.gained:
            pack = self.wish.pack and self.program.spots[number].program is self.program  # what scans take stays whole
            after = self.search(branched(alone.program, axes, self.shares(alone.program, [alone.number], axes), pack).after)
            self.gained[key] = alone.time - after.minimizer.at([0.0])[0].time if least(after) < alone.time else 0.0
        return self.program.spots[number].times * self.gained[key]

    def kind(self, number: int) -> tuple[str, ...]:
        """Equal for regions that are alike."""
        spot = self.program.spots[number]
        return tuple(spot.program.graphs[b][0].key for b in spot.region.branches)

    def alone_of(self, number: int) -> _Alone | None:
        """A region as a program of its own; None if it is found to be none there."""
        kind = self.kind(number)
        if kind not in self.parts:
            spot = self.program.spots[number]
            part = Forked(spot.program.alone(spot.region))
            same = [k for k, r in enumerate(part.regions) if len(r.branches) == len(spot.region.branches)]
            search = self.search(part.captured)
            self.parts[kind] = _Alone(part, same[0], search.minimizer.at([0.0])[0].time) if same else None
        return self.parts[kind]

    def search(self, captured: Captured) -> Search:
        """The search of a part of the program."""
        return Search(captured.graph, captured.differentiated, self.machine, self.training, listed=self.listed)

    @cached_property
    def promising(self) -> bool:
        """Whether regions take enough longer than if all devices shared their work evenly, to gain what they must."""
        if self.wish.than is None:
            return True
        lost = 0.0
        for number, spot in self.spots:
            work, alone = sum(self.loads_of(spot)), self.alone_of(number)
            lost += max(0.0, spot.times * alone.time - work / self.machine.devices) if alone is not None else 0.0
        return lost >= PROMISE * self.wish.than[1].time

    def made(self, numbers: Sequence[int], axes: tuple[Axis, ...]) -> Branching:
        """The program with the branches of these regions dealt out to groups along these axes."""
        return branched(self.program, axes, self.shares(self.program, numbers, axes), self.wish.pack, self.wish.whole)

    def shares(self, program: Forked, numbers: Sequence[int], axes: tuple[Axis, ...]) -> list[Share]:
        """How the branches of a program's regions are dealt out to groups along these axes."""
        return [dealt(k, self.loads_of(program.spots[k]), prod(axis.size for axis in axes)) for k in numbers]

    def everything(self, ladder: Sequence[tuple[Axis, ...]]) -> None:
        """Tries all regions along every set of axes that is asked for."""
        for axes in ladder:
            count = prod(axis.size for axis in axes)
            if self.wish.exactly in (None, count):
                wide = self.wide(axes)
                if wide:
                    self.tried(self.made(wide, axes))
                else:
                    lines = ", ".join(spot.program.where(spot.region) for _, spot in self.spots)
                    self.refused.append(f"the branches joined at {lines} are fewer than {count}")

    def promised(self, ladder: Sequence[tuple[Axis, ...]]) -> tuple[float, list[int], tuple[Axis, ...]]:
        """What regions gain alone with more and more groups, as long as that grows: the most, which do, and along which axes."""
        best: tuple[float, list[int], tuple[Axis, ...]] = 0.0, [], ()
        for axes in ladder:
            gains = {k: self.gain(k, axes) for k in self.wide(axes)}
            wide = [k for k, gain in gains.items() if gain > 0]
            if best[0] > 0 and sum(gains[k] for k in wide) <= best[0]:
                break
            best = max(best, (sum(gains[k] for k in wide), wide, axes), key=lambda b: b[0])
        return best

    def wide(self, axes: tuple[Axis, ...]) -> list[int]:
        """The regions with a branch for each group at least."""
        return [number for number, spot in self.spots if len(spot.region.branches) >= prod(axis.size for axis in axes)]

    def tried(self, made: Branching) -> None:
        """Searches a program, unless it cannot be better than what there is."""
        than, groups = self.wish.than, prod(axis.size for axis in made.along)
        self.wish.say(f"branches on {groups} groups of devices")
        try:
            search = self.wish.search(made.after)
            if than is not None:  # what packed weights have in common makes the leanest plan, which the rate is of, hard to find
                search = replace(search, guessed=than[0].rate)
            if than is not None and least(search) + summed(made, self.machine) >= than[1].time:
                return
            candidate = self.wish.choose(search)
        except (InfeasibleError, ConstraintError) as reason:  # something that is constrained cannot be what branches need
            self.refused.append(str(reason))
            return
        if candidate is not None:
            self.found.append(Found(made, search, candidate))

    def corrected(self, found: Found) -> Found:
        """Searched once more, with the part that the slowest group really has, now that it is known how branches are split."""
        parts = parts_of(found, self.machine, self.training)
        made = found.branching
        if all(abs(parts[s.region] - s.weight) <= NEAR * s.weight for s in made.shares):
            return found
        shares = [replace(s, weight=parts[s.region]) for s in made.shares]
        again = branched(self.program, made.along, shares, self.wish.pack, self.wish.whole)
        search = replace(self.wish.search(again.after), guessed=found.search.guessed or found.search.rate)
        candidate = self.wish.choose(search)
        return found if candidate is None else Found(again, search, candidate)


def best(program: Forked, machine: Machine, training: Training, wish: BranchesWish) -> tuple[Found | None, list[str]]:
    """The best that a program can be with branches on devices of their own, and why others were refused."""
    choosing = _Choosing(program, machine, training, wish)
    rows = list(ladders(machine)) if choosing.spots else []
    if wish.than is None:
        for row in rows:
            choosing.everything(row)
    elif choosing.promising:
        gain, wide, axes = max(map(choosing.promised, rows), key=lambda promise: promise[0], default=(0.0, [], ()))
        if gain >= PROMISE * wish.than[1].time:
            choosing.tried(choosing.made(wide, axes))
    refused = list(dict.fromkeys(choosing.refused))
    if not choosing.program.spots:
        refused = ["the program has no branches: nothing in it joins several parts that have work of their own"]
    chosen = min(choosing.found, key=lambda f: wish.worth(f.candidate), default=None)
    return chosen and choosing.corrected(chosen), refused


def parts_of(found: Found, machine: Machine, training: Training) -> dict[int, float]:
    """For every region, by its number, the part of the time of all its branches that the slowest group has, as they are split."""
    graph = parallelize(found.branching.after.graph, found.candidate.assignment)
    costs = predict(graph, machine, found.branching.after.differentiated if training.backward else ())
    taken: dict[int, float] = {}  # by id of a node inside: seconds of one group's
    for term in costs.operators:
        taken[id(term.node)] = taken.get(id(term.node), 0.0) + term.forward + term.backward
    for term in costs.collectives:
        taken[id(term.collective.node)] = taken.get(id(term.collective.node), 0.0) + term.seconds
    parts = {}
    for node, _ in graph.walk():
        if node.kind == BRANCHES:
            loads = [sum(taken.get(id(n), 0.0) for n, _ in group.graph.walk()) for group in groups_of(node)]
            parts[int(node.attributes["region"])] = max(loads) / sum(loads) if sum(loads) else weight_of(node)
    return parts


def summed(made: Branching, machine: Machine) -> float:
    """Seconds that it takes at least to add up gradients over groups: those of weights that are not packed."""
    nodes = [node for node in made.after.graph.nodes if node.kind == BRANCHES]
    read = {id(v.node): v for node in nodes for p, v in enumerate(node.operands) if p not in packed_of(node)}
    weights = [made.after.graph.inputs[k] for k in made.after.differentiated]
    nbytes = sum(n.tensors[0].nbytes for n in weights if id(n) in read and n.tensors[0].floating)
    others = machine.devices // prod(axis.size for axis in made.along)
    return collective(machine, "all-reduce", made.along).beta * nbytes / others


def dealt(number: int, loads: Sequence[float], groups: int) -> Share:
    """Branches dealt out to groups by their loads."""
    total, of = [0.0] * groups, [0] * len(loads)
    counts = [0] * groups
    for k in sorted(range(len(loads)), key=lambda k: (-loads[k], k)):
        group = min(range(groups), key=lambda g: (total[g], counts[g], g))
        of[k], total[group], counts[group] = group, total[group] + loads[k], counts[group] + 1
    weight = max(total) / sum(total) if sum(total) else 1 / groups
    return Share(number, tuple(of), weight)
