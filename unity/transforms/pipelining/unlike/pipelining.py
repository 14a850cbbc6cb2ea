"""Pipelines of stages of different operators: their choice for a machine, and the transformation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod

from unity.base.documents import Natural
from unity.base.errors import InfeasibleError
from unity.machine.axis_ladders import axis_ladders
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.payloads import ScheduleKind
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, TWO_BW, Mixed, Schedule
from unity.pcg.types.axis import Axis
from unity.transforms.cotangent_of_one import check_cotangents
from unity.transforms.pipelining.choose import PipelineCandidate, PipelineWish, scheduled
from unity.transforms.pipelining.pipeline_operator import check_gradients
from unity.transforms.pipelining.pipelining import MicroBatched, PipelineRecord, Pipelining
from unity.transforms.pipelining.unlike.balance import Cuts, Loads, estimated
from unity.transforms.pipelining.unlike.chain import SampleChain, chain_of
from unity.transforms.pipelining.unlike.pipeline_operator import with_stages
from unity.transforms.pipelining.unlike.staging import Staging, tail_after
from unity.transforms.transformation import undifferentiated

TRIES = 3  # sets of axes, or pipelines where nothing fits, that are searched unless a pipeline is asked for


class UnlikeRecord(PipelineRecord, tag="different stages"):
    """An `Unlike` in a document."""

    cuts: Cuts
    pack: bool
    whole: tuple[Natural, ...]

    def pipelined(self, captured: Captured, along: Sequence[Axis]) -> Pipelining:
        return unlike(chain_of(captured), captured, self.cuts, along, self.rounds, self.pack, self.schedule, self.whole)


@dataclass(frozen=True, eq=False, repr=False)
class Unlike(Pipelining):
    """A pipeline of different stages, cut from a chain.

    Attributes:
        cuts: the places of the cuts.
        pack: whether the stages' weights are packed.
        whole: arguments, by number, that are never packed.
    """

    cuts: Cuts
    pack: bool
    whole: frozenset[int] = frozenset()

    @property
    def record(self) -> UnlikeRecord:
        along, whole = tuple(axis.name for axis in self.along), tuple(sorted(self.whole))
        return UnlikeRecord(along, self.rounds, self.schedule.kind, self.cuts, self.pack, whole)

    @property
    def note(self) -> str:
        if self.schedule.kind == ONE_F_ONE_B or not self.before.differentiated:
            return ""
        try:
            check_cotangents(self.before.body)
            tail_after(self.before, chain_of(self.before))
            check_gradients(self.after)
        except Mixed as reason:
            return str(reason)
        return ""

    def __str__(self) -> str:
        s = self.schedule
        where, name = self.packing or "weights on all of them", s.kind.label
        return f"{s.stages} stages of different operators, {s.micro_batches} micro-batches, {name}, {where}"


def unlike(
    chain: SampleChain,
    captured: Captured,
    cuts: Cuts,
    along: Sequence[Axis],
    rounds: int,
    pack: bool,
    kind: ScheduleKind = GPIPE,
    whole: Collection[int] = (),
) -> Unlike:
    """Cut a chain of a program into the stages of a pipeline.

    Args:
        chain: the chain.
        captured: the program.
        cuts: the places of the cuts.
        along: the mesh axes of the stages.
        rounds: the number of micro-batches for each stage.
        pack: whether the stages' weights are packed.
        kind: the schedule.
        whole: arguments that are not packed.

    Raises:
        Mixed: samples or operators do not allow it.
    """
    if kind == ONE_F_ONE_B and captured.differentiated:
        check_cotangents(captured.body)
    stages = prod(axis.size for axis in along)
    if chain.size % (stages * rounds):
        raise Mixed(f"{stages * rounds} micro-batches cannot share {chain.size} samples evenly")
    if len(cuts.places) != stages - 1 or not all(0 < p < len(chain) for p in cuts.places):
        raise Mixed(f"the program has no {stages} stages that are cut so")
    staging = Staging(captured, chain, cuts, rounds, tail_after(captured, chain) if kind == ONE_F_ONE_B else None)
    walk = staging.walked()
    free = walk.differentiated.difference(whole) if pack else ()
    graph, packing = with_stages(walk.graph, staging, walk, along, free)
    after = replace(walk, graph=graph)
    if kind == ONE_F_ONE_B and captured.differentiated:
        check_gradients(after)
    schedule = Schedule(stages, stages * rounds, stages, kind)
    again = MicroBatched(walk, lambda graph: with_stages(graph, staging, walk, along, free)[0])
    never, axes = frozenset(whole), tuple(along)
    stopped = undifferentiated(captured, staging.layouts[0].places) if staging.first_is_inactive else frozenset[str]()
    return Unlike(captured, after, rounds, schedule, again, cuts, pack, never, along=axes, packing=packing, stopped=stopped)


@dataclass(frozen=True, eq=False)
class _Option:
    """A pipeline that may be tried. `seconds` is an estimate of its time that leaves weights out."""

    along: tuple[Axis, ...]
    rounds: int
    cuts: Cuts
    seconds: float

    @property
    def stages(self) -> int:
        return len(self.cuts.places) + 1


def best_unlike(
    captured: Captured, machine: Machine, wish: PipelineWish, pack: bool, whole: Collection[int] = ()
) -> tuple[PipelineCandidate | None, list[str]]:
    """Return the best pipeline of different stages, and the reasons why others were refused.

    If no pipeline is asked for, some are tried that may be better than the plan to beat, or may fit where nothing does. `pack` and
    `whole` are those of `unlike`.
    """
    if wish.schedule == TWO_BW:
        return None, [f"stages of different operators go by '{ONE_F_ONE_B}' or '{GPIPE}', not by '{TWO_BW}'"]
    if wish.exactly is None and wish.than is not None and not pack:
        return None, []  # gradients are summed over all devices, as by data parallelism, and stages idle, too
    try:
        chain = chain_of(captured)
    except Mixed as reason:
        return None, [f"it cannot be cut into stages of different operators either: {reason}"]
    best: PipelineCandidate | None = None
    refused = list[str]()
    for options in _options(Loads(chain, machine, bool(captured.differentiated)), wish, refused):
        last = inf
        for option in options:
            stages, n = option.stages, option.stages * option.rounds
            wish.say(f"a pipeline of {stages} stages of different operators, {n} micro-batches")
            try:
                make = partial(unlike, chain, captured, option.cuts, option.along, option.rounds, pack, whole=whole)
                pipelining = scheduled(make, wish.schedule, bool(captured.differentiated))
                search = wish.search(pipelining.after)
                candidate = wish.choose(search)
            except (Mixed, InfeasibleError) as reason:
                refused.append(f"stages of different operators: {reason}")
                break
            if candidate is not None:
                if best is None or wish.worth(candidate) < wish.worth(best.candidate):
                    best = PipelineCandidate(pipelining, search, candidate)
                if wish.figure(candidate) >= last:
                    break
                last = wish.figure(candidate)
    return best, list(dict.fromkeys(refused))


def _options(loads: Loads, wish: PipelineWish, refused: list[str]) -> list[list[_Option]]:
    """Return the pipelines to try, in rows, each of which is tried as long as it improves.

    If a pipeline is asked for, there is a row for every set of axes; else rows of ascending micro-batches for the sets that may
    beat the plan, the best first. Where nothing fits, pipelines with most micro-batches, and so the least memory, come first.
    """
    rows: list[list[_Option]] = []
    for along in (axes for ladder in axis_ladders(loads.machine) for axes in ladder):
        stages, row = prod(axis.size for axis in along), list[_Option]()
        for n in wish.rounds(stages):
            if wish.exactly is None and loads.chain.size % (stages * n):
                continue
            try:
                seconds, cuts = estimated(loads, along, stages * n)
            except Mixed as reason:
                refused.append(f"stages of different operators: {reason}")
                break
            row.append(_Option(along, n, cuts, seconds))
        rows += [row] if row else []
    if wish.exactly is not None:
        return rows
    if wish.than is None:
        return [[o] for o in sorted((o for row in rows for o in row), key=lambda o: (-o.rounds, o.seconds))[:TRIES]]
    least = [(min(o.seconds for o in row), row) for row in rows]
    return [row for seconds, row in sorted(least, key=lambda pair: pair[0]) if seconds < wish.than[1].time][:TRIES]
