"""Recording of a parallel graph as the rules that derive it from the serial one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unity.base.errors import DerivationError
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State
from unity.substitutions.language.library import Library, LibraryEntry
from unity.substitutions.language.parallel_derivation import Change, Changes, Parallelization, Row, Split
from unity.verify.proofs.splits import justifies

# The name and hash of the rule that justifies an operator's states along an axis; empty texts if there is none.
RuleCache = dict[tuple[str, str, tuple[State, ...], Axis], tuple[str, str]]


def recorded(serial: PCG, parallel: PCG, library: Library) -> Parallelization:
    """Return the rules that derive a parallel graph, each named where the library has it.

    Raises DerivationError if the parallel graph is of another serial graph.
    """
    entries, cache = [e for e in library.entries if e.rule.parallel], RuleCache()
    pairs = list(_pairs(serial, parallel))
    rows = tuple(_row(old, new, parallel.axes, entries, cache) for old, new in pairs)
    outputs = tuple(tuple(_through(v)[0] for v in graph.outputs) for graph in parallel.graphs())
    return Parallelization(rows, outputs)


def _pairs(serial: PCG, parallel: PCG) -> Iterator[tuple[Node, Node]]:
    """Yield the nodes of the serial graph with their counterparts, which are in the same order in the parallel graph."""
    counterparts = [node for node in parallel.nodes if node.kind not in PARALLELIZATION]
    if [n.kind for n in serial.nodes] != [n.kind for n in counterparts]:
        raise DerivationError("the parallel graph without its parallelization operators has other operators than the serial one")
    for old, new in zip(serial.nodes, counterparts, strict=True):
        yield old, new
        if old.inside is not None and new.inside is not None:
            yield from _pairs(old.inside, new.inside)


def _row(old: Node, new: Node, axes: Sequence[Axis], entries: Sequence[LibraryEntry], cache: RuleCache) -> Row:
    changes = tuple(_through(v)[0] for v in new.operands)
    if new.body is None:
        return Row((), new.types, changes)
    again = 0 if old.again else int(new.again)
    return Row(tuple(_split(new, k, axis, entries, cache) for k, axis in enumerate(axes)), (), changes, again)


def _through(v: Value) -> tuple[Changes, Value]:
    """Return the parallelization operators that lead to a value, in order, and the value before them."""
    changes: list[Change] = []
    while v.node.kind in PARALLELIZATION:
        changes.append(Change(v.node.kind, v.type, bool(v.node.again)))
        v = v.node.operands[0]
    return tuple(reversed(changes)), v


def _split(node: Node, k: int, axis: Axis, entries: Sequence[LibraryEntry], cache: RuleCache) -> Split:
    """Return an operator's states along the axis of number `k`, with the library's rule about them."""
    operands, results = tuple(v.type[k] for v in node.operands), tuple(t[k] for t in node.types)
    assert node.body is not None
    key = (node.kind, node.body.key, operands + results, axis)
    if key not in cache:
        entry = None
        if any(s.kind in "PS" for s in operands + results):
            entry = next((e for e in entries if justifies(e.rule, node.body, operands + results, axis)), None)
        cache[key] = ("", "") if entry is None else (entry.rule.name, entry.hash)
    return Split(node.kind, operands, results, *cache[key])
