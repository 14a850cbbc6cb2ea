"""What runs, one task after another, once copies are made for what is written in place (XLA's CopyInsertion).

A loop writes its state in place, a scatter and an update of a slice their operand. If that is also read by something that need not
come before, or cannot be written at all, a copy of it is written instead. Of several that would write one value, one gets the value
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unity.exec.liveness.fusion import Kernel, kernels
from unity.exec.liveness.program import Op, Origin, Program
from unity.pcg.ir.program import Tensor

WRITING = ("dynamic-update-slice", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")


@dataclass(frozen=True, eq=False)
class Task:
    """What runs at one moment. `same`: results that lie where an operand lies, whatever else happens; `may`: operands in whose
    place the result may lie. `step`: the tasks of a loop's step, which run inside."""

    kind: str
    reads: tuple[int, ...]
    results: tuple[int, ...]
    origin: Origin
    same: Mapping[int, int]
    may: tuple[int, ...] = ()
    step: Tasks | None = None


@dataclass(frozen=True, eq=False)
class Tasks:
    """The tasks of a program. `outside`: values that lie in the memory of what is around it."""

    tasks: tuple[Task, ...]
    tensors: Sequence[Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    outside: frozenset[int] = frozenset()


def tasks(program: Program, library: bool, eager: bool = True) -> Tasks:
    """The tasks of a whole step. `eager`: whether the backend orders them itself, or runs them as they were traced."""
    return _Copying(program, library, eager).whole()


def step_tasks(program: Program, library: bool, eager: bool, carried: range, stacked: range) -> Tasks:
    """The tasks of a loop's step, whose inputs and results at `carried` and `stacked` are the loop's state."""
    return _Copying(program, library, eager).step(carried, stacked)


class _Copying:
    def __init__(self, program: Program, library: bool, eager: bool) -> None:
        self.program, self.library, self.eager = program, library, eager
        self.kernels = kernels(program, library)
        if not eager:  # they run as they were traced
            self.kernels.sort(key=lambda kernel: kernel.root.place)
        self.tensors = list(program.tensors)
        self.before: list[int] = []  # of every kernel, the kernels that must run before it, as bits
        made: dict[int, int] = {}
        for i, kernel in enumerate(self.kernels):
            bits = 0
            for v in kernel.reads:
                if v in made:
                    bits |= self.before[made[v]] | 1 << made[v]
            self.before.append(bits)
            made.update(dict.fromkeys(kernel.root.results, i))
        self.made = made
        self.alias = {k.root.results[0]: k.reads[0] for k in self.kernels if not k.moves and k.reads}
        self.readers: dict[int, set[int]] = {}
        for i, kernel in enumerate(self.kernels):
            if kernel.moves:
                for v in kernel.reads:
                    self.readers.setdefault(self.base(v), set()).add(i)
        self.written: dict[int, int] = {}
        self.fixed = {self.base(v) for v in (*program.inputs, *program.outputs)}
        self.constant = {v for op in program.ops if op.kind == "constant" for v in op.results}

    def base(self, v: int) -> int:
        while v in self.alias:
            v = self.alias[v]
        return v

    def whole(self) -> Tasks:
        return self.finished([task for i, k in enumerate(self.kernels) for task in self.task(i, k)], frozenset())

    def finished(self, found: Sequence[Task], outside: frozenset[int]) -> Tasks:
        return Tasks(tuple(found), self.tensors, self.program.inputs, self.program.outputs, outside)

    def task(self, i: int, kernel: Kernel) -> list[Task]:
        """A kernel's task, after those that copy what it writes."""
        op = kernel.root
        if not kernel.moves:
            return [Task("bitcast", kernel.reads, op.results, op.origin, dict(zip(op.results, kernel.reads, strict=False)))]
        if op.kind == "barrier":
            return [Task("barrier", kernel.reads, op.results, op.origin, dict(zip(op.results, op.operands, strict=True)))]
        if op.kind == "while":
            return self.loop(i, op)
        if op.kind in WRITING and op.operands[0] in kernel.inplace:
            target = op.operands[0]
            copies, (own,) = self.owned(i, [target], op.origin)
            reads = tuple(own if v == target else v for v in kernel.reads)
            return [*copies, Task(op.kind, reads, op.results, op.origin, {op.results[0]: own})]
        return [Task(op.kind, kernel.reads, op.results, op.origin, {}, kernel.inplace)]

    def loop(self, i: int, op: Op) -> list[Task]:
        assert op.inside is not None
        c, k, n, _ = op.params
        copies, own = self.owned(i, [*op.operands[c : c + k], *op.operands[c + k + n :]], op.origin)
        carried, stacked = range(1 + c, 1 + c + k), range(1 + c + k + n, len(op.inside.inputs))
        inside = step_tasks(op.inside, self.library, self.eager, carried, stacked)
        reads = (*op.operands[:c], *own[:k], *op.operands[c + k : c + k + n], *own[k:])
        reads = tuple(v for v in dict.fromkeys(reads) if v not in self.constant)
        return [*copies, Task("while", reads, op.results, op.origin, dict(zip(op.results, own, strict=True)), step=inside)]

    def owned(self, i: int, values: Sequence[int], origin: Origin) -> tuple[list[Task], list[int]]:
        """Values that kernel `i` may write: these themselves, or copies of them."""
        copies, own = [], []
        for place, v in enumerate(values):
            if self.writable(i, v) and self.base(v) not in {self.base(w) for w in values[place + 1 :]}:
                self.written[self.base(v)] = i
                own.append(v)
            else:
                self.tensors.append(self.tensors[v])
                own.append(len(self.tensors) - 1)
                reads = () if v in self.constant else (v,)
                copies.append(Task("copy", reads, (own[-1],), origin, {}))
        return copies, own

    def writable(self, i: int, v: int) -> bool:
        v = self.base(v)
        others = self.readers.get(v, set()) - {i}
        if v in self.fixed or v in self.constant or self.written.get(v, i) != i:
            return False
        later = {j for j in others if not self.before[i] >> j & 1}
        # the last of those that would write it gets the value itself
        return all(self.kernels[j].root.kind in ("while", *WRITING) and j < i for j in later)

    def step(self, carried: range, stacked: range) -> Tasks:
        """The state is written in place; what is carried is copied first, if it may be read after its next value is there."""
        inputs, outputs = self.program.inputs, self.program.outputs
        pairs = list(zip([inputs[k] for k in (*carried, *stacked)], outputs, strict=True))
        self.fixed = {self.base(v) for v in inputs} - {a for a, _ in pairs}
        outside, first, last, instead = set(inputs), [], [], {}
        taken: set[int] = set()
        for given, made in pairs:
            if self.base(made) == given:
                continue
            if self.base(made) in taken or self.base(made) in self.constant or self.base(made) in inputs:
                last.append(Task("copy", tuple({made} - self.constant), (), Origin(), {}))  # into the state, whose memory is there
                continue
            taken.add(self.base(made))
            outside.add(made)
            end = self.made[self.base(made)]
            if any(j != end and not self.before[end] >> j & 1 for j in self.readers.get(given, ())) or (
                end in self.readers.get(given, ()) and not self.in_place(end, given)
            ):
                self.tensors.append(self.tensors[given])
                instead[given] = len(self.tensors) - 1
                first.append(Task("copy", (given,), (instead[given],), Origin(), {}))
            else:
                outside |= self.also_there(end, given)
        for i, kernel in enumerate(self.kernels):
            for task in self.task(i, kernel):
                reads, may = (tuple(instead.get(v, v) for v in values) for values in (task.reads, task.may))
                first.append(replace(task, reads=reads, may=may))
        return self.finished([*first, *last], frozenset(outside))

    def also_there(self, end: int, given: int) -> set[int]:
        """What is made in the state's own memory before its next value is: an operand in whose place that lies, if the last
        value is not read any more."""
        found = set()
        for v in self.kernels[end].inplace:
            made = self.made.get(v)
            if made is not None and self.readers[self.base(v)] == {end} and not found:
                found |= {v} if all(self.before[made] >> j & 1 for j in self.readers.get(given, ())) else set()
        return found

    def in_place(self, i: int, v: int) -> bool:
        kernel = self.kernels[i]
        return v in kernel.inplace or (kernel.root.kind in WRITING and kernel.root.operands[0] == v)
