"""Rotations, masks and shifts along a sequence, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.equivalent.attention import PROJECTIONS, rescored, rotated
from benchmarks.equivalent.forms import Equivalence, same


def pairs(q: Any, cos: Any, sin: Any) -> Any:
    """Neighbours in the last dimension are rotated together."""
    a, b = q[..., ::2], q[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(q.shape)


def pairs_reshaped(q: Any, cos: Any, sin: Any) -> Any:
    two = q.reshape(*q.shape[:-1], -1, 2)
    a, b = two[..., 0], two[..., 1]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(q.shape)


def pairs_by_matrix(q: Any, cos: Any, sin: Any) -> Any:
    two = q.reshape(*q.shape[:-1], -1, 2)
    turned = jnp.stack([-two[..., 1], two[..., 0]], -1)
    return (two * cos[..., None] + turned * sin[..., None]).reshape(q.shape)


def distance(s: Any) -> Any:
    return jnp.abs(jnp.arange(s.shape[-2])[:, None] - jnp.arange(s.shape[-1])).astype(s.dtype)


def slopes(s: Any) -> Any:
    """How fast the scores of each head fall with the distance."""
    return (2.0 ** -(jnp.arange(s.shape[1]) + 1.0)).astype(s.dtype)


def counted_distance(s: Any) -> Any:
    rows, columns = (lax.broadcasted_iota(s.dtype, s.shape[-2:], k) for k in (0, 1))
    return jnp.maximum(rows - columns, columns - rows)


def near(s: Any) -> Any:
    """Which keys lie in the window before a query."""
    row, column = jnp.arange(s.shape[-2])[:, None], jnp.arange(s.shape[-1])
    return (row >= column) & (row - column < 4)


def band(s: Any) -> Any:
    ones = jnp.ones(s.shape[-2:], bool)
    return jnp.tril(ones) & ~jnp.tril(ones, -4)


def before(shift: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Each position mixed with the one before it."""
    return lambda w, x: jnp.tanh((w["mix"] * x + (1 - w["mix"]) * shift(x)) @ w["w"]).mean()


def rolled(x: Any) -> Any:
    return jnp.where(jnp.arange(x.shape[1])[:, None] > 0, jnp.roll(x, 1, 1), 0)


def convolved(w: Any, x: Any) -> Any:
    out = lax.conv_general_dilated(
        x, w["k"][:, None], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1]
    )
    return jnp.tanh(out @ w["w"]).mean()


def summed_shifts(w: Any, x: Any) -> Any:
    wide = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    return jnp.tanh(sum(wide[:, k : k + x.shape[1]] * w["k"][k] for k in range(4)) @ w["w"]).mean()


def stacked_shifts(w: Any, x: Any) -> Any:
    wide = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    views = jnp.stack([wide[:, k : k + x.shape[1]] for k in range(4)])
    return jnp.tanh(jnp.einsum("knsd,kd->nsd", views, w["k"]) @ w["w"]).mean()


def changes(difference: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: jnp.abs(difference(x @ w)).mean()


def causal(dims: tuple[str, str, str]) -> Callable[..., Any]:
    return lambda w, x, padding: lax.conv_general_dilated(x, w, (1,), padding, dimension_numbers=dims)


CLASSES: dict[str, Equivalence] = {
    "rotary embedding of pairs": same(
        *("D H C", "N S D"), strided=rotated(pairs), reshaped=rotated(pairs_reshaped), turned=rotated(pairs_by_matrix),
    ),
    "attention with distances": same(
        *(PROJECTIONS, "N S D"),
        outer=rescored(lambda s: s - slopes(s)[:, None, None] * distance(s)),
        iota=rescored(lambda s: s - counted_distance(s) * slopes(s)[None, :, None, None]),
        vmap=rescored(lambda s: jax.vmap(lambda s, m: s - m * distance(s), (1, 0), 1)(s, slopes(s))),
        einsum=rescored(lambda s: s - jnp.einsum("h,qk->hqk", slopes(s), distance(s))),
    ),
    "attention in a window": same(
        *(PROJECTIONS, "N S D"),
        where=rescored(lambda s: jnp.where(near(s), s, -1e30)),
        band=rescored(lambda s: jnp.where(band(s), s, -1e30)),
        added=rescored(lambda s: s + jnp.where(band(s), 0.0, -1e30).astype(s.dtype)),
        vmap=rescored(lambda s: jax.vmap(lambda s: jnp.where(near(s), s, -1e30))(s)),
    ),
    "positions before": same(
        *({"mix": "D", "w": "D D"}, "N S D"),
        concatenated=before(lambda x: jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)),
        padded=before(lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]),
        rolled=before(rolled),
        vmap=before(jax.vmap(lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0))))),
    ),
    "changes over time": same(
        *("D F", "N S D"),
        slices=changes(lambda y: y[:, 1:] - y[:, :-1]), diff=changes(lambda y: jnp.diff(y, axis=1)),
        rolled=changes(lambda y: (y - jnp.roll(y, 1, 1))[:, 1:]), vmap=changes(jax.vmap(lambda y: y[1:] - y[:-1])),
    ),
    "causal convolution of features": same(
        *("4 D F", "N S D"),
        own_padding=lambda w, x: jnp.tanh(causal(("NWC", "WIO", "NWC"))(w, x, [(3, 0)])).mean(),
        padded=lambda w, x: jnp.tanh(causal(("NWC", "WIO", "NWC"))(w, jnp.pad(x, ((0, 0), (3, 0), (0, 0))), "VALID")).mean(),
        first=lambda w, x: jnp.tanh(
            causal(("NCW", "OIW", "NCW"))(w.transpose(2, 1, 0), x.transpose(0, 2, 1), [(3, 0)]).transpose(0, 2, 1)
        ).mean(),
    ),
    "causal convolution": same(
        *({"k": "4 D", "w": "D D"}, "N S D"), conv=convolved, shifts=summed_shifts, stacked=stacked_shifts,
        differences={
            "conv": "its result goes through memory; rule: it is a sum of shifted products",
            "stacked": "shifted sequences are written to memory; rule: it is a sum of shifted products",
        },
    ),
}  # fmt: skip
