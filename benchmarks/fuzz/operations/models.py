# ruff: noqa: E501 (templates are lines of programs)
"""Operations that models have and transformations change: recurrent cells, experts, offloaded values; and programs with them."""

from __future__ import annotations

import jax

from benchmarks.fuzz.operations.table import draw_step, operation
from benchmarks.fuzz.programs import Draw, Function, Step, dtype_name

# The operations of a program that is drawn for a kind of plans. Without any, sizes alone decide whether the kind applies.
FOCUS: dict[str, tuple[str, ...]] = {
    "loops": ("recurrent",),
    "experts": ("experts",),
    "recomputation": ("layers", "offloaded", "remat", "product", "attention", "recurrent"),
    "padding": ("product", "layer", "looked up", "gather", "reduction", "convolution", "loss", "joined", "attention"),
    "micro-batches": (),
    "chain": ("recurrent", "layers", "experts", "product"),
    "mesh": ("product", "layers", "attention"),
    "options": ("product", "layers", "layers", "recurrent"),
}
ODD = (3, 5, 7, 9, 10, 11, 2, 4, 6, 1), (4, 4, 4, 3, 3, 2, 3, 3, 3, 1)  # sizes, and how often each is drawn


def draw_for(kind: str, d: Draw, steps: int) -> None:
    """Draw the steps of a program of one kind of plans: an operation that the kind is about, and others around it."""
    if kind == "padding":
        d.sizes = ODD
    d.argument(d.shape(2), d.dtype("f"))
    before = d.rng.randint(0, steps - 1) if d.rng.random() < 0.5 else 0
    d.fill(before)
    for _ in range(d.rng.choice((1, 1, 2))):
        draw_step(d, names=FOCUS[kind])
    d.fill(steps - 1 - before)


# Recurrent cells

CELLS = """jnp.tanh(x @ {u} + h @ {w})|jnp.tanh(jnp.concatenate([x, h], -1) @ {j})|jnp.tanh(jnp.concatenate([h, x, jnp.sin(x)], -1) @ jnp.concatenate([{w}, {u}, {u}]))
jnp.tanh(h @ ({w} @ {g}) + jnp.sin(x) @ {u})|h + jax.nn.relu(x @ jnp.tanh({u}))|h * jax.nn.sigmoid(x @ {u} + 1)|jnp.where(x.sum() > 0, jnp.tanh(x @ {u}), h)|h + x @ {u} @ {w}
h + (x - x.mean(0)) @ {u}|h + jax.checkpoint(lambda x, h: jnp.tanh(x @ {u}) * h)(x, h)|h + jnp.einsum('bm,mk->bk', x * 2, {u}) / 3|h + jnp.exp(-jnp.abs(x @ {u} / (1 + jnp.max(jnp.abs({w})))))
(1 - jax.nn.sigmoid(x @ {u})) * h + jax.nn.sigmoid(x @ {u}) * jnp.tanh(h @ {w})|jnp.tanh(x.astype('float32') @ {u}.astype('float32')).astype(h.dtype) + h|h @ jnp.linalg.matrix_power({w}, 2) + x @ {u}
lax.scan(lambda c, r: (jnp.tanh(c @ {w}) + r, r), h, jnp.stack([x @ {u}, x @ {u} * 2]))[0]|h + lax.dot(x, {u}, preferred_element_type={u}.dtype)|h + (x @ {u}).reshape(-1, h.shape[1]) - (jnp.ones_like(x) @ {u})"""
CELLS_OF = [t for line in CELLS.split("\n") for t in line.split("|")]
SUMS = (
    "s + x.T @ h",
    "s + jnp.sin(x).T @ n",
    "s + jnp.einsum('bm,bk->mk', x, jnp.tanh(n))",
    "s + x.T @ (x @ {u})",
    "s * 2 + x.T @ n",
    "s + x.T @ h * 0.5",
    "jnp.einsum('bm,bk->mk', x, n) + s",
)
OUTPUTS = ("None", "n", "n @ {w}", "x @ {u}", "jnp.sum(n * n, -1)", "(h * (x @ {u})).mean(0)")


