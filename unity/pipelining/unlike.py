"""A pipeline of stages that are unlike: found for a machine, kept in files, and made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from unity.pcg.axis import Axis
from unity.pcg.capture import Captured
from unity.pcg.errors import InfeasibleError
from unity.pcg.packed import Packing
from unity.pcg.stages import GPIPE, Mixed, Schedule
from unity.pipelining.apart import Staging, with_stages
from unity.pipelining.balance import Cuts, Loads, balanced
from unity.pipelining.chain import Chain, chain_of
from unity.pipelining.choose import Found, PipelineWish, ladders
from unity.pipelining.pipelining import Pipelining, Walk
from unity.search.machine import Machine


@dataclass(frozen=True, eq=False)
class Unlike(Pipelining):
    """A chain of operators that became a pipeline: where it is cut, and how the stages' weights are packed, if they are."""

    cuts: Cuts
    pack: bool
    packed: Packing

    def to_json(self) -> dict[str, Any]:
        along = [axis.name for axis in self.along]
        cuts, weight = list(self.cuts.places), self.cuts.weight
        return {"cuts": cuts, "weight": weight, "along": along, "rounds": self.rounds, "pack": self.pack}

    @property
    def note(self) -> str:
        return "its stages are of different operators, which go by GPipe's schedule" if self.before.differentiated else ""

    @property
    def packing(self) -> Packing:
        return self.packed

    def again(self) -> Pipelining:
        return unlike(chain_of(self.before), self.before, self.cuts, self.along, self.rounds, self.pack)

    def __str__(self) -> str:
        s, names = self.schedule, " ".join(axis.name for axis in self.along)
        where = self.packed or "weights on all of them"
        return f"{s.stages} stages of different operators along {names}, {s.micro_batches} micro-batches, GPipe, {where}"


def unlike(chain: Chain, captured: Captured, cuts: Cuts, along: Sequence[Axis], rounds: int, pack: bool) -> Unlike:
    """The program with a chain of it cut into stages. Raises Mixed if samples or operators do not allow it."""
    stages = prod(axis.size for axis in along)
    if chain.size % (stages * rounds):
        raise Mixed(f"{stages * rounds} micro-batches cannot share {chain.size} samples evenly")
    if len(cuts.places) != stages - 1 or not all(0 < p < len(chain) for p in cuts.places):
        raise Mixed(f"the program has no {stages} stages that are cut so")
    staging = Staging(captured, chain, cuts, rounds)
    walk = staging.walked()
    graph, packed = with_stages(walk.graph, staging, walk, along, pack)
    after = replace(walk, graph=graph)
    schedule = Schedule(stages, stages * rounds, stages)
    again = Walk(walk, lambda graph: with_stages(graph, staging, walk, along, pack)[0])
    return Unlike(captured, after, tuple(along), rounds, schedule, again, cuts, pack, packed)


def best_unlike(captured: Captured, machine: Machine, wish: PipelineWish, pack: bool) -> tuple[Found | None, list[str]]:
    """The best pipeline of stages that are unlike, as it is asked for, and why others were refused."""
    assert wish.exactly is not None
    stages, micro_batches = wish.exactly
    if wish.schedule not in (None, GPIPE):
        return None, [f"stages of different operators go by GPipe's schedule, not by {wish.schedule!r}"]
    if micro_batches % stages:
        return None, []
    found, refused = list[Found](), list[str]()
    try:
        chain = chain_of(captured)
    except Mixed as reason:
        return None, [f"it cannot be cut into stages of different operators either: {reason}"]
    loads = Loads(chain, machine, bool(captured.differentiated))
    for along in (axes for ladder in ladders(machine) for axes in ladder if prod(axis.size for axis in axes) == stages):
        wish.say(f"a pipeline of {stages} stages of different operators, {micro_batches} micro-batches")
        try:
            made = unlike(chain, captured, balanced(loads, along, micro_batches), along, micro_batches // stages, pack)
            search = wish.search(made.after)
            candidate = wish.choose(search)
        except (Mixed, InfeasibleError) as reason:
            refused.append(f"stages of different operators: {reason}")
            continue
        if candidate is not None:
            found.append(Found(made, search, candidate))
    return min(found, key=lambda f: wish.worth(f.candidate), default=None), list(dict.fromkeys(refused))
