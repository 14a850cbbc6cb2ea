"""An operator of many parts, each of which could be divided alone, has a bounded number of choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from unity.pcg.capture.capture import capture
from unity.pcg.ir.program import Body
from unity.pcg.propagation import choices as module
from unity.pcg.propagation.choices import MANY, operand_states
from unity.pcg.types.parallel_type import State, partitioned

PARTS = 10


def sums(xs: list[jax.Array]) -> jax.Array:
    """Of few elements, as the log-determinants of coupling layers on few features."""
    return sum((jnp.tanh(x).sum(-1) for x in xs), jnp.zeros(16))


def loop(xs: list[jax.Array]) -> list[jax.Array]:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, [jnp.tanh(x) for x in c[1]]), (0, xs))[1]


PROGRAMS: dict[str, Callable[..., Any]] = {"sums": sums, "loop": loop}


def body_of(name: str, parts: int) -> Body:
    graph = capture(PROGRAMS[name], [jax.ShapeDtypeStruct((16, 4), jnp.float32)] * parts).graph
    (body,) = (n.body for n in graph.nodes if n.body is not None and len(n.body.inputs) >= parts)
    return body


@pytest.mark.parametrize("name", PROGRAMS)
def test_independent_parts_are_divided_alone_and_all_together(name: str) -> None:
    """There are 3 to the power of `PARTS` ways in all."""
    body = body_of(name, PARTS)
    found = list(operand_states(body))
    assert len(found) < 2 * MANY
    floating = [k for k, v in enumerate(body.inputs) if body.tensors[v].floating]

    def divided(states: tuple[State, ...], dim: int) -> int:
        return sum(states[k] == partitioned(dim) for k in floating)

    assert len(floating) == PARTS
    assert any(divided(states, 1) == 1 for states in found)
    assert all(any(divided(states, dim) == PARTS for states in found) for dim in (0, 1))


def test_up_to_the_limit_every_way_to_divide_independent_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    body = body_of("loop", 4)
    found = set(operand_states(body))
    monkeypatch.setattr(module, "MANY", 10_000)
    assert found == set(operand_states(body))
    assert len(found) >= 3**4 - 1
