"""Random programs of four kinds of fault: control flow, sums of narrow types, operators that need a whole batch, and constants.

A program is a source text that is put together from lines, so that a failing one is printed and run again as it is. Its lines are
drawn by any function that chooses one element of a sequence: `random.Random.choice`, or hypothesis, which also shrinks the choices.

    python -m benchmarks.fuzz.kinds --kind control --minutes 10 --seed 0
"""

from __future__ import annotations

import argparse
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import unity
from benchmarks.fuzz.lives import FEWER, MORE
from benchmarks.fuzz.plans import random_point
from benchmarks.fuzz.run import FLAGS, environment
from benchmarks.fuzz.verdict import QUICK, Reference
from benchmarks.record import record
from unity.base.errors import UnityError
from unity.plan.plan import Plan
from unity.search.session import Candidate

T = TypeVar("T")
ROWS, WIDTH, LAYERS, CLASSES = 16, 8, 4, 6
# A device that computes slowly, so that plans divide small arrays.
SLOW = unity.Device("slow", {name: 1e6 for name in ("float32", "bfloat16", "float16")}, 10**9, 1e9, 0.5, 0.0)
SMALL = 64  # elements that XLA may save: equal indices are gathered once
SIZES = ((1, 2), (1, 4), (2, 2), (2, 4))


class Choices:
    """Draws of one program. `choose` returns an element of a sequence."""

    def __init__(self, choose: Callable[[Sequence[Any]], Any]) -> None:
        self.choose = choose

    def one(self, options: Sequence[T]) -> T:
        return self.choose(options)

    def maybe(self) -> bool:
        return self.choose((False, True))

    def some(self, options: Sequence[T], least: int, most: int) -> list[T]:
        return [self.choose(options) for _ in range(self.choose(range(least, most + 1)))]


