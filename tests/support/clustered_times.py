"""Times of plans of operators, and of the same program's plans with every equation as an operator of its own.

`python tests/support/clustered_times.py 0 300` compares them for networks of `wide_networks`, and prints where operators lose.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from wide_networks import WideNetwork

from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture, graph_of
from unity.pcg.capture.clustering import EquationCluster, restored
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.program import Body
from unity.search.cost.cost import Training
from unity.search.session import Search

A100S = Machine.grid(2, 2, "a100")  # on two axes the search is exact: from three on it considers few orders of choices
# Separate operators pay for launches and messages one by one: without latency the comparison is strict.
MACHINE = replace(
    A100S, device=replace(A100S.device, launch=0.0), levels=tuple(replace(x, latency=0.0, protocols=()) for x in A100S.levels)
)
# Separate operators pay for the memory between them, too: with fast memory the collectives decide.
FAST_MEMORY = replace(MACHINE, device=replace(MACHINE.device, bandwidth=1000 * MACHINE.device.bandwidth))


class Network(Protocol):
    """A function of arrays, with their shapes."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The shapes of the arguments."""
        ...

    def __call__(self, weights: Any, *inputs: Any) -> Any: ...


def separate(body: Body, constant: Mapping[int, int] | None = None) -> list[EquationCluster]:
    """Every equation as an operator of its own."""
    constant = constants(body) if constant is None else constant
    varying = [i for i, e in enumerate(body.equations) if not (e.results and e.results[0] in constant)]
    return restored(body, constant, [[i] for i in varying])


def clustered_and_separate(network: Network, *machines: Machine) -> list[float]:
    """Return for every machine the time of the fastest plan of operators, in parts of that of separate equations."""
    captured = capture(network, *network.arguments)
    graphs = captured.graph, graph_of(captured.body, [node.name for node in captured.graph.inputs], clustering=separate)
    times = [[Search(g, captured.differentiated, m, Training()).fastest.time for g in graphs] for m in machines]
    return [clustered / apart for clustered, apart in times]


def main() -> None:
    first, last = map(int, sys.argv[1:])
    slower = [0, 0]
    for seed in range(first, last):
        ratios = clustered_and_separate(WideNetwork(seed), MACHINE, FAST_MEMORY)
        slower = [n + (ratio > 1.01) for n, ratio in zip(slower, ratios, strict=True)]
        if max(ratios) > 1.01:
            print(f"network {seed}: {ratios[0]:.3f}, with fast memory {ratios[1]:.3f}", flush=True)
    print(f"{last - first} networks: {slower[0]} lose more than 1 %, with fast memory {slower[1]}")


if __name__ == "__main__":
    main()
