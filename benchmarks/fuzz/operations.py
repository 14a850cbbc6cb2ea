# ruff: noqa: E501 (templates are lines of programs)
"""The operations that programs are made of: JAX's public functions, as templates and as small functions that draw a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.fuzz.programs import Draw, Function, Rejected, Step, dtype_name, kind_of

Operation = Callable[[Draw], Any]
OPERATIONS: dict[str, tuple[float, Operation]] = {}


def operation(weight: float) -> Callable[[Operation], Operation]:
    """Enters a function into the table, under its name."""

    def enter(fn: Operation) -> Operation:
        OPERATIONS[fn.__name__.replace("_", " ").strip()] = weight, fn
        return fn

    return enter


def draw_step(d: Draw, tries: int = 40, names: Sequence[str] = ()) -> None:
    """One more step (and what it needs), of a random operation, or of one of some names, which are drawn alike."""
    weights = [1.0] * len(names)
    if not names:
        names = [n for n in OPERATIONS if d.depth < 2 or n not in NESTED]
        weights = [OPERATIONS[n][0] for n in names]
    for _ in range(tries):
        name = d.rng.choices(names, weights)[0]
        steps = len(d.steps)
        try:
            OPERATIONS[name][1](d)
            d.root.kinds.append(name)
            return
        except Rejected:
            d.forget(steps)
    raise Rejected("nothing fits")


# Elementwise

UNARY = """jnp.tanh({0})|jnp.sin({0})|jnp.cos({0})|jnp.exp({0})|jnp.exp(-jnp.abs({0}))|jnp.log(jnp.abs({0}) + 0.5)|jnp.sqrt(jnp.abs({0}) + 0.1)
{0} * 2|{0} + 1|1 - {0}|{0} / 3|1 / ({0} * {0} + 1)|{0} ** 2|{0} ** 3|-{0}|jnp.abs({0})|jnp.square({0})|jnp.sign({0}) * {0}|jnp.log1p(jnp.abs({0}))
jnp.expm1({0})|jax.nn.relu({0})|jax.nn.gelu({0})|jax.nn.gelu({0}, approximate=False)|jax.nn.silu({0})|jax.nn.sigmoid({0})|jax.nn.softplus({0})
jax.nn.elu({0})|jax.nn.leaky_relu({0})|jax.nn.relu6({0})|jax.nn.log_sigmoid({0})|jax.nn.hard_swish({0})|jax.nn.selu({0})|jax.nn.celu({0})
jax.nn.mish({0})|jax.nn.soft_sign({0})|jax.nn.hard_tanh({0})|jax.nn.squareplus({0})|jnp.arctan({0})|jnp.sinh(jnp.tanh({0}))|jnp.cosh(jnp.tanh({0}))
jnp.arcsinh({0})|jnp.arccosh(1.5 + jnp.abs({0}))|jnp.arctanh(0.9 * jnp.tanh({0}))|jnp.arcsin(0.9 * jnp.sin({0}))|jnp.arccos(0.9 * jnp.sin({0}))
jnp.tan(jnp.tanh({0}))|lax.erf({0})|lax.erfc({0})|lax.erf_inv(0.9 * jnp.tanh({0}))|lax.rsqrt(jnp.abs({0}) + 0.3)|jnp.cbrt(jnp.abs({0}) + 0.1)
lax.digamma(jnp.abs({0}) + 0.5)|lax.lgamma(jnp.abs({0}) + 0.5)|lax.bessel_i0e({0})|lax.bessel_i1e({0})|jnp.sinc({0})|jnp.exp2(jnp.tanh({0}))
jnp.log2(jnp.abs({0}) + 0.5)|jnp.log10(jnp.abs({0}) + 0.5)|jnp.floor({0})|jnp.ceil({0})|jnp.round({0})|jnp.trunc({0})|jnp.modf({0})[0]
jnp.nan_to_num({0})|jnp.clip({0}, -1, 1)|jnp.clip({0}, min=0)|lax.stop_gradient({0}) * {0}|lax.stop_gradient({0})|jnp.where({0} > 0, {0}, 0)
jnp.where(jnp.isnan({0}), 0, {0})|jnp.where(jnp.isfinite({0}), {0}, 1)|jnp.where({0} != 0, 1 / {0}, 0)|jnp.maximum({0}, 0)|jnp.minimum({0}, 0.5)
lax.reduce_precision({0}, 8, 7)|lax.integer_pow({0}, -2)|lax.clamp(-0.5, {0}, 0.5)|jnp.log({0})|jnp.sqrt({0})|1 / {0}|jnp.power(jnp.abs({0}) + 0.1, 2.5)
jnp.deg2rad({0})|jnp.heaviside({0}, 0.5)|jax.scipy.special.ndtr({0})|jax.scipy.special.xlogy(jnp.abs({0}), 2.0)|jax.scipy.special.entr(jnp.abs({0}))
jax.scipy.special.logit(0.9 * jax.nn.sigmoid({0}))|jax.scipy.special.i0({0})|jax.scipy.stats.norm.logpdf({0})|jax.scipy.stats.norm.cdf({0})
jax.scipy.special.expit({0})|jax.scipy.special.gammaln(jnp.abs({0}) + 1)|jax.scipy.stats.laplace.logpdf({0})|jnp.polyval(jnp.array([1.0, -2.0, 0.5], {0}.dtype), {0})
lax.optimization_barrier({0})|jax.numpy.array({0}, copy=True)|jax.device_put({0})|jnp.copysign({0}, -1.0)|lax.polygamma(jnp.ones_like({0}), jnp.abs({0}) + 0.5)
jnp.ldexp({0}, 2)|jnp.frexp({0})[0]|lax.nextafter(lax.stop_gradient({0}), jnp.ones_like({0}))|jnp.spacing(lax.stop_gradient({0}))|jnp.unwrap({0})"""
UNARY_OF_FLOATS = [t for line in UNARY.split("\n") for t in line.split("|")]
COMMON = UNARY_OF_FLOATS[:24]


@operation(10)
def unary(d: Draw) -> None:
    d.add(d.rng.choice(COMMON if d.rng.random() < 0.4 else UNARY_OF_FLOATS), d.pick())


BINARY = """{0} + {1}|{0} - {1}|{0} * {1}|{0} / (jnp.abs({1}) + 1)|jnp.maximum({0}, {1})|jnp.minimum({0}, {1})|jnp.arctan2({0}, {1})
jnp.power(jnp.abs({0}) + 0.1, {1})|jnp.hypot({0}, {1} + 1)|jnp.logaddexp({0}, {1})|jnp.where({0} > {1}, {0}, {1})|{0} / {1}|jnp.remainder({0}, {1})
lax.rem({0}, jnp.broadcast_to({1}, {0}.shape).astype({0}.dtype))|jnp.copysign({0}, {1})|jnp.fmax({0}, {1})|jnp.fmod({0}, {1})|{0} * {0} + {1}|jnp.float_power({0} * {0}, {1})
jnp.heaviside({0}, {1})|jnp.nextafter(lax.stop_gradient({0}), lax.stop_gradient({1}))|jnp.logaddexp2({0}, {1})|jnp.floor_divide({0}, {1})
jax.scipy.special.xlog1py(jnp.abs({0}), jnp.abs({1}))|jax.scipy.special.rel_entr(jnp.abs({0}) + 0.1, jnp.abs({1}) + 0.1)|jax.scipy.special.betaln(jnp.abs({0}) + 1, jnp.abs({1}) + 1)
lax.igamma(lax.stop_gradient(jnp.abs({0}) + 0.5), jnp.broadcast_to(jnp.abs({1}) + 0.5, {0}.shape).astype({0}.dtype))
jax.scipy.stats.norm.logpdf({0}, {1})|jax.scipy.special.kl_div(jnp.abs({0}) + 0.1, jnp.abs({1}) + 0.1)|jnp.divmod({0}, 1 + jnp.abs({1}))[1]"""
BINARY_OF_FLOATS = [t for line in BINARY.split("\n") for t in line.split("|")]


@operation(10)
def binary(d: Draw) -> None:
    x = d.pick()
    y = d.beside(x)
    if d.rng.random() < 0.5:
        x, y = (x, y) if d.rng.random() < 0.7 else (y, x)
    d.add(d.rng.choice(BINARY_OF_FLOATS[:6] if d.rng.random() < 0.6 else BINARY_OF_FLOATS), x, y)


WHOLES = """{0} + {1}|{0} - {1}|{0} * {1}|{0} // (jnp.abs({1}) + 1)|{0} % (jnp.abs({1}) + 1)|jnp.maximum({0}, {1})|{0} & {1}|{0} | {1}|{0} ^ {1}|{0} << ({1} & 3)|{0} >> ({1} & 3)
lax.shift_right_logical({0}, jnp.broadcast_to({1} & 3, {0}.shape).astype({0}.dtype))|jnp.gcd({0}, {1})|lax.clz({0})|lax.population_count({0})|~{0}|jnp.abs({0})|jnp.sign({0})
jnp.minimum({0}, 3)|jnp.bitwise_count({0})|{0} // {1}|{0} % {1}|jnp.lcm({0} & 7, {1} & 7)|jnp.divmod({0}, {1})[0]|jnp.left_shift({0}, 1)|jnp.clip({0}, 0, 3)|lax.div({0}, jnp.broadcast_to({1}, {0}.shape).astype({0}.dtype))"""
BINARY_OF_INTEGERS = [t for line in WHOLES.replace("{0} | {1}", "{0} @or {1}").split("\n") for t in line.split("|")]


