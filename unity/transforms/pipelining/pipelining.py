"""One pipeline of a program: which scan, along which axes, in how many micro-batches; found, kept in files, and made again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from unity.base.errors import DerivationError
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.packed_arguments import NOTHING, Packing
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.stages import FOLLOWED, GPIPE, ONE_F_ONE_B, TWO_BW, Mixed, Schedule
from unity.pcg.propagation.solver import nested_body
from unity.pcg.types.axis import Axis
from unity.transforms.pipelining.evened import EVENED, evened
from unity.transforms.pipelining.micro import Positioned, Scan, scans, walked
from unity.transforms.pipelining.numbered import NUMBERED, draws, numbered
from unity.transforms.pipelining.rolled import ROLLED, Layers, layers, rolled
from unity.transforms.pipelining.splice import within
from unity.transforms.pipelining.staged import with_stages
from unity.transforms.pipelining.tails import Tail, tail_of

SAID = {GPIPE: "GPipe", ONE_F_ONE_B: "1F1B", TWO_BW: "2BW"}


@dataclass(frozen=True, eq=False)
class Program:
    """A program that may become a pipeline, and what there is in it: scans, and equal layers that could be one."""

    captured: Captured

    @cached_property
    def layers(self) -> Layers | None:
        """The longest run of equal layers."""
        return layers(self.captured)

    @cached_property
    def scans(self) -> tuple[list[Scan], list[str]]:
        """The scans that can be walked in micro-batches, and why others cannot."""
        return scans(self.captured)

    @cached_property
    def _rolled(self) -> dict[int, Program]:
        return {}

    def tail(self, number: int) -> Tail:
        """What follows one of the scans, if it can be computed in micro-batches. Raises Mixed if not."""
        scan = self.scans[0][number]
        if number not in self._tails:
            try:
                self._tails[number] = tail_of(self.captured, scan.equation, scan.samples, scan.size)
            except Mixed as reason:
                self._tails[number] = reason
        found = self._tails[number]
        if isinstance(found, Mixed):
            raise Mixed(str(found))
        return found

    @cached_property
    def _tails(self) -> dict[int, Tail | Mixed]:
        return {}

    def source(self, count: int) -> Program:
        """The program with so many layers a scan, or as it is."""
        return self.rolled(count) if count else self

    def rolled(self, count: int) -> Program:
        """The program with so many of its layers a scan."""
        if self.layers is None or not 0 < count <= len(self.layers):
            raise Mixed(f"the program has no {count} equal layers")
        if count not in self._rolled:
            self._rolled[count] = Program(rolled(self.captured, self.layers, count))
        return self._rolled[count]

    @cached_property
    def _evened(self) -> dict[tuple[int, int], Program]:
        return {}

    def evened(self, number: int, stages: int) -> tuple[Program, int]:
        """The program with one of its scans such that so many stages can share its steps, and the scan's number then."""
        if self.scans[0][number].steps % stages == 0:
            return self, number
        key = (number, stages)
        if key not in self._evened:
            self._evened[key] = Program(evened(self.captured, self.scans[0][number].equation, stages))
        return self._evened[key], self._evened[key].called(EVENED)

    def numbered(self, number: int) -> tuple[Program, int]:
        """The program with one of its scans such that it draws bits for each sample, if any, and the scan's number then."""
        scan = self.scans[0][number]
        if not draws(nested_body(self.captured.body.equations[scan.equation]), scan.size):
            return self, number
        program = Program(numbered(self.captured, scan.equation, scan.size))
        return program, program.called(NUMBERED)

    def called(self, name: str) -> int:
        """The number of the scan that was made under a name."""
        equations = self.captured.body.equations
        found = [k for k, scan in enumerate(self.scans[0]) if within(equations[scan.equation].scope, name)]
        if not found:
            raise Mixed("; ".join(self.scans[1]))
        return found[0]

    @property
    def refused(self) -> list[str]:
        """Why scans of it, and layers that were rolled, can be no pipelines."""
        rolled = (program.scans[1] for program in self._rolled.values())
        return list(dict.fromkeys([*self.scans[1], *(reason for reasons in rolled for reason in reasons)]))

    def within(self, stages: int) -> list[tuple[int, int]]:
        """What could have so many stages: (layers to roll, scan's number). A scan's steps, or layers: as many as can be shared
        evenly, and all."""
        found = [(0, k) for k in range(len(self.scans[0]))]
        most = len(self.layers) if self.layers is not None else 0
        for count in dict.fromkeys((most // stages * stages, most)) if most >= stages else ():
            program = self.rolled(count)
            equations = program.captured.body.equations
            found += [(count, k) for k, scan in enumerate(program.scans[0]) if within(equations[scan.equation].scope, ROLLED)]
        return found


@dataclass(frozen=True, eq=False)
class Walk:
    """A program in micro-batches, without stages. `staged` gives a graph of it its stages."""

    captured: Captured
    staged: Callable[[PCG], PCG]


@dataclass(frozen=True, eq=False)
class Pipelining(ABC):
    """A program before and after some of it became a pipeline.

    `along`: the axes of its stages; `rounds`: micro-batches for each stage. `schedule` says which way it goes through them.
    """

    before: Captured
    after: Captured
    along: tuple[Axis, ...]
    rounds: int
    schedule: Schedule
    walk: Walk

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What is needed to make it again."""

    @property
    @abstractmethod
    def note(self) -> str:
        """Why it cannot go by 1F1B; nothing if it does, or could, or there is no backward pass."""

    @property
    def packing(self) -> Packing:
        """How weights are packed for it."""
        return NOTHING

    @abstractmethod
    def again(self) -> Pipelining:
        """Makes it again, from the program before it."""

    def check(self) -> None:
        """Makes it again. Raises DerivationError if something else comes out."""
        if self.again().after.graph.key != self.after.graph.key:
            raise DerivationError("the pipeline, made again from the program before it, is another")


@dataclass(frozen=True, eq=False)
class Alike(Pipelining):
    """A pipeline of equal steps. `rolled`: how many equal layers became a scan first; `scan`: the scan's number then."""

    rolled: int
    scan: int

    def to_json(self) -> dict[str, Any]:
        along = [axis.name for axis in self.along]
        return {"rolled": self.rolled, "scan": self.scan, "along": along, "rounds": self.rounds, "schedule": self.schedule.kind}

    @property
    def note(self) -> str:
        if self.schedule.kind in FOLLOWED or not self.before.differentiated:
            return ""
        try:
            Program(self.before).source(self.rolled).tail(self.scan)
        except Mixed as reason:
            return str(reason)
        return ""

    def again(self) -> Pipelining:
        return pipelined(Program(self.before), self.rolled, self.scan, self.along, self.rounds, self.schedule.kind)

    def __str__(self) -> str:
        s, names = self.schedule, " ".join(axis.name for axis in self.along)
        what = "layers" if self.rolled else "steps"
        count = f"{s.slots - 1} to {s.slots}" if s.steps % s.stages else s.slots
        return f"{s.stages} stages of {count} {what} along {names}, {s.micro_batches} micro-batches, {SAID[s.kind]}"


def pipelined(program: Program, count: int, number: int, along: Sequence[Axis], rounds: int, kind: str = GPIPE) -> Alike:
    """The program with a pipeline: of so many layers, if not 0; of the scan of this number; by this schedule.

    Raises Mixed if the scan's steps, samples or operators do not allow it.
    """
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
    except Positioned:
        walk = _walk(*source.numbered(at), along, rounds, kind)
    after = replace(walk.captured, graph=walk.staged(walk.captured.graph))
    schedule = Schedule(stages, stages * rounds, steps, kind)
    return Alike(program.captured, after, tuple(along), rounds, schedule, walk, count, number)


def _walk(source: Program, number: int, along: Sequence[Axis], rounds: int, kind: str) -> Walk:
    """The program, one of its scans in micro-batches, and the stages that it shall have."""
    scan = source.scans[0][number]
    tail = source.tail(number) if kind in FOLLOWED else None
    captured = source.captured.of(walked(source.captured.body, scan, rounds, tail), source.captured.bodies)
    return Walk(captured, partial(with_stages, scan=scan, along=along, before=source.captured.graph, tail=tail, kind=kind))
