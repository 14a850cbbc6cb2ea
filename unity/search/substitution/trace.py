"""The trace of a search: the rules applied by every step, and by every simplification that the step allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unity.base.documents import Record
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.parallel_type import State
from unity.search.substitution.space import Axes, Graph, GraphSpace
from unity.search.substitution.substitutions import SubstitutionStep, after, choice_on


class RuleApplication(Record):
    """An applied rule (in which `a` is the applied degree), the operator or place it was applied to, the user's line, and the mesh
    axes.
    """

    rule: str
    operator: str
    source: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.rule}, at {self.operator}{where}, a = {'·'.join(self.axes)}"


def trace(space: GraphSpace, steps: Sequence[SubstitutionStep]) -> tuple[RuleApplication, ...]:
    """Return all rules applied since the serial graph, in order."""
    applications, graph = list[RuleApplication](), space.serial
    for step in steps:
        new = after(space, graph, step)
        applications += _applications(space, graph, new, step)
        graph = new
    return tuple(applications)


def _applications(space: GraphSpace, old: Graph, new: Graph, step: SubstitutionStep) -> Iterator[RuleApplication]:
    for s, choice in step.choices:
        kind = space.kinds[s]
        before = choice_on(space, old, s, step.axes)
        assert before is not None
        if before != kind.serial:
            yield _at(space, s, f"{rule_of(space, s, kind.choices[before])} (backward)", step.axes)
        if choice != kind.serial:
            yield _at(space, s, rule_of(space, s, kind.choices[choice]), step.axes)
    changed, placed = dict(step.choices), dict(step.placed)
    for u, edges in enumerate(space.edges):
        for p, (source, position, _) in enumerate(edges):
            if (u in changed or source in changed) and source not in placed and (u not in placed or space.users[u]):
                producer_state, user_state = _state(space, new, source, position, step.axes), _state(space, new, u, p, step.axes)
                rule = (
                    simplified(producer_state, user_state, space.sites[u].ports[p].tensor.ndim)
                    if producer_state and user_state
                    else ""
                )
                if rule:
                    yield _at(space, u if space.sites[u].node else source, rule, step.axes)


def _state(space: GraphSpace, graph: Graph, s: int, end: int, axes: Axes) -> State | None:
    choice = choice_on(space, graph, s, axes)
    return None if choice is None else space.kinds[s].choices[choice].states[end]


def _at(space: GraphSpace, s: int, rule: str, axes: Axes) -> RuleApplication:
    site, names = space.sites[s], tuple(space.machine.axes[i].name for i in axes)
    while site.node is None:  # a place has no line of its own: use that of its value
        site = space.sites[site.ports[0].source]
    name = site.node.name if site.kind == "input" else site.node.kind
    return RuleApplication(rule, name, site.node.source, names)


def rule_of(space: GraphSpace, s: int, choice: Choice) -> str:
    """Return the rule that a choice of a site is, in the language of `unity.substitutions.language.text`; for a place, in words."""
    site = space.sites[s]
    ranks = [p.tensor.ndim for p in site.ports], [t.ndim for t in site.results]
    if site.kind != "operator":
        (result,) = choice.results
        change = _changed("x", result, ranks[1][0])
        if site.kind == "input":
            return f"{change} = x, an argument that is stored so"
        return f"{change} once, for all that use x" if space.users[s] else f"{_back('x', result, ranks[1][0])} = x, a result"
    names = [f"x{p}" if len(site.ports) > 3 else "xyz"[p] for p in range(len(site.ports))]
    assert site.node is not None
    # what an operator can be given only by its neighbour (a partial sum) or only leave to it (a replica) moves through it
    left = [f"reduce(a, {x})" if s.kind == "S" else x for x, s in zip(names, choice.operands, strict=True)]
    right = [_changed(x, s, rank) for x, s, rank in zip(names, choice.operands, ranks[0], strict=True)]
    before, now = (f"{site.node.kind}({', '.join(arguments)})" for arguments in (left, right))
    results = list(zip(choice.results, ranks[1], strict=True))
    indexed = [""] if len(results) == 1 else [f".{k}" for k in range(len(results))]
    lefts = [f"replicate(a, {before}{i})" if s.kind == "R" else f"{before}{i}" for i, (s, _) in zip(indexed, results, strict=True)]
    rights = [_back(f"{now}{i}", s, rank) for i, (s, rank) in zip(indexed, results, strict=True)]
    return f"{_tuple(lefts)} = {_tuple(rights)}"


def _tuple(sides: Sequence[str]) -> str:
    return sides[0] if len(sides) == 1 else f"({', '.join(sides)})"


def _dim(state: State, rank: int) -> str:
    return f"{state.dim - rank}" if state.outer == 1 else f"{state.dim - rank}/{state.outer}"


def _changed(x: str, state: State, rank: int) -> str:
    """Return an operand converted to a state."""
    return {"P": f"partition({_dim(state, rank)}, a, {x})", "R": f"replicate(a, {x})"}.get(state.kind, x)


def _back(x: str, state: State, rank: int) -> str:
    """Return a result converted back from a state."""
    return {"P": f"combine({_dim(state, rank)}, a, {x})", "S": f"reduce(a, {x})"}.get(state.kind, x)


def simplified(producer_state: State, user_state: State, rank: int) -> str:
    """Return the rule by which neighbours on an edge become fewer; empty if none applies."""
    d, e = _dim(producer_state, rank), _dim(user_state, rank)
    if producer_state.kind == "P" and producer_state == user_state:
        return f"partition({d}, a, combine({d}, a, x)) = x"
    return {
        "PP": f"partition({e}, a, combine({d}, a, x)) = combine_partition({d}, {e}, a, x)",
        "PR": f"replicate(a, combine({d}, a, x)) = combine_replicate({d}, a, x)",
        "SP": f"partition({e}, a, reduce(a, x)) = reduce_partition({e}, a, x)",
    }.get(producer_state.kind + user_state.kind, "")