@operation(2.5)
def integers(d: Draw) -> None:
    x = d.pick("i")
    d.add(d.rng.choice(BINARY_OF_INTEGERS).replace("@or", "|"), x, d.beside(x, "i"))


@operation(2)
def comparison(d: Draw) -> None:
    x = d.pick("fi")
    if d.rng.random() < 0.3:
        d.add(d.rng.choice(("jnp.isnan({0})", "jnp.isfinite({0})", "jnp.isinf({0})", "{0} > 0", "{0} == 0", "jnp.signbit({0})")), x)
    else:
        op = d.rng.choice(("==", "!=", "<", "<=", ">", ">="))
        d.add("{0} <op> {1}", x, d.beside(x, "fi"), op=op)


@operation(1.2)
def logic(d: Draw) -> None:
    x = d.pick("b")
    d.add(
        d.rng.choice(
            ("{0} & {1}", "{0} ^ {1}", "jnp.logical_or({0}, {1})", "~{0}", "jnp.logical_xor({0}, {1})", "jnp.where({0}, {1}, {0})")
        ),
        x,
        d.beside(x, "b"),
    )


@operation(4)
def selection(d: Draw) -> None:
    x = d.pick("fi")
    y = d.beside(x, "fi")
    shape = d.of(x).shape
    p = d.pick("b", shape=shape if d.rng.random() < 0.6 else shape[d.rng.randrange(len(shape)) :] if shape else ())
    texts = ["jnp.where({2}, {0}, {1})", "jnp.where({2}, {0}, 0)", "jnp.where({2}, {0}, -jnp.inf)", "jnp.where({2}, {0}, 1)"]
    texts += ["jnp.where({2}, jnp.nan, {0})", "jnp.select([{2}, ~{2}], [{0}, {1}], 0)", "jnp.clip({0}, {1}, {1} + 1)"]
    d.add(d.rng.choice(texts), x, y, p)


@operation(3.5)
def conversion(d: Draw) -> None:
    x = d.pick("fib")
    kinds = [
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "int32",
        "int8",
        "uint8",
        "int64",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
        d.main,
    ]
    weights = [4, 3 if d.main == "float64" else 0.5, 3, 2.5, 2, 1, 1, 1, 1, 0.7, 0.4, 4]
    text = "{0}.astype('<dtype>')" if d.rng.random() < 0.9 else "lax.convert_element_type({0}, '<dtype>')"
    d.add(text, x, dtype=d.rng.choices(kinds, weights)[0])


@operation(0.5)
def bitcast(d: Draw) -> None:
    x = d.pick("fi")
    width = d.of(x).dtype.itemsize * 8
    d.add("lax.bitcast_convert_type(lax.stop_gradient({0}), '<dtype>')", x, dtype=f"{d.rng.choice(('int', 'uint'))}{width}")


@operation(1)
def complex_numbers(d: Draw) -> None:
    if d.rng.random() < 0.4:
        d.add(d.rng.choice(("{0} * (1 + 2j)", "lax.complex({0}, {0} * 2)", "jnp.exp(1j * {0})", "{0} + 1j")), d.pick())
        return
    x = d.pick("c", fresh=0.1)
    texts = [
        "jnp.real({0})",
        "jnp.imag({0})",
        "jnp.abs({0})",
        "jnp.conj({0})",
        "{0} * jnp.conj({0})",
        "jnp.angle({0} + 3)",
        "{0} * {1}",
        "jnp.exp({0})",
        "jnp.sum({0}, -1)",
    ]
    d.add(d.rng.choice(texts), x, d.beside(x, "c"))


# Reductions and what runs along one axis


@operation(9)
def reduction(d: Draw) -> None:
    x = d.pick(least=1)
    texts = [
        "jnp.sum",
        "jnp.sum",
        "jnp.mean",
        "jnp.mean",
        "jnp.max",
        "jnp.min",
        "jnp.prod",
        "jnp.var",
        "jnp.std",
        "jax.nn.logsumexp",
        "jnp.linalg.norm",
    ]
    texts += ["jnp.nansum", "jnp.nanmax", "jnp.nanmean", "jnp.median", "jnp.ptp", "jax.scipy.special.logsumexp"]
    name = d.rng.choices(texts, [4, 4, 4, 4, 3, 2, 1, 2, 1, 3, 0.7, 0.5, 0.5, 0.5, 0.4, 0.5, 0.7])[0]
    keep = ", keepdims=True" if d.rng.random() < 0.4 and name not in ("jnp.ptp",) else ""
    axes = d.axes(x) if name not in ("jnp.median", "jnp.linalg.norm") else str(d.axis(x))
    if name in ("jnp.sum", "jnp.mean") and d.rng.random() < 0.15:
        keep += f", dtype='{d.rng.choice(('float32', 'bfloat16', d.main))}'"
    text = f"{name}({{0}}, axis={axes}{keep})"
    if name in ("jnp.sum", "jnp.mean", "jnp.max", "jnp.prod", "jnp.var") and d.rng.random() < 0.15:
        p = d.pick("b", shape=d.of(x).shape)
        first = ", initial=0" if name == "jnp.max" else ""
        d.add(f"{name}({{0}}, axis={axes}{keep}, where={{1}}{first})", x, p)
    else:
        d.add(text, x)


@operation(2)
def reduction_of_others(d: Draw) -> None:
    if d.rng.random() < 0.5:
        x = d.pick("b", least=1)
        d.add(f"{d.rng.choice(('jnp.any', 'jnp.all', 'jnp.sum', 'jnp.mean', 'jnp.count_nonzero'))}({{0}}, axis={d.axes(x)})", x)
        return
    x = d.pick("i", least=1)
    names = ["jnp.sum", "jnp.max", "jnp.min", "jnp.prod", "jnp.mean", "jnp.any"]
    axis = d.axis(x)
    text = (
        f"{d.rng.choice(names)}({{0}}, axis={d.axes(x)})"
        if d.rng.random() < 0.7
        else f"lax.reduce_{d.rng.choice(('and', 'or', 'xor'))}({{0}}, ({axis},))"
    )
    d.add(text, x)


