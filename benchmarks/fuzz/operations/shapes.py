"""Operations that move, cut, pad, join and create arrays."""

from __future__ import annotations

import numpy as np

from benchmarks.fuzz.operations.table import operation, pick_along
from benchmarks.fuzz.programs import Draw, dtype_name


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
    x, shape, a = pick_along(d, "ffffib")
    n, size = len(shape), shape[a]
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
    x, shape, a = pick_along(d, "fffi")
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
    x, shape, a = pick_along(d, "fffi")
    n = len(shape)
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
    x, shape, a = pick_along(d)
    y = d.pick(shape=shape, dtype=dtype_name(d.of(x).dtype))
    texts = ["jnp.concatenate([{0}, {1}], axis=<a>)"] * 3 + ["jnp.stack([{0}, {1}], axis=<a>)"] * 2
    texts += [
        "jnp.concatenate([{0}, {1}, {0}], axis=<a>)",
        "jnp.concatenate([{0}, jnp.zeros_like({1})], axis=<a>)",
        "jnp.hstack([{0}, {1}])",
        "jnp.stack([{0}, {1}]).sum(0)",
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
        "{0} + lax.broadcasted_iota({0}.dtype, {0}.shape, 0)",
        "jnp.where(jnp.tril(jnp.ones({0}.shape[-2:], bool)), {0}, -1e9)",
        "{0} + jnp.zeros_like({0})",
        "jnp.full_like({0}, 2) * {0}",
        "{0} - np.arange(<n>)",
    ]
    d.add(d.rng.choice(texts), x, n=n, k=n // 2)
