"""Products, convolutions and windows."""

from __future__ import annotations

from benchmarks.fuzz.data import PLAIN
from benchmarks.fuzz.operations.table import operation
from benchmarks.fuzz.programs import Draw, Rejected, dtype_name, kind_of


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
    # XLA's kernels multiply an infinite weight with the padding, which is NaN, or leave it out, depending on types and sizes.
    kind = None if padding == "'VALID'" else rng.choice(PLAIN)
    y = d.pick(shape=(out, shape[1] // groups, *window), dtype=dtype_name(d.of(x).dtype), fresh=0.9, kind=kind)
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
