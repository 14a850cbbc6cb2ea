"""Random programs, and how each can be written in other layouts: the same values, from tensors that lie elsewhere."""

import itertools
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from hypothesis import assume
from hypothesis import strategies as st
from jax import lax

FUNCTIONS = {"relu": jax.nn.relu, "sign(x)": jnp.sign, "neg(x)": jnp.negative}
BINARY = {"add": lax.add, "sub": lax.sub, "mul": lax.mul}


@dataclass(frozen=True)
class Program:
    """Arguments' shapes, and operators: name, numbers of operands, what else."""

    arguments: tuple
    operators: tuple

    def traced(self, layout=None):
        """The program of all values. With a random `layout`, everything is computed in others than those that are written."""
        laid = Laid(layout)

        def run(*arrays):
            values = list(arrays)
            for name, operands, said in self.operators:
                values.append(RUN[name](laid, *(values[k] for k in operands), *said))
            return values[len(arrays) :]

        return jax.make_jaxpr(run)(*self.arguments)


class Laid:
    """Orders of dimensions: as they are, or random ones."""

    def __init__(self, rng):
        self.rng = rng

    def order(self, dims):
        dims = list(dims)
        return tuple(self.rng.sample(dims, len(dims)) if self.rng else dims)

    def coin(self):
        return bool(self.rng and self.rng.random() < 0.5)


def inverse(order):
    return tuple(sorted(range(len(order)), key=lambda k: order[k]))


def binary(laid, x, y, name):
    order = laid.order(range(x.ndim))
    z = BINARY[name](x.transpose(order).reshape(-1), y.transpose(order).reshape(-1))
    return z.reshape([x.shape[d] for d in order]).transpose(inverse(order))


def mirrored(laid, x, name, dims):
    """With itself, two dimensions exchanged."""
    return binary(laid, x, x.swapaxes(*dims), name)


def bias(laid, x, b):
    if laid.coin():
        return (x.reshape(-1, x.shape[-1]) + b).reshape(x.shape)
    return x + jnp.broadcast_to(b, x.shape) if laid.coin() else x + b


def function(laid, x, name):
    order = laid.order(range(x.ndim))
    return FUNCTIONS[name](x.transpose(order)).transpose(inverse(order))


def dot(laid, x, y, contracted, batch):
    """Result: batch dimensions, the first operand's others, the second's others."""
    p, q = laid.order(range(x.ndim)), laid.order(range(y.ndim))
    contracted, turned = laid.order(contracted), laid.order(batch)
    free = [[d for d in order if d not in {pair[k] for pair in (*contracted, *batch)}] for k, order in enumerate((p, q))]
    along = [([p.index(d) for d, _ in pairs], [q.index(e) for _, e in pairs]) for pairs in (contracted, turned)]
    z = lax.dot_general(x.transpose(p), y.transpose(q), (along[0], along[1]))
    labels = [*turned, *(("x", d) for d in free[0]), *(("y", d) for d in free[1])]
    wanted = [*batch, *(("x", d) for d in sorted(free[0])), *(("y", d) for d in sorted(free[1]))]
    return z.transpose([labels.index(w) for w in wanted])


def concat(laid, x, y, dim):
    order = laid.order(range(x.ndim))
    z = lax.concatenate([x.transpose(order), y.transpose(order)], order.index(dim))
    return z.transpose(inverse(order))


def part(laid, x, dim, start, size):
    order = laid.order(range(x.ndim))
    turned = x.transpose(order)
    if laid.coin() and 0 < start < start + size < x.shape[dim]:
        pieces = [start, start + size]
        return jnp.split(turned, pieces, axis=order.index(dim))[1].transpose(inverse(order))
    return lax.slice_in_dim(turned, start, start + size, axis=order.index(dim)).transpose(inverse(order))


def total(laid, x, dims):
    order = laid.order(range(x.ndim))
    z = lax.reduce_sum(x.transpose(order), [order.index(d) for d in dims])
    kept, wanted = [d for d in order if d not in dims], [d for d in range(x.ndim) if d not in dims]
    return z.transpose([kept.index(d) for d in wanted])


def turn(laid, x, order, target):
    return x.transpose(order).reshape(target)


def rows(laid, x, ids):
    def found(ids):
        numbers = lax.GatherDimensionNumbers((ids.ndim,), (0,), (0,))
        return lax.gather(x, ids[..., None], numbers, (1, x.shape[1]), mode="clip")

    return found(ids.T).transpose(1, 0, 2) if laid.coin() else found(ids)


