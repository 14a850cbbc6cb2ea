"""The user's line behind a node: its own, or that of its first use; and behind an operation of a compiled program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.payloads import Input
from unity.pcg.ir.program import tensor_type
from unity.pcg.ir.user_lines import labelled_place, source_of_use

TENSOR = tensor_type((4,), np.dtype("float32"))


def residual_layers(count: int) -> PCG:
    """Layers that add what they compute to their input. The result alone has a line."""
    x = Value(Node("input", (), (TENSOR,), payload=Input(name="x")))
    first = x
    for _ in range(count):
        x = Value(Node("add", (x, Value(Node("tanh", (x,), (TENSOR,)))), (TENSOR,)))
    return PCG((first.node,), (Value(Node("neg", (x,), (TENSOR,), source="model.py:7 (f)")),))


def test_each_node_on_the_way_to_a_line_is_looked_at_once() -> None:
    graph = residual_layers(10)
    looked_at = []

    class Users(dict[int, Any]):
        def __getitem__(self, key: int) -> Any:
            looked_at.append(key)
            return super().__getitem__(key)

    vars(graph)["users"] = Users(graph.users)
    assert source_of_use(graph.inputs[0], graph) == "model.py:7 (f)"
    assert len(looked_at) == len(set(looked_at)) == len(graph.nodes) - 1


def test_a_node_without_any_line_behind_it_has_none() -> None:
    x = Node("input", (), (TENSOR,), payload=Input(name="x"))
    graph = PCG((x,), (Value(Node("neg", (Value(x),), (TENSOR,))),))
    assert source_of_use(x, graph) == ""


@pytest.mark.parametrize(
    ("scope", "line"),
    [
        ("jit(step)/jvp(jit(call))/shard_map/replicate at model.py:7/psum", "model.py:7"),
        ("jit(step)/branches at model.py:9/cond/branch_0_fun/jvp(combine at model.py:7)/all_gather", "model.py:7"),
        ("jit(step)/branches at model.py:9/cond/transpose(jvp(combine at model.py:7))/psum_scatter", "model.py:7"),
        ("jit(step)/scan at model.py:9/while/body/combine at /all_gather", "model.py:9"),
        ("jit(step)/shard_map/psum", ""),
    ],
)
def test_the_innermost_label_names_the_line_whatever_transformations_are_around_it(scope: str, line: str) -> None:
    assert labelled_place(scope) == line
