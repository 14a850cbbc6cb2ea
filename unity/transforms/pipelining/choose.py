"""Which pipeline is best, if any is: stages along every set of axes that could be one, in several numbers of micro-batches.

Each is a graph of its own, parallelized by the exact search, so that data and tensor parallelism inside of stages, and what is
outside of the pipeline, are chosen together with it. What cannot be better than what is there is not searched: a device has at
least its even part of the work, and idles while the pipeline fills and drains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf, prod

from unity.base.errors import InfeasibleError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, TWO_BW, Mixed, Schedule
from unity.pcg.types.axis import Axis
from unity.search.request import Wish
from unity.search.session import Candidate, Search
from unity.transforms.pipelining.pipelining import Pipelining, Program, pipelined
from unity.transforms.pipelining.rolled import LEAST

ROUNDS = (2, 4, 8, 16)  # micro-batches for each stage, in the order in which they are tried
NEAR = 1.2  # times the best so far: with what is slower, more micro-batches are not tried


@dataclass(frozen=True, eq=False)
class Found:
    """A pipeline, its search, and the best of that."""

    pipelining: Pipelining
    search: Search
    candidate: Candidate


@dataclass(frozen=True, eq=False)
class PipelineWish(Wish):
    """A wish for a pipeline."""

    exactly: tuple[int, int] | None = None  # so many stages, and micro-batches
    schedule: str | None = None  # 1F1B where the program allows it, if nothing is said


@dataclass(eq=False)
class _Choosing:
    """One choice: what was found so far, and why the rest was refused."""

    program: Program
    wish: PipelineWish
    found: list[Found] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    first: str = ONE_F_ONE_B  # the schedule that is tried first, if none is asked for

    def along(self, axes: tuple[Axis, ...]) -> float:
        """Tries more and more micro-batches, as long as that helps. Gives the least time; infinity if nothing will do."""
        before = len(self.found)
        stages = prod(axis.size for axis in axes)
        rounds = [n for n in self.rounds(stages) if not self.hopeless(Schedule(stages, stages * n, stages))]
        for count, number in self.program.within(stages) if rounds else ():
            steps, last = count or self.program.scans[0][number].steps, inf
            for n in rounds:
                if self.hopeless(Schedule(stages, stages * n, steps)):
                    continue
                self.wish.say(f"a pipeline of {stages} stages, {stages * n} micro-batches")
                try:
                    time = self.tried(self.made(count, number, axes, n))
                except Mixed as reason:
                    self.refused.append(f"{stages} stages along {' '.join(a.name for a in axes)}: {reason}")
                    break
                if last < time < inf or NEAR * self.best < time < inf or (time == inf and n > ROUNDS[0]):
                    break
                last = time
        return min((f.candidate.time for f in self.found[before:]), default=inf)

    def made(self, count: int, number: int, axes: tuple[Axis, ...], rounds: int) -> Pipelining:
        """One pipeline. Raises Mixed if it cannot be."""
        kind, where = self.wish.schedule, (self.program, count, number, axes, rounds)
        if kind == TWO_BW:
            _check_loss(self.program.captured)
        if kind is None and self.first == ONE_F_ONE_B and self.program.captured.differentiated:
            try:
                return pipelined(*where, ONE_F_ONE_B)
            except Mixed:
                kind = GPIPE
        return pipelined(*where, kind or GPIPE)

    def other(self, machine: Machine) -> None:
        """Tries GPipe's schedule for as many stages as were best, and more, where no pipeline was asked for: it keeps more, but all
        devices share what follows the layers, where 1F1B leaves it to the last stage, which the others wait for."""
        one = self.chosen.pipelining
        if self.wish.exactly is None and one.schedule.kind == ONE_F_ONE_B:
            self.wish.say("the same pipeline by GPipe's schedule")
            self.first = GPIPE
            for ladder in ladders(machine):
                if one.along in ladder:
                    self.up(ladder[ladder.index(one.along) :])

    def up(self, ladder: Iterable[tuple[Axis, ...]]) -> None:
        """Tries more and more stages, as long as that helps."""
        last = inf
        for axes in ladder:
            time = self.along(axes)
            if last < inf and time >= last:
                break
            last = time

    def tried(self, made: Pipelining) -> float:
        """Seconds of a pipeline's best; infinity if none will do, or it cannot be better than what there is."""
        search = self.wish.search(made.after)
        try:
            if self.wish.than is not None and least(search) >= self.best:
                return inf
            candidate = self.wish.choose(search)
        except InfeasibleError as reason:  # an argument that is pinned cannot be what stages need
            self.refused.append(str(reason))
            return inf
        if candidate is None:
            return inf
        self.found.append(Found(made, search, candidate))
        return candidate.time

    def rounds(self, stages: int) -> Iterable[int]:
        """Micro-batches for each stage that are to be tried."""
        if self.wish.exactly is None:
            return ROUNDS
        wanted, micro_batches = self.wish.exactly
        return [micro_batches // stages] if stages == wanted and micro_batches % stages == 0 else []

    @property
    def chosen(self) -> Found:
        """The best of what was found."""
        return min(self.found, key=lambda f: self.wish.worth(f.candidate))

    @property
    def best(self) -> float:
        """The least time so far, of what was there too."""
        there = [] if self.wish.than is None else [self.wish.than[1].time]
        return min([f.candidate.time for f in self.found] + there, default=inf)

    def hopeless(self, schedule: Schedule) -> bool:
        """Whether even the work of layers, shared as stages can, and what a device idles, take longer than what is there."""
        if self.wish.than is None:
            return False
        search, candidate = self.wish.than
        longer = schedule.slots * schedule.stages / schedule.steps * schedule.ticks / schedule.micro_batches
        return least(search) + repeated(search) * (longer - 1) >= candidate.time


def _check_loss(captured: Captured) -> None:
    """Raises Mixed if a program has no loss and no gradients, which 2BW gives for the batch before."""
    if not captured.differentiated:
        raise Mixed("2BW gives gradients, but none are asked for (training=False): use '1f1b' or 'gpipe'")
    value = captured.graph.outputs[0].tensor
    if value.shape or not value.floating:
        raise Mixed(f"2BW gives gradients of the first result, which is no scalar but {value}")
    numbers = [k for k in captured.differentiated if not captured.graph.inputs[k].tensors[0].floating]
    if numbers:
        raise Mixed(f"2BW gives gradients, but {captured.paths[numbers[0]]} is no real number")


def best(captured: Captured, machine: Machine, wish: PipelineWish) -> tuple[Found | None, list[str]]:
    """The best pipeline of a program, and why scans of it, or stages, were refused."""
    choosing = _Choosing(Program(captured), wish)
    for ladder in ladders(machine):
        choosing.up(ladder)
    refused = choosing.refused or choosing.program.refused or ["the program has no scan over layers, and no equal layers"]
    if choosing.found:
        choosing.other(machine)
    return choosing.chosen if choosing.found else None, refused


def least(search: Search) -> float:
    """Seconds of all operators, each split as is best for it: no strategy takes less."""
    return sum(float(c.time.min()) for c in search.assembled.problem.unary)


def repeated(search: Search) -> float:
    """Of these seconds, those of operators in loops, or of which there are several: what a pipeline could be made of."""
    assembled = search.assembled
    sites, costs = assembled.opened.sites, assembled.problem.unary
    bodies = [site.node.body.key if site.node is not None and site.node.body is not None else "" for site in sites]
    often = Counter(bodies)
    inside = [site.around.stacked or (key != "" and often[key] >= LEAST) for site, key in zip(sites, bodies, strict=True)]
    return sum(float(c.time.min()) for c, flag in zip(costs, inside, strict=True) if flag)


def ladders(machine: Machine) -> Iterator[list[tuple[Axis, ...]]]:
    """Sets of axes along which stages may lie, in rows of more and more stages: some axes of one level (which of equal ones does
    not matter), or whole outer levels and some axes of the next."""
    outer: tuple[Axis, ...] = ()
    for level in range(len(machine.levels)):
        here = tuple(axis for axis in machine.axes if axis.level == level)
        for before in ((), outer) if outer and here else ((),):
            yield sorted(((*before, *part) for part in _parts(here)), key=lambda axes: prod(axis.size for axis in axes))
        outer += here


def _parts(axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, ...]]:
    """Some of a level's axes: any number of each size, but not none."""
    counts: list[tuple[Axis, ...]] = [()]
    for size in sorted({axis.size for axis in axes}):
        same = [axis for axis in axes if axis.size == size]
        counts = [(*c, *same[:n]) for c in counts for n in range(len(same) + 1)]
    yield from (tuple(sorted(c, key=axes.index)) for c in counts if c)
