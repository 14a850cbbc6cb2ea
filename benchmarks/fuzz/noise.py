"""Rounding errors of a program, learned by perturbing it: stochastic arithmetic, as in CESTAC or Monte Carlo arithmetic.

A program is evaluated several times, each inexact result moved by an ulp or two. What that changes is how far a program that rounds
elsewhere, such as a plan, may be from it. The perturbation is a hash of the value, so that what is equal stays equal (ties in a
maximum, a value minus itself); values on a coarse binary grid, such as small integers, are computed exactly and stay. A plan may
add the summands of equal sums in unlike orders, though, where devices hold partial sums. So a salt can say that sums are perturbed
by their places too, which breaks ties among them. Which sums a plan holds in parts is not known here, so that all additions are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from unity.pcg.jaxprs.loops import constants_and_carry

EXACT = frozenset(
    {
        "neg",
        "abs",
        "sign",
        "max",
        "min",
        "select_n",
        "reshape",
        "broadcast_in_dim",
        "transpose",
        "squeeze",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "concatenate",
        "pad",
        "rev",
        "gather",
        "copy",
        "stop_gradient",
        "convert_element_type",
        "reduce_max",
        "reduce_min",
        "argmax",
        "argmin",
        "sort",
        "top_k",
        "cummax",
        "cummin",
        "iota",
        "floor",
        "ceil",
        "round",
        "clamp",
        "is_finite",
        "real",
        "imag",
        "conj",
        "complex",
        "bitcast_convert_type",
        "split",
        "tile",
        "device_put",
        "optimization_barrier",
        "scatter",
        "reduce_window_max",
        "reduce_window_min",
        "select_and_gather_add",
        "select_and_scatter_add",
        "reduce_precision",
        "random_bits",
        "random_wrap",
        "random_unwrap",
        "random_seed",
        "random_split",
        "random_fold_in",
        "threefry2x32",
        "nextafter",
        "copysign",
        "name",
        "unstack",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "not",
        "xor",
        "reduce_and",
        "reduce_or",
        "stack",
    }
)
WIDENED = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "reduce_window_sum", "ragged_dot_general"})
SUMS = WIDENED | {"add", "sub", "add_any", "cumlogsumexp", "scatter-add", "scatter-sub"}
CALLS = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
JUMPING = frozenset({"rem"})  # operators that jump where their operands are equal: perturbed apart, these are not
GRIDS = {53: (2.0**10, 2.0**40), 24: (2.0**6, 2.0**14), 11: (2.0**3, 2.0**5), 8: (2.0, 2.0**4)}


class Salt(NamedTuple):
    """What the errors of an evaluation are drawn from.

    Attributes:
        number: odd or even, which float8 is perturbed by.
        apart: 1 if equal sums in different places may differ, else 0.
        equation: a number of the equation, which is a part of a place.
    """

    number: Any
    apart: Any
    equation: int = 0

    def inside(self, k: int) -> Salt:
        """Return the salt of the `k`th equation of a program."""
        return self._replace(equation=(self.equation * 8191 + k + 1) % 2**31)

    def in_places(self, x: Any) -> Any:
        """Return numbers for the elements of a sum, odd or even as `number` is: the factor is even."""
        places = lax.iota(jnp.uint32, max(x.size, 1))[: x.size].reshape(x.shape) + jnp.uint32(self.equation * 65521 % 2**32)
        return self.number ^ (self.apart * places * jnp.uint32(0x85EBCA6A))


def moved(x: Any, salt: Any) -> Any:
    """Multiply each element of floats by `1 + k eps`, by a hash of its bits: k in -2..2; of float8 in -1..1, 0 for even salts."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(moved(lax.real(x), salt), moved(lax.imag(x), salt))
    info = jnp.finfo(x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating) or info.nmant < 2:
        return x
    most_ulps = 2 if info.bits >= 16 else 1
    bits = lax.bitcast_convert_type(x, f"uint{info.bits}")
    bits = bits.astype("uint32") if info.bits <= 32 else (bits ^ (bits >> 32)).astype("uint32")
    h = (bits ^ salt) * jnp.uint32(0x9E3779B1)
    h = (h ^ (h >> 15)) * jnp.uint32(0x85EBCA77)
    h = h ^ (h >> 13)
    k = ((h >> 8) % (2 * most_ulps + 1)).astype(jnp.int32) - most_ulps
    if info.bits < 16:
        k = jnp.where(salt % 2 == 1, k, 0)
    wide = jnp.float32 if info.bits < 16 else x.dtype  # compilers are slow at float8
    y, eps = x.astype(wide), jnp.asarray(info.eps, wide)
    grid, most = GRIDS.get(info.nmant + 1, (1.0, 4.0))
    on_grid = (jnp.round(y * jnp.asarray(grid, wide)) == y * jnp.asarray(grid, wide)) & (jnp.abs(y) < most)
    return jnp.where(on_grid, y, y * (1 + k.astype(wide) * eps)).astype(x.dtype)


