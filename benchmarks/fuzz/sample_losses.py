# ruff: noqa: E501 (templates are lines of programs)
"""Losses that add up over samples, as micro-batches need them: each sample is computed from its own data and from weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import jax

from benchmarks.fuzz.operations.elementwise import COMMON
from benchmarks.fuzz.operations.layers import LOSSES_OF
from benchmarks.fuzz.programs import Draw, Function, Program, Rejected, dtype_name, kind_of, returning

ROW_WISE = """jax.nn.softmax({0})|jax.nn.log_softmax({0})|jax.nn.standardize({0})|jax.nn.logsumexp({0}, axis=-1, keepdims=True)|jnp.sort({0}, -1)|jnp.cumsum({0}, -1)|{0} / (jnp.sum(jnp.abs({0}), -1, keepdims=True) + 1e-3)
{0} * lax.rsqrt(jnp.mean({0} * {0}, -1, keepdims=True) + 1e-6)|jnp.max({0}, -1, keepdims=True) - {0}|{0} @ jnp.swapaxes({0}, -1, -2) @ {0} if {0}.ndim == 3 else {0} * 2|jnp.concatenate([{0}, jnp.sin({0})], -1)|{0}[..., ::-1]
{0} * jnp.arange({0}.shape[0]).reshape((-1,) + (1,) * ({0}.ndim - 1))|jnp.where(jnp.arange({0}.shape[0]).reshape((-1,) + (1,) * ({0}.ndim - 1)) < 3, {0}, 0)|{0}.astype('float32').astype({0}.dtype)|jnp.mean({0}, 1, keepdims=True)"""
ROW_WISE_OF = [t for line in ROW_WISE.split("\n") for t in line.split("|")]
WITH_WEIGHTS = (
    ("jnp.tanh({0} @ {1})", "m2"),
    ("{0} @ {1}", "m3"),
    ("jax.nn.gelu({0} @ {1}) @ {1}.T", "m4"),
    ("{0} + {1}", "m"),
    ("{0} * {1}", "m"),
    ("jnp.where({1} > 0, {0}, 0)", "m"),
    ("lax.scan(lambda h, w: (jnp.tanh(h @ w), None), {0}, {1})[0]", "3mm"),
    ("lax.scan(jax.checkpoint(lambda h, w: (h + jax.nn.gelu(h @ w) @ w.T, None)), {0}, {1})[0]", "2mm"),
    ("jax.checkpoint(lambda h, w: jnp.sin(h @ w))({0}, {1})", "mm"),
    ("(lambda e: (lambda o: lax.ragged_dot({0}[o], {1}, jnp.bincount(e, length=3).astype('int32'))[jnp.argsort(o)])(jnp.argsort(e)))(jnp.argmax({0} @ {1}[0, :, :1].T.repeat(3, 0).T, -1))", "3mm"),
    ("jnp.einsum('bqk,bkm->bqm', jax.nn.softmax(jnp.einsum('bqm,bkm->bqk', {0} @ {1}, {0})), {0})", "mm"),
    ("jnp.moveaxis(lax.scan(lambda c, x: (jnp.tanh(c + x @ {1}), c), jnp.zeros_like({0}[:, 0]), jnp.moveaxis({0}, 1, 0))[1], 0, 1)", "mm"),
)  # fmt: skip
ENDS = (
    "jnp.mean({0})",
    "jnp.mean({0})",
    "jnp.sum({0})",
    "jnp.sum({0}) / 7",
    "jnp.sqrt(jnp.mean({0} * {0}) + 1)",
    "jnp.mean({0}.astype('float32'))",
    "jnp.log(1 + jnp.mean(jnp.abs({0}))) * 2",
    "jnp.sum(jnp.mean({0}, 0))",
    "jnp.mean({0}) + jnp.sum({1} * {1}) / 9",
    "jnp.mean({0}) * jnp.tanh(jnp.sum({1}))",
    "jnp.sum(jnp.where({2}, {0}.T, 0)) / jnp.maximum(jnp.sum({2}), 1)",
    "jnp.sum({0}.T * {2}) / (1 + jnp.sum({2}))",
    "jnp.mean({0}) / jnp.mean(jnp.abs({0}) + 1)",
)
FURTHER = ("{0}", "jnp.sum({0})", "jnp.argmax({0}, -1)", "jnp.sum({2})", "jnp.mean({1})", "lax.stop_gradient({0}) * 2")


class SampleDraw(Draw):
    """The state of drawing a loss. Functions inside see weights, but no array of all samples.

    Attributes:
        samples: the values that have samples.
    """

    def __init__(self, rng: random.Random, main: str) -> None:
        super().__init__(rng, main)
        self.samples: set[str] = set()
        self._is_inside = False

    @property
    def visible(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        return [(name, s) for name, s in super().visible if not (self._is_inside and name in self.samples)]

    def inner(self, parameters: Sequence[tuple[str, jax.ShapeDtypeStruct]], steps: int) -> Draw:
        self._is_inside = True
        try:
            return super().inner(parameters, steps)
        finally:
            self._is_inside = False

    def sample(self, shape: Sequence[int], dtype: str, kind: str | None = None) -> str:
        """Return a new argument that has samples."""
        name = self.argument(shape, dtype, kind)
        self.samples.add(name)
        return name

    def row_wise(self, text: str, *operands: str, functions: Sequence[Function] = ()) -> str:
        """Add a step of samples, and return its first result."""
        results = self.add(text, *operands, functions=functions)
        self.samples.update(results)
        return results[0]


def draw_sample_loss(seed: int, rng: random.Random, main: str, x64: bool) -> Program:
    """Draw a loss of weights, which are differentiated, and of data with samples."""
    d = SampleDraw(rng, main)
    n, m = rng.choice((4, 6, 8, 12)), rng.choice((2, 4, 3))
    h = d.sample((n, rng.choice((2, 3)), m) if rng.random() < 0.3 else (n, m), main)
    mask = d.sample((n,), "bool")
    h = d.row_wise("{0} @ {1}", h, d.argument((m, rng.choice((2, 4))), main))
    for _ in range(rng.randint(0, 4)):
        steps = len(d.steps)
        try:
            h = _next(d, h)
        except Rejected:
            d.forget(steps)
    own = h
    if rng.random() < 0.4:
        own = d.row_wise(rng.choice(LOSSES_OF), h, d.sample(d.of(h).shape, dtype_name(d.of(h).dtype)))
    weight = rng.choice([a.name for a in d.arguments if a.name not in d.samples and a.dtype == main])
    (loss,) = d.add(rng.choice(ENDS), own, weight, mask)
    if d.of(loss).shape or kind_of(d.of(loss).dtype) != "f":
        raise Rejected("no loss")
    further = [d.add(rng.choice(FURTHER), h, weight, mask)[0] for _ in range(rng.choice((0, 0, 1, 2)))]
    program = returning([loss, *further], seed, d, x64)
    floating = [program.arguments[k].name for k in program.differentiated]
    weights = tuple(name for name in floating if name not in d.samples)
    if not weights:
        raise Rejected("no weight")
    return replace(program, focus="micro-batches", weights=weights)


def _next(d: SampleDraw, h: str) -> str:
    """Add a step that computes each sample from the same sample of `h` and from weights."""
    rng, shape, dtype = d.rng, tuple(d.of(h).shape), dtype_name(d.of(h).dtype)
    m, way = shape[-1], rng.random()
    if way < 0.4:
        text, letters = rng.choice(WITH_WEIGHTS)
        sizes = tuple(m if letter == "m" else int(letter) for letter in letters)
        return d.row_wise(text, h, d.argument(sizes, dtype))
    if way < 0.55:
        return d.row_wise(rng.choice(ROW_WISE_OF), h)
    if way < 0.65:
        return d.row_wise(rng.choice(COMMON), h)
    if way < 0.72:
        return d.row_wise("{0} + {1}[{2}]", h, d.argument((rng.choice((3, 5)), m), dtype), d.sample(shape[:-1], "int32", "index 3"))
    if way < 0.8:
        texts = (
            "jnp.where(jax.random.bernoulli({1}, 0.7, {0}.shape), {0}, 0)",
            "{0} + jax.random.normal({1}, {0}.shape, {0}.dtype)",
        )
        return d.row_wise(rng.choice(texts), h, d.argument((), "key:threefry2x32"))
    parameter = d.name("x"), jax.ShapeDtypeStruct(shape[1:], d.of(h).dtype)
    inner = d.inner([parameter], rng.randint(1, 3))
    result = next((v for v, s in reversed(inner.values) if kind_of(s.dtype) == "f" and s.shape), parameter[0])
    if result == parameter[0]:
        raise Rejected("no row")
    f = inner.function([parameter[0]], "{0}", [result])
    return d.row_wise(rng.choice(("jax.vmap({f0})({0})", "lax.map({f0}, {0})")), h, functions=[f])
