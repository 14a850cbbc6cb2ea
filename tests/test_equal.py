"""Which cotangents are one value, so that equal collectives of theirs are compiled to one: those of what is split, too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from small_models import f

from unity.optimize import optimize
from unity.pcg.capture import capture
from unity.pcg.equal import Names, parts_of
from unity.pcg.graph import PCG, Value
from unity.search.machine import Machine


def gates(params: Any, x: Any, other: int = 0) -> Any:
    """Two products are split, and added part by part; `other`: a part of the second goes elsewhere, too, and is no part then."""
    ours, theirs = jnp.split(x @ params["a"], 2, -1), jnp.split(jnp.cos(x) @ params["b"], 2, -1)
    first, second = jnp.tanh(ours[0] + theirs[0]) @ params["c"], jnp.tanh(ours[1] + theirs[1]) @ params["d"]
    return jnp.mean(jnp.cumsum(first, 0) * jnp.cumsum(second, 1)) + (jnp.mean(jnp.cumsum(theirs[1], 0)) if other else 0.0)


def planned(other: int) -> PCG:
    """Not rewritten: else the products are merged, and nothing is split."""
    params, machine = {"a": f(16, 32), "b": f(16, 32), "c": f(16, 16), "d": f(16, 16)}, Machine.grid(1, 1, "a100")
    loss = lambda p, x: gates(p, x, other)  # noqa: E731
    return optimize(loss, params, f(8, 16), machine=machine, search="captured", progress=False).pcg


@pytest.mark.parametrize("other", [0, 1])
def test_cotangents_of_what_is_split_and_added_are_equal_if_all_parts_are(other: int) -> None:
    graph = planned(other)
    ours, theirs = (n for n in graph.nodes if n.kind == "dot_general" and n.tensors[0].shape == (8, 32))
    names = Names(graph)
    assert (names.cotangent(Value(ours)) == names.cotangent(Value(theirs))) == (not other)


def test_parts_are_all_that_a_value_is_used_for() -> None:
    def parts(fn: Any) -> int:
        body = capture(fn, f(4, 6)).body
        return len(parts_of(body, body.inputs[0]))

    assert parts(lambda x: jnp.split(x, 2, 1)) == 2
    assert parts(lambda x: (*jnp.split(x, 2, 1), x)) == 0
    assert parts(lambda x: (*jnp.split(x, 2, 1), jnp.sin(x))) == 0
    assert parts(lambda x: jnp.split(jnp.sin(x), 2, 1)) == 0
