"""Stages that read a scalar from around the function: all devices have it, in a loop whose carries differ between devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unlike_models import SQUARE, largest_difference, planned

import unity
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B
from unity.transforms.pipelining.micro_batches import scans

LEAST = jnp.float32(-1e9)


def loss(params: Any, x: Any, y: Any) -> Any:
    """Two layers of attention, whose masks are filled with a closed-over scalar, one for each head."""
    for w in params:
        q, k, v = (jnp.einsum("bsm,mhd->bhsd", x, w[n]) for n in "qkv")
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        fill = jnp.broadcast_to(LEAST, (2,))[None, :, None, None]
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, fill)
        x = x + jnp.einsum("bhqk,bhkd,hdm->bqm", jax.nn.softmax(s), v, w["o"])
    return ((x - y) ** 2).mean()


@pytest.mark.parametrize("kind", [GPIPE, ONE_F_ONE_B])
def test_a_scalar_may_fill_a_mask_of_a_stage(kind: Any) -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)

    params = [{"q": normal(16, 2, 8), "k": normal(16, 2, 8), "v": normal(16, 2, 8), "o": normal(2, 8, 16)} for _ in range(2)]
    args = params, normal(8, 4, 16), normal(8, 4, 16)
    plan = planned(loss, args, SQUARE.axes[:1], 4, machine=SQUARE, kind=kind)
    ours, theirs = (jax.jit(jax.value_and_grad(fn))(*args) for fn in (plan, loss))
    assert largest_difference(ours, theirs) < 1e-5


def test_a_scan_whose_step_returns_a_weight_as_its_carry_is_no_pipeline() -> None:
    """Nor does it run over micro-batches: the weight has no samples."""

    def last(w: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda c, w: (w, None), x, w)[0] * x).mean()

    w, x = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) for shape in ((4, 8, 8), (8, 8)))
    plan = unity.optimize(last, w, x, machine=unity.Machine.grid(1, 8, "a100"), progress=False)
    ours, theirs = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(w, x) for fn in (plan, last))
    assert largest_difference(ours, theirs) < 1e-5
    (refused,) = scans(plan.program.family.captured)[1]
    assert "no dimension of what it carries is one of samples" in refused