@dataclass(frozen=True)
class ProgramCase:
    """A program, its arguments, and how it is planned.

    Attributes:
        function: the program.
        args: its arguments.
        machine: the machine that it is planned for.
        options: further options of `unity.optimize`.
        source: the text of the function, if it was drawn.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    machine: unity.Machine
    options: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(self.args))
        return f"{self.source}\n# {shapes} on {self.machine.name}, {self.options}"


def drawn(lines: Sequence[str], args: tuple[Any, ...], machine: unity.Machine, **options: Any) -> ProgramCase:
    """Return the program that these lines define, as `fn`."""
    source = "\n".join(lines)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax}
    exec(compile(source, "<program>", "exec"), names)
    return ProgramCase(names["fn"], args, machine, options, source)


def machine_of(c: Choices) -> unity.Machine:
    nodes, devices = c.one(SIZES)
    return replace(unity.Machine.grid(nodes, devices), device=SLOW)


# Control flow

LAYER = (
    "jnp.tanh(h @ w)",
    "h + jax.nn.softmax(h @ w) @ w.T",
    "h - (h @ w).mean(-1, keepdims=True)",
    "h + jax.checkpoint(lambda h: jax.nn.gelu(h @ w) @ w.T)(h)",
    "lax.cond(w[0, 0] > 0, lambda h: jnp.tanh(h @ w), lambda h: h - jnp.sin(h), h)",
    "lax.cond(jnp.sum(w) > 0, lambda h: h @ w, lambda h: jnp.cos(h), h) / 2",
    "lax.switch(jnp.argmax(w.sum(0)) % 3, [jnp.sin, lambda h: h @ w.T / 3, lambda h: jax.nn.softmax(h)], h)",
    "lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), h)",
    "lax.map(lambda r: jnp.tanh(r @ w), h)",
    "jax.vmap(lambda r: lax.cond(r.sum() > 0, lambda r: jnp.sin(r @ w), jnp.cos, r))(h)",
    "h + jax.vmap(lambda r: lax.while_loop(lambda r: (r * r).sum() > 1, lambda r: r / 2, r))(lax.stop_gradient(h @ w))",
    "h + lax.scan(lambda c, v: (c + jnp.outer(h[:, 0], v), (h * v).sum(-1)), jnp.zeros_like(h), w)[0] / 8",
    "h + lax.scan(lambda c, v: (c, (h * v).sum(-1)), 0.0, w)[1].T",
)
# Layers that look at all samples: no pipeline and no micro-batches divide them.
WHOLE_LAYER = (
    "h - h.mean(0)",
    "lax.cond((h * h).mean() > 0.5, lambda h: jnp.tanh(h @ w), lambda h: h + 1, h)",
    "lax.cond(jnp.any(h > 2), lambda h: h @ w / 3, lambda h: jax.nn.softmax(h @ w, 0), h)",
    "h + lax.while_loop(lambda c: jnp.max(jnp.abs(c)) > 1,"
    " lambda c: c / 2 + jnp.tanh(c @ lax.stop_gradient(w)) / 9, lax.stop_gradient(h))",
    "h + lax.while_loop(lambda c: c[0] < jnp.argmax(h.sum(0)) % 3, lambda c: (c[0] + 1, jnp.sin(c[1] @ lax.stop_gradient(w))),"
    " (0, lax.stop_gradient(h)))[1]",
    "lax.scan(lambda c, r: (jnp.tanh(c + r @ w), c), jnp.zeros((8,), h.dtype), h)[1] + h",
    "lax.cond(h[0, 0] > 0, lambda h: jax.nn.softmax(h, 0) @ w, lambda h: h[::-1], h)",
    "lax.switch(jnp.argmax(h.sum(0)) % 3, [lambda h: h - h.mean(0), lambda h: h @ w, jnp.sin], h)",
)
TAIL = (
    "((h @ out - y) ** 2).mean()",
    "-(jax.nn.log_softmax(h @ out) * y).sum() / 16",
    "-(jnp.take_along_axis(jax.nn.log_softmax(h @ out), jnp.maximum(ids, 0)[:, None], -1)[:, 0] * (ids >= 0)).sum()"
    " / jnp.maximum((ids >= 0).sum(), 1)",
    "jnp.where(ids[:, None] >= 0, jnp.abs(h @ out - y), 0).sum()",
    "jax.nn.logsumexp(h @ out, -1).sum() + (out * out).sum()",
    "(lax.cond(out[0, 0] > 0, jnp.sin, lambda z: z * z, h @ out) - y).sum()",
    "lax.scan(lambda c, o: (c + ((h @ o - 1) ** 2).mean(), None), 0.0, out.T)[0]",
    "lax.map(lambda r: jnp.sum(jax.nn.softmax(r @ out) ** 2), h).mean()",
    "jnp.square(jnp.sort(h @ out, -1)[:, -2:] - y[:, :2]).mean()",
)
WHOLE_TAIL = (
    "lax.cond(ids.sum() > 20, lambda z: jnp.sin(z).sum(), lambda z: (z * z).mean(), h @ out)",
    "jnp.max(jnp.abs(h @ out - y))",
    "jnp.sort((h @ out - y).reshape(-1))[-5:].sum()",
    "lax.while_loop(lambda c: c > 1, lambda c: c / 2, lax.stop_gradient(((h @ out) ** 2).sum())) * (h @ out).mean()",
    "((h @ out).var(0) + 1).sum()",
)
START = ("x", "x @ inn", "jnp.tanh(x @ inn)", "inn[ids]", "x + inn[jnp.maximum(ids, 0)]")


def control(c: Choices) -> ProgramCase:
    """Draw layers in a scan, or written out, with control flow in them, behind them or around them."""
    divided = c.maybe()
    layer = c.some(LAYER if divided else (*LAYER, *WHOLE_LAYER), 1, 2)
    tail = c.one(TAIL if divided else (*TAIL, *WHOLE_TAIL))
    lines = ["def fn(inn, ws, out, x, y, ids):", "    def layer(h, w):", *(f"        h = {text}" for text in layer)]
    lines += ["        return h, None", f"    h = {c.one(START)}"]
    body = "jax.checkpoint(layer)" if c.maybe() else "layer"
    lines += (
        [f"    h = lax.scan({body}, h, ws)[0]"]
        if c.one((True, True, False))
        else ["    for w in ws:", "        h = layer(h, w)[0]"]
    )
    lines += [f"    return {tail}"]
    rng = np.random.default_rng(c.one(range(100)))
    shapes = (WIDTH, WIDTH), (LAYERS, WIDTH, WIDTH), (WIDTH, CLASSES), (ROWS, WIDTH), (ROWS, CLASSES)
    arrays = [(rng.normal(size=n) / (np.sqrt(WIDTH) if k < 3 else 1)).astype(np.float32) for k, n in enumerate(shapes)]
    ids = rng.integers(-1, CLASSES, ROWS).astype(np.int32)
    machine, options = machine_of(c), dict[str, Any]()
    if divided:
        n = c.one([n for n in (2, 4) if machine.devices % n == 0])
        ways = (
            {},
            {"pipeline": unity.PipelineShape(n, c.one((4, 8)), "gpipe")},
            {"pipeline": unity.PipelineShape(n, c.one((4, 8)), "1f1b")},
            {"micro_batches": c.one((2, 4))},
        )
        options = c.one(ways)
    return drawn(lines, (*arrays, ids), machine, **options)


# Narrow types

NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
NARROW_STEP = (
    "h = h @ w",
    "h = jnp.tanh(h @ w)",
    "h = (h.astype('{d}') @ w.astype('{d}')).astype(h.dtype)",
    "h = jnp.matmul(h, w, preferred_element_type='float32').astype(h.dtype)",
    "h = lax.dot(h.astype('{d}'), w.astype('{d}'), preferred_element_type='float32').astype(h.dtype)",
    "h = h - h.mean(-1, keepdims=True)",
    "h = h / (1 + jnp.abs(h).mean(0))",
    "h = h / (1 + jnp.sqrt((h * h).mean(-1, keepdims=True)))",
    "h = jax.nn.softmax(h) * 8",
    "h = jax.nn.softmax(h, 0) * 16",
    "h = h * s",
    "h = h + jnp.sum(h, 0) / 16",
    "h = h.astype('{d}').astype(h.dtype)",
    "h = jnp.clip(h, -4, 4)",
    "h = jnp.cumsum(h, 0) / 4",
    "h = jnp.maximum(h, h.mean())",
    "h = (h / s.max()).astype('{d}').astype(h.dtype) * s.max()",
    "h = jnp.round(h * 8).astype('int8').astype(h.dtype) / 8",
    "h = h + lax.dot(n, n.T, preferred_element_type='int32').astype(h.dtype)[:, :8] / 64",
    "h = h + jnp.sum(n, 0)[:8].astype(h.dtype) / 64",
    "h = h + n.sum(0, dtype='int8')[:8].astype(h.dtype)",
    "h = h.at[ids].add(h)",
    "h = w[ids] + h",
    "h = jax.checkpoint(lambda h: jnp.sin(h @ w))(h)",
    "h = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h, length=3)[0]",
    "h = lax.reduce_precision(h, 5, 3)",
    "h = h @ w @ w.T",
    "h = (h.T @ h) [ids % 8] / 4",
)
NARROW_END = (
    "h.sum()",
    "h.mean()",
    "h.astype('float32').mean()",
    "(h * h).mean()",
    "jnp.sum(h.astype('float32') ** 2)",
    "h.sum(0)",
    "h",
    "jax.nn.logsumexp(h, -1).sum()",
    "h.astype('{d}').astype('float32').sum()",
    "jnp.var(h)",
    "h.sum(0).astype('{d}').astype('float32')",
    "jnp.linalg.norm(h.astype('float32'))",
)
SCALES = (1.0, 1.0, 0.01, 30.0, 300.0)


def narrow(c: Choices) -> ProgramCase:
    """Draw products, sums and conversions of narrow types, of data whose sums are large or cancel."""
    dtype = c.one((*NARROW[:2], *NARROW[:2], "float32"))
    steps = c.some(NARROW_STEP, 1, 5)
    lines = ["def fn(w, h, s, n, ids):", *(f"    {text.format(d=c.one(NARROW))}" for text in steps)]
    lines += [f"    return {c.one(NARROW_END).format(d=c.one(NARROW))}"]
    rng = np.random.default_rng(c.one(range(100)))
    scale, signs = c.one(SCALES), c.one(("none", "rows", "one"))
    w, h, s = rng.normal(size=(WIDTH, WIDTH)), rng.normal(size=(ROWS, WIDTH)), rng.uniform(0.5, 2, WIDTH)
    h = h + scale * np.resize([1, -1], (ROWS, 1)) if signs == "rows" else np.abs(h) * scale if signs == "one" else h * scale
    limit = float(jnp.finfo(dtype).max) / 64
    arrays = [jnp.asarray(np.clip(x, -limit, limit), dtype) for x in (w, h, s)]
    n = rng.integers(-128, 128, (ROWS, 16)).astype(np.int8)
    return drawn(lines, (*arrays, n, rng.integers(0, WIDTH, ROWS).astype(np.int32)), machine_of(c))


# Whole batches: random bits, ties, transforms, linear algebra

BATCH_STEP = (
    "h = h + jax.vmap(lambda k: jax.random.normal(k, (8,)))(keys)",
    "h = h * jax.vmap(lambda k, r: jax.random.bernoulli(k, 0.7, r.shape))(keys, h)",
    "h = h + jax.random.normal(key, h.shape)",
    "h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)",
    "h = h + jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 3), (8,)))(jax.random.split(key, 16))",
    "h = h[jax.random.permutation(key, 16)]",
    "h = jax.random.permutation(key, h, 1)",
    "h = h + jax.nn.one_hot(jax.random.categorical(key, h), 8)",
    "h = h + jax.vmap(lambda k, r: jax.nn.one_hot(jax.random.categorical(k, r), 8))(keys, h)",
    "h = h + jax.random.truncated_normal(key, -1, 1, h.shape) * jax.random.gumbel(jax.random.fold_in(key, 1), (8,))",
    "h = h + jax.random.randint(key, h.shape, 0, 5)",
    "h = jnp.sort(h, 0)",
    "h = jnp.sort(jnp.round(h), -1)",
    "h = h[jnp.argsort(jnp.round(h[:, 0]))]",
    "h = jnp.take_along_axis(h, jnp.argsort(jnp.round(h), 0), 0)",
    "h = lax.sort((jnp.round(h), h), dimension=0, num_keys=1)[1]",
    "h = lax.sort((ids, h[:, 0]), dimension=0, num_keys=1, is_stable=True)[1][:, None] + h",
    "h = h + lax.top_k(jnp.round(h), 8)[0]",
    "h = h + jax.nn.one_hot(lax.top_k(jnp.round(h), 3)[1], 8).sum(1)",
    "h = h + jnp.argmax(jnp.round(h), 0)",
    "h = h + jax.nn.one_hot(jnp.argmax(jnp.round(h), -1), 8)",
    "h = h * (jnp.round(h) == jnp.round(h).max(0))",
    "h = h - jnp.max(jnp.round(h), 0)",
    "h = lax.cummax(jnp.round(h), 0) + h",
    "h = jnp.fft.fft(h).real / 3",
    "h = jnp.fft.fft(h, axis=0).imag / 3",
    "h = jnp.fft.irfft(jnp.fft.rfft(h, axis=-1) * w[0, 0], 8)",
    "h = jnp.abs(jnp.fft.fft2(h)) / 10",
    "h = jax.vmap(lambda r: jnp.fft.ifft(jnp.fft.fft(r) * jnp.fft.fft(w[0])).real)(h)",
    "h = jnp.linalg.solve(w @ w.T + 3 * jnp.eye(8), h.T).T",
    "h = jax.vmap(lambda r: jnp.linalg.solve(jnp.outer(r, r) + 2 * jnp.eye(8), w[0]))(h) + h",
    "h = jax.vmap(lambda r: jnp.linalg.cholesky(jnp.outer(r, r) + jnp.eye(8))[-1])(h)",
    "h = h @ jnp.linalg.inv(jnp.tanh(h.T @ h / 16) + 4 * jnp.eye(8))",
    "h = h / (1 + jnp.linalg.norm(h, axis=0))",
    "h = h + jax.vmap(lambda r: jnp.linalg.slogdet(jnp.outer(r, r) + 2 * jnp.eye(8))[1])(h)[:, None]",
    "h = jax.vmap(lambda r: jax.scipy.linalg.solve_triangular(jnp.tril(w) + 3 * jnp.eye(8), r))(h)",
    "h = h + jnp.linalg.eigvalsh(h.T @ h / 16 + jnp.diag(jnp.arange(8.0)))",
    "h = h @ jnp.linalg.qr(w + 3 * jnp.eye(8))[1]",
    "h = jnp.tanh(h @ w)",
    "h = h - h.mean(0)",
    "h = h + jnp.searchsorted(jnp.sort(jnp.round(h[:, 1])), jnp.round(h[:, 2]))[:, None]",
    "h = h.at[ids].max(jnp.round(h))",
    "h = h + jnp.bincount(ids, length=8)",
    "h = h + jnp.median(h, 0) + jnp.quantile(h, 0.3, axis=-1, keepdims=True)",
    "h = lax.associative_scan(jnp.maximum, h) + h",
    "h = h + jnp.unique(ids, size=16, fill_value=0)[:, None]",
    "h = h + jax.ops.segment_max(jnp.round(h), ids, 8, indices_are_sorted=False)[ids]",
)
BATCH_END = ("h.sum()", "(h * h).mean()", "h", "jnp.sin(h).sum(0)", "jnp.max(jnp.round(h), -1).sum()", "jax.nn.logsumexp(h)")
GENERATORS = ("threefry2x32", "threefry2x32", "rbg", "unsafe_rbg")


def batch(c: Choices) -> ProgramCase:
    """Draw operators whose rows look independent, of data with ties."""
    steps = c.some(BATCH_STEP, 1, 4)
    lines = ["def fn(w, h, ids, key, keys):", *(f"    {s}" for s in steps), f"    return {c.one(BATCH_END)}"]
    rng = np.random.default_rng(c.one(range(100)))
    w = (rng.normal(size=(WIDTH, WIDTH)) / 3).astype(np.float32)
    h = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    key = jax.random.key(c.one(range(20)), impl=c.one(GENERATORS))
    args = (w, h, rng.integers(0, WIDTH, ROWS).astype(np.int32), key, jax.random.split(key, ROWS))
    return drawn(lines, args, machine_of(c))


# Constants, which all devices hold, and positions of samples; beside functions with derivative rules

CONSTANT_STEP = (
    "h = h * jnp.ones(16).at[0].set(0.0)[:, None]",
    "h = h * jnp.ones(16).at[ids].multiply(0.5)[:, None]",
    "h = h + jnp.zeros((16, 8)).at[:, 0].set(-4.0)",
    "h = h + jnp.full((16, 8), 0.5).at[jnp.arange(16), ids].add(1.0)",
    "h = jnp.where(jnp.zeros((16, 8), bool).at[:, 0].set(True), 0, h)",
    "h = h * lax.dynamic_update_slice(jnp.ones((16, 8)), jnp.zeros((4, 2)), (ids[0], 3))",
    "h = h * lax.dynamic_slice(jnp.arange(40.0).reshape(20, 2), (ids[0], 0), (16, 1))",
    "h = h + jnp.arange(12.0)[ids][:, None]",
    "h = h + jnp.arange(16.0).at[ids].max(9.0)[:, None] / 16",
    "h = h * jnp.tri(16, 8)",
    "h = h @ jnp.eye(8)[::-1]",
    "h = h + jnp.cumsum(jnp.ones(16))[:, None] / 16",
    "h = h + jnp.sort(jnp.arange(16.0)[::-1])[:, None] / 16",
    "h = h + jnp.pad(jnp.ones((14, 8)), ((1, 1), (0, 0)))",
    "h = h + jnp.roll(jnp.arange(16.0), 3)[:, None] / 16",
    "h = h + jnp.concatenate([jnp.zeros(4), jnp.ones(12)])[:, None]",
    "h = jnp.where(jnp.arange(16)[:, None] % 3 == 0, h, 0)",
    "h = h + jax.nn.one_hot(ids, 8)",
    "h = h + h[jnp.arange(16), ids][:, None]",
    "h = h.at[jnp.arange(16), ids].set(0.0)",
    "h = h.at[jnp.arange(16), ids].add(w[0, 0])",
    "h = h - jnp.take_along_axis(h, ids[:, None], 1)",
    "h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)",
    "h = h + 0.1 * jax.random.normal(key, h.shape)",
)
RULED_STEP = ("jax.nn.relu(h @ w)", "jax.nn.softplus(h)", "jax.nn.silu(h @ w)", "jax.nn.log_sigmoid(h)", "jax.nn.softmax(h) @ w")
CONSTANT_END = (
    "h.sum()",
    "(h * h).mean()",
    "((h[jnp.arange(16), ids] - 1) ** 2).mean()",
    "-jax.nn.log_softmax(h)[jnp.arange(16), ids].mean()",
    "(h * jnp.ones(16).at[0].set(0.0)[:, None]).mean()",
)


def constants(c: Choices) -> ProgramCase:
    """Draw operators of constants and of positions, whole or in micro-batches."""
    steps = [*c.some(CONSTANT_STEP, 1, 3), f"h = {c.one(RULED_STEP)}", *c.some(CONSTANT_STEP, 0, 2)]
    lines = ["def fn(w, h, ids, key):", *(f"    {s}" for s in steps), f"    return {c.one(CONSTANT_END)}"]
    rng = np.random.default_rng(c.one(range(100)))
    w = (rng.normal(size=(WIDTH, WIDTH)) / 3).astype(np.float32)
    h = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    args = (w, h, rng.integers(0, WIDTH, ROWS).astype(np.int32), jax.random.key(c.one(range(20))))
    return drawn(lines, args, machine_of(c), **({"micro_batches": 2, "argnums": (0,)} if c.maybe() else {}))


KINDS: dict[str, Callable[[Choices], ProgramCase]] = {
    "control": control,
    "narrow": narrow,
    "batch": batch,
    "constants": constants,
}


# Verdict


def plans_of(program: ProgramCase, rng: random.Random, assigned: int) -> Iterator[tuple[str, Plan]]:
    """Yield the fastest, the leanest and another point of a program's frontier, and plans of random assignments."""
    options = {"argnums": active(program), "machine": program.machine, "progress": False} | program.options
    plan = unity.optimize(program.function, *program.args, **options)
    points = plan.frontier
    named = {rng.randrange(len(points)): "", len(points) - 1: "leanest", 0: "fastest"}
    for k in sorted(named):
        yield named[k] or f"frontier[{k}]", points[k]
    family = plan.program.family
    for k in range(assigned):
        if (point := random_point(family.search.assembled, rng)) is not None:
            yield f"assignment {k}", Plan(family, Candidate(0.0, 0.0, family.search.assembled.assignment(point)))


