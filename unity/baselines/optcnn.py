"""OptCNN (Jia et al., "Exploring Hidden Dimensions in Parallelizing Convolutional Neural Networks", ICML 2018), algorithm 1.

A graph of layers is made smaller by two eliminations that keep an optimal strategy, until neither applies; what is left is
enumerated, and the eliminations are undone. A chain, and all that is put together from chains in series and side by side, ends as
two layers. Time alone is minimized, whatever the memory. Costs are this project's, strategies are OptCNN's (`optcnn_space`), and of
a large machine those that a first search looks at (`configurations.LADDER`).

A recurrent network is far from a chain: what its eliminations leave has up to 1e57 strategies, and FlexFlow's authors, to compare,
fused all of a layer's steps by hand. There the strategy that enumeration would find is found by exact elimination of operators with
any number of neighbours (`minimizer`), which is no part of the published algorithm: its seconds say nothing about OptCNN, what it
finds is the best of OptCNN's strategies all the same.

Where the paper's graph has a direction so has this one; but a scan's carry closes a circle, so an edge may come to lead from a
layer to itself. It is a cost of that layer's configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import product

import numpy as np

from unity.base.errors import InfeasibleError, UnityError
from unity.baselines.optcnn_space import layerwise, light
from unity.search.published import Asked
from unity.search.session import Candidate, Search
from unity.search.solver import minplus
from unity.search.solver.minimizer import minimize
from unity.search.solver.problem import Array, Cost, Edge, Point, Problem, best_alternatives, points

ENUMERATED = 10**8  # strategies of a final graph, at most; where there are more, others than the published eliminations go on
BLOCK = 10**6  # of them that are added up at once
NOTHING = "OptCNN splits operators along dimensions of their outputs alone, and no such strategy can be run"


class IrreducibleError(UnityError):
    """The two eliminations leave a graph with too many strategies to be enumerated, and too dense for others."""

    docs = "searches"


@dataclass(frozen=True)
class Reduced:
    """What algorithm 1 found, and what it did.

    `values`: a configuration for every variable. `nodes`: of the graph of layers; `final`: of the final graph (K in the paper).
    """

    values: tuple[int, ...]
    seconds: float
    nodes: int
    final: int
    node_eliminations: int
    edge_eliminations: int


def optcnn(search: Search, asked: Asked) -> Candidate:
    """The fastest of OptCNN's strategies. What is asked of memory does not change it.

    Raises:
        IrreducibleError: the graph is too far from a chain.
        InfeasibleError: none of OptCNN's strategies can be run.
    """
    search.say("eliminating nodes and edges (OptCNN)")
    problem = layerwise(search.assembled)
    found = optimal(problem, light(search.assembled.opened))
    return search.candidate(search.assembled, point_of(problem, found.values))


def point_of(problem: Problem, values: Sequence[int]) -> Point:
    """A strategy with the fastest alternative everywhere."""
    chosen = np.array([values])
    (point,) = points(problem, chosen, best_alternatives(problem, chosen, np.array([[1.0, 0.0]])), exact=True)
    return point


def optimal(problem: Problem, rim: Sequence[bool] = ()) -> Reduced:
    """Algorithm 1. `rim`: the variables that are part of a layer if they are joined to one other alone (without: none)."""
    allowed = [np.flatnonzero(np.isfinite(cost.time).any(0)) for cost in problem.unary]
    if not all(map(len, allowed)):
        raise InfeasibleError(NOTHING)
    layers = Layers({v: cost.time.min(0)[allowed[v]] for v, cost in enumerate(problem.unary)})
    for edge in problem.edges:
        layers.insert(edge.first, edge.second, edge.cost.time.min(0)[np.ix_(allowed[edge.first], allowed[edge.second])])
    layers.edge_eliminations = 0  # of tensors that two layers have in common; those to come are the algorithm's
    light = [v for v in layers.costs if v < len(rim) and rim[v]]
    layers.fold(light)
    nodes = len(layers.costs)
    layers.eliminate(light)
    final = len(layers.costs)
    chosen, seconds = dict[int, int](), layers.apart
    for part in layers.parts():
        best, least = enumerated(layers, part)
        chosen |= best
        seconds += least
    if not math.isfinite(seconds):
        raise InfeasibleError(NOTHING)
    layers.undo(chosen)
    values = tuple(int(allowed[v][chosen[v]]) for v in range(len(allowed)))
    return Reduced(values, seconds, nodes, final, layers.node_eliminations, layers.edge_eliminations)


Joined = list[tuple[int, Array]]  # other layers, and the cost of the tensors between, [C, C_other]


@dataclass(eq=False)
class Layers:
    """G: seconds of every layer's configurations, t_c + t_s [C], and of each tensor between two, t_x [C_i, C_j]. Mutable."""

    costs: dict[int, Array]
    tensors: dict[tuple[int, int], Array] = field(default_factory=dict)
    before: dict[int, dict[int, None]] = field(default_factory=dict)
    after: dict[int, dict[int, None]] = field(default_factory=dict)
    taken: list[tuple[int, Array, Joined]] = field(default_factory=list)  # away: layers, their t_c + t_s and tensors
    apart: float = 0.0  # seconds of what was folded and is joined to nothing
    node_eliminations: int = 0
    edge_eliminations: int = 0

    def __post_init__(self) -> None:
        self.before = {v: {} for v in self.costs}
        self.after = {v: {} for v in self.costs}

    def insert(self, i: int, j: int, table: Array) -> None:
        """A further edge. Edge elimination: of two between the same layers in the same direction the sum is left (equation 3)."""
        if i == j:
            self.costs[i] = self.costs[i] + table.diagonal()
        elif (i, j) in self.tensors:
            self.tensors[i, j] = self.tensors[i, j] + table
            self.edge_eliminations += 1
        else:
            self.tensors[i, j] = table
            self.after[i][j] = self.before[j][i] = None

    def remove(self, v: int) -> Joined:
        """Takes a layer and its edges away, and gives these."""
        found = [(i, self.tensors.pop((i, v)).T) for i in self.before.pop(v)]
        found += [(k, self.tensors.pop((v, k))) for k in self.after.pop(v)]
        for other, _ in found:
            self.after[other].pop(v, None)
            self.before[other].pop(v, None)
        self.taken.append((v, self.costs.pop(v), found))
        return found

    def neighbours(self, v: int) -> dict[int, None]:
        return self.before[v] | self.after[v]

    def fold(self, light: Iterable[int]) -> None:
        """Makes what is at the rim part of the layer beside it, and of that one's cost what it costs at best there."""
        may, waiting = set(light), list(light)
        while waiting:
            v = waiting.pop()
            if v in self.costs and len(others := list(self.neighbours(v))) <= 1 < len(self.costs):
                own = self.costs[v]
                total = own[:, None] + sum(table for _, table in self.remove(v))
                for u in others:
                    self.costs[u] = self.costs[u] + np.asarray(total).min(axis=0)
                    waiting += [u] if u in may else []
                self.apart += 0.0 if others else float(own.min())

    def eliminate(self, light: Sequence[int]) -> None:
        """Node and edge eliminations, until there are none (lines 6 to 13)."""
        while self._nodes():
            self.fold(light)

    def _nodes(self) -> bool:
        """Eliminates every layer with one in-edge and one out-edge (equation 2). Whether there was any."""
        done, waiting = self.node_eliminations, list(self.costs)[::-1]
        while waiting:
            j = waiting.pop()
            if j in self.costs and len(self.before[j]) == len(self.after[j]) == 1:
                own = self.costs[j]
                (i, first), (k, second) = self.remove(j)
                self.insert(i, k, minplus.product(first.T[None], own[None], second[None])[0])
                self.node_eliminations += 1
                waiting += [i, k]
        return self.node_eliminations > done

    def parts(self) -> Iterator[list[int]]:
        """The layers that are left, by what is joined."""
        left = dict.fromkeys(self.costs)
        while left:
            part, waiting = [], [next(iter(left))]
            while waiting:
                v = waiting.pop()
                if v in left:
                    del left[v]
                    part.append(v)
                    waiting += self.neighbours(v)
            yield sorted(part)

    def undo(self, chosen: dict[int, int]) -> None:
        """Adds the best configuration of each layer that was taken away, the last one first (lines 15 to 23)."""
        for v, own, joined in reversed(self.taken):
            total = own + sum(table[:, chosen[other]] for other, table in joined)
            chosen[v] = int(np.argmin(total))


