"""Detection of independent branches that a program forks into and joins again.

A *branch* of an equation is everything that one of its operands depends on and nothing else does: a subtree of the post-dominator
tree. An equation with several branches that have enough work is a *join*. A sum or a concatenation at the end of a branch may be a
join itself; its branches then count as branches of the outer join.

Equations in which all devices take part are in no branch: values whose type the user constrains, and pipelines in micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from unity.pcg.capture.heavy_operators import Uses, constants
from unity.pcg.ir.graph import CONSTRAIN
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import LOOPED
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import facts_of
from unity.transforms.pipelining.micro_batches import WALK
from unity.transforms.splice import within

END = -1


@dataclass(frozen=True)
class Branch:
    """Equations of a program, by number, in order, and the one variable that the rest of the program reads."""

    members: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class BranchRegion:
    """Independent branches, in the order of the operands that they compute, and the equation that joins them."""

    branches: tuple[Branch, ...]
    join: int


def regions(body: Body) -> list[BranchRegion]:
    """Return the regions of a program, in order. Regions are not nested."""
    forks = _Forks(body)
    joined: list[BranchRegion] = []
    in_regions: set[int] = set()
    for join in reversed(range(len(body.equations))):  # the outer ones first
        if join in in_regions or len(forks.ends(join)) < 2:
            continue
        branches = forks.branches(join)
        if sum(map(forks.deep, branches)) >= 2:
            joined.append(BranchRegion(tuple(branches), join))
            in_regions.update(k for end in forks.ends(join) for k in forks.members(end))
    return joined[::-1]


class _Forks:
    """A program's post-dominator tree, and queries on its subtrees."""

    def __init__(self, body: Body) -> None:
        self.body, self.uses, self.constant = body, Uses(body), constants(body)

    @cached_property
    def children(self) -> Mapping[int, Sequence[int]]:
        """For every equation, those whose immediate post-dominator it is."""
        graph = nx.DiGraph()
        graph.add_node(END)
        for k, e in enumerate(self.body.equations):
            if e.results and e.results[0] in self.constant:
                continue
            for v in e.results:
                graph.add_edges_from((u, k) for u in self.uses.users.get(v, ()))
                if v in self.uses.ends:
                    graph.add_edge(END, k)
        children_of: dict[int, list[int]] = {}
        for k, d in nx.immediate_dominators(graph, END).items():
            if k != END and d is not None:
                children_of.setdefault(d, []).append(k)
        return children_of

    def members(self, root: int) -> tuple[int, ...]:
        """Return the equations of a subtree, in order."""
        equations, waiting = [], [root]
        while waiting:
            equations.append(k := waiting.pop())
            waiting += self.children.get(k, ())
        return tuple(sorted(equations))

    def ends(self, join: int) -> list[int]:
        """Return the equations whose only result no other equation than `join` reads, in the order of its operands."""
        makers = []
        for a in dict.fromkeys(self.body.equations[join].operands):
            if isinstance(a, int) and a in self.uses.maker and a not in self.constant and a not in self.uses.ends:
                maker = self.uses.maker[a]
                if len(self.body.equations[maker].results) == 1 and set(self.uses.users[a]) == {join}:
                    makers.append(maker)
        return makers

    def branches(self, join: int) -> list[Branch]:
        """Return the branches of a join that have work, with nested joins at their ends flattened."""
        branches_of: list[Branch] = []
        for end in self.ends(join):
            members = self.members(end)
            if not self.works(members):
                continue
            inner = self.branches(end) if joins_sums(self.body, self.body.equations[end]) else []
            branches_of += inner if len(inner) > 1 else [Branch(members, self.body.equations[end].results[0])]
        return branches_of

    def works(self, members: Collection[int]) -> bool:
        """Whether equations have work to share out, and none of them needs all devices."""
        equations = [self.body.equations[k] for k in members]
        return any(_heavy(e) or _looks_up(self.body, e) for e in equations) and not any(map(_everywhere, equations))

    def deep(self, branch: Branch) -> bool:
        """Whether a branch has more work than one product, which is better split itself, evenly."""
        equations = [self.body.equations[k] for k in branch.members]
        return sum(map(_heavy, equations)) > 1 or any(e.name in LOOPED or _looks_up(self.body, e) for e in equations)


def _heavy(e: Equation) -> bool:
    return facts_of(e.name).product or e.name in LOOPED


def joins_sums(body: Body, e: Equation) -> bool:
    """Return whether an equation joins partial sums to one: it is jointly linear in all of its operands, which are several."""
    spec = spec_of(body, e)
    return spec is not None and len(e.operands) > 1 and frozenset(range(len(e.operands))) in spec.linear


def _everywhere(e: Equation) -> bool:
    return e.name == CONSTRAIN or within(e.scope, WALK)


def _looks_up(body: Body, e: Equation) -> bool:
    """Whether an equation looks up rows of a table."""
    floating = facts_of(e.name).looks_up and body.tensors[e.results[0]].floating
    return floating and any(n > 1 for n in e.params["slice_sizes"])
