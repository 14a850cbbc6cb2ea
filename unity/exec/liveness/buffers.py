"""Which memory a schedule needs: how long every buffer is held, and what lies in the place of what.

As XLA's BufferAssignment and HeapSimulator have it: results have memory of their own, from the start; what is made for a time lies
in the memory of a result that is not there yet, if it fits; what an operation makes takes the place of an operand that nothing
reads any more, if every element is only read for its own; and the rest is packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unity.exec.liveness.copies import Task, Tasks
from unity.exec.liveness.packing import aligned, packed
from unity.exec.liveness.program import NOWHERE, Origin
from unity.exec.liveness.schedule import scheduled
from unity.pcg.body import Tensor

Key = tuple[int, int]  # a program's number, and a value's
Span = tuple[int, int]  # the first and the last of some moments


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that is held in some spans of time, and what it was made by and is last read by.

    spans: the first and the last moment of each, ascending. Several: what branches give, each for itself, and the whole later.
    """

    key: Key
    tensor: Tensor
    kind: str
    origin: Origin
    spans: tuple[Span, ...]
    may: tuple[Key, ...] = ()  # values in whose place it may lie
    reader: Origin = NOWHERE

    @property
    def nbytes(self) -> int:
        return aligned(self.tensor.nbytes)

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        return self.spans[-1][1]

    def at(self, moment: int) -> bool:
        """Whether it is held then."""
        return any(first <= moment <= last for first, last in self.spans)

    def until(self, moment: int, reader: Origin) -> Buffer:
        """The same, held until a later moment."""
        return replace(self, spans=(*self.spans[:-1], (self.spans[-1][0], moment)), reader=reader)


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
            for first, last in b.spans:
                change[first] += b.nbytes
                change[last + 1] -= b.nbytes
        return np.cumsum(change)[:-1]


def assigned(tasks: Tasks, eager: bool, donated: int = 0) -> Assignment:
    """The memory of a step. `eager`: how the backend schedules. `donated`: so many outputs, the last, lie in inputs' memory."""
    found = _Lifetimes(eager)
    number = found.run(tasks)
    given = {found.under.get((number, v)) for v in tasks.outputs[: len(tasks.outputs) - donated]} - {None}
    results = [b for k, b in found.buffers.items() if k in given]
    others = [b for k, b in found.buffers.items() if k not in given]
    rest = in_place(beside(others, results, found.under), found.under)
    sizes = np.array([b.nbytes for b in rest], np.int64)
    spans = np.array([span for b in rest for span in b.spans], np.int64).reshape(-1, 2)
    owners = np.repeat(np.arange(len(rest)), [len(b.spans) for b in rest])
    return Assignment(tuple(found.order), tuple(results), tuple(rest), packed(sizes, spans, owners))


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
            inside = [self.inside(program) for program in task.inside]
            now = len(self.order)
            self.order.append(task)
            for v in (*task.reads, *task.same.values()):
                self.read((me, v), now, task.origin)
            for k, v in enumerate(task.results):
                self.define(me, tasks, task, v, now)
                if task.kind == "conditional":
                    self.join((me, v), [self.under.get((number, program.gives[k])) for number, program in inside])
        return me

    def inside(self, tasks: Tasks) -> tuple[int, Tasks]:
        """Runs a loop's step or a branch, whose results are there until its end."""
        number = self.run(tasks)
        for v in tasks.gives:
            self.read((number, v), len(self.order) - 1, NOWHERE)
        return number, tasks

    def join(self, key: Key, options: Sequence[Key | None]) -> None:
        """What each branch gives lies where the whole's result does."""
        parts = [self.buffers.pop(k) for k in options if k is not None]
        whole = self.buffers.get(key)
        if whole is None:  # it lies in the memory of what is around
            return
        self.under.update((part.key, key) for part in parts)
        spans, may = (s for part in parts for s in part.spans), (k for part in parts for k in part.may)
        self.buffers[key] = replace(whole, spans=(*spans, *whole.spans), may=(*may, *whole.may))

    def read(self, key: Key, now: int, reader: Origin) -> None:
        at = self.under.get(key)
        if at is not None:
            self.buffers[at] = self.buffers[at].until(now, reader)

    def define(self, me: int, tasks: Tasks, task: Task, v: int, now: int) -> None:
        key = (me, v)
        if v in task.same:
            if (me, task.same[v]) in self.under:
                self.under[key] = self.under[me, task.same[v]]
        elif v not in tasks.outside and tasks.tensors[v].nbytes:
            may = tuple((me, w) for w in task.may)
            self.under[key] = key
            self.buffers[key] = Buffer(key, tasks.tensors[v], task.kind, task.origin, ((now, now),), may)


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


def apart(b: Buffer, c: Buffer, under: Mapping[Key, Key]) -> bool:
    """Whether two buffers can share memory, one after the other."""
    if not shared(b, c):
        return True
    return any(x.key in {under.get(k) for k in y.may} and follows(y, x) for x, y in ((b, c), (c, b)))


def shared(b: Buffer, c: Buffer) -> list[Span]:
    """When both are held."""
    if b.end < c.start or c.end < b.start:
        return []
    both = ((max(x[0], y[0]), min(x[1], y[1])) for x in b.spans for y in c.spans)
    return [(first, last) for first, last in both if first <= last]


def follows(b: Buffer, c: Buffer) -> bool:
    """Whether a buffer begins, in some span, where another one ends, and is not held at once otherwise."""
    return b.nbytes == c.nbytes and shared(b, c) == [(c.end, c.end)] and any(first == c.end for first, _ in b.spans)


def in_place(buffers: Sequence[Buffer], under: Mapping[Key, Key]) -> list[Buffer]:
    """Buffers, those that lie in the place of an operand joined with it."""
    found = {b.key: b for b in buffers}
    joined: dict[Key, Key] = {}

    def lying(value: Key) -> Buffer | None:
        key = under.get(value, value)
        while key in joined:
            key = joined[key]
        return found.get(key)

    for one in sorted(buffers, key=lambda b: b.start):
        for k in one.may:
            b, a = lying(one.key), lying(k)
            if b is None or a is None or a is b or not follows(b, a):
                continue
            found[a.key] = replace(a, spans=united(a, b), reader=b.reader)
            joined[b.key] = a.key
            del found[b.key]
    return list(found.values())


def united(b: Buffer, c: Buffer) -> tuple[Span, ...]:
    """When one of two buffers is held that are never held at once, but for a moment at which one ends and the other begins."""
    found: list[Span] = []
    for first, last in sorted((*b.spans, *c.spans)):
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, last))
    return tuple(found)
