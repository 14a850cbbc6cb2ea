"""Which operations a library computes together with a reduction (XLA's LibraryRewriter with YnnMatcher, on CPUs).

A reduction of float32 takes in whatever elementwise operations, products and changes of shape nothing else reads, upward, and its
only reader, downward, again and again. The whole is one kernel, in which nothing is materialized.
"""

from __future__ import annotations

from collections import deque

from unity.exec.liveness.program import Op, Program
from unity.pcg.ir.program import Tensor

UNARY = frozenset(
    {
        "abs", "ceil", "convert", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "logistic", "neg", "round", "rsqrt",
        "sign", "sin", "sqrt", "tanh", "tan",
    }
)  # fmt: skip
BINARY = frozenset({"add", "divide", "max", "min", "multiply", "multiply-inverse", "pow", "sub"})
SHAPED = frozenset({"bitcast", "broadcast", "transpose", "pad"})
TYPES = frozenset({"float32", "float64", "bfloat16", "int8", "uint8"})
SUMMED = frozenset({"float32", "float64"})
COMPARED = SUMMED | {"bfloat16", "float16", "int8", "uint8"}
LEAST = 4096  # elements, below which the library is not preferred
OUTSIDE = -1  # reads what leaves the program


def library_fusions(program: Program) -> dict[int, frozenset[int]]:
    """The operations that are computed together, by the one whose result they give; each by its number."""
    return _Library(program).found


class _Library:
    def __init__(self, program: Program) -> None:
        self.ops, self.tensors, self.maker = program.ops, program.tensors, program.maker
        outputs = set(program.outputs)
        self.users = [
            {r for v in op.results for r in program.readers.get(v, ())} | ({OUTSIDE} if outputs & set(op.results) else set())
            for op in self.ops
        ]
        self.taken: set[int] = set()
        self.found: dict[int, frozenset[int]] = {}
        for i in reversed(range(len(self.ops))):
            if i not in self.taken and self.reduction(self.ops[i]) and self.preferred(self.ops[i]):
                root, members = self.grown(i)
                self.taken |= members
                self.found[root] = frozenset(members)

    def grown(self, start: int) -> tuple[int, set[int]]:
        root, members = start, {start}
        changed = True
        while changed:
            changed, visited = False, set(members)
            queue = deque((i, "up") for i in self.up(members, members, visited))
            queue.extend((i, "down") for i in self.down(root, visited))
            while queue:
                i, way = queue.popleft()
                if not self.supported(self.ops[i]):
                    continue
                members.add(i)
                changed = True
                if way == "up":
                    queue.extend((j, "up") for j in self.up({i}, members, visited))
                else:
                    root = i
                    queue.extend((j, "down") for j in self.down(i, visited))
        return root, members

    def up(self, of: set[int], members: set[int], visited: set[int]) -> list[int]:
        """Operands that nothing outside reads."""
        found = []
        for i in sorted(of):
            for v in self.ops[i].operands:
                j = self.maker.get(v)
                if j is not None and j not in visited and j not in self.taken and self.users[j] <= members:
                    visited.add(j)
                    found.append(j)
        return found

    def down(self, i: int, visited: set[int]) -> list[int]:
        """The only reader."""
        (user, *more) = self.users[i] or {OUTSIDE}
        if more or user == OUTSIDE or user in visited or user in self.taken:
            return []
        visited.add(user)
        return [user]

    def reduction(self, op: Op) -> bool:
        if op.kind != "reduce" or len(op.results) != 1:
            return False
        given, made = (str(self.tensors[v].dtype) for v in (op.operands[0], op.results[0]))
        return given == made and given in {"add": SUMMED, "max": COMPARED, "min": COMPARED}.get(op.params[0], ())

    def preferred(self, op: Op) -> bool:
        return any(_elements(self.tensors[v]) >= LEAST for v in (*op.results, *op.operands))

    def supported(self, op: Op) -> bool:
        types = {str(self.tensors[v].dtype) for v in (*op.operands, *op.results)}
        if op.kind in SHAPED:
            return types <= TYPES | {"int32", "float16"}
        if op.kind == "constant":
            return True
        if not self.preferred(op):
            return False
        if op.kind == "dot":
            return self.product(op)
        if op.kind == "reduce":
            return self.reduction(op)
        return (op.kind in UNARY or op.kind in BINARY) and types <= TYPES

    def product(self, op: Op) -> bool:
        """Vectors are left to others, and what is read turned."""
        m, n = self.tensors[op.results[0]].shape[-2:]
        return m > 1 and n > 1 and str(self.tensors[op.operands[0]].dtype) in SUMMED and op.params[0] != "turned"


def _elements(tensor: Tensor) -> int:
    return tensor.nbytes // tensor.itemsize
