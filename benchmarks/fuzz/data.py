"""Data of arguments: benign, and what programs meet in use: ties, NaN, infinities, indices out of range, cancelling sums."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fuzz.programs import Argument, Program

PLAIN = ("normal", "normal", "normal", "positive", "small integers")
SPECIAL = ("duplicates", "zeros", "non-finite", "denormal", "cancelling", "large", "masked rows", "few", "ones")
WHOLE, WHOLE_SPECIAL = ("small", "small", "index 4"), ("index 4 outside", "extremes", "zeros", "index 12 outside")


def kinds(dtype: str) -> tuple[Sequence[str], Sequence[str]]:
    """The names of distributions for a type: benign ones, and others."""
    if dtype.startswith("key:"):
        return ("key",), ("key",)
    kind = jnp.dtype(dtype).kind
    if dtype == "bool":
        return ("half",), ("all", "none", "half")
    return (WHOLE, WHOLE_SPECIAL) if kind in "iu" else (PLAIN, SPECIAL)


def drawn(program: Program, again: int = 0) -> list[Any]:
    """The arguments of a program. `again`: other data of the same kinds."""
    return [array(a, np.random.default_rng([program.seed, again, zlib.crc32(a.name.encode())])) for a in program.arguments]


def array(a: Argument, rng: np.random.Generator) -> Any:
    if a.dtype.startswith("key:"):
        key = jax.random.key(int(rng.integers(2**31)), impl=a.dtype[4:])
        return jax.random.split(key, a.shape) if a.shape else key
    dtype = jnp.dtype(a.dtype)
    if a.dtype == "bool":
        return np.asarray(
            {"half": rng.random(a.shape) < 0.5, "all": np.ones(a.shape, bool), "none": np.zeros(a.shape, bool)}[a.kind]
        )
    if jnp.issubdtype(dtype, jnp.integer):
        return integers(a, dtype, rng)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (floats(a.kind, a.shape, dtype, rng) + 1j * floats(a.kind, a.shape, dtype, rng)).astype(dtype)
    return np.asarray(floats(a.kind, a.shape, dtype, rng)).astype(dtype)


def integers(a: Argument, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    info = jnp.iinfo(dtype)
    low = -4 if info.min < 0 else 0
    match a.kind.split():
        case ["small"]:
            x = rng.integers(low, 9, a.shape)
        case ["zeros"]:
            x = np.zeros(a.shape, np.int64)
        case ["index", n]:
            x = rng.integers(0, max(int(n), 1), a.shape)
        case ["unique", n]:
            flat = rng.permutation(max(int(n), int(np.prod(a.shape))))[: int(np.prod(a.shape))]
            x = flat.reshape(a.shape)
        case ["index", n, "outside"]:
            n = int(n)
            x = rng.integers(-n - 3 if info.min < 0 else 0, n + 4, a.shape)
            x = np.where(rng.random(a.shape) < 0.1, rng.choice([info.min, info.max, -1 if info.min < 0 else 0, n], a.shape), x)
        case ["extremes"]:
            x = rng.choice([info.min, info.max, info.max - 1, 0, 1, -1 if info.min < 0 else 2], a.shape)
        case _:
            raise ValueError(a.kind)
    return np.asarray(x).astype(dtype)


def floats(kind: str, shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Of float64; rounded by the caller."""
    info = jnp.finfo(dtype)
    large = {2: 2.0**12, 4: 1e30, 8: 1e100, 1: 64.0}.get(info.bits // 8, 1e4)
    x = rng.normal(size=shape)
    match kind:
        case "normal":
            return x
        case "positive":
            return rng.uniform(0.2, 0.8, shape)
        case "small integers":
            return rng.integers(-3, 4, shape).astype(float)
        case "few" | "duplicates":
            return rng.choice([-1.5, 0.25, 0.25, 2.0], shape)
        case "zeros":
            return np.zeros(shape)
        case "ones":
            return np.ones(shape)
        case "non-finite":
            values = np.array([np.inf, -np.inf, np.nan, -0.0])
            return np.where(rng.random(shape) < 0.15, rng.choice(values, shape), x)
        case "denormal":
            tiny = float(info.tiny)
            return np.where(rng.random(shape) < 0.5, x * tiny * 0.25, x)
        case "cancelling":
            scale = float(min(large**0.25, 1e8))
            signs = np.resize([1.0, -1.0], shape) if shape else 1.0
            return x + scale * signs
        case "large":
            return np.where(rng.random(shape) < 0.3, x * large, x)
        case "masked rows":
            rows = rng.random(shape[:1] + (1,) * (len(shape) - 1)) < 0.5 if shape else False
            return np.where(rows, -np.inf, x)
    raise ValueError(kind)
