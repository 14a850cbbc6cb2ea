"""Clustering is for speed: equations as operators of their own have no faster plan than the operators that they are joined to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from random_networks import RandomNetwork

from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture, graph_of
from unity.pcg.capture.clustering import EquationCluster, restored
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.program import Body
from unity.search.cost.cost import Training
from unity.search.session import Search

A100S = Machine.grid(2, 2, "a100")  # on two axes the search is exact: from three on it considers few orders of choices
# Separate operators pay for launches and messages one by one: without latency the comparison is strict.
MACHINE = replace(A100S, device=replace(A100S.device, launch=0.0), levels=tuple(replace(x, latency=0.0) for x in A100S.levels))

SLICED = {165}  # a statistic of slices of a value that is whole otherwise: an operator does not divide a part of its equations


def separate(body: Body, constant: Mapping[int, int] | None = None) -> list[EquationCluster]:
    """Every equation as an operator of its own."""
    constant = constants(body) if constant is None else constant
    varying = [i for i, e in enumerate(body.equations) if not (e.results and e.results[0] in constant)]
    return restored(body, constant, [[i] for i in varying])


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_separate_equations_have_no_faster_plan(first: int) -> None:
    for seed in range(first, first + 20):
        network = RandomNetwork(seed)
        captured = capture(network, *network.arguments)
        names = [node.name for node in captured.graph.inputs]
        graphs = captured.graph, graph_of(captured.body, names, clustering=separate)
        clustered, apart = (Search(g, captured.differentiated, MACHINE, Training()).fastest.time for g in graphs)
        assert clustered <= (1.05 if seed in SLICED else 1.01) * apart, f"network {seed}: {clustered / apart:.3f} times as long"