@operation(1.5)
def argument_of_extremum(d: Draw) -> None:
    x = d.pick("fi", least=1)
    d.add(f"jnp.{d.rng.choice(('argmax', 'argmin', 'nanargmax'))}({{0}}, axis={d.axis(x)})", x)


@operation(1)
def monoid(d: Draw) -> None:
    x = d.pick(least=1)
    a = d.axis(x)
    texts = [
        "lax.reduce({0}, jnp.zeros((), {0}.dtype), lax.add, (<a>,))",
        "lax.reduce({0}, jnp.asarray(-jnp.inf, {0}.dtype), lax.max, (<a>,))",
    ]
    texts += [
        "lax.reduce(lax.stop_gradient({0}), jnp.ones((), {0}.dtype), lambda p, q: p * q, (<a>,))",
        "lax.associative_scan(jnp.add, {0}, axis=<a>)",
    ]
    texts += [
        "lax.associative_scan(jnp.maximum, {0}, axis=<a>, reverse=True)",
        "lax.associative_scan(lambda p, q: p * q, {0}, axis=<a>)",
    ]
    d.add(d.rng.choice(texts), x, a=a)


@operation(3)
def along(d: Draw) -> None:
    x = d.pick(least=1)
    n = d.of(x).shape
    a = d.axis(x)
    k = max(1, min(n[a], d.rng.randint(1, 3)))
    texts = [
        "jnp.cumsum({0}, <a>)",
        "jnp.cumprod({0}, <a>)",
        "lax.cummax({0}, <a>)",
        "lax.cummin({0}, <a>, reverse=True)",
        "lax.cumlogsumexp({0}, <a>)",
        "lax.cumsum({0}, <a>, reverse=True)",
    ]
    texts += [
        "jnp.sort({0}, <a>)",
        "jnp.argsort({0}, <a>)",
        "jnp.sort({0}, <a>, descending=True)",
        "lax.top_k({0}, <k>)",
        "lax.approx_max_k({0}, <k>)[0]",
        "jnp.diff({0}, axis=<a>)",
    ]
    texts += [
        "lax.sort(({0}, {0} * 2), dimension=<a>, num_keys=1)",
        "jnp.gradient({0}, axis=<a>)",
        "jnp.trapezoid({0}, axis=<a>)",
        "jnp.quantile({0}, 0.3, axis=<a>)",
        "jnp.argpartition({0}, 0, axis=<a>)",
    ]
    text = d.rng.choice(texts)
    if "top_k" in text or "_k(" in text:
        k = max(1, min(n[-1], k))
    d.add(text, x, a=a, k=k)


# Shapes


def factored(d: Draw, n: int) -> tuple[int, ...]:
    """A number as a product of some factors."""
    if n == 0:
        return (0,)
    parts = []
    while n > 1 and len(parts) < 3:
        options = [k for k in range(2, n + 1) if n % k == 0]
        k = d.rng.choice(options)
        parts.append(k)
        n //= k
    parts = [*parts, n] if n > 1 else parts
    if d.rng.random() < 0.2:
        parts.insert(d.rng.randint(0, len(parts)), 1)
    d.rng.shuffle(parts)
    return tuple(parts)


@operation(6)
def moved(d: Draw) -> None:
    x = d.pick("ffffib", least=1)
    shape = tuple(d.of(x).shape)
    n, a = len(shape), d.axis(x)
    size = shape[a]
    order = list(range(n))
    d.rng.shuffle(order)
    way = d.rng.randrange(12)
    if way <= 1:
        d.add("jnp.transpose({0}, <order>)", x, order=tuple(order))
    elif way <= 4:
        whole = int(np.prod(shape))
        new = factored(d, whole) if d.rng.random() < 0.6 else (*shape[:a], *factored(d, size), *shape[a + 1 :])
        d.add("jnp.reshape({0}, <new>)", x, new=new)
    elif way == 5:
        d.add(d.rng.choice(("jnp.expand_dims({0}, <a>)", "jnp.squeeze({0})", "jnp.atleast_2d({0})", "jnp.ravel({0})")), x, a=a)
    elif way == 6:
        d.add(
            d.rng.choice(("jnp.flip({0}, <a>)", "jnp.roll({0}, <k>, <a>)", "lax.rev({0}, (<a>,))", "jnp.rot90({0})")),
            x,
            a=a,
            k=d.rng.randint(-3, 3),
        )
    elif way == 7:
        d.add(
            d.rng.choice(("jnp.repeat({0}, 2, axis=<a>)", "jnp.tile({0}, 2)", "jnp.tile({0}, (2,) + (1,) * <m>)")), x, a=a, m=n - 1
        )
    elif way == 8:
        m = d.rng.choice((2, 3, 6))
        d.add("jnp.broadcast_to({0}, <new>)", x, new=(m, *shape))
    elif way == 9:
        d.add(d.rng.choice(("jnp.swapaxes({0}, 0, <a>)", "jnp.moveaxis({0}, <a>, 0)")), x, a=a)
    elif way == 10 and n >= 2:
        d.add(d.rng.choice(("jnp.tril({0})", "jnp.triu({0}, 1)", "jnp.diagonal({0})", "jnp.trace({0})")), x)
    else:
        d.add("jnp.concatenate([{0}, {0}], axis=<a>)", x, a=a)


