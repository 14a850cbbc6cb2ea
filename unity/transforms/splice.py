"""Replacement of some of a body's equations by a program, and transfer of the user's lines to operators that were traced again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import takewhile

from unity.base.formatting import short
from unity.pcg.capture.capture import graph_of
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.program import Atom, Body, Equation


def spliced(
    body: Body, gone: Collection[int], given: Sequence[Atom], results: Sequence[int], program: Body, named: Equation, scope: str
) -> Body:
    """Return the body with some equations replaced by a program, at the position of the last of them.

    Args:
        body: the body.
        gone: the variables whose equations are replaced.
        given: the variables that the program reads, in its order.
        results: the variables that the program computes.
        program: the program.
        named: the equation whose line and scope the program's equations get.
        scope: a scope below that one, by which the equations can be recognized (`within`).
    """
    start = max(body.tensors) + 1
    same: dict[int, Atom] = {v: start + k for k, v in enumerate(program.tensors)}
    same |= dict(zip(program.inputs, given, strict=True))
    same |= {a: v for a, v in zip(program.outputs, results, strict=True) if isinstance(a, int)}

    def of(a: Atom) -> Atom:
        return same[a] if isinstance(a, int) else a

    def renamed(p: Equation) -> Equation:
        outputs = tuple(v for v in map(of, p.results) if isinstance(v, int))
        placed = p.with_provenance_of(named)
        return replace(placed, operands=tuple(map(of, p.operands)), results=outputs, scope=f"{named.scope}/{scope}")

    leaving = [k for k, e in enumerate(body.equations) if set(e.results) & set(gone)]
    remaining = [e for k, e in enumerate(body.equations) if k not in set(leaving)]
    at = leaving[-1] + 1 - len(leaving)
    equations = (*remaining[:at], *map(renamed, program.equations), *remaining[at:])
    tensors = {v: program.tensors[p] for p, v in same.items() if isinstance(v, int)}
    return used(Body(body.inputs, body.outputs, equations, {**tensors, **body.tensors}))


def in_order(body: Body, gone: Collection[int], after: Collection[int]) -> Body:
    """Return the body, reordered: equations that are to be replaced come after all that they may read, and before their readers.

    Args:
        body: the body.
        gone: the numbers of the equations that a program will replace.
        after: the numbers of the equations that depend on their results.
    """
    order = sorted(range(len(body.equations)), key=lambda k: (k in after, k in gone, k))
    return replace(body, equations=tuple(body.equations[k] for k in order))


def within(scope: str, called: str) -> bool:
    """Whether a scope is that of equations that `spliced` inserted with the scope `called`."""
    return scope.endswith(f"/{called}")


def variables_of(atoms: Sequence[object]) -> list[int]:
    """Return the variables among atoms."""
    return [a for a in atoms if isinstance(a, int)]


def operator_at(equation: Equation) -> str:
    """Return an equation's primitive and source line, in words, and the library function that the line calls, if that has it."""
    name = equation.name
    part = f" in {equation.library}" if equation.library not in ("", name) else ""
    return f"{name}{part} at {short(equation.source)}" if equation.source else name


def named(graph: PCG, before: PCG) -> PCG:
    """Return a graph with another's lines, if both have the same operators in the same order; otherwise unchanged."""
    return beginning(graph, before) if _kinds(graph) == _kinds(before) else graph


def aligned(graph: PCG, before: PCG) -> PCG:
    """Return a graph with another's lines, where the kinds of both align; operators in between get the line before them."""
    operators, others = _operators(graph), _operators(before)
    pairs = {
        a + k: others[b + k]
        for a, b, size in SequenceMatcher(None, _kinds(graph), _kinds(before), autojunk=False).get_matching_blocks()
        for k in range(size)
    }
    changed, last = {}, next(iter(pairs.values()), None)
    for k, node in enumerate(operators):
        last, inside = pairs.get(k, last), node.inside
        if last is None:
            continue
        if inside is not None and k in pairs and last.inside is not None:
            inside = aligned(inside, last.inside)
        changed[id(node)] = _on_the_lines_of(last, replace(node, inside=inside))
    return with_nodes(graph, changed)


def beginning(graph: PCG, before: PCG) -> PCG:
    """Return a graph with another's lines, for the common prefix of their operators."""
    changed = {}
    for node, old in takewhile(lambda pair: pair[0].kind == pair[1].kind, zip(_operators(graph), _operators(before), strict=False)):
        inside = node.inside
        if inside is not None and old.inside is not None:
            inside = aligned(inside, old.inside)
        changed[id(node)] = _on_the_lines_of(old, replace(node, inside=inside))
    return with_nodes(graph, changed)


def with_steps(graph: PCG, scope: str, step: Body, before: PCG) -> PCG:
    """Return a graph with the lines of a step's operators in its only scan of a scope, which was made from that step.

    `before` is the graph before it was made. Steps that were traced more than once have their lines there only.
    """
    graph = with_lines_of_scans(graph, before)
    (loop,) = [n for n in graph.nodes if n.kind == "scan" and within(n.scope, scope)]
    assert loop.inside is not None
    old = graph_of(step, [f"operand {p}" for p in range(len(step.inputs))])
    for inside in steps_at(before, loop.source):
        old = named(old, inside)
    return with_nodes(graph, {id(loop): replace(loop, inside=beginning(loop.inside, old))})


def with_lines_of_scans(graph: PCG, before: PCG) -> PCG:
    """Return a graph whose scans have the lines of the scans of another at the same line, if they have the same operators."""
    changed = {}
    for node in graph.nodes:
        if node.kind == "scan" and node.inside is not None:
            inside = node.inside
            for old in steps_at(before, node.source):
                inside = named(inside, old)
            changed[id(node)] = node if inside is node.inside else replace(node, inside=inside)
    return with_nodes(graph, changed)


def steps_at(graph: PCG, source: str) -> list[PCG]:
    """Return the steps of the scans at a line."""
    return [n.inside for n in graph.nodes if n.kind == "scan" and n.source == source and n.inside is not None]


def _on_the_lines_of(old: Node, node: Node) -> Node:
    lines = old.lines if node.body is old.body else ()
    return replace(node, source=old.source, scope=old.scope, lines=lines)


def _operators(graph: PCG) -> list[Node]:
    return [n for n in graph.nodes if n.kind not in ("input", "constant")]


def _kinds(graph: PCG) -> list[str]:
    return [n.kind for n in _operators(graph)]


def with_nodes(graph: PCG, changed: Mapping[int, Node]) -> PCG:
    """Return a graph with some nodes, by id, replaced by others with the same operands."""
    new: dict[int, Node] = {}
    for node in graph.nodes:
        replacement = changed.get(id(node), node)
        operands = tuple(Value(new[id(v.node)], v.index) if id(v.node) in new else v for v in replacement.operands)
        same = all(v.node is w.node for v, w in zip(operands, replacement.operands, strict=True))
        new[id(node)] = replacement if same else replace(replacement, operands=operands)
    return PCG(graph.inputs, tuple(Value(new[id(v.node)], v.index) for v in graph.outputs), graph.axes)
