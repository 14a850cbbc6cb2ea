"""When most is held before the backward pass begins, where a backend makes things ahead of their turn.

What waits for nothing but arguments is made at the start: what is moved of weights for every operator, and what the backend makes
for itself. So while operators run forward, what those after them will read is there beside what those before them keep.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.graph import UNCHANGED, Node, Value
from unity.search.held import NOTHING_MOVES, WORKING, Held, Lying
from unity.search.peak import Later, places


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
    for node in nodes:
        if node.kind not in UNCHANGED:
            continue
        (v,) = node.operands
        if v.node.kind != "input" and v not in ready:
            continue
        made = Value(node)
        ready.add(made)
        if node.kind not in NOTHING_MOVES and made in readers:
            first, last = readers[made][0], readers[made][-1]
            again = made in kept
            found.append(Ahead(Held(WORKING, node, lying.nbytes[made]), first if again else last, first if again else len(nodes)))
    return found


@dataclass(frozen=True, eq=False)
class Forward:
    """What is held while operators run forward: what those before keep (`loops`: from the start), what is made ahead, their own."""

    kept: Sequence[Sequence[Held]]
    loops: Sequence[bool]
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
        keeps = [sum(h.nbytes for h in k) for k in self.kept]
        below = sum(n for n, loop in zip(keeps, self.loops, strict=True) if loop)
        waiting = sum(a.held.nbytes for a in self.ahead)
        found = {-1: below + waiting}
        for i, (n, loop) in enumerate(zip(keeps, self.loops, strict=True)):
            waiting -= done[i]
            below += 0.0 if loop else n
            if i in self.own:
                found[i] = below + waiting + self.own[i]
        return found

    def held(self, at: int) -> list[Held]:
        """What is held at an operator's turn, but for what it works on."""
        then = [h for i, k in enumerate(self.kept) for h in k if i <= at or self.loops[i]]
        return [*then, *(a.held for a in self.ahead if a.until > at)]

    def placed(self, at: int) -> list[tuple[int, float]]:
        """The gradients in whose place something lies at an operator's turn, by number, and its bytes."""
        end = len(self.kept)
        found = [(h.nbytes, i) for i, k in enumerate(self.kept) for h in k if i <= at or self.loops[i]]
        found += [(a.held.nbytes, a.reader) for a in self.ahead if a.until > at]
        found += [(self.own[at], end)] if at in self.own else []
        sizes: dict[float, list[int]] = {}
        for n, i in sorted(found):
            if n > 0:
                sizes.setdefault(n, []).append(i)
        return places(sizes, self.later, end)
