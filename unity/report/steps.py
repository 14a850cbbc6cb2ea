"""The graph after every rule of the derivation, and after what became a pipeline or branches: made of a plan, kept in its file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unity.base.formatting import short
from unity.pcg.ir.compact_json import fold_all, unfold_all
from unity.plan.summary import RuleUse, read_use
from unity.report.frames import Frame, by_rules
from unity.search.joint.nested import program
from unity.transforms.rewriting import Rewriting, end_of, path_of, programs_of

if TYPE_CHECKING:
    from unity.plan.plan import Plan

MADE = (
    ("In stages", "A loop became a pipeline"),
    ("Apart", "What does not need each other runs at the same time"),
    ("Joined", "Weights that every step would join are joined once"),
)
MOST = 16  # steps by rules: of more, several that follow each other are one


def steps_of(plan: Plan, uses: Sequence[RuleUse]) -> tuple[Frame, ...]:
    """The steps between the captured program and the parallel one. `uses`: the rules that rewrote it, as a summary has them."""
    found = list(_applied(plan.rewriting, uses)) if plan.rewriting else []
    made = (plan.pipelining, plan.branching, plan.joining)
    found += [Frame(title, f"{says}: {m}.", m.after.graph) for (title, says), m in zip(MADE, made, strict=True) if m is not None]
    return tuple(found)


def _applied(rewriting: Rewriting, uses: Sequence[RuleUse]) -> Iterator[Frame]:
    """The graph after each application, where those to equal parts of the program are one."""
    whole = program(rewriting.before.body, rewriting.before.differentiated)
    bodies = programs_of(whole, rewriting.ways)
    paths = {key: path_of(part, rewriting.ways[key], rewriting.library) for key, part in bodies.items()}
    steps = [(key, k) for key, path in paths.items() for k in range(1, len(path) + 1)]
    says = {use.rule: use.says for use in uses}
    each = max(1, -(-len(steps) // MOST))
    for first in range(0, len(steps), each):
        together = steps[first : first + each]
        done = dict(steps[: first + len(together)])
        graph = rewriting.after.graph
        if first + len(together) < len(steps):
            changed = {key: end_of(bodies[key], paths[key][:k]) for key, k in done.items()}
            graph = rewriting.before.of(whole.with_segments(changed), rewriting.before.bodies).graph
        applied = rewriting.uses[first : first + each]
        lines = (tuple(dict.fromkeys(map(short, use.lines))) for use in applied)
        shown = (RuleUse(str(use.applied), says[str(use.applied)], use.times, at) for use, at in zip(applied, lines, strict=True))
        yield by_rules(tuple(dict.fromkeys(shown)), graph)


def to_json(steps: Sequence[Frame]) -> dict[str, Any]:
    """Steps as data for a plan's file."""
    told = [{"title": s.title, "says": s.says, "uses": [asdict(u) for u in s.uses]} for s in steps]
    return {"told": told, "graphs": fold_all(s.graph for s in steps)}


def from_json(data: Any) -> tuple[Frame, ...]:
    """What `to_json` gave. Raises PlanFileError, or what damaged data raise: KeyError, TypeError and the like."""
    pairs = zip(data["told"], unfold_all(data["graphs"]), strict=True)
    return tuple(Frame(str(s["title"]), str(s["says"]), graph, tuple(map(read_use, s["uses"]))) for s, graph in pairs)
