"""The graph as the search sees it: one variable for every operator, flat, with scans and remats opened.

A *site* is an operator, or a place where a tensor's type is free: an argument (how it is stored), what a scan carries or takes
one step of, a copy that several users share, a result. Sites are joined by ports: an operand of one is a result of another,
changed from the one type to the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from unity.pcg.body import Tensor
from unity.pcg.gradients import Gradients, gradients, kept
from unity.pcg.graph import PCG, Node, Value

SHARING = frozenset({"dot_general", "conv_general_dilated"})  # users of a kind that take one converted copy together


@dataclass(frozen=True)
class Port:
    """An operand of a site: result `index` of site `source`.

    `times`: how often the change of type runs. `again`: it runs once more in the backward pass, inside a remat.
    """

    source: int
    index: int
    tensor: Tensor
    times: int
    gradient: bool
    kept: bool  # the operand is needed in the backward pass as the operator sees it
    again: bool = False


@dataclass(eq=False)
class Site:
    """A variable of the search."""

    kind: str  # "operator", "input", "free"
    node: Node | None
    ports: list[Port]
    results: tuple[Tensor, ...]
    times: int = 1
    again: bool = False  # runs again in the backward pass
    flows: tuple[bool, ...] = ()  # gradients of the results
    stored: list[bool] = field(default_factory=list)  # whether each result is kept for the backward pass as it is
    weight: bool = False  # an argument that is differentiated
    step: str = ""  # "in": the result is one step of the operand; "out": the result stacks the operand
    whole: bool = False  # crosses the program's boundary: most major digits only, nothing partial


@dataclass(frozen=True, eq=False)
class Sites:
    """All sites of a graph, and how to find the ones that hold an operator's or a result's type."""

    sites: tuple[Site, ...]
    of_node: dict[int, int]  # id(node) → site
    operands: dict[tuple[int, int], tuple[int, ...]]  # (id(node), position) → free sites that the operand passes through
    outputs: dict[tuple[int, int], tuple[int, ...]]
    results: dict[int, tuple[tuple[int, int], ...]]  # id(node) → (site, result) of each result, for scans


def sites(graph: PCG, differentiated: Collection[int], training: bool) -> Sites:
    """Opens a serial graph. `differentiated`: the inputs that gradients are taken for (none count if not training)."""
    flow = gradients(graph, differentiated if training else ())
    builder = _Builder(flow, frozenset(differentiated) if training else frozenset())
    builder.top(graph)
    return Sites(tuple(builder.sites), builder.of_node, builder.operands, builder.outputs, builder.results)


Where = tuple[int, int]  # (site, result)


class _Builder:
    """Walks graphs inside out, appending sites."""

    def __init__(self, flow: Gradients, differentiated: frozenset[int]) -> None:
        self.flow, self.differentiated = flow, differentiated
        self.sites: list[Site] = []
        self.of_node: dict[int, int] = {}
        self.operands: dict[tuple[int, int], tuple[int, ...]] = {}
        self.outputs: dict[tuple[int, int], tuple[int, ...]] = {}
        self.results: dict[int, tuple[Where, ...]] = {}

    def add(self, site: Site) -> int:
        site.stored = [False] * len(site.results)
        self.sites.append(site)
        return len(self.sites) - 1

    def port(self, where: Where, times: int, kept_: bool, again: bool) -> Port:
        site = self.sites[where[0]]
        tensor, gradient = site.results[where[1]], site.flows[where[1]]
        if kept_ and not again:
            site.stored[where[1]] = True
        return Port(where[0], where[1], tensor, times, gradient, kept_ and not again, again)

    def top(self, graph: PCG) -> None:
        given = []
        for k, node in enumerate(graph.inputs):
            weight = k in self.differentiated and node.tensors[0].floating
            site = Site("input", node, [], node.tensors, flows=(self.flow(Value(node)),), weight=weight, whole=True)
            self.of_node[id(node)] = self.add(site)
            given.append((self.of_node[id(node)], 0))
        for k, where in enumerate(self.graph(graph, given, 1, False)):
            free = self.free(where, 1, False, whole=True)
            self.outputs[id(graph), k] = (free,)

    def free(self, where: Where, times: int, again: bool, step: str = "", whole: bool = False, tensor: Any = None) -> int:
        """A place where the type of a value may be chosen."""
        port = self.port(where, times, False, again)
        result = tensor or port.tensor
        return self.add(Site("free", None, [port], (result,), times, again, (port.gradient,), step=step, whole=whole))

    def graph(self, graph: PCG, given: Sequence[Where], times: int, again: bool) -> list[Where]:
        """Adds the sites of a graph whose inputs are at `given`; returns where its outputs are."""
        at: dict[Value, Where] = {Value(n): w for n, w in zip(graph.inputs, given, strict=True)}
        copies: dict[tuple[Value, str], int] = {}
        for node in graph.nodes:
            if node.kind == "input":
                continue
            operands = []
            for p, v in enumerate(node.operands):
                copy = self.copy(graph, node, p, v, at[v], copies, times, again)
                operands.append(at[v] if copy is None else (copy, 0))
                if copy is not None:
                    self.operands[id(node), p] = (copy,)
            if node.kind == "scan":
                found = self.scan(node, operands, times, again)
            elif node.kind == "remat":
                assert node.inside is not None
                for where in operands:
                    self.port(where, times, not again, again)  # what a remat starts from is kept
                found = self.graph(node.inside, operands, times, True)
                self.results[id(node)] = tuple(found)
            else:
                found = self.operator(node, operands, times, again)
            at.update(zip(node.results, found, strict=True))
        return [at[v] for v in graph.outputs]

    def copy(self, graph: PCG, node: Node, p: int, v: Value, where: Where, copies: dict, times: int, again: bool) -> int | None:
        """The copy that an operand shares with other users of the same kind (None: it shares none)."""
        if node.kind not in SHARING:
            return None
        key = (v, f"{node.kind} {p}")
        if key not in copies:
            users = [u for u, q in graph.users[id(v.node)] if u.kind == node.kind and u.operands[q] == v and q == p]
            copies[key] = self.free(where, times, again) if len(users) > 1 else -1
        return None if copies[key] < 0 else copies[key]

    def operator(self, node: Node, operands: list[Where], times: int, again: bool) -> list[Where]:
        flags = tuple(self.sites[s].flows[r] for s, r in operands)
        flows = tuple(self.flow(v) for v in node.results)
        needed = kept(node.body, flags) if node.body is not None and any(flows) else (False,) * len(flags)
        ports = [self.port(w, times, k, again) for w, k in zip(operands, needed, strict=True)]
        site = self.add(Site("operator", node, ports, node.tensors, times, again, flows))
        self.of_node[id(node)] = site
        return [(site, k) for k in range(len(node.tensors))]

    def scan(self, node: Node, operands: list[Where], times: int, again: bool) -> list[Where]:
        """Constants and carries have one type for all steps; of what is stacked, the steps are not partitioned."""
        assert node.inside is not None
        inside, c, k = node.inside, int(node.attributes["consts"]), int(node.attributes["carry"])
        inner = times * int(node.attributes["length"])
        given: list[Where] = []
        for p, (where, n) in enumerate(zip(operands, inside.inputs, strict=True)):
            free = self.free(where, times, again, step="in" if p >= c + k else "", tensor=n.tensors[0])
            self.sites[free].flows = (self.flow(Value(n)),)
            self.of_node[id(n)] = free
            self.operands[id(node), p] = (*self.operands.get((id(node), p), ()), free)
            given.append((free, 0))
        ends = self.graph(inside, given, inner, again)
        found: list[Where] = []
        for q, where in enumerate(ends):
            if q < k:
                carry = given[c + q][0]
                self.sites[carry].ports.append(self.port(where, inner, False, again))
                self.outputs[id(inside), q] = (carry,)
                found.append((carry, 0))
            else:
                free = self.free(where, inner, again, step="out", tensor=node.tensors[q])
                self.outputs[id(inside), q] = (free,)
                found.append((free, 0))
        self.results[id(node)] = tuple(found)
        return found
