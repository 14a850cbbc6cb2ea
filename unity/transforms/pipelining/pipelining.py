"""The transformation that makes a scan of a program a pipeline, its plan-file form and its replay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from unity.base.cached_method import cached_method
from unity.base.documents import Natural, Positive
from unity.base.errors import PlanError
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.graph import PCG, PIPELINE
from unity.pcg.ir.payloads import ScheduleKind
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.stages import FOLLOWED, GPIPE, TWO_BW, Mixed, Schedule
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.types.axis import Axis
from unity.transforms.cotangent_of_one import check_cotangents
from unity.transforms.pipelining.equal_layers import EqualLayers, layers
from unity.transforms.pipelining.micro_batches import LayerScan, PositionDependent, scans, walked, with_usable_scans
from unity.transforms.pipelining.pipeline_operator import check_gradients, with_stages
from unity.transforms.pipelining.rolling import ROLLED, rolled
from unity.transforms.pipelining.sample_bits import NUMBERED, draws, numbered
from unity.transforms.pipelining.step_padding import EVENED, evened
from unity.transforms.pipelining.tails import Tail, tail_of
from unity.transforms.splice import with_lines_of_scans, within
from unity.transforms.transformation import Transformation, TransformationRecord, TransformationSource, reserved_in_words

UNDRAINED = "in unity.plan.stream, where gradients are of the batch before, at weights one version older (docs: pipelines#2bw)"


@dataclass(frozen=True, eq=False)
class PipelineSource:
    """A program that may become a pipeline: its scans, and its equal layers, which could be rolled into one."""

    captured: Captured

    @cached_property
    def layers(self) -> EqualLayers | None:
        """The longest run of equal layers."""
        return layers(self.captured)

    @cached_property
    def scans(self) -> tuple[list[LayerScan], list[str]]:
        """The scans that can run over micro-batches, and the reasons why others cannot."""
        return scans(self.captured)

    @cached_method(Mixed)
    def tail(self, number: int) -> Tail:
        """Return the tail after one of the scans. Raises Mixed if it cannot run over micro-batches."""
        scan = self.scans[0][number]
        return tail_of(self.captured, scan.equation, scan.samples, scan.size)

    @cached_property
    def stepped(self) -> PipelineSource:
        """The program in which scans carry no counters, keys or other values without samples, where these prevent a pipeline."""
        captured = with_usable_scans(self.captured)
        return self if captured is self.captured else PipelineSource(captured)

    def source(self, count: int) -> PipelineSource:
        """Return the program with its last `count` layers rolled into a scan, or for 0 as it is, with usable scans (`stepped`)."""
        return self.rolled(count) if count else self.stepped

    def rolled(self, count: int) -> PipelineSource:
        """Return the program with its last `count` layers rolled into a scan, and with usable scans (`stepped`)."""
        if self.layers is None or not 0 < count <= len(self.layers):
            raise Mixed(f"the program has no {count} equal layers")
        if count not in self._rolled:
            self._rolled[count] = PipelineSource(rolled(self.captured, self.layers, count)).stepped
        return self._rolled[count]

    @cached_property
    def _rolled(self) -> dict[int, PipelineSource]:
        """The programs with rolled layers so far, by the number of layers."""
        return {}

    @cached_method(Mixed)
    def evened(self, number: int, stages: int) -> tuple[PipelineSource, int]:
        """Return the program with a scan padded to a multiple of `stages` steps, and the scan's number in it. Raises Mixed."""
        if self.scans[0][number].steps % stages == 0:
            return self, number
        program = PipelineSource(evened(self.captured, self.scans[0][number].equation, stages))
        return program, program.called(EVENED)

    @cached_method(Mixed)
    def numbered(self, number: int) -> tuple[PipelineSource, int]:
        """Return the program with a scan's random bits drawn for each sample, and the scan's number in it."""
        scan = self.scans[0][number]
        if not draws(nested_body(self.captured.body.equations[scan.equation]), scan.size):
            return self, number
        program = PipelineSource(numbered(self.captured, scan.equation, scan.size))
        return program, program.called(NUMBERED)

    @cached_method(Mixed)
    def walked(self, number: int, rounds: int, followed: bool) -> Captured:
        """Return the program with one of its scans, and its tail if `followed`, over micro-batches.

        It does not depend on the number of stages. Raises Mixed if a step, or the tail, does not allow it, and
        PositionDependent, a Mixed, if a step depends on the positions of its samples.
        """
        tail = self.tail(number) if followed else None
        program = self.captured.of(walked(self.captured.body, self.scans[0][number], rounds, tail), self.captured.bodies)
        return replace(program, graph=with_lines_of_scans(program.graph, self.captured.graph))

    def called(self, name: str) -> int:
        """Return the number of the scan whose scope has a name."""
        equations = self.captured.body.equations
        numbers = [k for k, scan in enumerate(self.scans[0]) if within(equations[scan.equation].scope, name)]
        if not numbers:
            raise Mixed(f"the scan after {name!r} cannot run over micro-batches: {'; '.join(self.scans[1])}")
        return numbers[0]

    @property
    def refused(self) -> list[str]:
        """The reasons why scans, and the layers that were rolled so far, cannot be pipelines."""
        rolled = (program.scans[1] for program in self._rolled.values())
        return list(dict.fromkeys([*self.stepped.scans[1], *(reason for reasons in rolled for reason in reasons)]))

    def candidates(self, stages: int) -> list[tuple[int, int]]:
        """Return the scans to try with `stages` stages, as (number of layers to roll, number of the scan).

        Layers are rolled to the largest count that stages share evenly, and to all.
        """
        candidates = [(0, k) for k in range(len(self.stepped.scans[0]))]
        most = len(self.layers) if self.layers is not None else 0
        for count in dict.fromkeys((most // stages * stages, most)) if most >= stages else ():
            program = self.rolled(count)
            scopes = [program.captured.body.equations[scan.equation].scope for scan in program.scans[0]]
            candidates += [(count, k) for k, scope in enumerate(scopes) if ROLLED in scope.split("/")]
        return candidates


@dataclass(frozen=True, eq=False)
class MicroBatched:
    """A program over micro-batches, without stages. `staged` gives the stages to a graph of it."""

    captured: Captured
    staged: Callable[[PCG], PCG]


class PipelineRecord(TransformationRecord):
    """A `Pipelining` in a document: the names of its axes, its micro-batches for each stage, and its schedule."""

    along: tuple[str, ...]
    rounds: Positive
    schedule: ScheduleKind

    def apply(self, source: TransformationSource) -> Pipelining:
        along = source.axes("the stages of a pipeline", self.along)
        try:
            return self.pipelined(source.program, along)
        except Mixed as reason:
            raise PlanError(f"the pipeline along {reserved_in_words(source.machine, along)} cannot be made: {reason}") from None

    def pipelined(self, captured: Captured, along: Sequence[Axis]) -> Pipelining:
        """Make the pipeline in a program. Raises Mixed if the program does not allow it."""
        raise NotImplementedError  # abstract, as `apply`


class AlikeRecord(PipelineRecord, tag="equal steps"):
    """An `AlikePipelining` in a document."""

    rolled: Natural
    scan: Natural

    def pipelined(self, captured: Captured, along: Sequence[Axis]) -> Pipelining:
        return pipelined(PipelineSource(captured), self.rolled, self.scan, along, self.rounds, self.schedule)


@dataclass(frozen=True, eq=False, repr=False)
class Pipelining(Transformation):
    """A program before and after a part of it became a pipeline along the axes of its stages.

    Attributes:
        rounds: the number of micro-batches for each stage.
        schedule: the pipeline's schedule.
        walk: the program over micro-batches, before it has stages.
    """

    kind = PIPELINE
    title = "In stages"
    effect = "A loop became a pipeline"

    rounds: int
    schedule: Schedule
    walk: MicroBatched

    @property
    @abstractmethod
    def record(self) -> PipelineRecord: ...

    @property
    @abstractmethod
    def note(self) -> str:
        """The reason why 1F1B is impossible; "" if it is used or possible, or the program has only a forward pass."""

    def check(self) -> None:
        self._check_same(self.record.pipelined(self.before, self.along))

    def explained(self, names: AxisNames) -> list[str]:
        note, lines = self.note, [f"a pipeline: {self.described(names)}; it idles {self.schedule.bubble:.0%} of the time"]
        lines += [f"    not by 1F1B: {note}"] if note else []
        return [*lines, f"    {UNDRAINED}"] if self.schedule.kind == TWO_BW else lines


@dataclass(frozen=True, eq=False, repr=False)
class AlikePipelining(Pipelining):
    """A pipeline of equal steps: the scan `scan`, after the last `rolled` layers were rolled into a scan."""

    rolled: int
    scan: int

    @property
    def record(self) -> AlikeRecord:
        along = tuple(axis.name for axis in self.along)
        return AlikeRecord(along, self.rounds, self.schedule.kind, self.rolled, self.scan)

    @property
    def note(self) -> str:
        if self.schedule.kind in FOLLOWED or not self.before.differentiated:
            return ""
        try:
            check_cotangents(self.before.body)
            PipelineSource(self.before).source(self.rolled).tail(self.scan)
            check_gradients(self.after)
        except Mixed as reason:
            return str(reason)
        return ""

    def __str__(self) -> str:
        s = self.schedule
        what = "layers" if self.rolled else "steps"
        count = f"{s.slots - 1} to {s.slots}" if s.steps % s.stages else s.slots
        return f"{s.stages} stages of {count} {what}, {s.micro_batches} micro-batches, {s.kind.label}"


def pipelined(
    program: PipelineSource, count: int, number: int, along: Sequence[Axis], rounds: int, kind: ScheduleKind = GPIPE
) -> AlikePipelining:
    """Make a scan of a program a pipeline.

    Args:
        program: the program.
        count: the number of layers to roll into a scan first, or 0.
        number: the number of the scan.
        along: the mesh axes of the stages.
        rounds: the number of micro-batches for each stage.
        kind: the schedule.

    Raises:
        Mixed: the scan's steps, samples or operators do not allow it.
    """
    if kind in FOLLOWED and program.captured.differentiated:
        check_cotangents(program.captured.body)
    source, stages = program.source(count), prod(axis.size for axis in along)
    if not 0 <= number < len(source.scans[0]):
        raise Mixed(f"the program has no scan {number} over layers")
    steps = source.scans[0][number].steps
    if steps < stages:
        raise Mixed(f"{stages} stages cannot share {steps} steps")
    source, at = source.evened(number, stages)
    scan = source.scans[0][at]
    if scan.size % (stages * rounds):
        raise Mixed(f"{stages * rounds} micro-batches cannot share {scan.size} samples evenly")
    try:
        walk = _walk(source, at, along, rounds, kind)
    except PositionDependent:
        walk = _walk(*source.numbered(at), along, rounds, kind)
    after = replace(walk.captured, graph=walk.staged(walk.captured.graph))
    if kind in FOLLOWED and program.captured.differentiated:
        check_gradients(after)
    schedule = Schedule(stages, stages * rounds, steps, kind)
    return AlikePipelining(program.captured, after, rounds, schedule, walk, count, number, along=tuple(along))


def _walk(source: PipelineSource, number: int, along: Sequence[Axis], rounds: int, kind: ScheduleKind) -> MicroBatched:
    """Return the program with one of its scans over micro-batches, and the function that gives it its stages."""
    scan = source.scans[0][number]
    tail = source.tail(number) if kind in FOLLOWED else None
    captured = source.walked(number, rounds, tail is not None)
    return MicroBatched(captured, partial(with_stages, scan=scan, along=along, before=source.captured.graph, tail=tail, kind=kind))