def enumerated(layers: Layers, part: Sequence[int]) -> tuple[dict[int, int], float]:
    """The best of all strategies of a final graph, and its seconds (line 14). Of equal ones, the first; or any, if they are too
    many to be enumerated.

    Raises IrreducibleError if there is no other way, either.
    """
    sizes = {v: len(layers.costs[v]) for v in part}
    if math.prod(sizes.values()) > ENUMERATED:
        return _eliminated(layers, part)
    inner = list(part)  # those whose configurations are added up at once
    while math.prod(sizes[v] for v in inner) > BLOCK:
        inner.pop(0)
    outer = part[: len(part) - len(inner)]
    best, least = dict.fromkeys(part, 0), math.inf
    for fixed in product(*(range(sizes[v]) for v in outer)):
        total = _total(layers, dict(zip(outer, fixed, strict=True)), inner)
        where = int(np.argmin(total))
        if total.flat[where] < least:
            least = float(total.flat[where])
            found = np.unravel_index(where, total.shape)
            best = dict(zip((*outer, *inner), (*fixed, *map(int, found)), strict=True))
    return best, least


def _eliminated(layers: Layers, part: Sequence[int]) -> tuple[dict[int, int], float]:
    """What enumeration would find, by eliminations of any number of neighbours."""
    number = {v: k for k, v in enumerate(part)}
    unary = tuple(_time(layers.costs[v]) for v in part)
    edges = tuple(Edge(number[i], number[j], _time(table)) for (i, j), table in layers.tensors.items() if i in number)
    found = minimize(Problem(tuple(map(len, (layers.costs[v] for v in part))), unary, edges), [0.0])
    if not found:
        return dict.fromkeys(part, 0), math.inf
    if not found[0].exact:
        count = Decimal(math.prod(len(layers.costs[v]) for v in part))
        raise IrreducibleError(
            f"OptCNN's node and edge eliminations leave {len(part)} layers with {count:.2g} strategies, more than the"
            f" {ENUMERATED:.0g} that can be enumerated, and joined too closely for other eliminations: its algorithm is for graphs"
            " that are nearly chains. Take another search"
        )
    return dict(zip(part, found[0].values, strict=True)), found[0].time


def _time(seconds: Array) -> Cost:
    """A table that costs nothing but time."""
    return Cost("", seconds[None], np.zeros((1, *seconds.shape)))


def _total(layers: Layers, fixed: Mapping[int, int], inner: Sequence[int]) -> Array:
    """Equation 1 for all configurations of some layers, [C, C, …], where those of the others are fixed."""
    scopes = [*(((v,), layers.costs[v]) for v in (*fixed, *inner))]
    scopes += [(ends, table) for ends, table in layers.tensors.items() if all(v in fixed or v in inner for v in ends)]
    total = np.zeros([len(layers.costs[v]) for v in inner])
    for scope, table in scopes:
        table = table[tuple(fixed.get(v, slice(None)) for v in scope)]
        own = [v for v in scope if v not in fixed]
        if own != sorted(own, key=inner.index):
            table, own = table.T, own[::-1]
        total = total + table.reshape([len(layers.costs[v]) if v in own else 1 for v in inner])
    return total
