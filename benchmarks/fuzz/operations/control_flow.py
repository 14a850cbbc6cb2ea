# ruff: noqa: E501 (templates are lines of programs)
"""Loops, branches, checkpoints, maps, gradients, derivative rules, and functions of several layers."""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.fuzz.operations.indexing import indices
from benchmarks.fuzz.operations.table import operation
from benchmarks.fuzz.programs import Draw, Function, Rejected, Step, dtype_name, kind_of


def parameter(d: Draw, prefix: str, shape: Any, dtype: Any) -> tuple[str, jax.ShapeDtypeStruct]:
    return d.name(prefix), jax.ShapeDtypeStruct(tuple(shape), dtype)


def function_of(d: Draw, s: jax.ShapeDtypeStruct, most: int, is_fitted: bool = False) -> Function:
    """A function of one value, of up to `most` steps, whose result has the value's shape and type if it is fitted."""
    p = parameter(d, "x", s.shape, s.dtype)
    inner = d.inner([p], d.rng.randint(1, most))
    return inner.function([p[0]], "{0}", [inner.fitted(s.shape, s.dtype) if is_fitted else inner.values[-1][0]])


@operation(3)
def scan(d: Draw) -> None:
    xs = d.pick(least=1, fits=lambda s: s.shape[0] in (1, 2, 3, 4, 6))
    carry = d.pick("ffffi", fits=lambda s: len(s.shape) < 4)
    c, s = d.of(carry), d.of(xs)
    p, q = parameter(d, "c", c.shape, c.dtype), parameter(d, "x", s.shape[1:], s.dtype)
    inner = d.inner([p, q], d.rng.randint(1, 4))
    out = inner.fitted(c.shape, c.dtype)
    ys = inner.values[-1][0] if d.rng.random() < 0.6 else None
    f = inner.function([p[0], q[0]], "{0}, {1}" if ys else "{0}, None", [out, ys] if ys else [out])
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
    bodies = [
        "jnp.tanh({h} @ {w})",
        "{h} + jnp.tanh({h} @ {w})",
        "jax.nn.softmax({h} @ {w})",
        "{h} + jax.nn.gelu({h} @ {w}) @ {w}.T",
    ]
    if d.of(x).shape[0] % 2 == 0:  # pairs of neighbouring samples, which are in different micro-batches
        bodies += [
            "({h} @ {w} - ({h} @ {w}).reshape({h}.shape[0] // 2, 2, -1).mean(1, keepdims=True).repeat(2, 1).reshape({h}.shape))"
        ]
        bodies += ["{h} + jnp.tanh({h} @ {w}).reshape({h}.shape[0] // 2, 2, -1)[:, ::-1].reshape({h}.shape)"]
    body = d.rng.choice(bodies)
    h, own = d.name("h"), d.name("w")
    r = d.name("v")
    step = Step((r,), body.replace("{h}", "{0}").replace("{w}", "{1}"), (h, own))
    f = Function(d.name("f"), (h, own), (step,), "{0}, None", (r,))
    d.add("lax.scan({f0}, {0}, {1})[0]", x, w, functions=[f])


@operation(1.5)
def while_loop(d: Draw) -> None:
    x = d.pick()
    f = function_of(d, d.of(x), 3, is_fitted=True)
    way = d.rng.choice(("lax.fori_loop(0, 3, lambda i, c: {f0}(c), {0})", "lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, {f0}(c[1])), (0, lax.stop_gradient({0})))[1]",
                        "lax.while_loop(lambda c: (c[0] < 4) & (jnp.sum(c[1]) < 20), lambda c: (c[0] + 1, {f0}(c[1])), (0, lax.stop_gradient({0})))[1]"))  # fmt: skip
    d.add(way, x, functions=[f])


@operation(1.5)
def branch(d: Draw) -> None:
    x = d.pick()
    functions = [function_of(d, d.of(x), 3, is_fitted=True) for _ in range(2)]
    if d.rng.random() < 0.6:
        p = d.pick("b", shape=())
        d.add("lax.cond({1}, {f0}, {f1}, {0})", x, p, functions=functions)
    else:
        d.add("lax.switch({1}, [{f0}, {f1}], {0})", x, indices(d, 2, ()), functions=functions)


@operation(2)
def remat(d: Draw) -> None:
    x = d.pick()
    f = function_of(d, d.of(x), 4)
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
    f = function_of(d, jax.ShapeDtypeStruct(d.of(x).shape[1:], d.of(x).dtype), 4)
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
    f = inner.function([p[0]], "jnp.sum({0})", [last])
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
    d.add(d.rng.choice(("{f0}({0})", "{f0}({0})", "{f0}({0}) + 2 * {f0}({0})")), x, functions=[f])


@operation(0.8)
def next_value(d: Draw) -> None:
    """A rule that returns the next value of an operand in the place of its gradient, as scales of 8-bit numbers have it."""
    x = d.pick(letters="f", least=1)
    scale = d.argument((), dtype_name(d.of(x).dtype), "normal")
    forward, backward = d.rng.choice(
        (
            ("jnp.maximum(s, jnp.max(jnp.abs(x)))", "(g, kept)"),
            ("(x, s)", "(g, jnp.maximum(kept[1], jnp.max(jnp.abs(kept[0]))))"),
            ("s", "(g, kept)"),
            ("s", "(g, kept / 2 + 1)"),
            ("s", "(g, jnp.max(jnp.abs(g)))"),
            ("s", "(g, jnp.ones_like(kept))"),
        )
    )
    h, t, r, name = d.name("x"), d.name("x"), d.name("v"), d.name("f")
    step = Step((r,), "{0} / (1 + {1} * {1})", (h, t))
    tail = f"{name}.defvjp(lambda x, s: ({name}(x, s), {forward}), lambda kept, g: {backward})"
    f = Function(name, (h, t), (step,), "{0}", (r,), wrap="jax.custom_vjp", tail=tail)
    d.add("{f0}({0}, {1})", x, scale, functions=[f])


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
