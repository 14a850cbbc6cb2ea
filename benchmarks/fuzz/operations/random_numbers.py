"""Random numbers."""

from __future__ import annotations

from benchmarks.fuzz.operations.table import operation
from benchmarks.fuzz.programs import Draw


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
        "jax.random.gumbel({0}, <s>, '<t>')",
        "jax.random.truncated_normal({0}, -1, 1, <s>, '<t>')",
        "jax.random.exponential({0}, <s>, '<t>')",
        "jax.random.laplace({0}, <s>, '<t>')",
        "jax.random.rademacher({0}, <s>, '<t>')",
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
