"""Where a program forks into branches that do not need each other, and joins them again.

What only one operand of an equation needs is a *branch* of it: everything that leads to this operand, and to nothing else. These
are the subtrees of the tree of post-dominators. Where several of them have work worth sharing out, their equation is a *join*. A
sum or a concatenation at the end of a branch may be a join itself: its branches are then branches of the whole.

What all devices take part in is in no branch: values of a type that the user gave, and what is walked in micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from unity.pcg.capture.heavy_operators import Uses, constants
from unity.pcg.ir.graph import CONSTRAIN
from unity.pcg.ir.program import Body, Equation
from unity.pcg.types.factors import facts_of
from unity.transforms.pipelining.micro import WALK
from unity.transforms.pipelining.splice import within

LINEAR = frozenset({"add", "add_any", "sub", "concatenate"})  # joins that leave partial sums partial sums
LOOPED = frozenset({"scan", "while"})
END = -1


@dataclass(frozen=True)
class Branch:
    """Equations of a program, by number, in order, and the one variable that the rest of it reads."""

    members: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Region:
    """Branches side by side, in the order of the operands that they are, and the equation that joins them."""

    branches: tuple[Branch, ...]
    join: int


def regions(body: Body) -> list[Region]:
    """The regions of a program, in order. None lies in another."""
    forks = _Forks(body)
    found: list[Region] = []
    taken: set[int] = set()
    for join in reversed(range(len(body.equations))):  # the outer ones first
        if join in taken or len(forks.ends(join)) < 2:
            continue
        branches = forks.branches(join)
        if sum(map(forks.deep, branches)) >= 2:
            found.append(Region(tuple(branches), join))
            taken.update(k for end in forks.ends(join) for k in forks.members(end))
    return found[::-1]


class _Forks:
    """A program's tree of post-dominators, and what there is in its subtrees."""

    def __init__(self, body: Body) -> None:
        self.body, self.uses, self.constant = body, Uses(body), constants(body)

    @cached_property
    def children(self) -> Mapping[int, Sequence[int]]:
        """Of every equation, those for which it is the next that all their paths to the results go through."""
        graph = nx.DiGraph()
        graph.add_node(END)
        for k, e in enumerate(self.body.equations):
            if e.results and e.results[0] in self.constant:
                continue
            for v in e.results:
                graph.add_edges_from((u, k) for u in self.uses.users.get(v, ()))
                if v in self.uses.ends:
                    graph.add_edge(END, k)
        found: dict[int, list[int]] = {}
        for k, d in nx.immediate_dominators(graph, END).items():
            if k != END and d is not None:
                found.setdefault(d, []).append(k)
        return found

    def members(self, root: int) -> tuple[int, ...]:
        """The equations of a subtree, in order."""
        found, waiting = [], [root]
        while waiting:
            found.append(k := waiting.pop())
            waiting += self.children.get(k, ())
        return tuple(sorted(found))

    def ends(self, join: int) -> list[int]:
        """The equations whose one result only this one reads, in the order of its operands."""
        found = []
        for a in dict.fromkeys(self.body.equations[join].operands):
            if isinstance(a, int) and a in self.uses.maker and a not in self.constant and a not in self.uses.ends:
                maker = self.uses.maker[a]
                if len(self.body.equations[maker].results) == 1 and set(self.uses.users[a]) == {join}:
                    found.append(maker)
        return found

    def branches(self, join: int) -> list[Branch]:
        """The branches that a join has work in, those of joins at their ends among them."""
        found: list[Branch] = []
        for end in self.ends(join):
            members = self.members(end)
            if not self.works(members):
                continue
            inner = self.branches(end) if self.body.equations[end].name in LINEAR else []
            found += inner if len(inner) > 1 else [Branch(members, self.body.equations[end].results[0])]
        return found

    def works(self, members: Collection[int]) -> bool:
        """Whether there is any work to share out, and nothing that must stay where all devices see it."""
        equations = [self.body.equations[k] for k in members]
        return any(_heavy(e) or _looks_up(self.body, e) for e in equations) and not any(map(_everywhere, equations))

    def deep(self, branch: Branch) -> bool:
        """Whether a branch is more than one product. One alone is as well split in itself, evenly."""
        equations = [self.body.equations[k] for k in branch.members]
        return sum(map(_heavy, equations)) > 1 or any(e.name in LOOPED or _looks_up(self.body, e) for e in equations)


def _heavy(e: Equation) -> bool:
    return facts_of(e.name).product or e.name in LOOPED


def _everywhere(e: Equation) -> bool:
    return e.name == CONSTRAIN or within(e.scope, WALK)


def _looks_up(body: Body, e: Equation) -> bool:
    """Whether an equation takes rows of a table."""
    floating = e.name == "gather" and body.tensors[e.results[0]].floating
    return floating and any(n > 1 for n in e.params["slice_sizes"])
