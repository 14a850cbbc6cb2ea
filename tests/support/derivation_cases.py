"""Small programs in which rules of the library apply."""

import jax
import jax.numpy as jnp
from jax import lax


def struct(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in (q, k, v))
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k)), v)


def two_products(x, a, b, c):
    return jnp.tanh(x @ a + x @ b) @ c


def joins(x, y, a):
    z = jnp.concatenate([jnp.tanh(x) @ a, y @ a], -1)
    left, right = jnp.split(z, [3], -1)
    return left * 2.0, right[:2], jnp.concatenate([z, z + z], 0)[2:]


def biased(x, w, b, c, s):
    return jax.nn.relu((x @ w + b) * s + c), (x * s + x) @ w + c


def images(x, v, w, u):
    def conv(k):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return jax.nn.relu(conv(v) + conv(w) + conv(u))


def tables(t, u, i, j, w):
    return (t[i] + u[i]) @ w, jnp.concatenate([t[i], t[j]], 1)


def parted(x):
    return jnp.concatenate(jnp.split(jnp.tanh(x), 2, 0), 0)


def both_biased(x, y, b):
    return jnp.concatenate([x + b, y + b], 0)


def sums(x, y, s):
    return (jnp.sum(x, 1) + jnp.sum(y, 1)) * s - jnp.sum(x * s, 1)


def turned(x, y, a, b):
    return jnp.swapaxes(x, 0, 1) @ a + jnp.swapaxes(x @ b, 0, 1) * 3 - y


def mirrored(x, a, s, w):
    """Where one value is both operands, as it is and transposed, which of them comes first shows in the layout of nothing else."""
    z = x @ a + x
    return ((z + z.T) * s).T @ w, (z * z.T) @ w


def scanned(x, a, b):
    """Some of its tensors have no elements."""

    def composed(f, g):
        return f[0] * g[0], g[0] * f[1] + g[1]

    y = x @ a
    return lax.associative_scan(composed, (jnp.tanh(y), y @ b))[1]


PROGRAMS = {
    attention: [(2, 8, 16), *[(16, 4, 4)] * 3],
    two_products: [(2, 8, 16), (16, 16), (16, 16), (16, 5)],
    lambda a, b, c: (a @ b) @ c: [(4, 6), (6, 8), (8, 2)],
    joins: [(4, 6), (4, 6), (6, 4)],
    biased: [(2, 4, 6), (6, 6), (6,), (6,), ()],
    images: [(2, 8, 8, 4), (3, 3, 4, 4), (3, 3, 4, 4), (1, 1, 4, 4)],
    tables: [(10, 6), (10, 6), struct((2, 3), "int32"), struct((2, 3), "int32"), (6, 2)],
    parted: [(4, 4)],
    both_biased: [(4, 4), (4, 4), (4,)],
    sums: [(4, 6, 2), (4, 6, 2), ()],
    turned: [(2, 4, 6), (4, 2, 6), (6, 6), (6, 6)],
    mirrored: [(4, 4), (4, 4), (), (4, 2)],
    scanned: [(2, 4), (4, 3), (3, 3)],
}


def arguments(fn):
    return [struct(a) if isinstance(a, tuple) else a for a in PROGRAMS[fn]]
