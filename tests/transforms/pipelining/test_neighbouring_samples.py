"""Programs that join neighbouring samples, such as pairs or ghost batches: right over micro-batches, which are strided, or refused.

Each works on every slice of a multiple of the group, as devices have them, but a micro-batch has only some samples of each group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax import lax

import unity

WIDTH = 4
Grouped = Callable[[jax.Array], jax.Array]  # of [groups, samples of each, features]
JOINED: dict[str, Grouped] = {
    "ghost batch": lambda g: g - g.mean(1, keepdims=True),
    "soft-max of a group": lambda g: jax.nn.softmax(g, 1) * g,
    "neighbours swapped": lambda g: g[:, ::-1],
    "sums so far": lambda g: jnp.cumsum(g, 1),
    "attention in a group": lambda g: jax.nn.softmax(g @ g.swapaxes(1, 2)) @ g,
    "the group's sum for each": lambda g: jnp.repeat(g.sum(1, keepdims=True), g.shape[1], 1),
}
APART: dict[str, Grouped] = {"each by itself": jnp.tanh, "the same": lambda g: g}  # these join nothing
FORMS = JOINED | APART


def in_groups(form: str, size: int, x: jax.Array) -> jax.Array:
    """Apply a form to groups of adjacent samples."""
    return FORMS[form](x.reshape(-1, size, *x.shape[1:])).reshape(x.shape)


def model(layer: str, tail: str, size: int, checkpointed: bool, written: bool) -> Callable[..., jax.Array]:
    """Return the loss of a model whose layers and tail apply forms to groups of samples."""

    def step(x: Any, w: Any) -> Any:
        return 0.5 * x + 0.5 * in_groups(layer, size, jnp.tanh(x @ w)), None

    step = jax.checkpoint(step) if checkpointed else step

    def loss(weights: Any, x: Any) -> Any:
        if written:
            for w in weights:
                x = step(x, w)[0]
        else:
            x = lax.scan(step, x, weights)[0]
        return (in_groups(tail, size, x) ** 2).mean()

    return loss


def check(loss: Callable[..., Any], samples: int, plan: unity.Plan) -> None:
    """Check a plan's value and gradient against the function's."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, WIDTH, WIDTH), (samples, WIDTH)))
    want, got = (jax.jit(jax.value_and_grad(fn))(w, x) for fn in (loss, plan))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def planned(loss: Callable[..., Any], samples: int, **options: Any) -> unity.Plan | None:
    """Return a plan for two devices, or None if the program is refused."""
    args = jax.ShapeDtypeStruct((2, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((samples, WIDTH), jnp.float32)
    try:
        return unity.optimize(loss, *args, machine=unity.Machine.grid(1, 2), search="captured", **options)
    except unity.UnityError:
        return None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("form", JOINED)
def test_a_layer_that_joins_samples_of_several_micro_batches_is_refused(form: str, schedule: str) -> None:
    loss = model(form, "the same", 2, checkpointed=False, written=False)
    assert planned(loss, 16, pipeline=unity.PipelineShape(2, 4, schedule)) is None


@pytest.mark.parametrize("form", JOINED)
def test_a_tail_that_joins_samples_of_several_micro_batches_is_refused(form: str) -> None:
    loss = model("the same", form, 2, checkpointed=False, written=False)
    assert planned(loss, 16, pipeline=unity.PipelineShape(2, 4, "1f1b")) is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_layer_that_joins_nothing_may_see_samples_in_groups(schedule: str) -> None:
    loss = model("each by itself", "each by itself", 4, checkpointed=False, written=False)
    plan = planned(loss, 16, pipeline=unity.PipelineShape(2, 4, schedule))
    assert plan is not None
    check(loss, 16, plan)


def test_slices_of_whole_groups_are_micro_batches() -> None:
    """Of as many micro-batches as stages, each is a device's slice."""
    loss = model("ghost batch", "the same", 2, checkpointed=False, written=False)
    plan = planned(loss, 16, pipeline=unity.PipelineShape(2, 2, "gpipe"))
    assert plan is not None
    check(loss, 16, plan)


OPTIONS = st.one_of(
    st.builds(
        lambda count, kind: {"pipeline": unity.PipelineShape(2, count, kind)},
        st.sampled_from([2, 4, 8]),
        st.sampled_from(["gpipe", "1f1b"]),
    ),
    st.sampled_from([2, 4, 8]).map(lambda count: {"micro_batches": count}),
)


@example("ghost batch", "the same", 2, True, False, {"pipeline": unity.PipelineShape(2, 4, "gpipe")})
@example("ghost batch", "the same", 4, False, True, {"micro_batches": 4})
@example("the same", "soft-max of a group", 2, False, True, {"pipeline": unity.PipelineShape(2, 4, "1f1b")})
@settings(max_examples=fewer(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(FORMS)), st.sampled_from([2, 4]), st.booleans(), st.booleans(), OPTIONS
)
def test_what_is_not_refused_is_right(
    layer: str, tail: str, size: int, checkpointed: bool, written: bool, options: dict[str, Any]
) -> None:
    loss = model(layer, tail, size, checkpointed, written)
    plan = planned(loss, 32, **options)
    if plan is not None:
        check(loss, 32, plan)
