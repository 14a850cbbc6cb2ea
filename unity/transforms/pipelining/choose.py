"""Choice of a pipeline: stages along every set of axes that allows them, with several numbers of micro-batches.

Each candidate is a separate graph, parallelized by the exact search, so that data and tensor parallelism inside of stages and
outside of the pipeline are chosen together with it. A candidate is skipped if a lower bound excludes it: a device has at least an
even share of the work, and idles while the pipeline fills and drains; and with its levels joined (`machine.joined_levels`), the
machine is at least as fast, and much faster to search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf, prod
from typing import TypeAlias, TypeVar

from unity.base.errors import InfeasibleError
from unity.machine.axis_ladders import axis_ladders
from unity.machine.joined_levels import joined, joined_axes
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.payloads import ScheduleKind
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, TWO_BW, Mixed, Schedule
from unity.pcg.types.axis import Axis
from unity.search.cost.assembly import Listed
from unity.search.request import Wish
from unity.search.session import Search
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.masks import Mask
from unity.transforms.pipelining.equal_layers import LEAST
from unity.transforms.pipelining.pipelining import PipelineSource, Pipelining, pipelined
from unity.transforms.transformation import TransformationCandidate, reserved_in_words

T = TypeVar("T", bound=Pipelining)

ROUNDS = (2, 4, 8, 16)  # numbers of micro-batches for each stage, in the order of trial
CERTAIN = 1.01  # a fastest strategy, after refinement, is less above the optimum: at most 0.6 % in `benchmarks.pruning`
NEAR = 1.2  # of the best time so far: beyond it more micro-batches are not tried
# Of the best time so far: a pipeline whose first search is beyond it is not refined. That made no pipeline of a GPT-2, BERT, ViT,
# T5, DiT or Mamba-2 on 32 V100s or 64 H100s more than 15 % faster, and none of a Llama on 64 devices more than 16 %.
FAR = 1.25


PipelineCandidate: TypeAlias = TransformationCandidate[Pipelining]


@dataclass(frozen=True, eq=False)
class PipelineWish(Wish):
    """A request for a pipeline."""

    exactly: tuple[int, int] | None = None  # the numbers of stages and micro-batches, if they are given
    schedule: ScheduleKind | None = None  # if it is given; else 1F1B where the program allows it

    def rounds(self, stages: int) -> Sequence[int]:
        """Return the numbers of micro-batches for each of `stages` stages to try."""
        if self.exactly is None:
            return ROUNDS
        exactly, micro_batches = self.exactly
        return [micro_batches // stages] if stages == exactly and micro_batches % stages == 0 else []


@dataclass(eq=False)
class _Choosing:
    """The state of one choice: the best candidate so far, and the reasons why others were refused.

    Other candidates are dropped, since the tables of their searches may take gigabytes.
    """

    program: PipelineSource
    wish: PipelineWish
    machine: Machine
    chosen: PipelineCandidate | None = None
    refused: list[str] = field(default_factory=list)
    first: ScheduleKind = ONE_F_ONE_B  # the schedule that is tried first, if none is asked for

    def along(self, axes: tuple[Axis, ...]) -> float:
        """Try more and more micro-batches, as long as that helps. Return the least figure, infinity without a candidate."""
        stages, least = prod(axis.size for axis in axes), inf
        rounds = [n for n in self.wish.rounds(stages) if not self.hopeless(Schedule(stages, stages * n, stages))]
        for count, number in self.program.candidates(stages) if rounds else ():
            steps, last = count or self.program.stepped.scans[0][number].steps, inf
            for n in rounds:
                if self.hopeless(Schedule(stages, stages * n, steps)):
                    continue
                self.wish.say(f"a pipeline of {stages} stages, {stages * n} micro-batches")
                try:
                    bound = self.bound(partial(self.pipeline, count, number, rounds=n), axes)
                    if bound > NEAR * self.best:
                        break
                    if bound >= self.best:
                        continue
                    figure = self.figure_of(self.pipeline(count, number, axes, n))
                except Mixed as reason:
                    self.refused.append(f"{stages} stages along {reserved_in_words(self.machine, axes)}: {reason}")
                    break
                least = min(least, figure)
                if last < figure < inf or NEAR * self.best < figure < inf or (figure == inf and n > ROUNDS[0]):
                    break
                last = figure
        return least

    def pipeline(self, count: int, number: int, axes: tuple[Axis, ...], rounds: int) -> Pipelining:
        """Make one pipeline. Raises Mixed if that is impossible."""
        if self.wish.schedule == TWO_BW:
            _check_loss(self.program.captured)
        followed = self.first == ONE_F_ONE_B and bool(self.program.captured.differentiated)
        return scheduled(partial(pipelined, self.program, count, number, axes, rounds), self.wish.schedule, followed)

    def bound(self, pipeline: Callable[[tuple[Axis, ...]], Pipelining], axes: tuple[Axis, ...]) -> float:
        """Return seconds that no strategy of a pipeline along some axes goes below: those with the machine's levels joined.

        It stops at the first bound that excludes the pipeline. Without a plan to beat it is zero. Raises Mixed.
        """
        least = 0.0
        for machine, listed, whole in self.joined if self.wish.than is not None else ():
            after = pipeline(joined_axes(axes, self.machine, machine)).after
            search = replace(self.wish.search(after), machine=machine, listed=listed, restrict=_unrestricted)
            with suppress(InfeasibleError):
                least = max(least, search.least_operator_seconds)
                if whole and least < self.best:
                    least = max(least, search.fastest.time / CERTAIN)
            if least >= self.best:
                break
        return least

    @cached_property
    def joined(self) -> list[tuple[Machine, Listed, bool]]:
        """Machines with joined levels, fewest first, each with the costs of its searches and whether these consider whole programs.

        Elsewhere operators alone bound a program.
        """
        levels = self.machine.levels
        several = sum(level.size > 1 for level in levels)
        machines = [(joined(self.machine, n), n) for n in dict.fromkeys((1, len(levels) - 1)) if 0 < n < several]
        return [(machine, Listed(), n > 1) for machine, n in machines if machine is not None]

    def other(self) -> None:
        """Try GPipe's schedule for the best number of stages, and more, unless a pipeline was asked for.

        GPipe keeps more residuals, but all devices share the operators after the layers, which 1F1B leaves to the last stage while
        the others wait.
        """
        if self.chosen is None or self.wish.exactly is not None:
            return
        one = self.chosen.transformation
        if one.schedule.kind == ONE_F_ONE_B:
            self.wish.say("the same pipeline by GPipe's schedule")
            self.first = GPIPE
            for ladder in axis_ladders(self.machine):
                if one.along in ladder:
                    self.up(ladder[ladder.index(one.along) :])

    def up(self, ladder: Iterable[tuple[Axis, ...]]) -> None:
        """Try more and more stages, as long as that helps."""
        last = inf
        for axes in ladder:
            figure = self.along(axes)
            if last < figure:  # equal figures are `FAR` times the best, and say nothing of more stages
                break
            last = figure

    def figure_of(self, pipelining: Pipelining) -> float:
        """Return the figure of a pipeline's best point; infinity without one, or if it cannot beat the best so far.

        If its fastest point cannot, whatever memory that takes, this is its figure: none that fits a limit is faster. If the first
        search finds nothing within `FAR` times the best, that is the figure, since refinement takes most of the time.
        """
        search = replace(self.wish.search(pipelining.after), guessed=self.rate)
        try:
            if self.wish.than is not None:
                if search.least_operator_seconds >= self.best:
                    return inf
                if search.minimizer.least(0.0, above=FAR * self.best) > FAR * self.best:
                    return FAR * self.best
                if search.fastest.time >= self.best:
                    return search.fastest.time
            candidate = self.wish.choose(search)
        except InfeasibleError as reason:  # a pinned argument may exclude the types that stages need
            self.refused.append(str(reason))
            return inf
        if candidate is None:
            return inf
        if self.chosen is None or self.wish.worth(candidate) < self.wish.worth(self.chosen.candidate):
            self.chosen = PipelineCandidate(pipelining, search, candidate)
        return self.wish.figure(candidate)

    @cached_property
    def rate(self) -> float | None:
        """The seconds per byte of the plan to beat, an estimate of pipelines' own, whose leanest plans take long to find."""
        than = self.wish.than
        return None if than is None or than[0].assembled.whole else than[0].guessed or than[0].rate

    @property
    def best(self) -> float:
        """The least figure so far, that of the plan to beat included."""
        there = inf if self.wish.than is None else self.wish.than[1].time
        return there if self.chosen is None else min(there, self.wish.figure(self.chosen.candidate))

    def hopeless(self, schedule: Schedule) -> bool:
        """Whether a lower bound excludes a schedule: the layers' work, shared by stages, and the idle time."""
        if self.wish.than is None:
            return False
        search, candidate = self.wish.than
        longer = schedule.slots * schedule.stages / schedule.steps * schedule.ticks / schedule.micro_batches
        return search.least_operator_seconds + repeated(search) * (longer - 1) >= candidate.time