@operation(1.2)
def recurrent(d: Draw) -> None:
    """A scan whose steps have products and invariants that may leave it."""
    x = d.pick(ndim=3, wish=(d.rng.choice((3, 3, 4, 4, 6, 2)), d.rng.choice((2, 4, 6)), d.rng.choice((2, 4, 3))), fits=_is_sequence)
    (_, b, m), dtype, k = d.of(x).shape, dtype_name(d.of(x).dtype), d.rng.choice((2, 4, 6))
    h = d.pick(shape=(b, k), dtype=dtype, fresh=0.5)
    shapes = {"u": (m, k), "w": (k, k), "g": (k, k), "j": (m + k, k)}
    cell, output = d.rng.choice(CELLS_OF), d.rng.choice(OUTPUTS)
    added = d.rng.choice(SUMS) if d.rng.random() < 0.5 else "s"
    read = [name for name in shapes if any("{" + name + "}" in text for text in (cell, output, added))]
    weights = {name: d.pick(shape=shapes[name], dtype=dtype, fresh=0.7) for name in read}
    numbers = {name: f"{{{2 + i}}}" for i, name in enumerate(read)}
    cell, added, output = (text.format(**numbers) for text in (cell, added, output))
    step = f"lambda c, x: (lambda h, s: (lambda n: ((n, {added}), {output}))({cell}))(*c)"
    if d.rng.random() < 0.05:
        step = f"jax.checkpoint({step})"
    first = d.rng.choice(("jnp.zeros(<s>, {1}.dtype)", "jnp.zeros(<s>, {1}.dtype)", "jnp.full(<s>, 0.5, {1}.dtype)"))
    more = d.rng.choice(("", "", "", ", reverse=True")) if d.rng.random() < 0.92 else ", unroll=2"
    parts = ["p[0][0]"] + ["p[0][1]"] * (added != "s") + ["p[1]"] * (output != "None")
    text = f"(lambda p: [{', '.join(parts)}])(lax.scan({step}, ({{1}}, {first}), {{0}}{more}))"
    d.add(text, x, h, *weights.values(), s=(m, k))


def _is_sequence(s: jax.ShapeDtypeStruct) -> bool:
    return s.shape[0] in (1, 2, 3, 4, 6) and min(s.shape) > 0


# Experts

ORDERS = (
    "jnp.argsort({e})",
    "lax.sort(({e}, jnp.arange({e}.shape[0])), num_keys=1)[1]",
    "jnp.argsort({e}, descending=True)",
    "jnp.argsort({e}, stable=False)",
)
COUNTS = (
    "jnp.bincount({e}, length=<n>)",
    "({e}[:, None] == jnp.arange(<n>)).sum(0)",
    "jnp.zeros(<n>, int).at[{e}].add(1)",
    "jax.nn.one_hot({e}, <n>).sum(0).astype(int)",
)
TAKEN = ("{x}[{o} // <k>]", "jnp.repeat({x}, <k>, axis=0)[{o}]", "jnp.take(jnp.repeat({x}, <k>, axis=0), {o}, axis=0)")
BETWEEN = ("jax.nn.relu({y})", "jax.nn.gelu({y})", "jnp.tanh({y})", "{y} * {g}.reshape(-1)[{o}][:, None]", "{y} - {y}.mean(0)")
PUT = (
    "{y}[jnp.argsort({o})].reshape({x}.shape[0], <k>, -1).sum(1)",
    "jnp.zeros(({x}.shape[0], {y}.shape[1]), {y}.dtype).at[{o} // <k>].add({y})",
    "jnp.zeros(({x}.shape[0], {y}.shape[1]), {y}.dtype).at[{o} // <k>].add({y} * {g}.reshape(-1)[{o}][:, None])",
    "({y}[jnp.argsort({o})].reshape({x}.shape[0], <k>, -1) * {g}[..., None]).sum(1)",
    "jnp.zeros_like({y}).at[{o}].set({y})",
    "{y}",
)


