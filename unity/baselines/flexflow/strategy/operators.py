"""The operators of a serial graph as FlexFlow sees them: edges between them, and the cost of a piece of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unity.baselines.flexflow.strategy.configs import ParallelConfig, check_degrees, check_placed
from unity.baselines.flexflow.strategy.layer_cost import is_layer, seconds_of
from unity.baselines.flexflow.strategy.pieces import Degrees, Slices, share, slices, split_shape, splits
from unity.pcg.ir.gradient_flow import Gradients, gradients, losses, with_gradient
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.parallelize import Assignment, parallelize
from unity.search.cost.operator_seconds import seconds, single_piece
from unity.search.cost.prediction import predict
from unity.search.cost.roofline import dense_work
from unity.search.simulator.topology import Topology, grid_groups


class OperandEdge(NamedTuple):
    """An operand: its user and position there, its producer and the result there, and whether a gradient flows back."""

    user: int
    position: int
    producer: int
    result: int
    flows: bool


class Reduction(NamedTuple):
    """A sum over an operator's pieces, in groups, [groups, pieces]; pieces of a group differ along `dims` alone."""

    dims: tuple[int, ...]
    groups: NDArray[np.int64]
    nbytes: float
    backward: bool  # whether its gradient is summed, too


@dataclass(frozen=True, eq=False)
class Operators:
    """A serial graph's operators, by their number in `graph.nodes`.

    Light work that reads only constants and inputs with a gradient, such as the broadcast of a bias, belongs to no operator: like
    inputs, its results are available wherever they are read, and gradients are summed for them.

    Args:
        graph: the result of `unity.pcg.capture.capture`. Scans and remats are operators that are not split.
        differentiated: the inputs with respect to which gradients are taken.
        topology: the devices and links.
    """

    graph: PCG
    differentiated: frozenset[int]
    topology: Topology

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the nodes that are operators; results of other nodes are available wherever they are read."""
        return tuple(k for k, node in enumerate(self.nodes) if node.kind != "input" and id(node) not in self._light)

    @cached_property
    def _light(self) -> frozenset[int]:
        """The nodes (by id) that are inputs with a gradient, or light operators on nothing but such."""
        inside = {id(n) for k, n in enumerate(self.graph.inputs) if k in self.differentiated}
        for node in self.nodes:
            light = node.kind != "input" and node.body is not None and not dense_work(node.body)[0]
            if light and all(id(v.node) in inside for v in node.operands):
                inside.add(id(node))
        return frozenset(inside)

    def _is_available(self, node: Node) -> bool:
        return node.kind == "input" or id(node) in self._light

    @cached_property
    def flow(self) -> Gradients:
        return gradients(self.graph, self.differentiated)

    def runs_backward(self, k: int) -> bool:
        """Return whether an operator has a backward pass. A view's takes no time, but gradients pass through it nonetheless."""
        return any(with_gradient(self.nodes[k], self.flow))

    @cached_property
    def _number(self) -> Mapping[int, int]:
        return {id(node): k for k, node in enumerate(self.nodes)}

    @cached_property
    def incoming(self) -> tuple[tuple[OperandEdge, ...], ...]:
        """For each operator, its operands that other operators produce."""
        number, flow = self._number, self.flow
        return tuple(
            tuple(
                OperandEdge(k, p, number[id(v.node)], v.index, flow(v))
                for p, v in enumerate(node.operands)
                if not self._is_available(v.node)
            )
            for k, node in enumerate(self.nodes)
        )

    @cached_property
    def outgoing(self) -> tuple[tuple[OperandEdge, ...], ...]:
        """For each operator, its results, wherever another operator reads them."""
        edges_of: list[list[OperandEdge]] = [[] for _ in self.nodes]
        for operands in self.incoming:
            for e in operands:
                edges_of[e.producer].append(e)
        return tuple(map(tuple, edges_of))

    @cached_property
    def weights(self) -> Mapping[tuple[int, int], tuple[tuple[int, int], ...]]:
        """The values with a gradient that no operator produces, by (node, result): the operators and positions that read each."""
        number, readers_of = self._number, {}
        for k in self.numbers:
            for p, v in enumerate(self.nodes[k].operands):
                if self._is_available(v.node) and self.flow(v):
                    readers_of.setdefault((number[id(v.node)], v.index), []).append((k, p))
        return {k: tuple(readers) for k, readers in readers_of.items()}

    @cached_property
    def reads(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """For each operator, the (node, result) of all `weights` that it reads."""
        weights_of: dict[int, dict[tuple[int, int], None]] = {k: {} for k in self.numbers}
        for weight, readers in self.weights.items():
            for k, _ in readers:
                weights_of[k][weight] = None
        return {k: tuple(weights) for k, weights in weights_of.items()}

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
        """For each operator, the first one with equal costs and slices: with its program, and gradients at the same places."""
        first: dict[tuple[object, ...], int] = {}
        flow, representative = self.flow, {}
        for k in self.numbers:
            node = self.nodes[k]
            flows = (*map(flow, node.operands), *map(flow, node.results))
            representative[k] = k if node.body is None else first.setdefault((id(node.body), flows), k)
        return representative

    @cached_property
    def whole(self) -> Mapping[int, tuple[float, float]]:
        """Seconds forward and backward of each operator that is not split."""
        return {k: self.seconds(k, (1,) * len(split_shape(self.nodes[k]))) for k in self.numbers}

    @cached_property
    def _inside(self) -> Mapping[int, tuple[float, float]]:
        """Seconds forward and backward of each operator with a graph inside; of a loop, for all its steps."""
        types = {id(n): ((),) * len(n.tensors) for n, _ in self.graph.walk()}
        typed = parallelize(self.graph, Assignment((), types, {}, {}))
        terms = {id(t.node): t for t in predict(typed, self.topology.machine, self.differentiated).operators}
        seconds_of_node = {}
        for k, node in enumerate(typed.nodes):
            if node.inside is None:
                continue
            own = [terms[id(n)] for n, _ in node.inside.walk() if id(n) in terms]
            seconds_of_node[k] = (sum(t.forward for t in own), sum(t.backward for t in own))
        return seconds_of_node

    @cached_property
    def _seconds(self) -> dict[tuple[int, Degrees], tuple[float, float]]:
        return {}

    def seconds(self, k: int, degrees: Degrees) -> tuple[float, float]:
        """Return the seconds forward and backward of one of an operator's pieces, on a device of speed 1."""
        k = self.alike[k]
        pair = self._seconds.get((k, degrees))
        if pair is None:
            pair = self._seconds[k, degrees] = self._piece(k, degrees)
        return pair

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
        piece = single_piece(node.body, shapes, share(node, degrees), flags)
        forward, backward, _ = seconds(node.body, [t.shape for t in tensors], piece, flags, machine)
        return float(forward[0]), float(backward[0])

    def check(self, k: int, config: ParallelConfig) -> None:
        """Raise SimulationError unless an operator can be split and placed like this, MachineError unless the devices exist.

        Degrees are checked once.
        """
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
        """Return how an operator's operand or result is cut (a cached `pieces.slices`)."""
        k = self.alike[k]
        cut = self._slices.get((k, degrees, position))
        if cut is None:
            cut = self._slices[k, degrees, position] = slices(self.nodes[k], degrees, position)
        return cut

    @cached_property
    def _reductions(self) -> dict[tuple[int, Degrees], tuple[Reduction, ...]]:
        return {}

    def reductions(self, k: int, degrees: Degrees) -> tuple[Reduction, ...]:
        """Return the sums over an operator's pieces."""
        k = self.alike[k]
        sums = self._reductions.get((k, degrees))
        if sums is None:
            sums = self._reductions[k, degrees] = self._reduced(self.nodes[k], degrees)
        return sums

    def _reduced(self, node: Node, degrees: Degrees) -> tuple[Reduction, ...]:
        chosen = {dim: splits(node)[dim] for dim, degree in enumerate(degrees) if degree > 1}
        flows = any(map(self.flow, node.results)) and any(map(self.flow, node.operands))
        sums = []
        for variable, r in {r.variable: r for c in chosen.values() for r in c.reduced if r.kind}.items():
            dims = tuple(dim for dim, c in chosen.items() if any(x.variable == variable for x in c.reduced))
            parts = prod(degrees[dim] for dim, c in chosen.items() if variable in c.partitions and dim not in dims)
            sums.append(Reduction(dims, _groups(degrees, dims), r.nbytes / parts, r.kind == "sum" and bool(r.users) and flows))
        for j, tensor in enumerate(node.tensors):
            dims = tuple(dim for dim, c in chosen.items() if c.results[j].kind == "S")
            if dims:
                sums.append(Reduction(dims, _groups(degrees, dims), tensor.nbytes, False))
        return tuple(sums)


def _groups(degrees: Degrees, dims: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(grid_groups(degrees, dims), np.int64)


def operators(graph: PCG, differentiated: Collection[int], topology: Topology) -> Operators:
    """Return the operators of a serial graph, `differentiated` with respect to these inputs, on the devices of a topology."""
    return Operators(graph, frozenset(differentiated), topology)
