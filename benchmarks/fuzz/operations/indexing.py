"""Look-ups and updates by indices: gathers, scatters, dynamic slices."""

from __future__ import annotations

from typing import Any

from benchmarks.fuzz.operations.table import operation, pick_along
from benchmarks.fuzz.programs import Draw, dtype_name, kind_of


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
    x, shape, a = pick_along(d, "fffi")
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
