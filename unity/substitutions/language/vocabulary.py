"""The vocabulary of rules: operators, each with the JAX function that it denotes.

Shapes, legal parallelizations and the computation on one device's piece follow from that function's body through the operator
table. A parallelization operator changes a state along an axis, and leaves the value as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned

# Elementwise functions that rules can name. A variable in their place stands for every elementwise function.
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    # Not `jnp.maximum(x, 0)`, whose gradient at 0 is 1/2, so that relu(relu(x)) there has 1/4.
    "relu": jax.nn.relu,
    "sigmoid": lax.logistic,
    "tanh": jnp.tanh,
    # A relu with another threshold, which the enumeration uses in place of relu. So it finds no law that depends on the threshold
    # 0, such as x relu(x) = relu(x)².
    "clip": lambda x: jnp.maximum(x, 3),
}
WORDS = {"function": tuple(FUNCTIONS), "padding": ("same", "valid")}


Thunk = Callable[[], Any]  # computes an operator's results


@dataclass(frozen=True)
class Operator:
    """An operator of the vocabulary. Attributes come before operands.

    Attributes:
        attributes: the kind of each attribute: "dim", "axis", "size", "groups", "function" or "padding".
        operands: the number of operands.
        results: the number of results.
        prepare: checks attributes and operands, and returns the computation; None for a parallelization operator.
        change: returns a parallelization operator's states before and after, from its dimensions; None for others.
    """

    name: str
    attributes: tuple[str, ...]
    operands: int
    results: int = 1
    prepare: Callable[..., Thunk] | None = None
    change: Callable[..., tuple[State, State]] | None = None

    @property
    def parallel(self) -> bool:
        return self.change is not None

    def run(self, *args: Any, **named: Any) -> Any:
        """Compute the results from attributes and arrays. Raises TypeError if the operator does not take them."""
        assert self.prepare is not None
        return self.prepare(*args, **named)()

    def words(self, position: int) -> tuple[str, ...]:
        """Return the words that an attribute may be; none for a number or an axis."""
        return WORDS.get(self.attributes[position], ())

    def is_variable(self, position: int, value: int | str) -> bool:
        """Return whether an attribute's value is a variable: any name that is not one of the attribute's words."""
        return isinstance(value, str) and value not in self.words(position)


VOCABULARY: dict[str, Operator] = {}


def compute(name: str, *attributes: str, operands: int, results: int = 1) -> Callable[[Callable], Callable]:
    """Register a JAX function as an operator of the vocabulary.

    The function inspects only shapes and types, and returns a thunk that computes the results, because operands are checked far
    more often than results are computed.
    """

    def register(prepare: Callable) -> Callable:
        VOCABULARY[name] = Operator(name, attributes, operands, results, prepare)
        return prepare

    return register


def parallel(name: str, *attributes: str) -> Callable[[Callable], Callable]:
    """Register a parallelization operator by the function from its dimensions to the states before and after."""

    def register(change: Callable) -> Callable:
        VOCABULARY[name] = Operator(name, attributes, 1, change=change)
        return change

    return register


# Parallelization


@parallel("partition", "dim", "axis")
def _partition(d: int) -> tuple[State, State]:
    return UNUSED, partitioned(d)


@parallel("combine", "dim", "axis")
def _combine(d: int) -> tuple[State, State]:
    return partitioned(d), UNUSED


@parallel("replicate", "axis")
def _replicate() -> tuple[State, State]:
    return UNUSED, REPLICATED


@parallel("reduce", "axis")
def _reduce() -> tuple[State, State]:
    return PARTIAL, UNUSED


@parallel("reduce_partition", "dim", "axis")
def _reduce_partition(d: int) -> tuple[State, State]:
    return PARTIAL, partitioned(d)


@parallel("combine_replicate", "dim", "axis")
def _combine_replicate(d: int) -> tuple[State, State]:
    return partitioned(d), REPLICATED


@parallel("combine_partition", "dim", "dim", "axis")
def _combine_partition(d: int, e: int) -> tuple[State, State]:
    return partitioned(d), partitioned(e)


@parallel("contribute", "axis")
def _contribute() -> tuple[State, State]:
    return UNUSED, PARTIAL


@parallel("unreplicate", "axis")
def _unreplicate() -> tuple[State, State]:
    return REPLICATED, UNUSED


def _positive(name: str, *sizes: int) -> None:
    if min(sizes) < 1:
        raise TypeError(f"{name} takes a stride and a window of at least 1, and got {sizes}")


def _dim(name: str, d: int, x: jax.Array) -> int:
    """Return a dimension counted from the front. In rules, -1 is the last dimension of any tensor."""
    if not -x.ndim <= d < x.ndim:
        raise TypeError(f"{name}({d}, …): a tensor of shape {x.shape} has no such dimension")
    return d % x.ndim


# Products and convolutions


@compute("matmul", operands=2)
def _matmul(x: jax.Array, y: jax.Array) -> Thunk:
    """The product of [..., n, k] and [..., k, m], with equal leading dimensions."""
    if x.ndim != y.ndim or x.ndim < 2:
        raise TypeError(f"matmul takes two tensors of one rank, at least 2, and got ranks {x.ndim} and {y.ndim}")
    if x.shape[:-2] != y.shape[:-2]:
        raise TypeError(f"matmul takes equal leading dimensions, and got {x.shape[:-2]} and {y.shape[:-2]}")
    if x.shape[-1] != y.shape[-2]:
        raise TypeError(f"matmul takes as many columns as rows, and got shapes {x.shape} and {y.shape}")
    return lambda: jnp.matmul(x, y)


@compute("conv2d", "groups", "size", "padding", operands=2)
def _conv2d(groups: int, stride: int, padding: str, x: jax.Array, w: jax.Array) -> Thunk:
    """The convolution of [n, c, h, w] with [o, c / groups, kh, kw]. With 0 groups, every channel is a group."""
    _positive("conv2d", stride)
    if x.ndim != 4 or w.ndim != 4:
        raise TypeError(f"conv2d takes tensors of rank 4, and got ranks {x.ndim} and {w.ndim}")
    groups = groups or x.shape[1]
    if x.shape[1] != groups * w.shape[1] or w.shape[0] % groups:
        raise TypeError(f"conv2d: {x.shape[1]} channels and a kernel of shape {w.shape} do not make {groups} groups")
    return lambda: lax.conv_general_dilated(x, w, (stride, stride), padding.upper(), feature_group_count=groups)


@compute("enlarge", "size", operands=1)
def _enlarge(k: int, w: jax.Array) -> Thunk:
    """A kernel padded with zeros to k by k."""
    if w.ndim != 4 or any(n > k or (k - n) % 2 for n in w.shape[2:]) or w.shape[2:] == (k, k):
        raise TypeError(f"enlarge({k}, …) takes a smaller kernel of odd sizes, and got shape {w.shape}")
    return lambda: _padded(w, [0, 0, *((k - n) // 2 for n in w.shape[2:])])


@compute("maxpool", "size", "size", "padding", operands=1)
def _maxpool(k: int, stride: int, padding: str, x: jax.Array) -> Thunk:
    _positive("maxpool", k, stride)
    if x.ndim != 4:
        raise TypeError(f"maxpool takes images, and got shape {x.shape}")
    return lambda: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, k, k), (1, 1, stride, stride), padding.upper())


@compute("avgpool", "size", "size", "padding", operands=1)
def _avgpool(k: int, stride: int, padding: str, x: jax.Array) -> Thunk:
    """The mean of k by k elements, where padding counts as zeros."""
    _positive("avgpool", k, stride)
    if x.ndim != 4:
        raise TypeError(f"avgpool takes images, and got shape {x.shape}")
    return lambda: lax.reduce_window(x, 0.0, lax.add, (1, 1, k, k), (1, 1, stride, stride), padding.upper()) / (k * k)


# Elementwise


def _floating(name: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} takes floating numbers, and got {x.dtype}")


def _same(name: str, x: jax.Array, y: jax.Array) -> None:
    _floating(name, x)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise TypeError(f"{name} takes two tensors of one shape and type, and got {x.dtype}{x.shape} and {y.dtype}{y.shape}")


@compute("add", operands=2)
def _add(x: jax.Array, y: jax.Array) -> Thunk:
    _same("add", x, y)
    return lambda: x + y


@compute("sub", operands=2)
def _sub(x: jax.Array, y: jax.Array) -> Thunk:
    _same("sub", x, y)
    return lambda: x - y


@compute("mul", operands=2)
def _mul(x: jax.Array, y: jax.Array) -> Thunk:
    _same("mul", x, y)
    return lambda: x * y


@compute("map", "function", operands=1)
def _map(f: str, x: jax.Array) -> Thunk:
    """An elementwise function. A variable is represented by the hyperbolic sine, which no rule mentions."""
    _floating("map", x)
    return lambda: FUNCTIONS.get(f, jnp.sinh)(x)


@compute("scale", operands=2)
def _scale(x: jax.Array, w: jax.Array) -> Thunk:
    """A tensor times a scalar."""
    if w.ndim or not x.ndim:
        raise TypeError(f"scale takes a tensor and a scalar, and got shapes {x.shape} and {w.shape}")
    return lambda: x * w


@compute("bias", operands=2)
def _bias(x: jax.Array, b: jax.Array) -> Thunk:
    """A vector added along the last dimension."""
    if b.ndim != 1 or x.ndim < 2 or x.shape[-1] != b.shape[0]:
        raise TypeError(f"bias takes a vector as long as the last dimension, and got {x.shape} and {b.shape}")
    return lambda: x + b


# Shapes


@compute("concat", "dim", operands=2)
def _concat(d: int, x: jax.Array, y: jax.Array) -> Thunk:
    d = _dim("concat", d, x)
    if x.ndim != y.ndim or any(n != m for k, (n, m) in enumerate(zip(x.shape, y.shape, strict=True)) if k != d):
        raise TypeError(f"concat({d}, …) takes shapes that differ there alone, and got {x.shape} and {y.shape}")
    return lambda: lax.concatenate([x, y], d)


@compute("split", "dim", operands=1, results=2)
def _split(d: int, x: jax.Array, at: int = 0) -> Thunk:
    """The two parts of a concatenation, the first of size `at`; a tensor without a seam is halved."""
    d = _dim("split", d, x)
    if not at and x.shape[d] % 2:
        raise TypeError(f"split({d}, …) has nothing to split in shape {x.shape}")
    at = at or x.shape[d] // 2
    return lambda: [lax.slice_in_dim(x, 0, at, axis=d), lax.slice_in_dim(x, at, x.shape[d], axis=d)]


@compute("transpose", operands=1)
def _transpose(x: jax.Array) -> Thunk:
    """The last two dimensions swapped."""
    if x.ndim < 2:
        raise TypeError(f"transpose takes rank 2 or more, and got shape {x.shape}")
    return lambda: jnp.swapaxes(x, -1, -2)


@compute("merge", "dim", operands=1)
def _merge(d: int, x: jax.Array) -> Thunk:
    """Dimension d merged with the one before it: the inverse of `unmerge(d, …)` for d counted from the end."""
    d = _dim("merge", d, x)
    if not d:
        raise TypeError(f"merge has no dimension before the first one of shape {x.shape}")
    return lambda: x.reshape(*x.shape[: d - 1], x.shape[d - 1] * x.shape[d], *x.shape[d + 1 :])


@compute("unmerge", "dim", "size", operands=1)
def _unmerge(d: int, n: int, x: jax.Array) -> Thunk:
    """Dimension d divided into [n, rest]."""
    d = _dim("unmerge", d, x)
    if n < 1 or x.shape[d] % n:
        raise TypeError(f"unmerge({d}, {n}, …) does not divide shape {x.shape}")
    return lambda: x.reshape(*x.shape[:d], n, x.shape[d] // n, *x.shape[d + 1 :])


# Reductions, normalization, tables


@compute("sum", "dim", operands=1)
def _sum(d: int, x: jax.Array) -> Thunk:
    return lambda: jnp.sum(x, _dim("sum", d, x))


@compute("softmax", operands=1)
def _softmax(x: jax.Array) -> Thunk:
    """The softmax along the last dimension."""
    return lambda: jax.nn.softmax(x)


@compute("layer_norm", operands=1)
def _layer_norm(x: jax.Array) -> Thunk:
    """Layer normalization along the last dimension, without scale and offset."""

    def normalized() -> jax.Array:
        centred = x - jnp.mean(x, -1, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)

    return normalized


def _indexing(name: str, table: jax.Array, ids: jax.Array) -> None:
    if table.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} takes a table and integers, and got {table.shape} and {ids.dtype}")


@compute("embedding", operands=2)
def _embedding(table: jax.Array, ids: jax.Array) -> Thunk:
    """Rows of a table [v, h], with indices clamped to its first and last row."""
    _indexing("embedding", table, ids)
    numbers = lax.GatherDimensionNumbers(offset_dims=(ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lambda: lax.gather(table, ids[..., None], numbers, (1, table.shape[1]), mode="clip")


def _counting(name: str, table: jax.Array, ids: jax.Array) -> None:
    _indexing(name, table, ids)
    if 2 * table.shape[0] > jnp.iinfo(ids.dtype).max:
        raise TypeError(f"{name}: two tables of {table.shape[0]} rows have more than {ids.dtype} can number")


@compute("within", operands=2)
def _within(table: jax.Array, ids: jax.Array) -> Thunk:
    """The indices of the rows that `embedding` reads: clamped to the table's first and last row."""
    _counting("within", table, ids)
    return lambda: lax.max(lax.min(ids, jnp.asarray(table.shape[0] - 1, ids.dtype)), jnp.asarray(0, ids.dtype))


