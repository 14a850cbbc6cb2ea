"""Two graphs as one picture in the DOT language, with removed, added and changed nodes in colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unity.diff.graph_diff import diff_matched
from unity.diff.matching import matching
from unity.pcg.ir.dot import escaped, label
from unity.pcg.ir.graph import PCG, Node

ADDED, REMOVED, CHANGED, UNCHANGED = "#a6e9b5", "#ffb3ad", "#ffe58a", "#ffffff"


def dot(before: PCG, after: PCG, partner: Mapping[int, int]) -> str:
    """Return both graphs in the DOT language. Dashed edges are those that only the first graph has.

    Args:
        before: the first graph.
        after: the second graph.
        partner: the matched nodes, as `matching` returns them.
    """
    head = ["digraph diff {", "  rankdir=TB; node [shape=box, style=filled, fontname=Helvetica, fontsize=10];"]
    return "\n".join([*head, *_lines(before, after, partner, "n", "  "), "}"]) + "\n"


def _lines(before: PCG, after: PCG, partner: Mapping[int, int], prefix: str, indent: str) -> Iterator[str]:
    difference = diff_matched(before, after, partner)
    changed = {c.now: c for c in difference.differences}
    first_index = {j: i for i, j in partner.items()}
    old = {id(n): f"{prefix}{partner[i]}" if i in partner else f"{prefix}old{i}" for i, n in enumerate(before.nodes)}
    new = {id(n): f"{prefix}{j}" for j, n in enumerate(after.nodes)}
    new_edges = set()
    for j, node in enumerate(after.nodes):
        colour = ADDED if j not in first_index else CHANGED if j in changed else UNCHANGED
        was = before.nodes[first_index[j]] if j in changed else None
        yield _node(new[id(node)], _text(node, after, was, before), colour, indent)
        new_edges |= {(new[id(v.node)], new[id(node)]) for v in node.operands}
        if was is not None and was.inside is not None and node.inside is not None and changed[j].inside:
            name = new[id(node)]
            yield f'{indent}subgraph cluster_{name} {{ label="{escaped(f"inside of {node.kind}")}"; style=dashed;'
            inside = was.inside, node.inside
            yield from _lines(*inside, matching(*inside), f"{name}_", indent + "  ")
            yield f"{indent}}}"
    old_edges = set()
    for i, node in enumerate(before.nodes):
        if i not in partner:
            yield _node(old[id(node)], _text(node, before, None, before), REMOVED, indent)
        old_edges |= {(old[id(v.node)], old[id(node)]) for v in node.operands}
    for k, (name, edge) in enumerate(_outputs(before, old, prefix)):
        old_edges |= {edge}
        if k >= len(after.outputs):
            yield f'{indent}{name} [label="result {k}", shape=ellipse, fillcolor="{REMOVED}"];'
    for k, (name, edge) in enumerate(_outputs(after, new, prefix)):
        new_edges |= {edge}
        yield f'{indent}{name} [label="result {k}", shape=ellipse, fillcolor="{UNCHANGED if k < len(before.outputs) else ADDED}"];'
    yield from (f"{indent}{a} -> {b}{'' if (a, b) in old_edges else _edge_style(ADDED)};" for a, b in sorted(new_edges))
    yield from (f"{indent}{a} -> {b}{_edge_style(REMOVED, ', style=dashed')};" for a, b in sorted(old_edges - new_edges))


def _outputs(graph: PCG, names: dict[int, str], prefix: str) -> Iterator[tuple[str, tuple[str, str]]]:
    for k, v in enumerate(graph.outputs):
        yield f"{prefix}out{k}", (names[id(v.node)], f"{prefix}out{k}")


def _edge_style(colour: str, more: str = "") -> str:
    return f' [color="{colour}", penwidth=2{more}]'


def _node(name: str, text: str, colour: str, indent: str) -> str:
    return f'{indent}{name} [label="{escaped(text)}", fillcolor="{colour}"];'


def _text(node: Node, graph: PCG, was: Node | None, before: PCG) -> str:
    """Return a node's label, followed by its label in the first graph if that differs."""
    now = label(node, graph)
    then = label(was, before) if was is not None else now
    return now if now == then else f"{now}\nwas:\n{then}"
