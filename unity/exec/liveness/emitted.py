"""How often a kernel's code would be written out for an operation in it (XLA's FusionNodeIndexingEvaluation).

An operation is written once for every index at which it is asked for an element. Operations of one shape ask at one index, and so
share the code; a concatenation or a pad starts a block of its own, in which nothing that was written before can be used again.
"""

from __future__ import annotations

from unity.exec.liveness.program import Program

MOST = 15  # times that an operation is written out
OWN_BLOCK = frozenset({"concatenate", "dot", "dynamic-update-slice", "pad", "reduce", "reduce-window"})
CALLER = -1  # asks the kernel's root for its elements


class Emitted:
    """A kernel's code, as operations are added to it: the latest first, so that all of the kernel that reads one is there."""

    def __init__(self, program: Program, root: int) -> None:
        self.program = program
        self.asking: dict[int, set[int]] = {root: {CALLER}}  # who makes an index at which each operation is asked
        self.times = {CALLER: 1}
        self.add(root)

    def add(self, i: int) -> None:
        """Puts an operation into the kernel."""
        op, tensors = self.program.ops[i], self.program.tensors
        self.times[i] = self.of(i)
        shape = tensors[op.results[0]].shape
        for v in op.operands:
            made = self.program.maker.get(v)
            if made is not None:
                same = op.kind == "transpose" or tensors[v].shape == shape
                self.asking.setdefault(made, set()).update(self.asking[i] if same else {i})

    def of(self, i: int) -> int:
        """How often an operation would be written out."""
        return sum(self.times[j] for j in self.asking[i])

    def too_often(self, i: int, readers: int) -> bool:
        """Whether an operation that so many others read is left out of the kernel."""
        times = self.of(i)
        return times > MOST or (self.program.ops[i].kind in OWN_BLOCK and (times > 1 or readers > 1))