def _check_loss(captured: Captured) -> None:
    """Raise Mixed if a program has no loss and no gradients, which 2BW returns for the batch before."""
    if not captured.differentiated:
        raise Mixed("2BW gives gradients, but none are asked for (training=False): use '1f1b' or 'gpipe'")
    value = captured.graph.outputs[0].tensor
    if value.shape or not value.floating:
        raise Mixed(f"2BW gives gradients of the first result, which is no scalar but {value}")
    numbers = [k for k in captured.differentiated if not captured.graph.inputs[k].tensors[0].floating]
    if numbers:
        raise Mixed(f"2BW gives gradients, but {captured.paths[numbers[0]]} is no real number")


def scheduled(make: Callable[[ScheduleKind], T], kind: ScheduleKind | None, prefer: bool) -> T:
    """Make a pipeline by a schedule, or, if it is None, by 1F1B if that is preferred and possible, else GPipe's. Raises Mixed."""
    if kind is None and prefer:
        try:
            return make(ONE_F_ONE_B)
        except Mixed:
            kind = GPIPE
    return make(kind or GPIPE)


def best(captured: Captured, machine: Machine, wish: PipelineWish) -> tuple[PipelineCandidate | None, list[str]]:
    """Return the best pipeline of a program, and the reasons why scans, or stages, were refused."""
    choosing = _Choosing(PipelineSource(captured), wish, machine)
    for ladder in axis_ladders(machine):
        choosing.up(ladder)
    refused = choosing.refused or choosing.program.refused or ["the program has no scan over layers, and no equal layers"]
    choosing.other()
    return choosing.chosen, refused


def repeated(search: Search) -> float:
    """Return the least seconds of operators in loops and of repeated operators, which could become a pipeline."""
    assembled = search.assembled
    sites, costs = assembled.opened.sites, assembled.unary
    bodies = [site.body.key if site.body is not None else "" for site in sites]
    often = Counter(bodies)
    inside = [site.around.stacked or (key != "" and often[key] >= LEAST) for site, key in zip(sites, bodies, strict=True)]
    return sum(float(c.time.min()) for c, flag in zip(costs, inside, strict=True) if flag)


def _unrestricted(dimensions: ProgramDimensions, machine: Machine) -> Mapping[int, Mask]:
    """Return no masks: constraints name axes of the machine, and a bound may ignore them."""
    return {}
