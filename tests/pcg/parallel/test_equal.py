"""Equal values and cotangents have equal numbers, and the compiler runs equal collectives of them once."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from slow_machines import slow
from small_models import f, i

from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG, Value
from unity.pcg.parallel.equal_values import ValueNumbering, parts_of, summand_of


def gates(params: Any, x: Any, other: int = 0) -> Any:
    """Return a loss of two products that are split and added part by part. With `other`, a part of the second has another user."""
    ours, theirs = jnp.split(x @ params["a"], 2, -1), jnp.split(jnp.cos(x) @ params["b"], 2, -1)
    first, second = jnp.tanh(ours[0] + theirs[0]) @ params["c"], jnp.tanh(ours[1] + theirs[1]) @ params["d"]
    return jnp.mean(jnp.cumsum(first, 0) * jnp.cumsum(second, 1)) + (jnp.mean(jnp.cumsum(theirs[1], 0)) if other else 0.0)


def planned(other: int) -> PCG:
    """Return the plan of the captured program. Rewriting would merge the products, so that nothing is split."""
    params, machine = {"a": f(16, 32), "b": f(16, 32), "c": f(16, 16), "d": f(16, 16)}, Machine.grid(1, 1, "a100")
    loss = lambda p, x: gates(p, x, other)  # noqa: E731
    return optimize(loss, params, f(8, 16), machine=machine, search="captured", progress=False).program.pcg


@pytest.mark.parametrize("other", [0, 1])
def test_cotangents_of_split_summands_are_equal_if_those_of_all_parts_are(other: int) -> None:
    graph = planned(other)
    ours, theirs = (n for n in graph.nodes if n.kind == "dot_general" and n.tensors[0].shape == (8, 32))
    names = ValueNumbering(graph)
    assert (names.cotangent(Value(ours)) == names.cotangent(Value(theirs))) == (not other)


def critic(weights: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]))


def adversaries(params: Any, noise: Any) -> Any:
    """Return the losses of a critic and of a generator; each stops the gradient to the other's weights."""
    made = jnp.tanh(noise @ params["maker"])
    return critic(params["critic"], lax.stop_gradient(made)) - critic(lax.stop_gradient(params["critic"]), made)


def test_a_value_recomputed_for_a_stopped_gradient_has_one_number() -> None:
    params = {"maker": f(16, 32), "critic": [f(32, 64), f(64, 16)]}
    alone, plan = (
        optimize(adversaries, params, f(64, 16), machine=Machine.grid(1, n, "a100"), search="captured", progress=False)
        for n in (1, 8)
    )
    names, products = (
        ValueNumbering(alone.program.pcg),
        [n for n in alone.program.pcg.nodes if n.kind == "dot_general" and n.tensors[0].shape == (64, 64)],
    )
    assert len(products) == 2
    assert len({names.value(Value(n)) for n in products}) == 1
    check = plan.frontier[-1].check()
    assert {line.kind for line in check.lines} >= {"all-gather", "reduce-scatter"}
    assert not any(line.difference for line in check.lines)


@pytest.mark.parametrize("weights", [("w", "w"), ("w", "v")])
def test_inputs_of_added_products_have_one_cotangent_if_they_share_the_weight(weights: tuple[str, str]) -> None:
    def loss(p: Any, ids: Any) -> Any:
        return jnp.sum(p["t"][ids] @ p[weights[0]] + p["s"][ids] @ p[weights[1]])

    params = {"t": f(48, 24), "s": f(48, 24), **dict.fromkeys(weights, f(24, 24))}
    graph = optimize(loss, params, i(48), machine=Machine.grid(1, 1, "a100"), search="captured", progress=False).program.pcg
    names = ValueNumbering(graph)
    first, second = (n.operands[0] for n in graph.nodes if n.kind == "dot_general")
    assert (names.cotangent(first) == names.cotangent(second)) == (len(set(weights)) == 1)


def test_gathers_of_one_cotangent_behind_two_products_are_predicted_once() -> None:
    def loss(p: Any, ids: Any) -> Any:
        return jnp.sum(p["t"][ids] @ p["w"] + p["s"][ids] @ p["w"])

    params = {"t": f(48, 24), "s": f(48, 24), "w": f(24, 24)}
    plan = optimize(loss, params, i(48), machine=slow(Machine.grid(2, 3, "a100")), search="captured", progress=False)
    check = plan.check()
    assert "all-to-all" in {line.kind for line in check.lines}
    assert not any(line.difference for line in check.lines)


def test_a_stopped_use_leaves_a_cotangent_with_the_other() -> None:
    def summand(fn: Any) -> int:
        body = capture(fn, f(4, 6)).body
        return summand_of(body, body.inputs[0]) == body.outputs[0]

    assert summand(lambda x: x + lax.stop_gradient(jnp.round(x)))
    assert not summand(lambda x: x + jnp.sin(x))


def test_a_value_with_another_user_has_no_parts() -> None:
    def parts(fn: Any) -> int:
        body = capture(fn, f(4, 6)).body
        return len(parts_of(body, body.inputs[0]))

    assert parts(lambda x: jnp.split(x, 2, 1)) == 2
    assert parts(lambda x: (*jnp.split(x, 2, 1), x)) == 0
    assert parts(lambda x: (*jnp.split(x, 2, 1), jnp.sin(x))) == 0
    assert parts(lambda x: jnp.split(jnp.sin(x), 2, 1)) == 0
