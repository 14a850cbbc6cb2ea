# ruff: noqa: E501 (templates are lines of programs)
"""Elementwise operations: of floats, integers and truth values, comparisons, conversions."""

from __future__ import annotations

from benchmarks.fuzz.operations.table import operation
from benchmarks.fuzz.programs import Draw

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
