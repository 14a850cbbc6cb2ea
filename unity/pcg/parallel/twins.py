"""A program beside its parallel graph: which node became which."""

from __future__ import annotations

from collections.abc import Iterator

from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node


def twins(serial: PCG, parallel: PCG) -> Iterator[tuple[Node, Node]]:
    """The nodes of a graph with what they became: parallelization operators stand between them, in no other order."""
    after = (node for node, _ in parallel.walk() if node.kind not in PARALLELIZATION)
    return zip((node for node, _ in serial.walk()), after, strict=True)