def active(program: ProgramCase) -> tuple[int, ...]:
    """Return the numbers of the arguments that are arrays, or trees, of floating-point numbers."""
    floating = [all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(a)) for a in program.args]
    return tuple(k for k, good in enumerate(floating) if good)


def faults_of(
    program: ProgramCase, seed: int = 0, assigned: int = 1, counts: Counter[str] | None = None, *, refusals: bool = True
) -> list[str]:
    """Return faults of a program's plans: values and gradients, collectives, and those that not all devices reach.

    A program that JAX itself cannot run has none; `counts` counts these, and `refusals` says whether refusals are allowed, too.
    """
    counts = Counter() if counts is None else counts
    leaves, tree = jax.tree.flatten(program.args)

    def flat(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *leaves: fn(*jax.tree.unflatten(tree, leaves))

    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(program.args)]
    reference = Reference(flat(program.function), leaves, names, seed)
    try:
        reference.settle()
        _ = reference.whole
    except Exception:
        if not refusals:
            raise
        counts["programs that JAX does not run"] += 1
        return []
    faults: list[str] = []
    try:
        for name, plan in plans_of(program, random.Random(seed), assigned):
            lowered: Any = jax.jit(reference.step(flat(plan))).lower(reference.args, reference.cotangents)
            results = lowered.compile(compiler_options=QUICK)(reference.args, reference.cotangents)
            faults += [f"{name}: {d}" for d in reference.differences(results) if not d.known]
            if name in ("fastest", "leanest"):
                faults += [f"{name}: {words}" for words in communicated_otherwise(plan)]
            counts["plans"] += 1
    except UnityError as error:
        if not refusals:
            raise
        counts[f"refused ({type(error).__name__})"] += 1
    return faults


