"""Random programs that sort rows, most of them products of rows with labels, have the values and derivatives that are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from unity.pcg.capture.routing import without_sorting
from unity.pcg.ir.program import close
from unity.pcg.local.interpreter import run_body

TOKENS, WIDTH, TWO = 24, 4, 2
Step = Callable[..., Any]
Steps = Mapping[str, Step]


def numbers(labels: Any, count: int) -> Any:
    return (labels[:, None] == jnp.arange(count)).sum(0)


def scattered(mode: Any) -> Callable[..., Any]:
    return lambda r: jnp.zeros(r.count, int).at[r.keys].add(1, mode=mode)


def unstable(r: Routed) -> Any:
    return lax.sort((r.keys, jnp.arange(r.rows)), num_keys=1, is_stable=False)[1]


def second(r: Routed) -> Any:
    return lax.sort((r.keys, jnp.arange(r.rows)[::-1], jnp.arange(r.rows)), num_keys=2)[2]


@dataclass
class Routed:
    """The arrays that the steps of a program read.

    Attributes:
        x: the tokens `[tokens, WIDTH]`.
        up: a matrix for each expert.
        each: the number of rows of a token.
        experts: the expert of each row.
        keys: functions of the experts, by which rows may be sorted.
        order: the number of the row at each place in sorted order.
    """

    x: Any
    up: Any
    each: int
    experts: Any = None
    keys: Any = None
    order: Any = None

    @property
    def count(self) -> int:
        return self.up.shape[0]

    @property
    def rows(self) -> int:
        return self.each * self.x.shape[0]


LABELS: Steps = {
    "argmax": lambda s, k: jnp.argmax(s, -1) if k == 1 else lax.top_k(s, k)[1].reshape(-1),
    "argmin": lambda s, k: jnp.argmin(s, -1) if k == 1 else lax.top_k(-s, k)[1].reshape(-1),
    "of narrow type": lambda s, k: lax.top_k(s, k)[1].astype(jnp.int8).reshape(-1),
    "along the first dimension": lambda s, k: jnp.argmax(s.T, 0) if k == 1 else lax.top_k(s, k)[1].reshape(k, -1).reshape(-1),
    "by place": lambda s, k: lax.top_k(s, k)[1].T.reshape(-1),
}
KEYS: Steps = {
    "label": lambda e: e,
    "itself, if not negative": lambda e: jnp.where(e < 0, e + 5, e),
    "in reverse": lambda e: 4 - e,
    "pairs": lambda e: e // TWO,
    "all but one": lambda e: (e + 1) % 4,
    "clipped": lambda e: jnp.clip(e, 1, 3),
    "next": lambda e: e + 1,
    "last": lambda e: e - 1,
    "negated": lambda e: -e,
    "wrapped": lambda e: (e * 60).astype(jnp.int8),
    "wrapped, unsigned": lambda e: (e - 1).astype(jnp.uint8),
    "saturated": lambda e: (e.astype(jnp.float32) - 1).astype(jnp.uint8),
    "saturated above": lambda e: (e * 100.0).astype(jnp.int8),
    "bits": lambda e: e ^ 1,
    "large": lambda e: e.astype(jnp.uint32) << 30,
    "large product": lambda e: e.astype(jnp.uint32) * jnp.uint32(3 << 30),
    "rounded": lambda e: (e * 0.7).astype(int),
    "truth": lambda e: (e > 1).astype(jnp.uint8),
    "with places": lambda e: e * e.shape[0] + jnp.arange(e.shape[0]),
}
SIZES: Steps = {
    "bincount": lambda r: jnp.bincount(r.keys, length=r.count),
    "sum": lambda r: numbers(r.keys, r.count),
    "sum of floats": lambda r: jax.nn.one_hot(r.keys, r.count).sum(0).astype(int),
    "sum of sorted": lambda r: numbers(r.keys[r.order], r.count),
    "added": scattered("drop"),
    "clamped": scattered("clip"),
    "of experts": lambda r: numbers(r.experts, r.count),
    "moved": lambda r: jnp.roll(numbers(r.keys, r.count), 1),
    "sorted": lambda r: numbers(r.keys, r.count)[r.order[: r.count]] if r.count < r.rows else numbers(r.keys, r.count)[r.order],
    "narrow": lambda r: numbers(r.keys, r.count).astype(jnp.int8).astype(int),
    "few bits": lambda r: numbers(r.keys, r.count).astype(jnp.int4).astype(int),
    "saturated": lambda r: numbers((r.experts.astype(jnp.float32) - 1).astype(jnp.uint8), r.count),
}
ORDERS: Steps = {
    "argsort": lambda r: jnp.argsort(r.keys),
    "sort": lambda r: lax.sort((r.keys, jnp.arange(r.rows)), num_keys=1)[1],
    "unstable": unstable,
    "two keys": second,
    "descending": lambda r: jnp.argsort(r.keys, descending=True),
    "of experts": lambda r: jnp.argsort(r.experts),
    "of narrow places": lambda r: lax.sort((r.keys, lax.iota(jnp.int8, r.rows)), num_keys=1)[1],
}
TAKEN: Steps = {
    "divided": lambda r: r.x[r.order // r.each],
    "repeated": lambda r: jnp.repeat(r.x, r.each, axis=0)[r.order],
    "filled": lambda r: jnp.take(jnp.repeat(r.x, r.each, axis=0), r.order, axis=0, mode="fill"),
    "put": lambda r: jnp.zeros((r.rows, WIDTH)).at[jnp.argsort(r.order)].set(jnp.repeat(r.x, r.each, axis=0)),
    "added": lambda r: jnp.zeros((r.rows, WIDTH)).at[jnp.argsort(r.order)].add(jnp.repeat(r.x, r.each, axis=0)),
    "by the rest": lambda r: r.x[r.order % r.x.shape[0]],
    "not sorted": lambda r: jnp.repeat(r.x, r.each, axis=0),
    "by the next place": lambda r: r.x[(r.order + 1) % r.x.shape[0]],
}
BETWEEN: Steps = {
    "relu": lambda r, h: jax.nn.relu(h),
    "gelu": lambda r, h: jax.nn.gelu(h),
    "softmax": lambda r, h: jax.nn.softmax(h, -1),
    "of the label": lambda r, h: h + r.up[:, 0][jnp.minimum(r.experts[r.order], r.count - 1)],
    "biased": lambda r, h: h + r.up[0, 0],
    "weighed": lambda r, h: h * jnp.sin(jnp.arange(r.rows))[r.order][:, None],
    "in pieces": lambda r, h: h.reshape(r.rows, 2, -1).sum(1).repeat(2, 1),
    "of the largest": lambda r, h: h * (jnp.argmax(h, -1)[:, None] == jnp.arange(h.shape[1])),
    "centred": lambda r, h: h - h.mean(0),
    "looped": lambda r, h: lax.fori_loop(0, 2, lambda i, h: h * jnp.arange(r.rows)[:, None], h),
    "numbered": lambda r, h: h * jnp.arange(r.rows)[:, None],
    "added along": lambda r, h: jnp.cumsum(h, 0),
    "largest so far": lambda r, h: lax.cummax(h, 0),
    "reversed": lambda r, h: h[::-1],
    "rolled": lambda r, h: jnp.roll(h, 1, 0),
    "padded": lambda r, h: jnp.pad(h, ((1, 0), (0, 0)))[:-1],
    "sorted": lambda r, h: jnp.sort(h, 0),
    "covered": lambda r, h: jnp.where(jnp.arange(r.rows)[:, None] < 3, h, 0.0),
    "convolved": lambda r, h: h + lax.reduce_window(h, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
    "multiplied": lambda r, h: (h @ h.T) @ h,
    "multiplied by the first": lambda r, h: h * h[:1],
    "transposed": lambda r, h: h.T.reshape(h.shape),
}
PUT: Steps = {
    "taken": lambda r, y: y[jnp.argsort(r.order)],
    "taken, filled": lambda r, y: jnp.take(y, jnp.argsort(r.order), axis=0, mode="fill"),
    "by places": lambda r, y: y[jnp.zeros_like(r.order).at[r.order].set(jnp.arange(r.rows, dtype=r.order.dtype))],
    "by places in a column": lambda r, y: y[
        jnp.zeros((r.rows, 1), r.order.dtype).at[r.order].set(jnp.arange(r.rows, dtype=r.order.dtype)[:, None])[:, 0]
    ],
    "by places in a row": lambda r, y: y[
        jnp.zeros((r.rows, r.rows), int).at[r.order].set(jnp.broadcast_to(jnp.arange(r.rows), (r.rows, r.rows)))[:, 0]
    ],
    "by stable places": lambda r, y: y[jnp.argsort(jnp.argsort(r.keys))],
    "set": lambda r, y: jnp.zeros_like(y).at[r.order].set(y),
    "added": lambda r, y: jnp.ones_like(y).at[r.order].add(y),
    "added to tokens": lambda r, y: jnp.zeros((r.x.shape[0], y.shape[1])).at[r.order // r.each].add(y),
    "added to few": lambda r, y: jnp.zeros((3, y.shape[1])).at[r.order // r.each].add(y, mode="drop"),
    "set to tokens": lambda r, y: jnp.zeros((r.x.shape[0], y.shape[1])).at[r.order // r.each].max(y),
    "of more rows": lambda r, y: jnp.zeros((r.rows + 2, y.shape[1])).at[r.order].set(y),
    "in halves": lambda r, y: jnp.zeros((r.rows, y.shape[1] // 2)).at[r.order].add(y[:, ::2]),
    "summed": lambda r, y: y.sum(0),
    "largest": lambda r, y: y.max(0),
    "left": lambda r, y: y,
    "shifted": lambda r, y: y[(jnp.argsort(r.order) + 1) % r.rows],
    "by order": lambda r, y: y[r.order],
    "twice": lambda r, y: jnp.concatenate([y[jnp.argsort(r.order)], y]),
}
STEPS = (LABELS, KEYS, ORDERS, SIZES, TAKEN, BETWEEN, BETWEEN, PUT)


def either(steps: Steps, right: int) -> st.SearchStrategy[str]:
    """Draw a step, mostly one of the first, `right`, as programs with many other steps stay as they are written."""
    names = list(steps)
    return st.integers(0, 3).flatmap(lambda n: st.sampled_from(names[:right] if n else names))


RIGHT = (2, 6, 2, 5, 5, 8, 8, 9)


def program(names: tuple[str, ...], each: int) -> Callable[..., Any]:
    chosen: list[Step] = [steps[name] for steps, name in zip(STEPS, names, strict=True)]
    label, key, order, sizes, taken, first, other, put = chosen

    def run(x: Any, router: Any, up: Any, down: Any) -> Any:
        r = Routed(x, up, each)
        r.experts = label(x @ router, each)
        r.keys = key(r.experts)
        r.order = order(r)
        groups = sizes(r)
        h = first(r, lax.ragged_dot(taken(r), up, groups))
        return put(r, other(r, lax.ragged_dot(h, down, groups)))

    return run


@settings(max_examples=fewer(12), deadline=None, derandomize=True)
@given(st.tuples(*map(either, STEPS, RIGHT)), st.sampled_from([5, TOKENS]), st.sampled_from([1, TWO]), st.integers(0, 9))
def test_a_program_keeps_its_values_and_derivatives(names: tuple[str, ...], count: int, each: int, seed: int) -> None:
    """Step by step, the original and the rewritten program compute with the same few primitives, compiled once."""
    rng = np.random.default_rng(seed)
    shapes = (TOKENS, WIDTH), (WIDTH, count), (count, WIDTH, WIDTH), (count, WIDTH, WIDTH)
    args = [rng.normal(size=s).astype(np.float32) for s in shapes]
    original = program(names, each)
    body = close(jax.make_jaxpr(original)(*args))
    result = without_sorting(body)
    if result is body:
        return

    def rewritten(*args: Any) -> Any:
        return run_body(result, args, ((),) * len(args), ((),), ())[0]

    directions = [np.cos(3.0 * x) for x in args]
    actual, wanted = (jax.jvp(fn, args, directions) for fn in (rewritten, original))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4), actual, wanted)
