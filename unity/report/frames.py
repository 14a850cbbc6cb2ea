"""From the captured program to the plan in steps: the graph after every rule of the derivation, and how it is parallelized at last.

`steps.py` makes the steps between. Of a file that lacks them, the rules between are shown at the lines that they were applied to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from unity.base.formatting import short
from unity.diff.matching import matching
from unity.pcg.ir.graph import BRANCHES, PCG, PIPELINE, Node
from unity.pcg.parallel.serial_view import erased
from unity.plan.summary import RuleUse, Summary

MADE = {PIPELINE: "A loop is a pipeline.", BRANCHES: "What does not need each other runs at the same time."}


@dataclass(frozen=True, eq=False)
class Frame:
    """A step: what happened, and the graph then. `uses`: the rules that were applied."""

    title: str
    says: str
    graph: PCG
    uses: tuple[RuleUse, ...] = ()


@dataclass(frozen=True, eq=False)
class Told:
    """A frame and what is new in it. `keys`: a number for every node, by identity; in the next frame the same, if it is matched.

    `marked`: nodes to look at, by identity; `difference`: what came and went, in words.
    """

    frame: Frame
    keys: Mapping[int, int]
    marked: frozenset[int]
    difference: str


def frames_of(captured: Summary, planned: Summary, between: Sequence[Frame] | None) -> tuple[Frame, ...]:
    """All steps, the captured program first. `between`: those in the middle; without them, the rules are shown at their lines."""
    first = Frame("As captured", f"{len(captured.graph)} operators, as your function says them, on one device.", captured.graph)
    middle = _at_lines(captured, planned) if between is None else between
    devices = f"{planned.devices} devices" if planned.devices > 1 else "one device"
    last = f"Operators and arguments have their places on {devices}; what changes who holds which part is an operator too."
    return (first, *middle, Frame("Parallelized", last, planned.graph, planned.applications))


def _at_lines(captured: Summary, planned: Summary) -> Iterator[Frame]:
    """The rules, each shown on the captured program; then what they led to, with a pipeline or branches where there are any."""
    for use in planned.rules:
        yield by_rules((use,), captured.graph)
    kinds = {node.kind for node, _ in planned.graph.walk()}
    said = ["What all rules together lead to."] if planned.rules else []
    said += [text for kind, text in MADE.items() if kind in kinds]
    if said:
        yield Frame("Rewritten", " ".join(said), erased(planned.graph))


def by_rules(uses: tuple[RuleUse, ...], graph: PCG) -> Frame:
    """The step of one or several rules."""
    return Frame(", ".join(dict.fromkeys(u.rule for u in uses)), "\n".join(u.says for u in uses), graph, uses)


def told(frames: Sequence[Frame]) -> Iterator[Told]:
    """The frames, each compared with the one before it."""
    fresh, known = count(), _Keys()
    before: PCG | None = None
    for frame in frames:
        if frame.graph is before:
            yield Told(frame, known.keys, frozenset(_looked_at(frame)), "")
            continue
        found = _Keys()
        _number(before, frame.graph, known.keys, found, fresh)
        marked = frozenset() if before is None or frame.graph.axes else frozenset(found.new | found.other)
        yield Told(frame, found.keys, marked, _difference(before, frame.graph, len(found.other)) if before is not None else "")
        before, known = frame.graph, found


@dataclass
class _Keys:
    """Numbers of nodes by identity; those that are new, and those that were there and make or read something else."""

    keys: dict[int, int] = field(default_factory=dict)
    new: set[int] = field(default_factory=set)
    other: set[int] = field(default_factory=set)


def _number(before: PCG | None, after: PCG, old: Mapping[int, int], found: _Keys, fresh: Iterator[int]) -> None:
    """Numbers the nodes of a graph, and of those inside: what is matched keeps its number."""
    partner = {j: i for i, j in matching(before, after).items()} if before is not None else {}
    for j, node in enumerate(after.nodes):
        was = before.nodes[partner[j]] if before is not None and j in partner else None
        found.keys[id(node)] = old[id(was)] if was is not None else next(fresh)
        if was is None:
            found.new.add(id(node))
        elif node.kind != "input" and _content(was, old) != _content(node, found.keys):
            found.other.add(id(node))
        if node.inside is not None:
            _number(was.inside if was is not None else None, node.inside, old, found, fresh)


def _content(node: Node, keys: Mapping[int, int]) -> tuple[str, str, list[tuple[int, int]]]:
    program = node.body or node.outline
    return str(node.tensors), program.key if program else "", [(keys[id(v.node)], v.index) for v in node.operands]


def _looked_at(frame: Frame) -> set[int]:
    """What a rule was applied to, as far as its lines say."""
    lines = {line for use in frame.uses for line in use.lines}
    return {id(n) for n, _ in frame.graph.walk() if n.source and short(n.source) in lines}


def _difference(before: PCG, after: PCG, others: int) -> str:
    """`+ 3 reduce, + combine, − 2 dot_general`: how many operators of each kind there are more, and fewer."""
    kinds = [Counter(n.kind for n, _ in g.walk() if n.kind != "input") for g in (before, after)]
    more, fewer = kinds[1] - kinds[0], kinds[0] - kinds[1]
    said = [f"+ {n} {kind}" for kind, n in more.most_common()] + [f"− {n} {kind}" for kind, n in fewer.most_common()]
    return ", ".join(said) or f"{others} operators make or read something else"
