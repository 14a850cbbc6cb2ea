"""OptCNN (Jia et al., "Exploring Hidden Dimensions in Parallelizing Convolutional Neural Networks", ICML 2018), algorithm 1.

A graph of layers is reduced by two eliminations that preserve an optimal strategy, until neither applies; the strategies of the
final graph are enumerated, and the eliminations are undone. A chain, or any graph composed of chains in series and in parallel,
ends as two layers. Time alone is minimized, whatever the memory. Costs are this project's, strategies are OptCNN's
(`optcnn_space`); on a large machine they are those that a first search considers (`configurations.LADDER`).

A recurrent network is far from a chain: its final graph has up to 1e57 strategies, and FlexFlow's authors, for their comparison,
fused all steps of a layer by hand. Here the strategy that enumeration would find is found by exact elimination of operators with
any number of neighbours (`minimizer`). That is not part of the published algorithm: its seconds say nothing about OptCNN, but its
result is the best of OptCNN's strategies all the same.

Edges have the direction that they have in the paper's graph. A scan's carry closes a cycle, so an edge may come to lead from a
layer to itself; it is then a cost of that layer's configuration.
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

ENUMERATED = 10**8  # strategies of a final graph that are enumerated; if there are more, further eliminations replace enumeration
BLOCK = 10**6  # strategies that are evaluated at once
NOTHING = "OptCNN splits operators along dimensions of their outputs alone, and no such strategy can be run"


class IrreducibleError(UnityError):
    """The two eliminations leave a graph with too many strategies to enumerate, and too dense for other eliminations."""

    docs = "searches"


@dataclass(frozen=True)
class OptcnnResult:
    """The result of algorithm 1.

    Args:
        values: a configuration for every variable.
        seconds: the time of this strategy.
        nodes: the number of layers.
        final: the number of layers of the final graph (K in the paper).
        node_eliminations: how many node eliminations were made.
        edge_eliminations: how many edge eliminations were made.
    """

    values: tuple[int, ...]
    seconds: float
    nodes: int
    final: int
    node_eliminations: int
    edge_eliminations: int


def optcnn(search: Search, asked: Asked) -> Candidate:
    """Return the fastest of OptCNN's strategies. A memory limit does not change it.

    Raises:
        IrreducibleError: the graph is too far from a chain.
        InfeasibleError: none of OptCNN's strategies can be run.
    """
    search.say("eliminating nodes and edges (OptCNN)")
    problem = layerwise(search.assembled)
    result = optimal(problem, light(search.assembled.opened))
    return search.candidate(search.assembled, point_of(problem, result.values))


def point_of(problem: Problem, values: Sequence[int]) -> Point:
    """Return a strategy with the fastest alternative everywhere."""
    chosen = np.array([values])
    (point,) = points(problem, chosen, best_alternatives(problem, chosen, np.array([[1.0, 0.0]])), exact=True)
    return point


def optimal(problem: Problem, rim: Sequence[bool] = ()) -> OptcnnResult:
    """Run algorithm 1. `rim` marks the variables that become part of a layer if that is their only neighbour; none by default."""
    allowed = [np.flatnonzero(np.isfinite(cost.time).any(0)) for cost in problem.unary]
    if not all(map(len, allowed)):
        raise InfeasibleError(NOTHING)
    layers = LayerGraph({v: cost.time.min(0)[allowed[v]] for v, cost in enumerate(problem.unary)})
    for edge in problem.edges:
        layers.insert(edge.first, edge.second, edge.cost.time.min(0)[np.ix_(allowed[edge.first], allowed[edge.second])])
    layers.edge_eliminations = 0  # inserting several tensors between two layers does not count as elimination
    light = [v for v in layers.costs if v < len(rim) and rim[v]]
    layers.fold(light)
    nodes = len(layers.costs)
    layers.eliminate(light)
    final = len(layers.costs)
    chosen, seconds = dict[int, int](), layers.isolated_seconds
    for part in layers.parts():
        best, least = enumerated(layers, part)
        chosen |= best
        seconds += least
    if not math.isfinite(seconds):
        raise InfeasibleError(NOTHING)
    layers.undo(chosen)
    values = tuple(int(allowed[v][chosen[v]]) for v in range(len(allowed)))
    return OptcnnResult(values, seconds, nodes, final, layers.node_eliminations, layers.edge_eliminations)


Joined = list[tuple[int, Array]]  # the layers that a layer is joined to, and the cost of the tensors between, [C, C_other]


@dataclass(eq=False)
class LayerGraph:
    """The mutable graph G: seconds of each layer's configurations, t_c + t_s [C], and of tensors between two, t_x [C_i, C_j]."""

    costs: dict[int, Array]
    tensors: dict[tuple[int, int], Array] = field(default_factory=dict)
    before: dict[int, dict[int, None]] = field(default_factory=dict)
    after: dict[int, dict[int, None]] = field(default_factory=dict)
    removed: list[tuple[int, Array, Joined]] = field(default_factory=list)  # removed layers, their t_c + t_s and tensors
    isolated_seconds: float = 0.0  # seconds of folded layers without neighbours
    node_eliminations: int = 0
    edge_eliminations: int = 0

    def __post_init__(self) -> None:
        self.before = {v: {} for v in self.costs}
        self.after = {v: {} for v in self.costs}

    def insert(self, i: int, j: int, table: Array) -> None:
        """Add an edge. Edge elimination: two edges between the same layers in the same direction become their sum (equation 3)."""
        if i == j:
            self.costs[i] = self.costs[i] + table.diagonal()
        elif (i, j) in self.tensors:
            self.tensors[i, j] = self.tensors[i, j] + table
            self.edge_eliminations += 1
        else:
            self.tensors[i, j] = table
            self.after[i][j] = self.before[j][i] = None

    def remove(self, v: int) -> Joined:
        """Remove a layer and its edges, and return these."""
        joined = [(i, self.tensors.pop((i, v)).T) for i in self.before.pop(v)]
        joined += [(k, self.tensors.pop((v, k))) for k in self.after.pop(v)]
        for other, _ in joined:
            self.after[other].pop(v, None)
            self.before[other].pop(v, None)
        self.removed.append((v, self.costs.pop(v), joined))
        return joined

    def neighbours(self, v: int) -> dict[int, None]:
        return self.before[v] | self.after[v]

    def fold(self, light: Iterable[int]) -> None:
        """Merge layers at the rim into the only layer beside them, by adding their least cost to that layer's."""
        may, waiting = set(light), list(light)
        while waiting:
            v = waiting.pop()
            if v in self.costs and len(others := list(self.neighbours(v))) <= 1 < len(self.costs):
                own = self.costs[v]
                total = own[:, None] + sum(table for _, table in self.remove(v))
                for u in others:
                    self.costs[u] = self.costs[u] + np.asarray(total).min(axis=0)
                    waiting += [u] if u in may else []
                self.isolated_seconds += 0.0 if others else float(own.min())

    def eliminate(self, light: Sequence[int]) -> None:
        """Make node and edge eliminations until there are none left (lines 6 to 13)."""
        while self._nodes():
            self.fold(light)

    def _nodes(self) -> bool:
        """Eliminate every layer with one in-edge and one out-edge (equation 2). Returns whether there was any."""
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
        """Yield the remaining layers by connected component."""
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
        """Add the best configuration of each removed layer, the last one first (lines 15 to 23)."""
        for v, own, joined in reversed(self.removed):
            total = own + sum(table[:, chosen[other]] for other, table in joined)
            chosen[v] = int(np.argmin(total))


