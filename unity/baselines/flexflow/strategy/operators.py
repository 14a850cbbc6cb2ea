"""The operators of a serial graph as FlexFlow sees them: edges between them, and what a piece of each costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unity.baselines.flexflow.strategy.configs import ParallelConfig, check_degrees, check_placed
from unity.baselines.flexflow.strategy.layer import is_layer, seconds_of
from unity.baselines.flexflow.strategy.pieces import Degrees, Slices, share, slices, split_shape, splits
from unity.pcg.ir.gradient_flow import Gradients, gradients, losses
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.parallelize import Assignment, parallelize
from unity.search.cost.cost import Pieces, seconds
from unity.search.cost.prediction import predict, with_gradient
from unity.search.cost.roofline import dense_work, touches
from unity.search.simulator.topology import Topology, grid_groups


class Edge(NamedTuple):
    """An operand: the operator that reads it, where; the one that makes it, as which result; whether a gradient flows back."""

    reader: int
    position: int
    maker: int
    result: int
    flows: bool


class Reduction(NamedTuple):
    """What an operator's pieces sum up among each other, in groups, [groups, pieces], that are alike but along `dims`."""

    dims: tuple[int, ...]
    groups: NDArray[np.int64]
    nbytes: float
    backward: bool  # and its gradient, too


