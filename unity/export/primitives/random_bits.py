"""Source of random numbers: functions of `jax.random`, or for several keys the primitive itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unity.export.primitives.primitive_call import AppliedPrimitive, Printer, dtype_code
from unity.export.source_code import Code, call

PRIMITIVES_MODULE = "primitives"  # the module of JAX with primitives that no other public module has


def _bits(e: AppliedPrimitive) -> Code:
    if e.operands[0].tensor.shape:
        return _bind_primitive(e, "bit_width", "shape")
    return call("jax.random.bits", e.codes[0], tuple(e["shape"]), Code(f"jnp.uint{e['bit_width']}"))


def _wrap(e: AppliedPrimitive) -> Code:
    return call("jax.random.wrap_key_data", e.codes[0], impl=generator_name(e["impl"]))


def _split(e: AppliedPrimitive) -> Code:
    return _bind_primitive(e, "shape") if e.operands[0].tensor.shape else call("jax.random.split", e.codes[0], tuple(e["shape"]))


def _fold_in(e: AppliedPrimitive) -> Code:
    several = any(o.tensor.shape for o in e.operands)
    return _bind_primitive(e) if several else call("jax.random.fold_in", *e.codes)


def _bind_primitive(e: AppliedPrimitive, *parameters: str) -> Code:
    """Return a call of the primitive itself, since the functions of `jax.random` take a single key."""
    return call(f"{PRIMITIVES_MODULE}.{e.name}_p.bind", *e.codes, **{p: e[p] for p in parameters})


def _seed(e: AppliedPrimitive) -> Code:
    if e.operands[0].tensor.shape:
        function = call("partial", Code("jax.random.key"), impl=generator_name(e["impl"]))
        for _ in e.operands[0].tensor.shape:
            function = call("jax.vmap", function)
        return call(function.text, *e.codes)
    return call("jax.random.key", e.codes[0], impl=generator_name(e["impl"]))


def generator_name(impl: Any) -> str:
    """Return the name of a random number generator."""
    return str(impl.name if hasattr(impl, "name") else impl)


def _gamma(e: AppliedPrimitive) -> Code:
    key, shape = e.operands
    if key.tensor.shape:
        return _bind_primitive(e, "log_space")
    function = "jax.random.loggamma" if e["log_space"] else "jax.random.gamma"
    return call(function, key.code, shape.code, dtype=dtype_code(shape.tensor.dtype))


def _rng_bit_generator(e: AppliedPrimitive) -> Code:
    options = {"dtype": dtype_code(e["dtype"]), "algorithm": Code(f"lax.RandomAlgorithm.{e['algorithm'].name}")}
    return call("lax.rng_bit_generator", *e.codes, tuple(e["shape"]), **options)


RANDOM_PRINTERS: Mapping[str, Printer] = {
    "random_bits": _bits,
    "random_split": _split,
    "random_fold_in": _fold_in,
    "random_clone": lambda e: call("jax.random.clone", *e.codes),
    "random_unwrap": lambda e: call("jax.random.key_data", *e.codes),
    "random_wrap": _wrap,
    "random_seed": _seed,
    "random_gamma": _gamma,
    "rng_bit_generator": _rng_bit_generator,
}