@operation(4)
def sliced(d: Draw) -> None:
    x = d.pick("fffi", least=1)
    shape = tuple(d.of(x).shape)
    a = d.axis(x)
    size = shape[a]
    lo = d.rng.randint(0, max(size - 1, 0))
    hi = d.rng.randint(lo, size)
    before = ":, " * a
    options = [
        "{0}[<b><lo>:<hi>]",
        "{0}[<b><lo>:<hi>]",
        "{0}[<b>::2]",
        "{0}[<b>::-1]",
        "{0}[<b>-1]",
        "{0}[<b>:<half>]",
        "{0}[<b><half>:]",
        "{0}[..., None, :]",
    ]
    options += [f"jnp.split({{0}}, {k}, axis=<a>)" for k in (2, 3) if size and size % k == 0] * 2
    options += ["jnp.array_split({0}, 2, axis=<a>)"] if size > 1 else []
    options += ["lax.slice_in_dim({0}, <lo>, <hi>, axis=<a>)", "jnp.unstack({0}, axis=<a>)" if 0 < size <= 4 else "{0}[<b>1:]"]
    d.add(d.rng.choice(options), x, b=before, lo=lo, hi=hi, half=size // 2, a=a)


@operation(3)
def padded(d: Draw) -> None:
    x = d.pick("fffi", least=1)
    shape = tuple(d.of(x).shape)
    a, n = d.axis(x), len(shape)
    widths = [(0, 0)] * n
    widths[a] = (d.rng.randint(0, 2), d.rng.randint(0, 3))
    mode = d.rng.choice(("constant", "constant", "edge", "reflect", "wrap", "symmetric", "mean"))
    config = [(0, 0, 0)] * n
    config[a] = (d.rng.randint(-1, 2), d.rng.randint(-1, 2), d.rng.choice((0, 0, 1)))
    if d.rng.random() < 0.5:
        d.add("jnp.pad({0}, <widths>, mode='<mode>')", x, widths=tuple(widths), mode=mode)
    else:
        d.add("lax.pad({0}, jnp.asarray(<v>, {0}.dtype), <config>)", x, config=tuple(config), v=d.rng.choice((0, 1, -3)))


@operation(3.5)
def joined(d: Draw) -> None:
    x = d.pick(least=1)
    a = d.axis(x)
    y = d.pick(shape=d.of(x).shape, dtype=dtype_name(d.of(x).dtype))
    texts = ["jnp.concatenate([{0}, {1}], axis=<a>)"] * 3 + ["jnp.stack([{0}, {1}], axis=<a>)"] * 2
    texts += [
        "jnp.concatenate([{0}, {1}, {0}], axis=<a>)",
        "jnp.concatenate([{0}, jnp.zeros_like({1})], axis=<a>)",
        "jnp.hstack([{0}, {1}])",
        "jnp.stack([{0}, {1}]).sum(0)",
    ]
    texts += [
        "jnp.concatenate([-{0}, {1}[..., :1]], axis=-1)",
        "jnp.append({0}, {1})",
        "jnp.meshgrid({0}.ravel()[:4], {1}.ravel()[:3])",
    ]
    d.add(d.rng.choice(texts), x, y, a=a)


@operation(1.5)
def created(d: Draw) -> None:
    x = d.pick("f", least=1)
    n = d.of(x).shape[-1]
    texts = [
        "{0} + jnp.arange(<n>, dtype={0}.dtype)",
        "{0} * (jnp.arange(<n>) % 2)",
        "jnp.where(jnp.arange(<n>) < <k>, {0}, 0)",
        "{0} + jnp.linspace(0, 1, <n>, dtype={0}.dtype)",
        "{0} @ jnp.eye(<n>, dtype={0}.dtype)",
    ]
    texts += [
        "{0} + lax.broadcasted_iota({0}.dtype, {0}.shape, 0)",
        "jnp.where(jnp.tril(jnp.ones({0}.shape[-2:], bool)), {0}, -1e9)",
        "{0} + jnp.zeros_like({0})",
        "jnp.full_like({0}, 2) * {0}",
        "{0} - np.arange(<n>)",
    ]
    d.add(d.rng.choice(texts), x, n=n, k=n // 2)


# Products


@operation(9)
def product(d: Draw) -> None:
    x = d.pick(least=1)
    shape = tuple(d.of(x).shape)
    dtype = dtype_name(d.of(x).dtype)
    k, m = shape[-1], d.rng.choice((2, 4, 6, 12, 1, 3))
    way = d.rng.randrange(10)
    if way <= 3:
        d.add("{0} @ {1}", x, d.pick(shape=(k, m), dtype=dtype, fresh=0.5))
    elif way == 4:
        d.add(
            "jnp.dot({0}, {1}, preferred_element_type='<p>')",
            x,
            d.pick(shape=(k, m), dtype=dtype, fresh=0.5),
            p=d.rng.choice(("float32", d.main)),
        )
    elif way == 5 and len(shape) >= 2:
        d.add(d.rng.choice(("{0} @ jnp.swapaxes({0}, -1, -2)", "jnp.einsum('...ij,...ik->...jk', {0}, {0})")), x)
    elif way == 6 and len(shape) >= 2:
        y = d.pick(shape=shape, dtype=dtype)
        texts = [
            "jnp.einsum('...ij,...ij->...i', {0}, {1})",
            "jnp.einsum('...ij,...kj->...ik', {0}, {1})",
            "jnp.einsum('...ij,...ij->...', {0}, {1})",
            "jnp.vdot({0}, {1})",
            "jnp.tensordot({0}, {1}, axes=<n>)",
        ]
        d.add(d.rng.choice(texts), x, y, n=len(shape))
    elif way == 7 and len(shape) == 3:
        d.add("jnp.einsum('bij,bjk->bik', {0}, {1})", x, d.pick(shape=(shape[0], k, m), dtype=dtype, fresh=0.5))
    elif way == 8:
        d.add(
            d.rng.choice(("jnp.outer({0}, {1})", "jnp.inner({0}, {0})", "jnp.kron({0}, {1})")), x, d.pick(shape=(m,), dtype=dtype)
        )
    else:
        d.add(
            "lax.dot_general({0}, {1}, ((({n},), (0,)), ((), ())))".replace("{n}", str(len(shape) - 1)),
            x,
            d.pick(shape=(k, m), dtype=dtype, fresh=0.5),
        )


@operation(0.8)
def product_of_others(d: Draw) -> None:
    x = d.pick("ib", least=1)
    k = d.of(x).shape[-1]
    d.add(
        "{0} @ {1}", x, d.pick(kind_of(d.of(x).dtype), shape=(k, d.rng.choice((2, 4))), dtype=dtype_name(d.of(x).dtype), fresh=0.5)
    )


@operation(1.2)
def product_in_groups(d: Draw) -> None:
    x = d.pick(ndim=2)
    rows, k = d.of(x).shape
    groups = d.rng.choice((2, 3))
    if not rows:
        raise Rejected("no rows")
    cut = sorted(d.rng.randint(0, rows) for _ in range(groups - 1))
    sizes = [b - a for a, b in zip([0, *cut], [*cut, rows], strict=True)]
    if d.rng.random() < 0.3:
        sizes[-1] = 0
    y = d.pick(shape=(groups, k, d.rng.choice((2, 4))), dtype=dtype_name(d.of(x).dtype), fresh=0.8)
    d.add("lax.ragged_dot({0}, {1}, jnp.array(<sizes>, 'int32'))", x, y, sizes=sizes)


@operation(2.5)
def convolution(d: Draw) -> None:
    rng = d.rng
    one = rng.random() < 0.6
    channels, out = rng.choice((1, 2, 4)), rng.choice((2, 4, 6))
    space = (rng.choice((4, 6, 12)),) if one else (rng.choice((4, 6)), rng.choice((2, 4, 6)))
    x = d.pick(ndim=2 + len(space), wish=(rng.choice((2, 4)), channels, *space), fits=lambda s: min(s.shape) > 0)
    shape = d.of(x).shape
    groups = rng.choice([g for g in (1, 1, 2, 3) if shape[1] % g == 0 and out % g == 0])
    window = tuple(rng.choice((1, 2, 3)) for _ in shape[2:])
    y = d.pick(shape=(out, shape[1] // groups, *window), dtype=dtype_name(d.of(x).dtype), fresh=0.9)
    strides = tuple(rng.choice((1, 1, 2)) for _ in window)
    padding = rng.choice(("'SAME'", "'VALID'", "'SAME'", str([(rng.randint(0, 2), rng.randint(0, 2)) for _ in window])))
    more = rng.choice(
        (
            "",
            "",
            f", rhs_dilation={tuple(rng.choice((1, 2)) for _ in window)}",
            f", lhs_dilation={tuple(rng.choice((1, 2)) for _ in window)}",
        )
    )
    if padding.startswith("'SAME") and "lhs" in more:
        more = ""
    d.add(
        "lax.conv_general_dilated({0}, {1}, <s>, <p>, feature_group_count=<g><more>)",
        x,
        y,
        s=strides,
        p=padding,
        g=groups,
        more=more,
    )


@operation(2)
def window(d: Draw) -> None:
    rng = d.rng
    x = d.pick(least=1, fits=lambda s: len(s.shape) > 0 and min(s.shape) > 0)
    shape = d.of(x).shape
    sizes = tuple(rng.choice((1, 2, 3)) if k >= len(shape) - 2 else 1 for k in range(len(shape)))
    strides = tuple(rng.choice((1, s)) for s in sizes)
    start, fn = rng.choice((("-jnp.inf", "lax.max"), ("jnp.inf", "lax.min"), ("0.0", "lax.add"), ("0.0", "lax.add")))
    d.add(
        "lax.reduce_window({0}, <i>, <fn>, <w>, <s>, '<p>')",
        x,
        i=start,
        fn=fn,
        w=sizes,
        s=strides,
        p=rng.choice(("SAME", "VALID")),
    )


# Indices


def indices(d: Draw, n: int, shape: Any = None, unique: bool = False) -> str:
    """Integers that index `n` rows: in range, or not."""
    shape = d.shape(d.rng.choice((0, 1, 1, 2))) if shape is None else shape
    kind = f"index {n} outside" if d.root.special and d.rng.random() < 0.6 else f"index {n}"
    kind = f"unique {n}" if unique else kind
    if d.rng.random() < 0.5 and not unique:
        return d.pick("i", shape=shape, kind=kind)
    return d.argument(shape, d.rng.choice(("int32", "int32", "int32", "int64", "uint8")) if not unique else "int32", kind)


@operation(7)
def gather(d: Draw) -> None:
    x = d.pick("fffi", least=1)
    shape = tuple(d.of(x).shape)
    a = d.axis(x)
    n = shape[a]
    mode = d.rng.choice(("clip", "fill", "wrap", "promise_in_bounds", "clip"))
    way = d.rng.randrange(9)
    before = ":, " * a
    i = d.argument(d.shape(d.rng.choice((0, 1, 2))), "int32", f"index {n}") if mode == "promise_in_bounds" else indices(d, n)
    if way <= 2:
        d.add("{0}[<b>{1}]", x, i, b=before)
    elif way == 3:
        d.add("jnp.take({0}, {1}, axis=<a>, mode='<m>')", x, i, a=a, m=mode if mode != "promise_in_bounds" else "fill")
    elif way == 4:
        d.add(
            "{0}.at[<b>{1}].get(mode='<m>'<fill>)",
            x,
            i,
            b=before,
            m=mode,
            fill=d.rng.choice((", fill_value=0", "")) if mode == "fill" else "",
        )
    elif way == 5:
        own = list(shape)
        own[a] = d.rng.choice((1, 2, 3, n))
        mode = d.rng.choice(("", ", mode='clip'", ", mode='fill'"))
        d.add("jnp.take_along_axis({0}, {1}, <a><m>)", x, indices(d, n, tuple(own)), a=a, m=mode)
    elif way == 6 and len(shape) >= 2:
        m = d.rng.choice((2, 4, 6))
        d.add("{0}[{1}, {2}]", x, indices(d, shape[0], (m,)), indices(d, shape[1], (m,)))
    elif way == 7:
        k = min(n, d.rng.randint(1, 3))
        d.add("lax.dynamic_slice_in_dim({0}, {1}, <k>, axis=<a>)", x, indices(d, n, ()), k=k, a=a)
    elif len(shape) >= 2:
        d.add("jax.vmap(lambda row, k: row[k])({0}, {1})", x, indices(d, shape[1], (shape[0],)))
    else:
        d.add("lax.dynamic_index_in_dim({0}, {1}, <a>, keepdims=False)", x, indices(d, n, ()), a=a)


@operation(5)
def scatter(d: Draw) -> None:
    x = d.pick("fffi", least=1)
    shape = tuple(d.of(x).shape)
    dtype, letter = dtype_name(d.of(x).dtype), kind_of(d.of(x).dtype)
    n = shape[0]
    rows = d.rng.choice((2, 4, 6, 3))
    way = d.rng.choice(
        (
            "add",
            "add",
            "add",
            "set",
            "set",
            "subtract",
            "max",
            "min",
            "multiply",
            "apply",
            "update",
            "segment",
            "add columns",
            "power",
        )
    )
    mode = d.rng.choice(("", "", ", mode='drop'", ", mode='clip'", ", mode='promise_in_bounds'"))
    if way == "apply":
        d.add("{0}.at[{1}].apply(lambda v: v * 3 + 1)", x, indices(d, n, (rows,), True))
    elif way == "update":
        k = min(n, d.rng.randint(1, 2))
        u = d.pick(letter, shape=(k, *shape[1:]), dtype=dtype, fresh=0.6)
        d.add("lax.dynamic_update_slice_in_dim({0}, {1}, {2}, axis=0)", x, u, indices(d, n, ()))
    elif way == "segment":
        m = d.rng.choice((2, 4, 6))
        fn = d.rng.choice(("segment_sum", "segment_sum", "segment_max", "segment_prod", "segment_min"))
        d.add("jax.ops.<fn>({0}, {1}, num_segments=<m>)", x, indices(d, m, (n,)), fn=fn, m=m)
    elif way == "add columns" and len(shape) >= 2:
        u = d.pick(letter, shape=(n, rows, *shape[2:]), dtype=dtype, fresh=0.6)
        d.add("{0}.at[:, {1}].add({2}<m>)", x, indices(d, shape[1], (rows,)), u, m=mode)
    else:
        way = way.split()[0]
        unique = way in ("set", "multiply", "power") or "promise" in mode
        i = indices(d, n, (min(rows, n) if unique else rows,), unique)
        u = d.pick(letter, shape=(*d.of(i).shape, *shape[1:]) if d.rng.random() < 0.8 else (), dtype=dtype, fresh=0.6)
        if unique and way == "multiply":
            mode += ", unique_indices=True"
        d.add("{0}.at[{1}].<way>({2}<m>)", x, i, u, way=way, m=mode)


@operation(3)
def looked_up(d: Draw) -> None:
    n = d.rng.choice((2, 4, 6, 12, 5))
    way = d.rng.randrange(7)
    if way <= 2:
        d.add("jax.nn.one_hot({0}, <n>, dtype='<t>')", indices(d, n), n=n, t=d.main)
    elif way == 3:
        table = d.pick(ndim=2, fits=lambda s: s.shape[0] > 0)
        d.add(
            "jax.nn.one_hot({1}, <n>, dtype={0}.dtype) @ {0}",
            table,
            indices(d, d.of(table).shape[0], (d.rng.choice((2, 4)),)),
            n=d.of(table).shape[0],
        )
    elif way == 4:
        d.add(d.rng.choice(("jnp.searchsorted(jnp.sort({0}), {1})", "jnp.digitize({1}, jnp.sort({0}))")), d.pick(ndim=1), d.pick())
    elif way == 5:
        d.add("jnp.interp({0}, jnp.arange(3.0), {1})", d.pick(), d.pick(shape=(3,)))
    else:
        i = indices(d, n, (d.rng.choice((4, 6, 12)),))
        d.add(
            d.rng.choice(
                (
                    "jnp.bincount(jnp.abs({0}), length=<n>)",
                    "jnp.unique({0}, size=4, fill_value=0)",
                    "jnp.nonzero({0}, size=3)",
                    "jnp.histogram({0}, bins=3)[0]",
                    "jnp.isin({0}, jnp.array([0, 2]))",
                )
            ),
            i,
            n=n,
        )


# Random numbers


@operation(3.5)
def random_numbers(d: Draw) -> None:
    key = d.pick("k", fresh=0.3, shape=())
    shape = d.shape(d.rng.choice((1, 2, 2, 3)))
    t = d.main
    texts = [
        "jax.random.normal({0}, <s>, '<t>')",
        "jax.random.uniform({0}, <s>, '<t>')",
        "jax.random.bernoulli({0}, 0.7, <s>)",
        "jax.random.randint({0}, <s>, 0, 9)",
        "jax.random.bits({0}, <s>, 'uint32')",
    ]
    texts += [
        "jax.random.gumbel({0}, <s>, '<t>')",
        "jax.random.truncated_normal({0}, -1, 1, <s>, '<t>')",
        "jax.random.exponential({0}, <s>, '<t>')",
        "jax.random.laplace({0}, <s>, '<t>')",
        "jax.random.rademacher({0}, <s>, '<t>')",
    ]
    texts += [
        "jax.random.split({0}, 4)",
        "jax.random.split({0})",
        "jax.random.fold_in({0}, 3)",
        "jax.random.cauchy({0}, <s>, '<t>')",
        "jax.random.permutation({0}, 6)",
        "jax.random.clone({0})",
    ]
    d.add(d.rng.choice(texts), key, s=shape, t=t)


@operation(3)
def random_of_data(d: Draw) -> None:
    x = d.pick(least=1)
    key = d.pick("k", fresh=0.3, shape=())
    texts = ["jnp.where(jax.random.bernoulli({1}, 0.8, {0}.shape), {0} / 0.8, 0)"] * 3 + [
        "{0} + jax.random.normal({1}, {0}.shape, {0}.dtype)",
        "{0} * jax.random.bernoulli({1}, 0.5, {0}.shape[-1:])",
    ]
    texts += ["jax.random.categorical({1}, {0})", "jax.random.permutation({1}, {0})", "jax.random.choice({1}, {0}, (3,))"]
    if d.rng.random() < 0.25 and d.of(x).shape[0]:
        keys = d.pick("k", shape=d.of(x).shape[:1], fresh=0.6)
        vmapped = [
            "jax.vmap(lambda x, k: x + jax.random.normal(k, x.shape, x.dtype))({0}, {1})",
            "jax.vmap(lambda x, k: jnp.where(jax.random.bernoulli(k, 0.7, x.shape), x, 0))({0}, {1})",
            "jax.vmap(jax.random.fold_in)({1}, jnp.arange({1}.shape[0]))",
        ]
        d.add(d.rng.choice(vmapped), x, keys)
    else:
        d.add(d.rng.choice(texts), x, key)


# Composites

LAYERS = """jax.nn.softmax({0})|jax.nn.log_softmax({0})|jax.nn.softmax({0}, axis=0)|jax.nn.standardize({0})|jax.nn.logsumexp({0}, axis=-1, keepdims=True)|jax.nn.glu({0})
({0} - {0}.mean(-1, keepdims=True)) * lax.rsqrt({0}.var(-1, keepdims=True) + 1e-5)|{0} * lax.rsqrt(jnp.mean({0} * {0}, -1, keepdims=True) + 1e-6)|({0} - {0}.mean(0)) / jnp.sqrt({0}.var(0) + 1e-5)
{0} / jnp.linalg.norm({0}, axis=-1, keepdims=True)|{0} / (jnp.sum(jnp.abs({0}), -1, keepdims=True) + 1e-3)|jax.nn.softmax(jnp.where({0} > 0, {0}, -jnp.inf))|jnp.cov({0}.reshape({0}.shape[0], -1))
jnp.corrcoef({0}.reshape({0}.shape[0], -1))|-jnp.mean(jax.nn.log_softmax({0})[..., 0])|jax.nn.softmax({0} * 1e4)|jax.nn.log_softmax({0}, axis=0)|jax.nn.sparse_plus({0})|jnp.cross({0}[..., :3], {0}[..., :3] * 2)
jax.image.resize({0}, tuple(2 * n for n in {0}.shape), 'linear')|jax.image.resize({0}, {0}.shape[:-1] + (3,), 'nearest')|jax.image.resize({0}, {0}.shape[:-1] + (6,), 'cubic')
jax.lax.map(jnp.tanh, {0})|jnp.convolve({0}.ravel()[:8], jnp.ones(3, {0}.dtype))|jnp.fft.fft({0})|jnp.abs(jnp.fft.rfft({0})) ** 2|jnp.fft.ifft(jnp.fft.fft({0}, axis=0), axis=0).real|jnp.fft.fft2({0}[None])|jnp.fft.irfft({0})|jnp.fft.fftshift({0})"""
LAYERS_OF = [t for line in LAYERS.split("\n") for t in line.split("|")]


@operation(6)
def layer(d: Draw) -> None:
    d.add(d.rng.choice(LAYERS_OF[:9] if d.rng.random() < 0.5 else LAYERS_OF), d.pick(least=1))


@operation(1.5)
def attention(d: Draw) -> None:
    b, s, h, k = d.rng.choice((1, 2)), d.rng.choice((2, 4, 6)), d.rng.choice((1, 2)), d.rng.choice((2, 4))
    q = d.pick(ndim=4, wish=(b, s, h, k), fits=lambda t: np.prod(t.shape) > 0)
    shape, dtype = d.of(q).shape, dtype_name(d.of(q).dtype)
    keys, values = d.pick(shape=shape, dtype=dtype), d.pick(shape=shape, dtype=dtype)
    texts = [
        "jax.nn.dot_product_attention({0}, {1}, {2})",
        "jax.nn.dot_product_attention({0}, {1}, {2}, is_causal=True)",
        "jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', {0}, {1})), {2})",
    ]
    d.add(d.rng.choice(texts), q, keys, values)


LOSSES = """optax.squared_error({0}, {1})|optax.l2_loss({0}, {1})|optax.huber_loss({0}, {1})|optax.log_cosh({0}, {1})|optax.cosine_distance({0}, {1}, epsilon=1e-3)|optax.cosine_similarity({0}, {1}, epsilon=1e-3)
optax.sigmoid_binary_cross_entropy({0}, jax.nn.sigmoid({1}))|optax.softmax_cross_entropy({0}, jax.nn.softmax({1}))|optax.kl_divergence(jax.nn.log_softmax({0}), jax.nn.softmax({1}))|optax.hinge_loss({0}, jnp.sign({1}))
optax.poly_loss_cross_entropy({0}, jax.nn.softmax({1}))|optax.safe_softmax_cross_entropy({0}, jax.nn.softmax({1}))|jnp.mean(({0} - {1}) ** 2)|optax.sigmoid_focal_loss({0}, jax.nn.sigmoid({1}))|optax.smooth_labels(jax.nn.softmax({0}), 0.1)"""
LOSSES_OF = [t for line in LOSSES.split("\n") for t in line.split("|")]


@operation(2.5)
def loss(d: Draw) -> None:
    x = d.pick(least=1)
    shape = d.of(x).shape
    if d.rng.random() < 0.35:
        y = indices(d, shape[-1], shape[:-1])
        texts = [
            "optax.softmax_cross_entropy_with_integer_labels({0}, {1})",
            "-jnp.take_along_axis(jax.nn.log_softmax({0}), {1}[..., None], -1)[..., 0]",
            "optax.losses.multiclass_hinge_loss({0}, {1})",
            "(jnp.argmax({0}, -1) == {1}).mean()",
        ]
        texts += [
            "jnp.sum(jnp.where({1} >= 0, optax.softmax_cross_entropy_with_integer_labels({0}, jnp.maximum({1}, 0)), 0)) / jnp.maximum(jnp.sum({1} >= 0), 1)"
        ]
        d.add(d.rng.choice(texts), x, y)
        return
    d.add(d.rng.choice(LOSSES_OF), x, d.pick(shape=shape, dtype=dtype_name(d.of(x).dtype)))


ALGEBRA = """jnp.linalg.solve({0} + 4 * jnp.eye(<n>, dtype={0}.dtype), {1})|jnp.linalg.inv({0} + 4 * jnp.eye(<n>, dtype={0}.dtype))|jnp.linalg.cholesky({0} @ {0}.mT + jnp.eye(<n>, dtype={0}.dtype))
jnp.linalg.qr({0} + 3 * jnp.eye(<n>, dtype={0}.dtype))[1]|jnp.linalg.eigvalsh({0} @ {0}.mT + jnp.diag(jnp.arange(<n>, dtype={0}.dtype)))|jnp.linalg.svd({0} + 3 * jnp.diag(jnp.arange(<n>, dtype={0}.dtype)), compute_uv=False)
jnp.linalg.det({0})|jnp.linalg.slogdet({0} + 4 * jnp.eye(<n>, dtype={0}.dtype))[1]|lax.linalg.triangular_solve({0} + 4 * jnp.eye(<n>, dtype={0}.dtype), {1}, left_side=True, lower=True)|jnp.linalg.matrix_power({0}, 3)
jax.scipy.linalg.expm({0} * 0.1)|jax.scipy.linalg.solve_triangular({0} + 4 * jnp.eye(<n>, dtype={0}.dtype), {1})|jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor({0} @ {0}.mT + jnp.eye(<n>, dtype={0}.dtype)), {1})
jnp.linalg.pinv({0} + 4 * jnp.eye(<n>, dtype={0}.dtype))|jnp.linalg.eigh({0} @ {0}.mT + jnp.diag(jnp.arange(<n>, dtype={0}.dtype)))[0]|lax.linalg.tridiagonal_solve({1}[..., 0] * 0.1, {1}[..., 0] + 4, {1}[..., 0] * 0.2, {1})"""
ALGEBRA_OF = [t for line in ALGEBRA.split("\n") for t in line.split("|")]


@operation(1.2)
def linear_algebra(d: Draw) -> None:
    if d.main not in ("float32", "float64"):
        raise Rejected("no narrow types")
    n, batch = d.rng.choice((2, 3, 4)), d.rng.choice(((), (), (2,), (6,)))
    a = d.argument((*batch, n, n), d.main, "normal")
    b = d.pick(shape=(*batch, n, d.rng.choice((2, 4))), dtype=d.main, fresh=0.6)
    d.add(d.rng.choice(ALGEBRA_OF), a, b, n=n)


RARE = """lax.igammac(lax.stop_gradient(jnp.abs({0}) + 0.5), jnp.abs({0}) + 0.5)|lax.zeta(lax.stop_gradient(jnp.abs({0}) + 2), lax.stop_gradient(jnp.abs({0}) + 0.5))
lax.reduce_precision({0}, 8, 7)|jnp.arctanh(0.9 * jnp.tanh({0}))|jnp.ldexp(*jnp.frexp(lax.stop_gradient({0})))|lax.random_gamma_grad(jnp.abs({0}) + 1, jnp.abs({0}) + 1)
jax.grad(lambda a: jnp.sum(lax.igamma(a, jnp.abs({0}) + 0.5)))(lax.stop_gradient(jnp.abs({0}) + 0.5))|jax.ad_checkpoint.checkpoint_name(jnp.sin({0}), 'sine')
jax.checkpoint(lambda x: jax.ad_checkpoint.checkpoint_name(jnp.sin(x), 'sine') ** 2, policy=jax.checkpoint_policies.save_only_these_names('sine'))({0})
{0} * jax.random.bernoulli(jax.random.key(3), 0.5, {0}.shape)|{0} + jax.random.uniform(jax.random.wrap_key_data(jnp.array([1, 2], 'uint32')), {0}.shape, {0}.dtype)
jax.random.key_data(jax.vmap(jax.random.key)(jnp.arange(6))) * {0}.size|jnp.linalg.eigvals(lax.stop_gradient({0}[..., :2, :2]))|jnp.linalg.qr(lax.stop_gradient({0}), mode='raw')[1]
lax.linalg.householder_product(lax.stop_gradient({0}[..., :2]), lax.stop_gradient({0}[..., 0, :2]))|lax.linalg.lu({0}[..., :2, :2] + 3 * jnp.eye(2, dtype={0}.dtype))[0]
jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor({0}[:2, :2] + 3 * jnp.eye(2, dtype={0}.dtype)), {0}[:2])|jax.random.multivariate_normal(jax.random.key(1), {0}.ravel()[:2], jnp.eye(2, dtype={0}.dtype))
jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1,) * (x.ndim - 1) + (2,), (1,) * (x.ndim - 1) + (2,), 'VALID') ** 2))({0})
jax.jvp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1,) * (x.ndim - 1) + (2,), (1,) * (x.ndim - 1) + (2,), 'VALID'), ({0},), ({0},))[1]
lax.with_sharding_constraint({0} * 2, jax.sharding.SingleDeviceSharding(jax.devices()[0]))|jax.jit(lambda x: x * 2, inline=False)({0})|lax.custom_root(lambda y: y - jnp.tanh({0}), {0}, lambda f, g: jnp.tanh({0}), lambda g, y: y)
jax.random.dirichlet(jax.random.key(0), jnp.ones(3, {0}.dtype)) * jnp.sum({0})|lax.map(lambda x: jnp.sum(x * x), {0}, batch_size=2)|jnp.vectorize(lambda a, b: jnp.dot(a, b), signature='(n),(n)->()')({0}, {0})"""
RARE_OF = [t for line in RARE.split("\n") for t in line.split("|")]


@operation(2.5)
def rare(d: Draw) -> None:
    """What few programs have: primitives that nothing else here leads to."""
    d.add(d.rng.choice(RARE_OF), d.pick(least=1))


# Functions inside


def parameter(d: Draw, prefix: str, shape: Any, dtype: Any) -> tuple[str, jax.ShapeDtypeStruct]:
    return d.name(prefix), jax.ShapeDtypeStruct(tuple(shape), dtype)


@operation(3)
def scan(d: Draw) -> None:
    xs = d.pick(least=1, fits=lambda s: s.shape[0] in (1, 2, 3, 4, 6))
    carry = d.pick("ffffi", fits=lambda s: len(s.shape) < 4)
    c, s = d.of(carry), d.of(xs)
    p, q = parameter(d, "c", c.shape, c.dtype), parameter(d, "x", s.shape[1:], s.dtype)
    inner = d.inner([p, q], d.rng.randint(1, 4))
    out = inner.fitted(c.shape, c.dtype)
    ys = inner.values[-1][0] if d.rng.random() < 0.6 else None
    f = inner.function(inner, [p[0], q[0]], "{0}, {1}" if ys else "{0}, None", [out, ys] if ys else [out])
    if d.rng.random() < 0.2:
        f = Function(f.name, f.parameters, f.steps, f.outputs, f.returned, wrap="jax.checkpoint")
    more = d.rng.choice(("", "", "", ", reverse=True", ", unroll=2"))
    text = "lax.scan({f0}, {0}, {1}<more>)" if ys else "lax.scan({f0}, {0}, {1}<more>)[0]"
    if ys:
        d.add("(lambda pair: [pair[0], pair[1]])(" + text + ")", carry, xs, functions=[f], more=more)
    else:
        d.add(text, carry, xs, functions=[f], more=more)


@operation(1.2)
def layers(d: Draw) -> None:
    """A scan over layers of one shape, as pipelines want."""
    n, b, m = d.rng.choice((2, 4, 4, 6)), d.rng.choice((4, 8, 12)), d.rng.choice((2, 4))
    x = d.pick(ndim=2, wish=(b, m), fits=lambda s: s.shape[0] >= 2 and s.shape[1] > 0)
    m = d.of(x).shape[1]
    w = d.argument((n, m, m), dtype_name(d.of(x).dtype), "normal")
    body = d.rng.choice(
        ("jnp.tanh({h} @ {w})", "{h} + jnp.tanh({h} @ {w})", "jax.nn.softmax({h} @ {w})", "{h} + jax.nn.gelu({h} @ {w}) @ {w}.T")
    )
    h, own = d.name("h"), d.name("w")
    r = d.name("v")
    step = Step((r,), body.replace("{h}", "{0}").replace("{w}", "{1}"), (h, own))
    f = Function(d.name("f"), (h, own), (step,), "{0}, None", (r,))
    d.add("lax.scan({f0}, {0}, {1})[0]", x, w, functions=[f])


@operation(1.5)
def while_loop(d: Draw) -> None:
    x = d.pick()
    s = d.of(x)
    p = parameter(d, "c", s.shape, s.dtype)
    inner = d.inner([p], d.rng.randint(1, 3))
    out = inner.fitted(s.shape, s.dtype)
    f = inner.function(inner, [p[0]], "{0}", [out])
    way = d.rng.choice(("lax.fori_loop(0, 3, lambda i, c: {f0}(c), {0})", "lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, {f0}(c[1])), (0, lax.stop_gradient({0})))[1]",
                        "lax.while_loop(lambda c: (c[0] < 4) & (jnp.sum(c[1]) < 20), lambda c: (c[0] + 1, {f0}(c[1])), (0, lax.stop_gradient({0})))[1]"))  # fmt: skip
    d.add(way, x, functions=[f])


@operation(1.5)
def branch(d: Draw) -> None:
    x = d.pick()
    s = d.of(x)
    functions = []
    for _ in range(2):
        p = parameter(d, "x", s.shape, s.dtype)
        inner = d.inner([p], d.rng.randint(1, 3))
        functions.append(inner.function(inner, [p[0]], "{0}", [inner.fitted(s.shape, s.dtype)]))
    if d.rng.random() < 0.6:
        p = d.pick("b", shape=())
        d.add("lax.cond({1}, {f0}, {f1}, {0})", x, p, functions=functions)
    else:
        d.add("lax.switch({1}, [{f0}, {f1}], {0})", x, indices(d, 2, ()), functions=functions)


@operation(2)
def remat(d: Draw) -> None:
    x = d.pick()
    s = d.of(x)
    p = parameter(d, "x", s.shape, s.dtype)
    inner = d.inner([p], d.rng.randint(1, 4))
    last = inner.values[-1][0]
    f = inner.function(inner, [p[0]], "{0}", [last])
    policy = d.rng.choice(
        (
            "",
            "",
            ", policy=jax.checkpoint_policies.dots_saveable",
            ", policy=jax.checkpoint_policies.everything_saveable",
            ", prevent_cse=False",
        )
    )
    d.add("jax.checkpoint({f0}<policy>)({0})", x, functions=[f], policy=policy)


@operation(2)
def vmapped(d: Draw) -> None:
    x = d.pick(least=1, fits=lambda s: s.shape[0] > 0)
    s = d.of(x)
    p = parameter(d, "x", s.shape[1:], s.dtype)
    inner = d.inner([p], d.rng.randint(1, 4))
    f = inner.function(inner, [p[0]], "{0}", [inner.values[-1][0]])
    d.add(
        d.rng.choice(
            (
                "jax.vmap({f0})({0})",
                "jax.vmap({f0})({0})",
                "jax.vmap({f0}, out_axes=-1)({0})",
                "lax.map({f0}, {0})",
                "jax.jit({f0})({0}[0])",
            )
        ),
        x,
        functions=[f],
    )


@operation(1.5)
def micro_batches(d: Draw) -> None:
    """A loss summed over micro-batches by a scan, or its gradients."""
    x = d.pick(ndim=2, wish=(8, 4), fits=lambda s: s.shape[0] in (4, 6, 8, 12) and s.shape[1] > 0)
    m = d.of(x).shape[1]
    w = d.pick(shape=(m, d.rng.choice((2, 4))), dtype=dtype_name(d.of(x).dtype), fresh=0.7)
    k = 2
    sums = "lax.scan(lambda c, b: (c + jnp.mean(jnp.tanh(b @ {1})), None), jnp.zeros((), {0}.dtype), {0}.reshape(<k>, -1, <m>))[0]"
    gradients = "lax.scan(lambda c, b: (c + jax.grad(lambda w: jnp.sum(jnp.tanh(b @ w) ** 2))({1}), None), jnp.zeros_like({1}), {0}.reshape(<k>, -1, <m>))[0]"
    d.add(d.rng.choice((sums, gradients)), x, w, k=k, m=m)


@operation(1.5)
def gradient(d: Draw) -> None:
    x = d.pick(letters="f")
    s = d.of(x)
    p = parameter(d, "x", s.shape, s.dtype)
    inner = d.inner([p], d.rng.randint(1, 3))
    last = next((n for n, t in reversed(inner.values) if kind_of(t.dtype) == "f" and n != p[0]), None)
    if last is None:
        raise Rejected("no float")
    f = inner.function(inner, [p[0]], "jnp.sum({0})", [last])
    d.add(d.rng.choice(("jax.grad({f0})({0})", "jax.grad({f0})({0})", "jax.jvp({f0}, ({0},), ({0},))[1]")), x, functions=[f])


@operation(1.5)
def custom_rule(d: Draw) -> None:
    x = d.pick(least=1)
    h = d.name("x")
    text, rule = d.rng.choice(
        (
            ("jnp.sin({0})", "2 * g * jnp.cos(x)"),
            ("jnp.round({0})", "g"),
            ("{0} * 1", "jnp.clip(g, -0.1, 0.1)"),
            ("jnp.tanh({0})", "g * (1 - jnp.tanh(x) ** 2) * 3"),
            ("{0} + 0", "g / jnp.maximum(1, jnp.sqrt(jnp.sum(g * g)))"),
        )
    )
    r = d.name("v")
    name = d.name("f")
    step = Step((r,), text, (h,))
    wrap, tail = "jax.custom_vjp", f"{name}.defvjp(lambda x: ({name}(x), x), lambda x, g: (({rule}).astype(x.dtype),))"
    if d.rng.random() < 0.4:
        rule = "dx * 2" if "sum" in rule or "clip" in rule else rule.replace("g", "dx")
        wrap, tail = "jax.custom_jvp", f"{name}.defjvps(lambda dx, ans, x: ({rule}).astype(x.dtype))"
    f = Function(name, (h,), (step,), "{0}", (r,), wrap=wrap, tail=tail)
    d.add("{f0}({0})", x, functions=[f])


@operation(1)
def branches(d: Draw) -> None:
    """Several products of one value, side by side, that come together again."""
    x = d.pick(ndim=2, wish=(4, 4), fits=lambda s: min(s.shape) > 0)
    m = d.of(x).shape[1]
    dtype = dtype_name(d.of(x).dtype)
    n = d.rng.choice((2, 4))
    parts = []
    for _ in range(d.rng.choice((2, 2, 3, 4))):
        w, v = (d.argument(shape, dtype, "normal") for shape in ((m, n), (n, m)))
        (h,) = d.add(d.rng.choice(("jax.nn.relu({0} @ {1})", "jnp.tanh({0} @ {1})", "jax.nn.gelu({0} @ {1})")), x, w)
        parts += d.add("{0} @ {1}", h, v)
    if d.rng.random() < 0.5:
        d.add(" + ".join(f"{{{k}}}" for k in range(len(parts))), *parts)
    else:
        d.add(f"jnp.concatenate([{', '.join(f'{{{k}}}' for k in range(len(parts)))}], axis=-1)", *parts)


@operation(0.8)
def constrained(d: Draw) -> None:
    x = d.pick(least=2)
    d.add(d.rng.choice(("constrain({0}, P('device'))", "constrain({0}, P(None, 'device'))", "constrain({0}, P())")), x)


NESTED = (
    "scan",
    "layers",
    "while loop",
    "branch",
    "remat",
    "vmapped",
    "micro batches",
    "gradient",
    "custom rule",
    "branches",
    "constrained",
    "recurrent",
    "experts",
    "offloaded",
)
