"""Random numbers as source: the functions of `jax.random`, or the primitive itself where there are several keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unity.export.applied import Applied, Printer, dtype_code
from unity.export.source import Code, call

PRIMITIVES_BY_NAME = "primitives"  # where JAX keeps those that are nowhere else


def _bits(e: Applied) -> Code:
    if e.operands[0].tensor.shape:
        return _of_several_keys(e, "bit_width", "shape")
    return call("jax.random.bits", e.codes[0], tuple(e["shape"]), Code(f"jnp.uint{e['bit_width']}"))


def _wrap(e: Applied) -> Code:
    return call("jax.random.wrap_key_data", e.codes[0], impl=implementation(e["impl"]))


def _split(e: Applied) -> Code:
    return _of_several_keys(e, "shape") if e.operands[0].tensor.shape else call("jax.random.split", e.codes[0], tuple(e["shape"]))


def _fold_in(e: Applied) -> Code:
    several = any(o.tensor.shape for o in e.operands)
    return _of_several_keys(e) if several else call("jax.random.fold_in", *e.codes)


def _of_several_keys(e: Applied, *parameters: str) -> Code:
    """A primitive of random numbers itself: the function that people call takes one key."""
    return call(f"{PRIMITIVES_BY_NAME}.{e.name}_p.bind", *e.codes, **{p: e[p] for p in parameters})


def _seed(e: Applied) -> Code:
    if e.operands[0].tensor.shape:
        given = call("partial", Code("jax.random.key"), impl=implementation(e["impl"]))
        for _ in e.operands[0].tensor.shape:
            given = call("jax.vmap", given)
        return call(given.text, *e.codes)
    return call("jax.random.key", e.codes[0], impl=implementation(e["impl"]))


def implementation(impl: Any) -> str:
    """The name of a generator of random numbers."""
    return str(impl.name if hasattr(impl, "name") else impl)


def _gamma(e: Applied) -> Code:
    key, shape = e.operands
    if key.tensor.shape:
        return _of_several_keys(e, "log_space")
    function = "jax.random.loggamma" if e["log_space"] else "jax.random.gamma"
    return call(function, key.code, shape.code, dtype=dtype_code(shape.tensor.dtype))


def _generator(e: Applied) -> Code:
    how = {"dtype": dtype_code(e["dtype"]), "algorithm": Code(f"lax.RandomAlgorithm.{e['algorithm'].name}")}
    return call("lax.rng_bit_generator", *e.codes, tuple(e["shape"]), **how)


RANDOM: Mapping[str, Printer] = {
    "random_bits": _bits,
    "random_split": _split,
    "random_fold_in": _fold_in,
    "random_clone": lambda e: call("jax.random.clone", *e.codes),
    "random_unwrap": lambda e: call("jax.random.key_data", *e.codes),
    "random_wrap": _wrap,
    "random_seed": _seed,
    "random_gamma": _gamma,
    "rng_bit_generator": _generator,
}