RUN = {
    "binary": binary, "mirrored": mirrored, "bias": bias, "function": function, "dot": dot, "concat": concat, "part": part,
    "total": total, "turn": turn, "rows": rows,
}  # fmt: skip


def pairs(x, y):
    """Dimensions of one size."""
    return [(d, e) for d, e in itertools.product(range(len(x)), range(len(y))) if x[d] == y[e]]


def mirrors(x):
    """Two dimensions of one size."""
    return [(d, e) for d, e in pairs(x, x) if d < e and x[d] > 1]


def applicable(shapes):
    """The operators that values of these shapes can be operands of, with all pairs of operands. Value 0 is of indices."""
    numbers = range(1, len(shapes))
    both = [(k, j) for k, j in itertools.product(numbers, numbers) if k != j]
    alone = [(k,) for k in numbers if shapes[k]]
    found = {
        "binary": [(k, j) for k, j in both if shapes[k] == shapes[j]],
        "mirrored": [(k,) for k in numbers if mirrors(shapes[k])],
        "bias": [(k, j) for k, j in both if len(shapes[k]) > 1 and shapes[j] == shapes[k][-1:]],
        "dot": [(k, j) for k, j in both if pairs(shapes[k], shapes[j])],
        "concat": [(k, j) for k, j in both if shapes[k] == shapes[j] != ()],
        "rows": [(k, 0) for k in numbers if len(shapes[k]) == 2],
        **dict.fromkeys(("part", "total", "turn", "function"), alone),
    }
    return {name: operands for name, operands in found.items() if operands}


@st.composite
def said(draw, name, x, y):
    """What else an operator says of operands of these shapes."""
    dims = st.integers(0, len(x) - 1)
    if name in ("binary", "function"):
        return (draw(st.sampled_from(list(BINARY if name == "binary" else FUNCTIONS))),)
    if name == "mirrored":
        return (draw(st.sampled_from(["add", "mul"])), draw(st.sampled_from(mirrors(x))))
    if name == "dot":
        chosen = []
        for p in draw(st.permutations(pairs(x, y))):
            if all(p[0] != q[0] and p[1] != q[1] for q in chosen):
                chosen.append(p)
        first, last = draw(st.integers(0, len(chosen))), draw(st.integers(0, len(chosen)))
        return (tuple(chosen[:first]), tuple(chosen[first : max(first, last)]))
    if name == "concat":
        return (draw(dims),)
    if name == "part":
        dim = draw(dims)
        size = draw(st.sampled_from([n for n in (1, 2, 4) if n <= x[dim]]))
        return (dim, draw(st.integers(0, x[dim] - size)), size)
    if name == "total":
        return (tuple(sorted(draw(st.sets(dims, min_size=1)))),)
    if name == "turn":
        order, at = tuple(draw(st.permutations(range(len(x))))), draw(dims)
        before, (n, *after) = [x[d] for d in order[:at]], [x[d] for d in order[at:]]
        return (order, (*before, n * prod(after)) if draw(st.booleans()) else (*before, n // 2 or 1, min(2, n), *after))
    return ()


@st.composite
def programs(draw):
    """Programs over sizes that are powers of two, so that no two reshapes are in each other's way. The first argument: indices."""
    size = st.sampled_from([1, 2, 4])
    shapes = [(2, 2), *draw(st.lists(st.lists(size, min_size=1, max_size=3).map(tuple), min_size=2, max_size=3))]
    shapes += [shapes[1], (4,)]
    arguments = (struct(shapes[0], "int32"), *map(struct, shapes[1:]))
    made = []
    for _ in range(draw(st.integers(1, 6))):
        options = applicable(shapes)
        name = draw(st.sampled_from(sorted(options)))
        operands = draw(st.sampled_from(options[name]))
        more = draw(said(name, shapes[operands[0]], shapes[operands[-1]]))
        given = [arguments[0] if k == 0 else struct(shapes[k]) for k in operands]
        shape = jax.eval_shape(lambda *xs: RUN[name](Laid(None), *xs, *more), *given).shape  # noqa: B023
        if prod(shape) <= 256 and len(shape) <= 4:
            made.append((name, operands, more))
            shapes.append(shape)
    assume(made)
    return Program(arguments, tuple(made))


def struct(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)
