"""A term of every class of an e-graph: greedily, counting shared terms once, and then improved by local changes.

The cheapest term of a graph with sharing is NP-hard to find. A greedy choice looks at each class alone, so it never takes a merged
operator, which pays only if all of its parts are used: the changes after it exchange all classes that read a shared class at once.
Neither is exact. An integer program is, under these prices, where it ends in time: it allows terms that need themselves, and is
solved again without each such cycle that its solution has.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from benchmarks.egraph.encoding import Operation
from unity.pcg.types.parallel_type import Shape

Cost = Callable[[Operation], float]
Choice = dict[str, Operation]


@dataclass
class Classes:
    """The classes of an e-graph: their operators and shapes, and those that are the program's results."""

    operations: dict[str, list[Operation]]
    shapes: dict[str, Shape]
    roots: list[str]

    @property
    def count(self) -> int:
        """The number of operators in all classes."""
        return sum(map(len, self.operations.values()))


def classes(serialized: str) -> Classes:
    """Read an e-graph from its JSON."""
    nodes: dict[str, dict[str, Any]] = json.loads(serialized)["nodes"]
    sort = {key: node["eclass"] for key, node in nodes.items()}
    vectors = {node["eclass"]: node for node in nodes.values() if node["op"] in ("vec-of", "vec-empty")}

    def value(node: Mapping[str, Any]) -> Any:
        if node["op"] in ("vec-of", "vec-empty"):
            return tuple(value(nodes[c]) for c in node["children"])
        return json.loads(node["op"])

    operations: dict[str, list[Operation]] = defaultdict(list)
    shapes: dict[str, Shape] = {}
    roots: dict[int, str] = {}
    for node in nodes.values():
        op, children = node["op"], node["children"]
        if op == "shape":
            shapes[sort[children[0]]] = value(vectors[node["eclass"]])
        elif op == "root":
            roots[value(nodes[children[0]])] = node["eclass"]
        elif node["eclass"].startswith("T-"):
            terms = tuple(sort[c] for c in children if sort[c].startswith("T-"))
            attributes = [
                value(vectors[sort[c]] if sort[c] in vectors else nodes[c]) for c in children if not sort[c].startswith("T-")
            ]
            if op == "Perm":
                attributes = [tuple(map(int, attributes[0].split(",")))]
            operations[node["eclass"]].append(Operation(op, tuple(attributes), terms))
    return Classes(dict(operations), shapes, [roots[k] for k in sorted(roots)])


def greedy(graph: Classes, cost: Cost) -> Choice:
    """Return an operator for every class: of those whose operands have one, that with the cheapest set of terms."""
    users: dict[str, list[tuple[str, Operation]]] = defaultdict(list)
    for key, operations in graph.operations.items():
        for o in operations:
            for x in o.operands:
                users[x].append((key, o))
    chosen: Choice = {}
    sets: dict[str, dict[str, float]] = {}
    totals: dict[str, float] = {}
    pending = [(key, o) for key, operations in graph.operations.items() for o in operations if not o.operands]
    while pending:
        following = []
        for key, o in pending:
            if any(x not in sets or key in sets[x] for x in o.operands):
                continue
            terms: dict[str, float] = {}
            for x in o.operands:
                terms |= sets[x]
            terms[key] = cost(o)
            total = sum(terms.values())
            if total < totals.get(key, math.inf) * (1 - 1e-9):
                chosen[key], sets[key], totals[key] = o, terms, total
                following += users[key]
        pending = list(dict.fromkeys(following))
    return chosen


def total(chosen: Mapping[str, Operation], roots: list[str], cost: Cost) -> float:
    """Return the cost of the chosen terms that the roots need, each once; infinite if one needs itself."""
    done: dict[str, bool] = {}
    stack, sum_ = list(roots), 0.0
    while stack:
        key = stack[-1]
        if done.get(key):
            stack.pop()
            continue
        o = chosen.get(key)
        if o is None:
            return math.inf
        if key in done:
            done[key] = True
            stack.pop()
            continue
        done[key] = False
        sum_ += cost(o)
        for x in o.operands:
            state = done.get(x)
            if state is False:
                return math.inf
            if state is None:
                stack.append(x)
    return sum_