def enumerated(layers: LayerGraph, part: Sequence[int]) -> tuple[dict[int, int], float]:
    """Return the best of all strategies of a final graph, and its seconds (line 14).

    Of equally fast strategies it is the first; if they are too many to enumerate, any of them.

    Raises:
        IrreducibleError: they are too many, and other eliminations fail too.
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
            position = np.unravel_index(where, total.shape)
            best = dict(zip((*outer, *inner), (*fixed, *map(int, position)), strict=True))
    return best, least


def _eliminated(layers: LayerGraph, part: Sequence[int]) -> tuple[dict[int, int], float]:
    """Return the result of enumeration, computed by eliminations of any number of neighbours."""
    number = {v: k for k, v in enumerate(part)}
    unary = tuple(_time(layers.costs[v]) for v in part)
    edges = tuple(Edge(number[i], number[j], _time(table)) for (i, j), table in layers.tensors.items() if i in number)
    solutions = minimize(Problem(tuple(map(len, (layers.costs[v] for v in part))), unary, edges), [0.0])
    if not solutions:
        return dict.fromkeys(part, 0), math.inf
    if not solutions[0].exact:
        count = Decimal(math.prod(len(layers.costs[v]) for v in part))
        raise IrreducibleError(
            f"OptCNN's node and edge eliminations leave {len(part)} layers with {count:.2g} strategies, more than the"
            f" {ENUMERATED:.0g} that can be enumerated, and joined too closely for other eliminations: its algorithm is for graphs"
            " that are nearly chains. Take another search"
        )
    return dict(zip(part, solutions[0].values, strict=True)), solutions[0].time


def _time(seconds: Array) -> Cost:
    """Return a table of costs without memory."""
    return Cost("", seconds[None], np.zeros((1, *seconds.shape)))


def _total(layers: LayerGraph, fixed: Mapping[int, int], inner: Sequence[int]) -> Array:
    """Evaluate equation 1 for all configurations of some layers, [C, C, …], with those of the others fixed."""
    scopes = [((v,), layers.costs[v]) for v in (*fixed, *inner)]
    scopes += [(ends, table) for ends, table in layers.tensors.items() if all(v in fixed or v in inner for v in ends)]
    total = np.zeros([len(layers.costs[v]) for v in inner])
    for scope, table in scopes:
        table = table[tuple(fixed.get(v, slice(None)) for v in scope)]
        own = [v for v in scope if v not in fixed]
        if own != sorted(own, key=inner.index):
            table, own = table.T, own[::-1]
        total = total + table.reshape([len(layers.costs[v]) if v in own else 1 for v in inner])
    return total
