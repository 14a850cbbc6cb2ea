"""Writing down a parallel graph as the rules that lead to it from the serial one (`parallelized`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unity.base.errors import DerivationError
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State
from unity.substitutions.language.library import Library, LibraryEntry
from unity.substitutions.language.parallel_derivation import Change, Changes, Parallelization, Row, Split
from unity.verify.proofs.splits import says

Known = dict[tuple[str, str, tuple[State, ...], Axis], tuple[str, str]]  # rules that were looked for, and found or not


def recorded(serial: PCG, parallel: PCG, library: Library) -> Parallelization:
    """The rules of a parallel graph, of the library where it has one. Raises DerivationError if it is of another serial graph."""
    entries, known = [e for e in library.entries if e.rule.parallel], Known()
    pairs = list(_pairs(serial, parallel))
    rows = tuple(_row(old, new, parallel.axes, entries, known) for old, new in pairs)
    outputs = tuple(tuple(_through(v)[0] for v in graph.outputs) for graph in _graphs(parallel))
    return Parallelization(rows, outputs)


def _graphs(graph: PCG) -> Iterator[PCG]:
    yield graph
    for node in graph.nodes:
        if node.inside is not None:
            yield from _graphs(node.inside)


def _pairs(serial: PCG, parallel: PCG) -> Iterator[tuple[Node, Node]]:
    """The nodes of the serial graph, each with what it has become: what is put between them leaves their order."""
    made = [node for node in parallel.nodes if node.kind not in PARALLELIZATION]
    if [n.kind for n in serial.nodes] != [n.kind for n in made]:
        raise DerivationError("the parallel graph without its parallelization operators has other operators than the serial one")
    for old, new in zip(serial.nodes, made, strict=True):
        yield old, new
        if old.inside is not None and new.inside is not None:
            yield from _pairs(old.inside, new.inside)


def _row(old: Node, new: Node, axes: Sequence[Axis], entries: Sequence[LibraryEntry], known: Known) -> Row:
    changes = tuple(_through(v)[0] for v in new.operands)
    if new.body is None:
        return Row((), new.types, changes)
    again = 0 if old.attributes.get("again") else int(new.attributes.get("again", 0))
    return Row(tuple(_split(new, k, axis, entries, known) for k, axis in enumerate(axes)), (), changes, again)


def _through(v: Value) -> tuple[Changes, Value]:
    """The parallelization operators behind a value, in order, and what they begin with."""
    found: list[Change] = []
    while v.node.kind in PARALLELIZATION:
        found.append(Change(v.node.kind, v.type, bool(v.node.attributes.get("again"))))
        v = v.node.operands[0]
    return tuple(reversed(found)), v


def _split(node: Node, k: int, axis: Axis, entries: Sequence[LibraryEntry], known: Known) -> Split:
    operands, results = tuple(v.type[k] for v in node.operands), tuple(t[k] for t in node.types)
    assert node.body is not None
    key = (node.kind, node.body.key, operands + results, axis)
    if key not in known:
        found = None
        if any(s.kind in "PS" for s in operands + results):
            found = next((e for e in entries if says(e.rule, node.body, operands + results, axis)), None)
        known[key] = ("", "") if found is None else (found.rule.name, found.hash)
    return Split(node.kind, operands, results, *known[key])
