"""Gradients of narrow weights are added up over micro-batches in float32, by every schedule and in exported files.

In bfloat16, 256 + 1 is 256 again, and in float16 2048 + 1 is 2048: each micro-batch adds 1 / M here, and all of them 1.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from jax import lax
from pipelined_models import TREE, planned
from unlike_models import planned as planned_unlike

import unity
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, TWO_BW
from unity.plan.plan import Plan
from unity.plan.stream import Stream

MICRO_BATCHES = {"bfloat16": 512, "float16": 4096}


def loss(params: Any, x: Any) -> Any:
    """Layers of which each adds its weight and a shared one, and a mean in the narrow type."""
    h = lax.scan(lambda h, w: (jnp.sin(h + w + params["shared"]), None), x, params["layers"])[0]
    return (h + params["last"]).sum(1).mean()


def unlike(params: Any, x: Any) -> Any:
    """Two layers that are unlike. With unit matrices each sample adds 1 / M to every gradient, and 2 / M to the shared one."""
    h = x @ params["first"] + params["shared"]
    return ((h - params["shared"]) @ params["second"] + 2 * params["shared"] + params["last"]).sum(1).mean()


def arguments(names: dict[str, tuple[int, ...]], dtype: str) -> tuple[Any, Any]:
    return {name: jnp.zeros(shape, dtype) for name, shape in names.items()}, jnp.zeros((MICRO_BATCHES[dtype], 4), dtype)


def assert_ones(gradients: Any, shared: int, dtype: str) -> None:
    """Each sample adds 1 / M to every gradient, as often as a weight is read."""
    for name, g in gradients.items():
        assert g.dtype == dtype
        np.testing.assert_array_equal(g.astype("float32"), shared if name == "shared" else 1)


ALIKE = {"layers": (4, 4), "shared": (4,), "last": (4,)}


CASES = [(GPIPE, "bfloat16"), (ONE_F_ONE_B, "bfloat16"), (ONE_F_ONE_B, "float16"), *by_hand((GPIPE, "float16"))]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_every_micro_batch_counts_in_a_gradient(kind: Any, dtype: str) -> None:
    args = arguments(ALIKE, dtype)
    plan = planned(loss, args, 2, MICRO_BATCHES[dtype], kind=kind)
    assert_ones(jax.jit(jax.grad(plan))(*args), 4, dtype)


@pytest.mark.parametrize("kind", [ONE_F_ONE_B, *by_hand(GPIPE)])
def test_every_micro_batch_counts_where_stages_are_unlike(kind: Any) -> None:
    params, x = arguments({"shared": (4,), "last": (4,)}, "bfloat16")
    args = {**params, "first": jnp.eye(4, dtype="bfloat16"), "second": jnp.eye(4, dtype="bfloat16")}, x + 1
    plan = planned_unlike(unlike, args, TREE.axes[:1], rounds=256, kind=kind)
    assert_ones(jax.jit(jax.grad(plan))(*args), 2, "bfloat16")


def test_every_micro_batch_counts_between_two_steps() -> None:
    args = arguments(ALIKE, "bfloat16")
    stream = Stream(planned(loss, args, 2, 512, kind=TWO_BW))
    flight = stream.start(*args)
    flight, (_, gradients) = jax.jit(stream.step)(flight, *args)
    assert_ones(gradients, 4, "bfloat16")
    assert_ones(jax.jit(stream.finish)(flight)[1], 4, "bfloat16")


@pytest.mark.parametrize("kind", [ONE_F_ONE_B, *by_hand(GPIPE)])
def test_every_micro_batch_counts_in_a_narrow_loss(kind: Any) -> None:
    params, x = arguments(ALIKE, "bfloat16")
    args = {**params, "last": jnp.full(4, 0.25, "bfloat16")}, x
    plan = planned(loss, args, 2, 512, kind=kind)
    assert jax.jit(jax.value_and_grad(plan))(*args)[0] == 1


def pipeline(args: Any) -> Plan:
    return planned(loss, args, 2, MICRO_BATCHES["bfloat16"])


def micro_batches(args: Any) -> Plan:
    machine = unity.Machine.grid(1, 2, "a100")
    return unity.optimize(loss, *args, machine=machine, micro_batches=256, rules=(), progress=False)


@pytest.mark.parametrize("make", [pipeline, micro_batches])
def test_every_micro_batch_counts_in_an_exported_file(make: Callable[[Any], Plan], tmp_path: Path) -> None:
    args, path = arguments(ALIKE, "bfloat16"), tmp_path / "plan.py"
    make(args).files.export(path)
    fn = runpy.run_path(str(path))["fn"]
    value, gradients = jax.jit(jax.value_and_grad(fn))(*args)
    assert value == 0
    assert_ones(gradients, 4, "bfloat16")


def dense(params: Any, x: Any) -> Any:
    h = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params)[0]
    return (h.astype("float32") ** 2).mean()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="its compiler holds up to twice as much for products of bfloat16")
@pytest.mark.parametrize("kind", [GPIPE, ONE_F_ONE_B, TWO_BW])
def test_sums_in_float32_are_part_of_the_predicted_memory(kind: Any) -> None:
    shapes = jax.ShapeDtypeStruct((4, 256, 256), "bfloat16"), jax.ShapeDtypeStruct((64, 256), "bfloat16")
    shape = unity.PipelineShape(2, 8, kind)
    plan = unity.optimize(dense, *shapes, machine=unity.Machine.grid(1, 2), pipeline=shape, rules=(), progress=False)
    check = plan.check()
    assert 0.95 <= check.timeline.step / check.memory.total <= 1.25


def test_stages_convert_weights_to_a_narrower_type() -> None:
    """Every stage repeats a conversion, although its derivative rounds."""

    def loss(layers: Any, x: Any) -> Any:
        step = lambda h, w: (h + jnp.tanh(h @ w.astype("bfloat16")), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(step, x, layers)[0].astype("float32") ** 2)

    args = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    pipeline = unity.PipelineShape(2, 8, "gpipe")
    plan = unity.optimize(loss, *args, machine=unity.Machine.grid(2, 4), pipeline=pipeline, search="captured", progress=False)
    assert plan.program.pipelining is not None
