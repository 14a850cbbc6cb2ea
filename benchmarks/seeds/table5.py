"""OptCNN's table 5: how VGG-16's products with weights are split on 4 GPUs, and what the paper's strategy takes here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.seeds.published import OPTCNN_VGG
from unity.base.errors import InfeasibleError
from unity.baselines.optcnn import point_of
from unity.baselines.optcnn_space import layerwise
from unity.machine.machine import Axis
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import Type, degrees
from unity.search.session import Candidate, Search
from unity.search.solver.minimizer import minimize

PUBLISHED = "as in table 5"


def layers(graph: PCG) -> Iterator[str]:
    """How products with weights are split, in order."""
    return (split_of(node, node.types[0], graph.axes) for node in graph.nodes if facts_of(node.kind).product)


def split_of(node: Node, made: Type, axes: Sequence[Axis]) -> str:
    """How a product is split that makes something of this type, as the paper says it: degrees of samples, channels, height and
    width; k is that of what is summed over."""
    ndim = node.tensors[0].ndim
    split = [f"{name}={d}" for name, d in zip("nchw", degrees(made, axes, ndim), strict=False)]
    summed = math.prod(axis.size for axis, state in zip(axes, made, strict=True) if state.kind == "S")
    return " ".join(["conv" if ndim > 2 else "dense", *split, *([f"k={summed}"] if summed > 1 else [])])


def as_published(search: Search) -> Candidate:
    """The fastest strategy of OptCNN's with these splits, for what they leave open.

    Raises:
        InfeasibleError: a layer cannot be split so.
    """
    assembled = search.assembled
    problem = layerwise(assembled)
    unary = list(problem.unary)
    heavy = [node for node in search.graph.nodes if facts_of(node.kind).product]
    for node, wanted in zip(heavy, OPTCNN_VGG, strict=True):
        s = assembled.opened.of_node[id(node)]
        domain, position = assembled.domains[s], len(node.operands)
        other = [split_of(node, domain.type_of(v, position), assembled.machine.axes) != wanted for v in range(len(domain))]
        if all(other):
            raise InfeasibleError(f"{node.source}: no way to split it is {wanted!r}")
        unary[s] = replace(unary[s], key=f"{unary[s].key} {wanted}", time=np.where(other, np.inf, unary[s].time))
    found = minimize(replace(problem, unary=tuple(unary)), [0.0])
    if not found:
        raise InfeasibleError("VGG-16 cannot be split as in OptCNN's table 5")
    return search.candidate(assembled, point_of(problem, found[0].values))