@compute("behind", operands=2)
def _behind(table: jax.Array, ids: jax.Array) -> Thunk:
    """The indices of rows of a second table in a joined table, in which it follows the first, `table`."""
    _counting("behind", table, ids)
    return lambda: ids + jnp.asarray(table.shape[0], ids.dtype)


# Constants (TASO's), with shapes that follow from another operand's


@compute("minus_one", operands=0)
def _minus_one() -> Thunk:
    """The scalar −1."""
    return lambda: jnp.asarray(-1.0, jnp.float32)


@compute("ones", operands=1)
def _ones(x: jax.Array) -> Thunk:
    return lambda: jnp.ones_like(x)


# Programs of operators are cached, and must not depend on jax_enable_x64, as those of jnp.eye and jnp.pad do.


def _eye(n: int, dtype: Any) -> jax.Array:
    """Return the identity matrix of size n."""
    rows, columns = (lax.broadcasted_iota(np.int32, (n, n), d) for d in range(2))
    return lax.convert_element_type(lax.eq(rows, columns), dtype)


def _padded(x: jax.Array, widths: Sequence[int]) -> jax.Array:
    """Pad each dimension with zeros on both sides."""
    return lax.pad(x, np.zeros((), x.dtype), [(n, n, 0) for n in widths])


@compute("identity", operands=1)
def _identity(x: jax.Array) -> Thunk:
    """The identity matrix of the size of x's last dimension, by which x can be multiplied from the right."""
    if x.ndim != 2:
        raise TypeError(f"identity takes a matrix, and got shape {x.shape}")
    return lambda: _eye(x.shape[-1], x.dtype)


@compute("identity_kernel", "size", operands=1)
def _identity_kernel(k: int, x: jax.Array) -> Thunk:
    """The k by k kernel by which a convolution leaves each channel of images x as it is."""
    if x.ndim != 4 or k % 2 == 0 or k < 1:
        raise TypeError(f"identity_kernel takes an odd size and images, and got {k} and shape {x.shape}")
    c = x.shape[1]
    return lambda: _padded(_eye(c, x.dtype)[:, :, None, None], [0, 0, k // 2, k // 2])


@compute("mean_kernel", "size", operands=1)
def _mean_kernel(k: int, x: jax.Array) -> Thunk:
    """The k by k kernel of a grouped convolution that takes the mean in each channel of images x."""
    _positive("mean_kernel", k)
    if x.ndim != 4:
        raise TypeError(f"mean_kernel takes images, and got shape {x.shape}")
    return lambda: jnp.ones((x.shape[1], 1, k, k), x.dtype) / (k * k)