@dataclass(frozen=True, eq=False)
class Operators:
    """A serial graph's operators, by their number in `graph.nodes`.

    Args:
        graph: what `unity.pcg.capture.capture` gives. Scans and remats are operators that are not split. Light work on constants
        and on
            inputs with a gradient alone (a bias that is broadcast, say) is part of no operator: like inputs, its results are there
            wherever they are read, and gradients are summed for them.
        differentiated: the inputs that gradients are taken for.
        topology: whose devices compute.
    """

    graph: PCG
    differentiated: frozenset[int]
    topology: Topology

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of operators; what other nodes give is there wherever it is read."""
        return tuple(k for k, node in enumerate(self.nodes) if node.kind != "input" and id(node) not in self._light)

    @cached_property
    def _light(self) -> frozenset[int]:
        """The nodes (by id) with a gradient input or a light operator that is made of such alone."""
        found = {id(n) for k, n in enumerate(self.graph.inputs) if k in self.differentiated}
        for node in self.nodes:
            light = node.kind != "input" and node.body is not None and not dense_work(node.body)[0]
            if light and all(id(v.node) in found for v in node.operands):
                found.add(id(node))
        return frozenset(found)

    def _given(self, node: Node) -> bool:
        return node.kind == "input" or id(node) in self._light

    @cached_property
    def flow(self) -> Gradients:
        return gradients(self.graph, self.differentiated)

    @cached_property
    def _number(self) -> Mapping[int, int]:
        return {id(node): k for k, node in enumerate(self.nodes)}

    @cached_property
    def incoming(self) -> tuple[tuple[Edge, ...], ...]:
        """By operator: its operands that other operators make."""
        number, flow = self._number, self.flow
        return tuple(
            tuple(Edge(k, p, number[id(v.node)], v.index, flow(v)) for p, v in enumerate(node.operands) if not self._given(v.node))
            for k, node in enumerate(self.nodes)
        )

    @cached_property
    def outgoing(self) -> tuple[tuple[Edge, ...], ...]:
        """By operator: its results, wherever another operator reads them."""
        found: list[list[Edge]] = [[] for _ in self.nodes]
        for edges in self.incoming:
            for e in edges:
                found[e.maker].append(e)
        return tuple(map(tuple, found))

    @cached_property
    def weights(self) -> Mapping[tuple[int, int], tuple[tuple[int, int], ...]]:
        """By (node, result) of a value with a gradient that is there anyway: the operators that read it, and at which positions."""
        number, found = self._number, {}
        for k in self.numbers:
            for p, v in enumerate(self.nodes[k].operands):
                if self._given(v.node) and self.flow(v):
                    found.setdefault((number[id(v.node)], v.index), []).append((k, p))
        return {k: tuple(readers) for k, readers in found.items()}

    @cached_property
    def reads(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """By operator: the (node, result) of all `weights` that it reads."""
        found: dict[int, dict[tuple[int, int], None]] = {k: {} for k in self.numbers}
        for weight, readers in self.weights.items():
            for k, _ in readers:
                found[k][weight] = None
        return {k: tuple(weights) for k, weights in found.items()}

    @cached_property
    def ends(self) -> frozenset[int]:
        """The operators at which the backward pass begins."""
        return (
            frozenset(self._number[id(self.graph.outputs[k].node)] for k in losses(self.graph))
            if self.differentiated
            else frozenset()
        )

    @cached_property
    def alike(self) -> Mapping[int, int]:
        """By operator: the first one that has the same program, and gradients of the same operands and results. What is found out
        of the one holds for the other."""
        first: dict[tuple[object, ...], int] = {}
        flow, found = self.flow, {}
        for k in self.numbers:
            node = self.nodes[k]
            flows = (*map(flow, node.operands), *map(flow, node.results))
            found[k] = k if node.body is None else first.setdefault((id(node.body), flows), k)
        return found

    @cached_property
    def whole(self) -> Mapping[int, tuple[float, float]]:
        """Seconds forward and backward of each operator as a whole."""
        return {k: self.seconds(k, (1,) * len(split_shape(self.nodes[k]))) for k in self.numbers}

    @cached_property
    def _inside(self) -> Mapping[int, tuple[float, float]]:
        """Seconds forward and backward of each operator that has a graph inside: loops with all their steps."""
        types = {id(n): ((),) * len(n.tensors) for n, _ in self.graph.walk()}
        typed = parallelize(self.graph, Assignment((), types, {}, {}))
        terms = {id(t.node): t for t in predict(typed, self.topology.machine, self.differentiated).operators}
        found = {}
        for k, node in enumerate(typed.nodes):
            if node.inside is None:
                continue
            own = [terms[id(n)] for n, _ in node.inside.walk() if id(n) in terms]
            found[k] = (sum(t.forward for t in own), sum(t.backward for t in own))
        return found

    @cached_property
    def _seconds(self) -> dict[tuple[int, Degrees], tuple[float, float]]:
        return {}

    def seconds(self, k: int, degrees: Degrees) -> tuple[float, float]:
        """Seconds forward and backward of one of an operator's pieces, on a device of speed 1."""
        k = self.alike[k]
        found = self._seconds.get((k, degrees))
        if found is None:
            found = self._seconds[k, degrees] = self._piece(k, degrees)
        return found

    def _piece(self, k: int, degrees: Degrees) -> tuple[float, float]:
        node, machine = self.nodes[k], self.topology.machine
        if node.body is None:
            return self._inside[k]
        flags = with_gradient(node, self.flow)
        if is_layer(node.body):
            cuts = [(splits(node)[dim], degree) for dim, degree in enumerate(degrees) if degree > 1]
            return seconds_of(node.body, cuts, flags, [self.flow(v) for v in node.results], machine)
        tensors = [*(v.tensor for v in node.operands), *node.tensors]
        shapes = [slices(node, degrees, p).local for p in range(len(tensors))]
        touched = sum(prod(shape) * t.itemsize * part for shape, t, part in zip(shapes, tensors, touches(node.body), strict=True))
        pieces = Pieces(
            np.array([share(node, degrees)]), np.array([float(touched)]), np.array([[n for s in shapes for n in s]], int)
        )
        forward, backward, _ = seconds(node.body, [t.shape for t in tensors], pieces, flags, machine)
        return float(forward[0]), float(backward[0])

    def check(self, k: int, config: ParallelConfig) -> None:
        """Raises SimulationError unless an operator can be split and placed so, MachineError unless the devices are there; degrees
        are looked at once."""
        if (self.alike[k], config.degrees) not in self._possible:
            check_degrees(self.nodes[k], config.degrees)
            self._possible.add((self.alike[k], config.degrees))
        check_placed(self.nodes[k], config, self.topology)

    @cached_property
    def _possible(self) -> set[tuple[int, Degrees]]:
        return set()

    @cached_property
    def _slices(self) -> dict[tuple[int, Degrees, int], Slices]:
        return {}

    def slices(self, k: int, degrees: Degrees, position: int) -> Slices:
        """How an operator's operand or result is cut: `pieces.slices`, asked for again and again."""
        k = self.alike[k]
        found = self._slices.get((k, degrees, position))
        if found is None:
            found = self._slices[k, degrees, position] = slices(self.nodes[k], degrees, position)
        return found

    @cached_property
    def _reductions(self) -> dict[tuple[int, Degrees], tuple[Reduction, ...]]:
        return {}

    def reductions(self, k: int, degrees: Degrees) -> tuple[Reduction, ...]:
        """What an operator's pieces sum up."""
        k = self.alike[k]
        found = self._reductions.get((k, degrees))
        if found is None:
            found = self._reductions[k, degrees] = self._reduced(self.nodes[k], degrees)
        return found

    def _reduced(self, node: Node, degrees: Degrees) -> tuple[Reduction, ...]:
        chosen = {dim: splits(node)[dim] for dim, degree in enumerate(degrees) if degree > 1}
        flows = any(map(self.flow, node.results)) and any(map(self.flow, node.operands))
        found = []
        for variable, r in {r.variable: r for c in chosen.values() for r in c.reduced if r.kind}.items():
            dims = tuple(dim for dim, c in chosen.items() if any(x.variable == variable for x in c.reduced))
            parts = prod(degrees[dim] for dim, c in chosen.items() if variable in c.partitions and dim not in dims)
            found.append(Reduction(dims, _groups(degrees, dims), r.nbytes / parts, r.kind == "sum" and bool(r.users) and flows))
        for j, tensor in enumerate(node.tensors):
            dims = tuple(dim for dim, c in chosen.items() if c.results[j].kind == "S")
            if dims:
                found.append(Reduction(dims, _groups(degrees, dims), tensor.nbytes, False))
        return tuple(found)


def _groups(degrees: Degrees, dims: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(grid_groups(degrees, dims), np.int64)


def operators(graph: PCG, differentiated: Collection[int], topology: Topology) -> Operators:
    """The operators of a serial graph, `differentiated` in these inputs, on a topology's devices."""
    return Operators(graph, frozenset(differentiated), topology)
