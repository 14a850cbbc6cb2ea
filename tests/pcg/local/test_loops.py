"""Loops and conditionals on pieces run over whichever axes their values vary, on every version of JAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pipelined_models
import pytest
import unlike_models
from ci_cases import one_in
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import unity
from unity.exec.pipelines.guarded import guarded
from unity.pcg.ir.payloads import ScheduleKind
from unity.pcg.local import varying_loops as loops
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B
from unity.pcg.types.varying_axes import varying
from unity.plan.stream import Stream

AXES = ("a", "b", "c")


def on_pieces(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the results of device 0 for operands that vary over all axes."""
    devices = np.asarray(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)

    def local(*xs: Any) -> Any:
        return jax.tree.map(lambda x: wide(x)[None], fn(*map(wide, xs)))

    run = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(AXES))
    return jax.tree.map(lambda x: np.asarray(x[0]), jax.jit(run)(*args))


def wide(x: Any) -> Any:
    missing = tuple(name for name in AXES if name not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def over(name: str) -> Any:
    """Return a zero that varies over one axis."""
    return (lax.axis_index(name) * 0).astype(jnp.float32)


# Carries that come in invariant, and vary over more axes after a step; beside each step the same on numbers that vary over nothing.
STEPS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "added": (lambda c, x: (c[0] + x.sum(), c[1] + 1, c[2]), lambda c, x: (c[0] + x.sum(), c[1] + 1, c[2])),
    "one by one": (
        lambda c, x: (c[1] + 1, c[2] + over("b"), c[2] + x.sum() + over("a")),
        lambda c, x: (c[1] + 1, c[2], c[2] + x.sum()),
    ),
    "exchanged": (lambda c, x: (c[1], c[0] + over("c"), c[2] * 0.5), lambda c, x: (c[1], c[0], c[2] * 0.5)),
    "unchanged": (lambda c, x: c, lambda c, x: c),
    "nested": (
        lambda c, x: (loops.scan(lambda d, y: (d + y, None), c[1], x)[0], c[1], c[2]),
        lambda c, x: (c[1] + x.sum(), c[1], c[2]),
    ),
    "chosen": (
        lambda c, x: (*loops.cond(over("b") < 1, lambda u, v: (v + over("a"), u), lambda u, v: (u, v), c[0], c[1]), c[2]),
        lambda c, x: (c[1], c[0], c[2]),
    ),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("size", [3, 0])
def test_a_carry_may_come_in_invariant_and_come_out_varying(name: str, size: int) -> None:
    (step, plain), wanted = STEPS[name], (1.0, 2.0, 3.0)
    start = tuple(map(jnp.float32, wanted))
    xs = np.arange(4 * size, dtype=np.float32).reshape(4, size)

    def scanned(x: Any) -> Any:
        return loops.scan(lambda c, x: (step(c, x), None), start, x)[0]

    def repeated(x: Any) -> Any:
        return loops.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, step(c[1], x[c[0]])), (0, start))[1]

    for x in xs:
        wanted = plain(wanted, x)
    np.testing.assert_allclose(on_pieces(scanned, xs), wanted)
    np.testing.assert_allclose(on_pieces(repeated, xs), wanted)


def test_branches_whose_results_vary_over_different_axes() -> None:
    def run(x: Any) -> Any:
        branches = [
            lambda x: (jnp.zeros(3), x.sum()),
            lambda x: (x, jnp.float32(0)),
            lambda x: (jnp.ones(3) + over("b"), over("c")),
        ]
        return [loops.switch(k, branches, x) for k in (0, 1, 2)]

    x = jnp.arange(3.0)
    wanted = [(np.zeros(3), 3.0), (np.arange(3.0), 0.0), (np.ones(3), 0.0)]
    for found, (a, b) in zip(on_pieces(run, x), wanted, strict=True):
        np.testing.assert_allclose(found[0], a)
        np.testing.assert_allclose(found[1], b)


@pytest.mark.parametrize("works", [True, False])
def test_guarded_work_may_have_residuals_that_vary_over_no_axis(works: bool) -> None:
    def run(x: Any) -> Any:
        def total(x: Any) -> Any:
            return (guarded(lambda parts: (counting(parts[0]),), over("a") + works > 0, (x,))[0] ** 2).sum()

        return jax.grad(total)(x)

    x = jnp.arange(3, dtype=jnp.float32)
    wanted = jax.grad(lambda x: ((jnp.sin(x) if works else x) ** 2).sum())(x)
    np.testing.assert_allclose(on_pieces(run, x), wanted, rtol=1e-6)


@jax.custom_vjp
def counting(x: Any) -> Any:
    """A sine whose rule has constant residuals, which vary over no axis while the samples do."""
    return jnp.sin(x)


def _forward(x: Any) -> Any:
    return jnp.sin(x), (x, jnp.ones(x.shape[-1], x.dtype), jnp.int32(3), jnp.zeros((0, 2)))


def _backward(kept: Any, g: Any) -> Any:
    x, ones, three, nothing = kept
    return (g * jnp.cos(x) * ones * (three / 3 + nothing.sum()),)


counting.defvjp(_forward, _backward)


def empty(x: Any) -> Any:
    """Return products over, joins of, and means beside dimensions of size zero."""
    none = x[..., :0]
    joined = jnp.concatenate([none, x], -1)
    return joined + jnp.einsum("bsd,bde->bse", none, none.mT @ x) + none.sum(-1, keepdims=True)


LAYERS = {"constants": lambda w, x: x + counting(x @ w), "empty": lambda w, x: empty(jnp.tanh(x @ w))}


def arguments() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    weights, x, y = (jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for s in ((4, 8, 8), (16, 4, 8), (16, 4, 8)))
    return weights, x, y


def scanned_loss(name: str) -> Callable[..., Any]:
    return lambda w, x, y: ((lax.scan(lambda c, w: (LAYERS[name](w, c), None), x, w)[0] - y) ** 2).mean()


def written_loss(name: str) -> Callable[..., Any]:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = LAYERS[name](w, x)
        return ((x - y) ** 2).mean()

    return loss


@pytest.mark.parametrize(("unlike", "kind", "name"), one_in(3, itertools.product([False, True], [GPIPE, ONE_F_ONE_B], LAYERS)))
def test_pipelines_may_have_residuals_that_vary_over_no_axis(name: str, kind: ScheduleKind, unlike: bool) -> None:
    weights, x, y = arguments()
    fn, params = (written_loss(name), list(weights)) if unlike else (scanned_loss(name), weights)
    models = unlike_models if unlike else pipelined_models
    plan = models.planned(fn, (params, x, y), kind=kind)
    pipelined_models.close(
        jax.jit(jax.value_and_grad(plan))(*plan.shard(params, x, y)), jax.jit(jax.value_and_grad(fn))(params, x, y)
    )


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", LAYERS)
def test_a_flight_may_have_residuals_that_vary_over_no_axis(name: str) -> None:
    args, fn = arguments(), scanned_loss(name)
    plan = unity.optimize(
        fn, *args, machine=pipelined_models.TREE, pipeline=unity.PipelineShape(2, 4, "2bw"), progress=False, budget=0
    )
    placed = plan.shard(*args)
    stream = Stream(plan)
    flight, *ended = stream.step(stream.start(*placed), *placed)
    wanted = jax.jit(jax.value_and_grad(fn))(*args)
    for found in (ended, stream.finish(flight)):
        pipelined_models.close(jax.tree.leaves(found), jax.tree.leaves(wanted))