def needed(chosen: Mapping[str, Operation], roots: list[str]) -> set[str]:
    """Return the classes that the roots need."""
    reached: set[str] = set()
    stack = list(roots)
    while stack:
        key = stack.pop()
        if key not in reached:
            reached.add(key)
            stack += chosen[key].operands
    return reached


def improved(graph: Classes, start: Choice, cost: Cost, seconds: float) -> Choice:
    """Return a choice whose cost no change of one class, or of all that read a shared one, lowers; or the last one in time."""
    ends = time.process_time() + seconds
    readers: dict[str, dict[str, Operation]] = defaultdict(dict)
    for key, operations in graph.operations.items():
        for o in operations:
            if o.constructor in ("Split0", "Split1"):
                readers[o.operands[0]].setdefault(key, o)
    chosen, least = dict(start), total(start, graph.roots, cost)
    while True:
        before = least
        reached = needed(chosen, graph.roots)
        shared = [parts for x, parts in readers.items() if x in chosen and len(parts) > 1 and sum(k in reached for k in parts) > 1]
        single = [{key: o} for key in reached for o in graph.operations[key] if o != chosen[key]]
        for change in (*shared, *single):
            if time.process_time() > ends:
                return chosen
            other = chosen | change
            price = total(other, graph.roots, cost)
            if price < least * (1 - 1e-9):
                chosen, least = other, price
        if least >= before * (1 - 1e-9):
            return chosen


def solved(graph: Classes, cost: Cost, seconds: float) -> Choice | None:
    """Return the choice of least cost by integer programming, or None without one in time."""
    ends = time.process_time() + seconds
    reached = needed_by_any(graph)
    nodes = [(key, o) for key in reached for o in graph.operations[key]]
    number: dict[str, list[int]] = defaultdict(list)
    for k, (key, _) in enumerate(nodes):
        number[key].append(k)
    rows: list[dict[int, float]] = [dict.fromkeys(number[root], 1.0) for root in dict.fromkeys(graph.roots)]
    lower: Any = [1.0] * len(rows)
    for k, (_, o) in enumerate(nodes):
        for x in set(o.operands):
            row = dict.fromkeys(number[x], 1.0)
            row[k] = row.get(k, 0.0) - 1
            rows.append(row)
            lower.append(0.0)
    prices = np.array([cost(o) for _, o in nodes]) * 1e6
    while time.process_time() < ends:
        entries = [(r, c, v) for r, row in enumerate(rows) for c, v in row.items()]
        r, c, v = (np.array(column) for column in zip(*entries, strict=True))
        matrix = coo_array((v, (r.astype(np.int32), c.astype(np.int32))), shape=(len(rows), len(nodes))).tocsc()
        answer = milp(
            prices, integrality=np.ones(len(nodes)), bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.array(lower), np.inf),  # pyright: ignore[reportArgumentType]
            options={"time_limit": max(0.1, ends - time.process_time()), "mip_rel_gap": 1e-4},
        )  # fmt: skip
        if answer.x is None:
            return None
        taken = {key: o for k, (key, o) in reversed(list(enumerate(nodes))) if answer.x[k] > 0.5}
        cycle = cycle_of(taken, graph.roots)
        if cycle is None:
            return taken
        rows.append({k: -1.0 for k, (key, o) in enumerate(nodes) if key in cycle and taken[key] == o})
        lower.append(1.0 - len(cycle))
    return None


def needed_by_any(graph: Classes) -> list[str]:
    """Return the classes that a choice may need, in order."""
    reached: dict[str, None] = {}
    stack = list(graph.roots)
    while stack:
        key = stack.pop()
        if key not in reached:
            reached[key] = None
            stack += [x for o in graph.operations[key] for x in o.operands]
    return list(reached)


def cycle_of(chosen: Mapping[str, Operation], roots: list[str]) -> set[str] | None:
    """Return the classes of a cycle of the chosen terms, or None."""
    graph = nx.DiGraph()
    graph.add_edges_from((key, x) for key in needed(chosen, roots) for x in chosen[key].operands)
    try:
        return {a for a, _ in nx.find_cycle(graph)}
    except nx.NetworkXNoCycle:
        return None