@operation(0.8)
def experts(d: Draw) -> None:
    """Tokens sorted by expert, products of groups of rows, and the rows put back."""
    rng = d.rng
    x = d.pick(ndim=2, wish=(rng.choice((4, 6, 8, 12)), rng.choice((2, 4))), fits=lambda s: s.shape[0] > 1 and s.shape[1] > 0)
    (_, m), dtype = d.of(x).shape, dtype_name(d.of(x).dtype)
    n, each, k = rng.choice((2, 3, 4)), rng.choice((1, 1, 2)), rng.choice((2, 4))
    router, up = d.pick(shape=(m, n), dtype=dtype, fresh=0.7), d.argument((n, m, k), dtype)
    p = {name: d.name("x") for name in ("x", "r", "u")}
    v = {name: d.name("v") for name in ("l", "g", "i", "e", "o", "c", "t", "y", "z", "b")}
    chosen = rng.choice(("lax.top_k({l}, <k>)", "lax.top_k(jax.nn.softmax({l}), <k>)"))
    order, count, taken, between, put = (rng.choice(texts) for texts in (ORDERS, COUNTS, TAKEN, BETWEEN, PUT))
    if rng.random() < 0.7:  # programs of which experts are sorted by themselves
        order, put = ORDERS[0], put if put != "{y}" else PUT[0]
    lines = (("l", "{x} @ {r}"), ("gi", chosen), ("e", "{i}.reshape(-1)"), ("o", order), ("c", count), ("t", taken))
    lines += (("y", "lax.ragged_dot({t}, {u}, {c}.astype('int32'))"), ("z", between), ("b", put.replace("{y}", "{z}")))
    steps = tuple(_written(results, text.replace("<n>", str(n)).replace("<k>", str(each)), p | v) for results, text in lines)
    f = Function(d.name("f"), tuple(p.values()), steps, "{0}", (v["b"],))
    d.add("{f0}({0}, {1}, {2})", x, router, up, functions=[f])


def _written(results: str, text: str, names: dict[str, str]) -> Step:
    """Return a step whose text has names of other values, each a letter, in braces."""
    read = [name for name in names if "{" + name + "}" in text]
    numbers = {name: f"{{{i}}}" for i, name in enumerate(read)}
    return Step(tuple(names[r] for r in results), text.format(**numbers), tuple(names[r] for r in read))


# Values that are recomputed or offloaded

POLICIES = (
    "save_and_offload_only_these_names(names_which_can_be_saved=[], names_which_can_be_offloaded=['a'], offload_src='device', offload_dst='pinned_host')",
    "save_and_offload_only_these_names(names_which_can_be_saved=['b'], names_which_can_be_offloaded=['a'], offload_src='device', offload_dst='pinned_host')",
    "offload_dot_with_no_batch_dims('device', 'pinned_host')",
    "save_only_these_names('a')",
    "dots_with_no_batch_dims_saveable",
)


@operation(0.8)
def offloaded(d: Draw) -> None:
    """Layers, in a scan or one, in a checkpoint whose policy saves values on the device or the host."""
    x = d.pick(ndim=2, wish=(d.rng.choice((4, 8, 12)), d.rng.choice((2, 4))), fits=lambda s: min(s.shape) > 0)
    m, dtype, k = d.of(x).shape[1], dtype_name(d.of(x).dtype), d.rng.choice((2, 4, 6))
    layer = "h + jax.ad_checkpoint.checkpoint_name(jnp.tanh(jax.ad_checkpoint.checkpoint_name(h @ w, 'a')), 'b') @ v"
    policy = f"jax.checkpoint_policies.{d.rng.choice(POLICIES)}"
    if d.rng.random() < 0.6:
        n = d.rng.choice((1, 2, 4))
        w, v = d.argument((n, m, k), dtype), d.argument((n, k, m), dtype)
        text = (
            f"lax.scan(jax.checkpoint(lambda h, p: ((lambda w, v: {layer})(*p), None), policy={policy}), {{0}}, ({{1}}, {{2}}))[0]"
        )
    else:
        w, v = d.argument((m, k), dtype), d.argument((k, m), dtype)
        text = f"jax.checkpoint(lambda h, w, v: {layer}, policy={policy})({{0}}, {{1}}, {{2}})"
    d.add(text, x, w, v)
