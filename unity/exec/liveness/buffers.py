"""Which memory a schedule needs: how long every buffer is held, and what lies in the place of what.

As XLA's BufferAssignment and HeapSimulator have it: results have memory of their own, from the start; what is made for a time lies
in the memory of a result that is not there yet, if it fits; what an operation makes takes the place of an operand that nothing
reads any more, if every element is only read for its own; and the rest is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unity.exec.liveness.copies import Task, Tasks
from unity.exec.liveness.packing import aligned, packed
from unity.exec.liveness.program import NOWHERE, Origin
from unity.exec.liveness.schedule import scheduled
from unity.pcg.ir.program import Tensor

Key = tuple[int, int]  # a program's number, and a value's


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that is held from a moment to a moment, both included, and what it was made by and is last read by."""

    key: Key
    tensor: Tensor
    kind: str
    origin: Origin
    start: int
    end: int
    may: tuple[Key, ...] = ()  # values in whose place it may lie
    reader: Origin = NOWHERE

    @property
    def nbytes(self) -> int:
        return aligned(self.tensor.nbytes)


@dataclass(frozen=True)
class Assignment:
    """What a step holds: `results`, all the time; `temporary`, what needs other memory, and its bytes when packed.

    `order`: what runs at every moment. `outputs`: the buffer of every output, by its place.
    """

    order: tuple[Task, ...]
    results: tuple[Buffer, ...]
    temporary: tuple[Buffer, ...]
    packed: int

    def held(self) -> np.ndarray:
        """Bytes of temporaries at every moment."""
        change = np.zeros(len(self.order) + 1, np.int64)
        for b in self.temporary:
            change[b.start] += b.nbytes
            change[b.end + 1] -= b.nbytes
        return np.cumsum(change)[:-1]


def assigned(tasks: Tasks, eager: bool) -> Assignment:
    """The memory of a step. `eager`: how the backend schedules."""
    found = _Lifetimes(eager)
    number = found.run(tasks)
    given = {found.under.get((number, v)) for v in tasks.outputs} - {None}
    results = [b for k, b in found.buffers.items() if k in given]
    others = [b for k, b in found.buffers.items() if k not in given]
    rest = in_place(beside(others, results, found.under), found.under)
    sizes = np.array([b.nbytes for b in rest], np.int64)
    spans = np.array([(b.start, b.end) for b in rest], np.int64).reshape(-1, 2)
    return Assignment(tuple(found.order), tuple(results), tuple(rest), packed(sizes, spans))


class _Lifetimes:
    """Buffers as tasks run, those of loops' steps inside."""

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self.order: list[Task] = []
        self.buffers: dict[Key, Buffer] = {}
        self.under: dict[Key, Key] = {}  # the buffer that a value lies in
        self.programs = 0

    def run(self, tasks: Tasks) -> int:
        """Adds the tasks of a program; gives its number."""
        self.programs += 1
        me = self.programs
        for task in scheduled(tasks, self.eager):
            if task.step is not None:
                self.run(task.step)
            now = len(self.order)
            self.order.append(task)
            for v in (*task.reads, *task.same.values()):
                self.read((me, v), now, task.origin)
            for v in task.results:
                self.define(me, tasks, task, v, now)
        return me

    def read(self, key: Key, now: int, reader: Origin) -> None:
        at = self.under.get(key)
        if at is not None:
            self.buffers[at] = replace(self.buffers[at], end=now, reader=reader)

    def define(self, me: int, tasks: Tasks, task: Task, v: int, now: int) -> None:
        key = (me, v)
        if v in task.same:
            if (me, task.same[v]) in self.under:
                self.under[key] = self.under[me, task.same[v]]
        elif v not in tasks.outside and tasks.tensors[v].nbytes:
            may = tuple((me, w) for w in task.may)
            self.under[key] = key
            self.buffers[key] = Buffer(key, tasks.tensors[v], task.kind, task.origin, now, now, may)


def beside(others: Sequence[Buffer], results: Sequence[Buffer], under: dict[Key, Key]) -> list[Buffer]:
    """What does not lie in the memory of a result before that is there: the largest first, each in the smallest that takes it.

    A result lies in its memory from when it is made; what it may be made in the place of can be there until then.
    """
    taken = [[b] for b in sorted(results, key=lambda b: b.nbytes)]
    rest = []
    for b in sorted(others, key=lambda b: (-b.nbytes, b.start)):
        for inside in taken:
            if inside[0].nbytes >= b.nbytes and all(apart(b, c, under) for c in inside):
                inside.append(b)
                break
        else:
            rest.append(b)
    return rest


def apart(b: Buffer, c: Buffer, under: dict[Key, Key]) -> bool:
    """Whether two buffers can share memory, one after the other."""
    b, c = (b, c) if (b.start, b.end) <= (c.start, c.end) else (c, b)
    return b.end < c.start or (b.end == c.start and b.nbytes == c.nbytes and b.key in {under.get(k) for k in c.may})


def in_place(buffers: Sequence[Buffer], under: dict[Key, Key]) -> list[Buffer]:
    """Buffers, those that lie in the place of an operand joined with it."""
    found = {b.key: b for b in buffers}
    joined: dict[Key, Key] = {}
    for b in sorted(buffers, key=lambda b: b.start):
        for k in b.may:
            at = under.get(k)
            at = joined.get(at, at) if at is not None else None
            a = found.get(at) if at is not None else None
            if a is not None and a is not found.get(b.key) and a.end == b.start and a.nbytes == b.nbytes:
                found[a.key] = replace(a, end=b.end, reader=b.reader)
                joined[b.key] = a.key
                del found[b.key]
                break
    return list(found.values())
