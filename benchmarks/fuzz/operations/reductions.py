"""Reductions, sums along dimensions, and sorts."""

from __future__ import annotations

from benchmarks.fuzz.operations.table import operation, pick_along
from benchmarks.fuzz.programs import Draw


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
        "lax.reduce(lax.stop_gradient({0}), jnp.ones((), {0}.dtype), lambda p, q: p * q, (<a>,))",
        "lax.associative_scan(jnp.add, {0}, axis=<a>)",
        "lax.associative_scan(jnp.maximum, {0}, axis=<a>, reverse=True)",
        "lax.associative_scan(lambda p, q: p * q, {0}, axis=<a>)",
    ]
    d.add(d.rng.choice(texts), x, a=a)


@operation(3)
def along(d: Draw) -> None:
    x, shape, a = pick_along(d)
    k = max(1, min(shape[a], d.rng.randint(1, 3)))
    texts = [
        "jnp.cumsum({0}, <a>)",
        "jnp.cumprod({0}, <a>)",
        "lax.cummax({0}, <a>)",
        "lax.cummin({0}, <a>, reverse=True)",
        "lax.cumlogsumexp({0}, <a>)",
        "lax.cumsum({0}, <a>, reverse=True)",
        "jnp.sort({0}, <a>)",
        "jnp.argsort({0}, <a>)",
        "jnp.sort({0}, <a>, descending=True)",
        "lax.top_k({0}, <k>)",
        "lax.approx_max_k({0}, <k>)[0]",
        "jnp.diff({0}, axis=<a>)",
        "lax.sort(({0}, {0} * 2), dimension=<a>, num_keys=1)",
        "jnp.gradient({0}, axis=<a>)",
        "jnp.trapezoid({0}, axis=<a>)",
        "jnp.quantile({0}, 0.3, axis=<a>)",
        "jnp.argpartition({0}, 0, axis=<a>)",
    ]
    text = d.rng.choice(texts)
    if "top_k" in text or "_k(" in text:
        k = max(1, min(shape[-1], k))
    d.add(text, x, a=a, k=k)
