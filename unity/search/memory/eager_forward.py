"""Peak memory of the forward pass, for a backend that computes some values ahead of their turn.

Operators that depend on arguments alone run at the start: changes of the types of weights for every operator, and values that the
backend makes for itself. So during the forward pass the operands of later operators are live beside the residuals of earlier ones.
Changes of types of weights in a scan's steps are hoisted before the first step (`pcg.analysis.hoisting`), so their results are live
as early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.ir.graph import UNCHANGED, Node, Value
from unity.pcg.ir.payloads import Scan
from unity.pcg.propagation.nested.scan_programs import SCANNED
from unity.search.memory.peak import ReusableGradient, assign_reuse
from unity.search.space.live_buffers import WORKING, AliasTables, Buffer, local, stays, unmoved


@dataclass(frozen=True)
class Ahead:
    """A buffer that is computed at the start.

    Args:
        buffer: The buffer.
        until: The operator at whose turn it is dead, or counted among the operator's residuals or working set.
        reader: The last operator that reads it, which decides the gradients whose memory it may use.
    """

    buffer: Buffer
    until: int
    reader: int


def changes_at_start(nodes: Sequence[Node], aliases: AliasTables, residuals: Collection[Value]) -> list[Ahead]:
    """Return the results of changes of type that depend on arguments alone, and that operators read.

    Such a result is live until its last reader, or, if it is a residual, until its first reader, which counts it from then on.
    """
    readers: dict[Value, list[int]] = {}
    for i, node in enumerate(nodes):
        for v in node.operands if node.kind not in UNCHANGED else ():
            readers.setdefault(aliases.unmoved[v], []).append(i)
    ready, ahead = set[Value](), []
    for i, node in enumerate(nodes):
        if node.kind in SCANNED:
            steps = _of_constants(node, {v for v in node.operands if v.node.kind == "input" or v in ready})
            ahead += [Ahead(buffer, i, len(nodes)) for buffer in steps]
        if node.kind not in UNCHANGED:
            continue
        (v,) = node.operands
        if v.node.kind != "input" and v not in ready:
            continue
        result = Value(node)
        ready.add(result)
        if not stays(node) and result in readers:
            first, last = readers[result][0], readers[result][-1]
            is_residual = result in residuals
            until, reader = (first, first) if is_residual else (last, len(nodes))
            ahead.append(Ahead(Buffer(WORKING, node, aliases.nbytes[result]), until, reader))
    return ahead


def _of_constants(scan: Node, ready: Collection[Value]) -> list[Buffer]:
    """Return the recomputed results of changes of type inside a scan's steps that depend on ready constants alone."""
    assert scan.inside is not None
    inside, constants = scan.inside, scan.operands[: scan.of(Scan).consts]
    computed = {Value(n) for n, v in zip(inside.inputs, constants, strict=False) if v in ready}
    operands: dict[Value, None] = {}  # the operands of operators
    for node in inside.nodes:
        if node.kind in UNCHANGED:
            computed |= {Value(node)} if node.operands[0] in computed else set()
            continue
        operands.update(dict.fromkeys(v for v in map(unmoved, node.operands) if v in computed and v.node.kind != "input"))
    return [Buffer(WORKING, v.node, local(v, inside)) for v in operands if v.node.again]


@dataclass(frozen=True, eq=False)
class Forward:
    """The buffers that are live while operators run forward.

    Args:
        kept: For each operator, the residuals that are live from its turn on.
        started: For each operator, the residuals that are live from the start, such as the stacks of a scan.
        ahead: Values that are computed at the start.
        own: Bytes of the working set of an operator, by number.
        later: The gradients whose memory may be reused, largest first.
    """

    kept: Sequence[Sequence[Buffer]]
    started: Sequence[Sequence[Buffer]]
    ahead: Sequence[Ahead]
    own: Mapping[int, float]
    later: Sequence[ReusableGradient]

    def highest(self) -> tuple[int, list[tuple[int, float]]]:
        """Return the operator at whose turn memory is highest (-1: before any), and the gradients whose memory is reused then."""
        sizes = self.sizes()
        best, highest = -1.0, (-1, list[tuple[int, float]]())
        for i in sorted((-1, *self.own), key=lambda i: -sizes[i]):
            if sizes[i] <= best:
                break
            reused = self.reused(i)
            here = sizes[i] - sum(n for _, n in reused)
            if here > best:
                best, highest = here, (i, reused)
        return highest

    def sizes(self) -> dict[int, float]:
        """Return the live bytes at each turn, before reuse."""
        done = [0.0] * (len(self.kept) + 1)
        for a in self.ahead:
            done[a.until] += a.buffer.nbytes
        below = sum(h.nbytes for k in self.started for h in k)
        ahead = sum(a.buffer.nbytes for a in self.ahead)
        totals = {-1: below + ahead}
        for i, k in enumerate(self.kept):
            ahead -= done[i]
            below += sum(h.nbytes for h in k)
            totals[i] = below + ahead + self.own.get(i, 0.0)
        return totals

    def held(self, at: int) -> list[Buffer]:
        """Return the buffers that are live at an operator's turn, without its working set."""
        then = [h for i, k in enumerate(self.kept) for h in k if i <= at]
        return [*then, *(h for k in self.started for h in k), *(a.buffer for a in self.ahead if a.until > at)]

    def reused(self, at: int) -> list[tuple[int, float]]:
        """Return the gradients whose memory is reused at an operator's turn, by number, with the reused bytes."""
        if not self.later:
            return []
        end = len(self.kept)
        live = [(h.nbytes, i) for i, k in enumerate(self.kept) for h in k if i <= at]
        live += [(h.nbytes, i) for i, k in enumerate(self.started) for h in k]
        live += [(a.buffer.nbytes, a.reader) for a in self.ahead if a.until > at]
        live += [(self.own[at], end)] if at in self.own else []
        sizes: dict[float, list[int]] = {}
        for n, i in sorted(live):
            if n > 0:
                sizes.setdefault(n, []).append(i)
        return assign_reuse(sizes, self.later, end)