def communicated_otherwise(plan: Plan) -> list[str]:
    """Return how a compiled program communicates otherwise than planned. Of small tensors XLA leaves some out, and merges some."""
    check = plan.check()
    total, few = check.total, (1 - FEWER) * check.total.predicted - SMALL
    words = [] if few <= total.compiled <= (1 + MORE) * total.predicted else [str(check).partition("\nmemory")[0]]
    return words + [str(d) for d in check.disagreements]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz.kinds", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="by default all of them, in turn")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="the first program's of each kind; each program has the next")
    parser.add_argument("--programs", type=int, default=10**9, help="at most as many of each kind")
    parser.add_argument("--record", action="store_true", help="also write benchmarks/results/fuzz_kinds.json")
    options = parser.parse_args()
    os.environ.update(environment() | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", FLAGS)})
    warnings.simplefilter("ignore")
    started, seed, wrong = time.monotonic(), options.seed, 0
    counts = {kind: Counter[str]() for kind in options.kind or KINDS}
    while time.monotonic() < started + 60 * options.minutes and seed < options.seed + options.programs:
        for kind, own in counts.items():
            program = KINDS[kind](Choices(random.Random(f"{kind} {seed}").choice))
            own["programs"] += 1
            try:
                faults = faults_of(program, seed, counts=own)
            except Exception as error:
                faults = [f"{type(error).__name__}: {str(error)[:600]}"]
            if faults:
                wrong += 1
                print(f"--kind {kind} --seed {seed} --programs 1\n{program}\n" + "\n".join(faults[:4]) + "\n", flush=True)
        seed += 1
    rows = [{"kind": kind, **own} for kind, own in counts.items()]
    print(f"{time.monotonic() - started:.0f} s: {rows}, {wrong} programs with faults")
    if options.record:
        command = f"python -m benchmarks.fuzz.kinds --minutes {options.minutes} --seed {options.seed}"
        record("fuzz_kinds", rows, command=command, seeds=[options.seed, seed], wrong=wrong)


if __name__ == "__main__":
    main()
