"""When most is held before the backward pass begins, where a backend makes things ahead of their turn.

What waits for nothing but arguments is made at the start: what is moved of weights for every operator, and what the backend makes
for itself. So while operators run forward, what those after them will read is there beside what those before them keep. What a
scan's steps move of weights, they move before the first step (`pcg.hoisting`), so that is there as early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.ir.graph import UNCHANGED, Node, Value
from unity.pcg.propagation.scan_programs import SCANNED
from unity.search.memory.peak import Later, places
from unity.search.space.live_buffers import WORKING, Held, Lying, local, stays, unmoved


@dataclass(frozen=True)
class Ahead:
    """What is made at the start, and the operator at whose turn it is counted otherwise, or done with.

    `reader`: the last operator that reads it, as far as what may lie in a gradient's place goes by that.
    """

    held: Held
    until: int
    reader: int


def moved(nodes: Sequence[Node], lying: Lying, kept: Collection[Value]) -> list[Ahead]:
    """What is moved of arguments alone, for others than further changes of type. What is kept counts from its first reader on."""
    readers: dict[Value, list[int]] = {}
    for i, node in enumerate(nodes):
        for v in node.operands if node.kind not in UNCHANGED else ():
            readers.setdefault(lying.unmoved[v], []).append(i)
    ready, found = set[Value](), []
    for i, node in enumerate(nodes):
        if node.kind in SCANNED:
            steps = _of_constants(node, {v for v in node.operands if v.node.kind == "input" or v in ready})
            found += [Ahead(held, i, len(nodes)) for held in steps]
        if node.kind not in UNCHANGED:
            continue
        (v,) = node.operands
        if v.node.kind != "input" and v not in ready:
            continue
        made = Value(node)
        ready.add(made)
        if not stays(node) and made in readers:
            first, last = readers[made][0], readers[made][-1]
            again = made in kept
            found.append(Ahead(Held(WORKING, node, lying.nbytes[made]), first if again else last, first if again else len(nodes)))
    return found


def _of_constants(scan: Node, ready: Collection[Value]) -> list[Held]:
    """What a scan's steps move of constants that are ready, for others than further changes of type, and do not keep."""
    assert scan.inside is not None
    inside, constants = scan.inside, scan.operands[: int(scan.attributes["consts"])]
    made = {Value(n) for n, v in zip(inside.inputs, constants, strict=False) if v in ready}
    found: dict[Value, None] = {}  # what an operator reads
    for node in inside.nodes:
        if node.kind in UNCHANGED:
            made |= {Value(node)} if node.operands[0] in made else set()
            continue
        found.update(dict.fromkeys(v for v in map(unmoved, node.operands) if v in made and v.node.kind != "input"))
    return [Held(WORKING, v.node, local(v, inside)) for v in found if v.node.attributes.get("again")]


@dataclass(frozen=True, eq=False)
class Forward:
    """What is held while operators run forward: what each keeps from its turn on, or has from the start, as scans their stacks;
    what is made ahead; and their own."""

    kept: Sequence[Sequence[Held]]
    started: Sequence[Sequence[Held]]
    ahead: Sequence[Ahead]
    own: Mapping[int, float]  # by an operator's number
    later: Sequence[Later]

    def highest(self) -> tuple[int, list[tuple[int, float]]]:
        """The operator at whose turn most is held, -1 before any, and the gradients in whose place something lies then."""
        sizes = self.sizes()
        best, found = -1.0, (-1, list[tuple[int, float]]())
        for i in sorted(sizes, key=lambda i: -sizes[i]):
            if sizes[i] <= best:
                break
            lying = self.placed(i)
            here = sizes[i] - sum(n for _, n in lying)
            if here > best:
                best, found = here, (i, lying)
        return found

    def sizes(self) -> dict[int, float]:
        """All bytes at each turn, whether they take memory of their own or not."""
        done = [0.0] * (len(self.kept) + 1)
        for a in self.ahead:
            done[a.until] += a.held.nbytes
        below = sum(h.nbytes for k in self.started for h in k)
        waiting = sum(a.held.nbytes for a in self.ahead)
        found = {-1: below + waiting}
        for i, k in enumerate(self.kept):
            waiting -= done[i]
            below += sum(h.nbytes for h in k)
            if i in self.own:
                found[i] = below + waiting + self.own[i]
        return found

    def held(self, at: int) -> list[Held]:
        """What is held at an operator's turn, but for what it works on."""
        then = [h for i, k in enumerate(self.kept) for h in k if i <= at]
        return [*then, *(h for k in self.started for h in k), *(a.held for a in self.ahead if a.until > at)]

    def placed(self, at: int) -> list[tuple[int, float]]:
        """The gradients in whose place something lies at an operator's turn, by number, and its bytes."""
        end = len(self.kept)
        found = [(h.nbytes, i) for i, k in enumerate(self.kept) for h in k if i <= at]
        found += [(h.nbytes, i) for i, k in enumerate(self.started) for h in k]
        found += [(a.held.nbytes, a.reader) for a in self.ahead if a.until > at]
        found += [(self.own[at], end)] if at in self.own else []
        sizes: dict[float, list[int]] = {}
        for n, i in sorted(found):
            if n > 0:
                sizes.setdefault(n, []).append(i)
        return places(sizes, self.later, end)
