"""Attention in a narrow type, and the mask in a loop's step, as a GPU's buffer assignments hold them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from unity.pcg.analysis.residuals import invariant, residuals
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.parallelize import on_one_device
from unity.search.cost.cost import Training
from unity.search.memory.backend import CPU, GPU, Backend
from unity.search.memory.memory import MemoryPrediction, predict_memory
from unity.search.space.live_buffers import KEPT

ROWS, WIDTH, STEPS = 128, 4, 3
SCORES = ROWS * ROWS  # elements


def masked(scores: jax.Array) -> jax.Array:
    allowed = jnp.tril(jnp.ones((ROWS, ROWS), bool))
    return jax.nn.softmax(jnp.where(allowed, scores.astype(jnp.float32), -1e9)).astype(scores.dtype)


def attended(x: jax.Array, w: jax.Array) -> jax.Array:
    return masked(x @ (w @ x.T)) @ x


def once(w: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(attended(x, w).astype(jnp.float32))


def looped(w: Any, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (attended(x, w), None)), x, w)
    return jnp.sum(x.astype(jnp.float32))


def looped_in_a_loop(w: Any, x: jax.Array) -> jax.Array:
    def layers(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return lax.scan(jax.checkpoint(lambda x, w: (attended(x, w), None)), x, w)[0], None

    return jnp.sum(lax.scan(layers, x, w)[0].astype(jnp.float32))


def predicted(fn: Any, weights: tuple[int, ...], dtype: Any, backend: Backend) -> tuple[PCG, MemoryPrediction]:
    args = jax.ShapeDtypeStruct(weights, dtype), jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    captured = capture(fn, *args)
    graph = on_one_device(captured.graph)
    return graph, predict_memory(graph, captured.differentiated, Training(), backend)


def softmax_of(graph: PCG) -> Node:
    return next(node for node, _ in graph.walk() if node.kind == "softmax")


@pytest.mark.parametrize(("length", "kept"), [(1024, "scores"), (197, "exponentials")])  # GPT-2 and ViT, compiled for H200s
def test_a_gpu_keeps_narrow_scores_where_a_softmax_is_one_kernel(length: int, kept: str) -> None:
    def loss(scores: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(scores.astype(jnp.float32)).astype(scores.dtype) ** 2)

    graph = on_one_device(capture(loss, jax.ShapeDtypeStruct((64, length), jnp.bfloat16)).graph)
    body = softmax_of(graph).body
    assert body is not None
    on_gpu, on_cpu = (residuals(body, (True,), buffered=flag) for flag in (False, True))
    assert on_gpu.operands == (kept == "scores",)
    wide = 4 * 64 * length
    assert [nbytes for _, nbytes in on_gpu.inner if nbytes == wide] == ([wide] if kept == "exponentials" else [])
    assert [nbytes for _, nbytes in on_cpu.inner if nbytes == wide] == [wide]


@pytest.mark.parametrize("backend", [GPU, CPU], ids=lambda b: b.name)
def test_the_mask_in_a_step_is_live_throughout_the_loop(backend: Backend) -> None:
    graph, found = predicted(looped, (STEPS, WIDTH, WIDTH), jnp.float32, backend)
    body = softmax_of(graph).body
    assert body is not None
    (mask,) = invariant(body, (True,) * len(body.inputs))
    assert body.tensors[mask].nbytes == SCORES
    assert any(h.why == KEPT and h.node.kind == "scan" and h.nbytes == SCORES for h in found.held)
    assert not any(h.nbytes == SCORES for h in predicted(once, (WIDTH, WIDTH), jnp.float32, backend)[1].held)


@pytest.mark.parametrize("backend", [GPU, CPU], ids=lambda b: b.name)
def test_the_mask_of_a_loop_in_a_loop_is_there_once(backend: Backend) -> None:
    _, found = predicted(looped_in_a_loop, (2, STEPS, WIDTH, WIDTH), jnp.float32, backend)
    masks = [h for h in found.held if h.why == KEPT and h.node.kind == "scan" and h.nbytes in (SCORES, 2 * SCORES)]
    assert [h.nbytes for h in masks] == [SCORES]


def test_the_residuals_of_a_long_chain_of_wide_values_are_found() -> None:
    """What a value is computed from is found once for all that read it: twice as long with each operator, it would take years."""

    def loss(x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        for _ in range(40):
            y = jnp.exp(y) + jnp.tanh(y)
        return jnp.sum(y)

    body = capture(loss, jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)).body
    assert residuals(body, (True,)).operands == (True,)


@pytest.mark.parametrize(("backend", "copies"), [(GPU, 3), (CPU, 6)])
def test_a_recomputed_softmax_holds_no_wide_exponentials_on_a_gpu(backend: Backend, copies: int) -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(attended)(x, w).astype(jnp.float32))

    _, found = predicted(loss, (WIDTH, WIDTH), jnp.bfloat16, backend)
    # scores, probabilities and their cotangent; on a CPU float32 besides
    assert found.total == pytest.approx(copies * 2 * SCORES, rel=0.03)