def noisy(closed: Any) -> Callable[..., list[Any]]:
    """A jaxpr as a function of the numbers of a `Salt` and its arguments, with rounding errors at random."""
    return lambda number, apart, *args: _run(closed.jaxpr, closed.consts, args, Salt(number, apart))


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], salt: Salt) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for k, e in enumerate(jaxpr.eqns):
        results = _equation(e, [read(v) for v in e.invars], salt.inside(k))
        env.update(zip(e.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _closed(inner: Any, operands: Sequence[Any], salt: Salt) -> list[Any]:
    jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
    return _run(jaxpr, consts, operands, salt)


def _equation(e: Any, operands: list[Any], salt: Salt) -> list[Any]:
    name, params = e.primitive.name, e.params
    if name in CALLS:
        return _closed(params[CALLS[name]], operands, salt)
    if name == "cond":
        index, *rest = operands
        return list(lax.switch(index, [lambda *x, b=b: _closed(b, x, salt) for b in params["branches"]], *rest))
    if name == "while":
        c, b = params["cond_nconsts"], params["body_nconsts"]
        first, second, carry = operands[:c], operands[c : c + b], operands[c + b :]
        going = lambda x: _closed(params["cond_jaxpr"], [*first, *x], salt)[0]  # noqa: E731

        def body(x: list[Any]) -> list[Any]:
            """One round of those rows of a batch that are not done yet."""
            on, after = going(x), _closed(params["body_jaxpr"], [*second, *x], salt)
            return [jnp.where(on.reshape(on.shape + (1,) * (a.ndim - on.ndim)), a, b) for a, b in zip(after, x, strict=True)]

        return list(lax.while_loop(lambda x: going(x).any(), body, list(carry)))
    if name == "scan":
        return _scan(params, operands, salt)
    if name == "convert_element_type":
        return [_converted(e, operands[0], salt.number)]
    floats = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in e.outvars]
    if name in EXACT or not any(floats):
        return _bound(e, operands)
    if name in JUMPING:
        operands = [moved(x, salt.number ^ jnp.uint32(0x51ED270 * k)) for k, x in enumerate(operands)]
    shapes = {v.aval.shape for v in (*e.invars, *e.outvars)} - {()}
    if len(shapes) > 1 or name in WIDENED or (len(shapes) == 1 and all(v.aval.shape == () for v in e.outvars)):
        operands, narrow = _widened(e, operands)
        operands = [moved(x, salt.number) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in operands]
        results = _bound(e, operands, narrow)
    else:
        results = _bound(e, operands)
    salts = [salt.in_places(x) if name in SUMS else salt.number for x in results]
    return [moved(x, one) if is_float else x for x, one, is_float in zip(results, salts, floats, strict=True)]


def _scan(params: dict[str, Any], operands: list[Any], salt: Salt) -> list[Any]:
    c, k = constants_and_carry(params)
    consts, carry, xs = operands[:c], operands[c : c + k], operands[c + k :]

    def step(carry: Any, xs: Any) -> Any:
        out = _closed(params["jaxpr"], [*consts, *carry, *xs], salt)
        return out[:k], out[k:]

    carry, ys = lax.scan(step, list(carry), list(xs), params["length"], params["reverse"])
    return [*carry, *ys]


def _widened(e: Any, operands: list[Any]) -> tuple[list[Any], bool]:
    """Operands of sums that accumulate in float32, in float32."""
    if e.primitive.name in WIDENED and all(
        v.aval.dtype.itemsize <= 2 and jnp.issubdtype(v.aval.dtype, jnp.floating) for v in e.invars[:1]
    ):
        return [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands], True
    return operands, False


def _bound(e: Any, operands: list[Any], widened: bool = False) -> list[Any]:
    params = dict(e.params)
    if widened and params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = np.dtype(np.float32)
    out = e.primitive.bind(*operands, **params)
    out = list(out) if e.primitive.multiple_results else [out]
    return [x.astype(v.aval.dtype) if widened else x for x, v in zip(out, e.outvars, strict=True)]


def _converted(e: Any, x: Any, salt: Any) -> Any:
    (result,) = _bound(e, [x])
    both = jnp.issubdtype(x.dtype, jnp.inexact) and jnp.issubdtype(result.dtype, jnp.floating)
    return moved(result, salt) if both and result.dtype.itemsize < x.dtype.itemsize else result


def perturber(step: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Callable[..., list[list[Any]]]:
    """Compiles perturbed evaluations of a step: a function of arguments like these, of how many evaluations there should be, and
    of whether equal sums are perturbed apart."""
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *flat: jax.tree.leaves(step(*jax.tree.unflatten(tree, flat))))(*leaves)
    run: Any = jax.jit(noisy(closed)).lower(np.uint32(1), np.uint32(0), *leaves).compile(compiler_options=options)

    def draws(args: Sequence[Any], count: int, apart: bool = False) -> list[list[Any]]:
        """Salts are odd and even by turns."""
        numbers = [np.uint32(0x1234567 * (k + 1) % 2**32) for k in range(count)]
        return [run(number, np.uint32(apart), *jax.tree.leaves(args)) for number in numbers]

    return draws
