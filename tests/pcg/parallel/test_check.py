"""The type checker accepts every plan of the search, and names the error in any other graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import MODELS, random_point

from unity.base.errors import ParallelTypeError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.axis_names import AxisNames, names_in
from unity.pcg.parallel.check import check, check_by_names
from unity.pcg.parallel.parallelize import Assignment, parallelize
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training

MACHINE = Machine.grid(2, 4, "a100")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_whatever_the_search_can_choose_typechecks(name: str) -> None:
    with jax.enable_x64(True):
        model = MODELS[name]()
        captured = capture(model.loss, model.params, model.batch)
    assembled = assemble(captured.graph, captured.differentiated, MACHINE, Training())
    for seed in range(5):
        graph = parallelize(captured.graph, assembled.assignment(random_point(assembled, np.random.default_rng(seed))))
        check(graph)
        check(names_in(graph, MACHINE.named_levels).run_graph(graph))  # as exported files run it


def product(x: tuple[State, ...], y: tuple[State, ...], z: tuple[State, ...], out: tuple[State, ...] | None = None) -> PCG:
    """A parallel graph of one matrix product with these types, its result changed to `out` if one is given."""
    graph = capture(lambda a, b: a @ b, *(jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2).graph
    (node,) = [n for n in graph.nodes if n.kind != "input"]
    results = {id(n): (t,) for n, t in zip(graph.inputs, (x, y), strict=True)} | {id(node): (z,)}
    return parallelize(graph, Assignment(MACHINE.axes[:1], results, {}, {(id(graph), 0): (out,)} if out else {}))


def test_errors_name_axes_as_specifications_do() -> None:
    wrong = product((partitioned(0),), (UNUSED,), (partitioned(0),))
    with pytest.raises(ParallelTypeError, match='along axis "n0"'):
        check(wrong)
    with pytest.raises(ParallelTypeError, match='along axis "node"'):
        check_by_names(wrong, AxisNames.of_every_axis(wrong.axes, MACHINE.named_levels))


def test_right_types_pass() -> None:
    check(product((partitioned(0),), (REPLICATED,), (partitioned(0),)))
    check(product((partitioned(1),), (partitioned(0),), (PARTIAL,), (UNUSED,)))


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (
            ((partitioned(0),), (partitioned(1),), (partitioned(0),)),
            ["two factors", 'axis "n0"', "operand 1", "dimension 1", "replicated"],
        ),
        (((partitioned(0),), (UNUSED,), (partitioned(0),)), ["operand 1 (float32[8,8]) is unused", "operand 1 replicated for use"]),
        (((partitioned(1),), (partitioned(0),), (UNUSED,)), ["result 0", "a partial sum"]),
        (((partitioned(1),), (partitioned(0),), (PARTIAL,)), ["output 0", "a partial sum", "Reduce"]),
    ],
)
def test_wrong_types_are_named(types: Any, words: list[str]) -> None:
    with pytest.raises(ParallelTypeError) as caught:
        check(product(*types))
    for word in words:
        assert word in str(caught.value), word


def test_a_relu_over_a_partial_sum_is_refused() -> None:
    graph = capture(lambda a: jax.nn.relu(a), jax.ShapeDtypeStruct((8,), jnp.float32)).graph
    (node,) = [n for n in graph.nodes if n.kind != "input"]
    results = {id(graph.inputs[0]): ((PARTIAL,),), id(node): ((PARTIAL,),)}
    parallel = parallelize(graph, Assignment(MACHINE.axes[:1], results, {}, {(id(graph), 0): ((UNUSED,),)}))
    with pytest.raises(ParallelTypeError, match=r"operand 0 .* is a partial sum"):
        check(parallel)


def test_dimensions_that_do_not_divide_are_named() -> None:
    graph = capture(lambda a: a + 1, jax.ShapeDtypeStruct((3,), jnp.float32)).graph
    (node,) = [n for n in graph.nodes if n.kind != "input"]
    types = {id(graph.inputs[0]): ((partitioned(0),),), id(node): ((partitioned(0),),)}
    with pytest.raises(ParallelTypeError, match=r"dimension 0 of size 3 is not divisible by 2 \(the nearest that is: 4\)"):
        parallelize(graph, Assignment(MACHINE.axes[:1], types, {}, {}))


def test_a_parallelization_operator_must_be_what_it_says() -> None:
    graph = product((partitioned(1),), (partitioned(0),), (PARTIAL,), (UNUSED,))
    (end,) = graph.outputs
    wrong: Node = replace(end.node, kind="combine")
    with pytest.raises(ParallelTypeError, match="a partial sum to unused, which is reduce"):
        check(replace(graph, outputs=(replace(end, node=wrong),)))
