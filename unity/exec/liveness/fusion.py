"""Which operations become one kernel, and what it reads: XLA's InstructionFusion with the CPU's rules (CpuInstructionFusion).

Fusion is decided for each reader of a value: a cheap operation is computed again inside of every kernel that reads it, and
its own result is only made if some reader cannot take it in. So what a kernel reads may be far above what it was written to read.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from unity.exec.liveness.emitted import Emitted
from unity.exec.liveness.kinds import ELEMENTWISE, FUSIBLE, PERMUTING, expensive, for_its_own, joins_rows, rank, size
from unity.exec.liveness.library import OUTSIDE, library_fusions
from unity.exec.liveness.program import Op, Program

MOST_REDUCTIONS = 5  # in one kernel


@dataclass(frozen=True)
class Kernel:
    """Operations that run as one. `root` is the one whose results are made; `reads`: values, in the order of their use.

    `inplace`: the values among them in whose place the result may be written, as every element is read only for its own.
    """

    root: Op
    reads: tuple[int, ...]
    inplace: tuple[int, ...]
    moves: bool = True  # not, if it is but another shape of what it reads


def kernels(program: Program, library: bool) -> list[Kernel]:
    """The kernels of a program, in an order in which they could run. `library`: whether one computes reductions."""
    return _Fusion(program, library_fusions(program) if library else {}).kernels()


class _Fusion:
    def __init__(self, program: Program, together: dict[int, frozenset[int]]) -> None:
        self.program, self.ops, self.tensors, self.maker = program, program.ops, program.tensors, program.maker
        self.members: dict[int, set[int]] = {i: {i} for i in range(len(self.ops))}
        self.library = frozenset(together)
        for root, inside in together.items():
            for i in inside - {root}:
                del self.members[i]
            self.members[root] = set(inside)
        self.order = sorted(self.members)
        self.operands = {i: self._operands(inside) for i, inside in self.members.items()}
        self.users: dict[int, set[int]] = {i: set() for i in self.order}
        for i in self.order:
            for j in self.makers(i):
                self.users[j].add(i)
        self.given_out = {self.maker[v] for v in program.outputs if v in self.maker}
        for i in self.given_out:
            self.users[i].add(OUTSIDE)
        self.lone = self.not_to_duplicate()
        self.fuse()

    def _operands(self, inside: set[int]) -> dict[int, None]:
        """The values that a group of operations reads from outside."""
        return {v: None for i in sorted(inside) for v in self.ops[i].operands if self.maker.get(v) not in inside}

    def makers(self, i: int) -> list[int]:
        return [self.maker[v] for v in self.operands[i] if v in self.maker]

    def kernels(self) -> list[Kernel]:
        """What is left after fusion; constants are part of the program, and take no time or memory of the step."""
        found = []
        for i in self.order:
            op = self.ops[i]
            if not self.users[i] or op.kind == "constant":
                continue
            reads = tuple(v for v in self.operands[i] if v not in self.maker or self.ops[self.maker[v]].kind != "constant")
            moves = len(self.members[i]) > 1 or not (op.kind == "bitcast" or self.laid_otherwise(op))
            found.append(Kernel(op, reads, tuple(v for v in reads if self.aligned(i, v)), moves))
        return found

    def laid_otherwise(self, op: Op) -> bool:
        """Whether an operation is but the layout of a convolution's result, which whoever reads it takes as it is
        (LayoutAssignment)."""
        made = self.maker.get(op.operands[0]) if op.kind == "transpose" else None
        return made is not None and self.ops[made].kind == "convolution" and made not in self.library

    def aligned(self, i: int, v: int) -> bool:
        """Whether all between an operand and the result works element by element, so that one can take the other's place."""
        op = self.ops[i]
        if len(op.results) != 1 or self.tensors[v] != self.tensors[op.results[0]]:
            return False
        if op.kind in ("dynamic-update-slice", "scatter", "scatter-add"):
            return op.operands[0] == v
        waiting = {(j, v) for j in self.members[i] if v in self.ops[j].operands}
        seen = set(waiting)
        while waiting:
            j, w = waiting.pop()
            if not for_its_own(self.ops[j], w):
                return False
            made = self.ops[j].results
            more = {(k, r) for r in made for k in self.program.readers.get(r, ()) if k in self.members[i]} - seen
            waiting |= more
            seen |= more
        return True

    # What is decided for the program as a whole

    def not_to_duplicate(self) -> set[int]:
        """Operations that read more than they make, and cannot be taken in by all readers (ComputeGloballyUnfusible)."""
        found: set[int] = set()
        self.reach: dict[int, int] = {}
        for i in self.order:
            self.reach[i] = 1 << i
            for j in self.makers(i):
                self.reach[i] |= self.reach[j]
        known: dict[tuple[int, int], bool] = {}
        for i in reversed(self.order):
            if self.light(i) or (self.fusible(i) and all(self.on_all_paths(i, u, found, known) for u in self.users[i])):
                continue
            found.add(i)
        return found

    def light(self, i: int) -> bool:
        """Whether an operation reads no more than one large value, or no more than it makes."""
        if self.ops[i].kind not in FUSIBLE:
            return False
        op, out = self.ops[i], self.tensors[self.ops[i].results[0]]
        large = 0
        for v in op.operands:
            j = self.maker.get(v)
            kind = self.ops[j].kind if j is not None else ""
            large += kind not in ("broadcast", "iota", "constant") and rank(self.tensors[v]) >= rank(out)
        return large <= 1 or sum(size(self.tensors[v]) for v in set(op.operands)) <= size(out)

    def on_all_paths(self, producer: int, consumer: int, lone: set[int], known: dict[tuple[int, int], bool]) -> bool:
        if consumer == producer:
            return True
        if consumer == OUTSIDE or self.ops[consumer].kind in ("while", "conditional"):
            return False
        if (producer, consumer) not in known:
            known[producer, consumer] = all(
                j not in lone and self.allowed(consumer, j) and self.on_all_paths(producer, j, lone, known)
                for j in self.makers(consumer)
                if self.reach[j] >> producer & 1
            )
        return known[producer, consumer]

    def fusible(self, i: int) -> bool:
        return self.ops[i].kind in FUSIBLE and i not in self.library

    def allowed(self, consumer: int, producer: int) -> bool:
        """Whether a kernel may take in what makes one of its operands."""
        if not self.fusible(consumer) or not self.fusible(producer):
            return False
        op = self.ops[producer]
        if op.kind == "dynamic-update-slice" and (producer in self.given_out or self.written_on(producer)):
            return False  # it is done in place, once
        if joins_rows(op, self.tensors) or joins_rows(self.ops[consumer], self.tensors):
            return False
        taken = [self.ops[j] for j in self.members[consumer]]
        written = any(other.kind == "dynamic-update-slice" and other.operands[0] in op.results for other in taken)
        if written and self.ops[consumer].kind != "convert":  # which need not be in place
            return False  # it is written in place
        if not expensive(op, self.tensors):
            return True
        if self.users[producer] != {consumer} or self.reuses(consumer, op.results[0]):
            return False
        inside = self.members[consumer]
        return op.kind != "reduce" or sum(self.ops[j].kind == "reduce" for j in inside) <= MOST_REDUCTIONS

    def read_by(self, i: int) -> int:
        """How many operations read what an operation makes, in all the kernels that do."""
        made = set(self.ops[i].results)
        found = 0
        for u in self.users[i]:
            found += 1 if u == OUTSIDE else sum(not made.isdisjoint(self.ops[j].operands) for j in self.members[u])
        return found

    def written_on(self, producer: int) -> bool:
        """Whether something else is written into what an operation makes."""
        (result,) = self.ops[producer].results
        readers = (self.ops[j] for j in self.program.readers.get(result, ()))
        return any(op.kind == "dynamic-update-slice" and op.operands[0] == result for op in readers)

    def reuses(self, consumer: int, v: int) -> bool:
        """Whether a kernel reads an element of an operand more than once (FusionReusesParamElements)."""
        inside, uses = self.members[consumer], {v: 1}
        for j in sorted(inside):
            op = self.ops[j]
            met = [uses[x] for x in op.operands if x in uses]
            if not met:
                continue
            if op.kind not in ELEMENTWISE and op.kind not in PERMUTING:
                return True
            if len(met) > 1 and (op.kind not in ELEMENTWISE or max(met) > 1):
                return True
            uses.update(dict.fromkeys(op.results, 1 if op.kind in ELEMENTWISE and max(met) == 1 else 2))
        return False

    # What is done, from the last operation to the first

    def fuse(self) -> None:
        for i in reversed(self.order):
            if self.users[i] and self.fusible(i):
                self.take_in(i)

    def take_in(self, i: int) -> None:
        """Takes in what makes operands, the latest first, until nothing can be taken in."""
        waiting = [-j for j in self.makers(i)]
        heapq.heapify(waiting)
        tried: set[int] = set()
        emitted = Emitted(self.program, i)
        while waiting:
            j = -heapq.heappop(waiting)
            if j in tried:
                continue
            tried.add(j)
            if j in self.lone or not self.allowed(i, j):
                continue
            if len(self.members[i]) > 1 and emitted.too_often(j, self.read_by(j)):
                continue
            self.members[i].add(j)
            emitted.add(j)
            self.users[j].discard(i)
            for v in self.ops[j].operands:
                if v in self.maker:
                    k = self.maker[v]
                    self.users[k].add(i)
                    heapq.heappush(waiting, -k)
            if not self.users[j]:
                for k in self.makers(j):
                    self.users[k].discard(j)
        self.operands[i] = self._operands(self.members[i])
