"""What the backward pass computes again: of a remat, all that it reads and what that is made of; else what is marked so.

A change of type is marked by the attribute "again" where what it gives is not kept; an operator where its inner values are not
(`INNER`), or its result is not either (`WHOLE`). Then it runs again with its only reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unity.pcg.gradients import Gradients, carrying_in
from unity.pcg.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.residuals import Residuals, residuals

INNER, WHOLE = 1, 2  # what of an operator runs again


def in_words(again: int) -> str:
    """What the attribute "again" of an operator says."""
    words = ("all of it is kept", "inner values are computed again in the backward pass", "it runs again in the backward pass")
    return words[again]


def runs_again(node: Node) -> bool:
    """Whether an operator's result is not kept, but made again for its reader."""
    return node.kind not in PARALLELIZATION and node.attributes.get("again") == WHOLE


class Again:
    """The nodes of one graph that run once more in the backward pass."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.ids = {id(n) for n in nodes}

    def __contains__(self, node: Node) -> bool:
        return id(node) in self.ids


NOTHING = Again(())


def everything_again(graph: PCG, flow: Gradients, looped: bool) -> Again:
    """The nodes of a remat's graph that its backward pass needs; the others, its last sum perhaps, are dead code there."""
    return Again(_needed(graph, flow, looped))


def _needed(graph: PCG, flow: Gradients, looped: bool) -> Iterator[Node]:
    wanted: set[Value] = set()
    for node in reversed(graph.nodes):
        runs = not wanted.isdisjoint(node.results)
        if node.body is not None:
            kept = _kept(node, flow, looped)
            read = [v for v, flag in zip(node.operands, kept.operands, strict=True) if flag]
            wanted.update(_changed_again(v)[-1] for v in read)
            runs = runs or any(kept.results) or bool(kept.inner) or _keeps_inside(node, flow)
        elif node.inside is not None:
            runs = runs or any(flow(v) for v in node.results)
        if runs:
            wanted.update(node.operands)
            yield node


def _keeps_inside(node: Node, flow: Gradients) -> bool:
    """Whether a branch or a loop in an operator is differentiated: what that reads is made inside, so JAX runs it again."""
    assert node.body is not None
    carried = carrying_in(node, flow)
    return any(e.name in ("cond", "scan") and not carried.isdisjoint(e.results) for e in node.body.equations)


def gathered_again(graph: PCG, flow: Gradients, looped: bool) -> Again:
    """The changes of type marked to be made again, as far as the product that they are for reads its operand backward."""
    return Again(_gathered(graph, flow, looped))


def _gathered(graph: PCG, flow: Gradients, looped: bool) -> Iterator[Node]:
    for node in graph.nodes:
        if node.body is not None:
            kept = _kept(node, flow, looped)
            for v, flag in zip(node.operands, kept.operands, strict=True):
                if flag:
                    yield from (w.node for w in _changed_again(v)[:-1])


def _changed_again(v: Value) -> list[Value]:
    """An operand, through the changes that are made again for it, back to the value that is kept."""
    found = [v]
    while v.node.kind in PARALLELIZATION and v.node.attributes.get("again"):
        v = v.node.operands[0]
        found.append(v)
    return found


def _kept(node: Node, flow: Gradients, looped: bool) -> Residuals:
    assert node.body is not None
    live = any(flow(v) for v in node.results)
    return residuals(node.body, tuple(live and flow(v) for v in node.operands), looped)
