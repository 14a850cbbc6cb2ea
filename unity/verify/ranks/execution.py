"""Rules at concrete ranks, run by JAX: what the denotation of operators is tested against.

Here dimensions have positions. Operators are called as a program calls them, and their results are brought into the order of
names, or into the order that a `transpose` asked for."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.verify.ranks.composite_execution import Dimension, run_composite
from unity.verify.ranks.composites import COMPOSITES, with_groups
from unity.verify.ranks.denotation import Reader
from unity.verify.ranks.forms import GENERIC, WORDED, is_group
from unity.verify.ranks.instances import NAMES, Concrete, Instance, TooLarge, compare, elementwise, monoid_at_instances
from unity.verify.ranks.rule import RankRule, signature

TOLERANCE = 2e-4  # of float32


@dataclass(frozen=True)
class Positioned:
    """An array, its dimensions by position, and their order: by names, or a variable's."""

    array: Any
    dims: tuple[Dimension, ...]
    order: str = ""


class Runner:
    """Runs terms at one instance of a rule."""

    def __init__(self, rule: RankRule, instance: Instance) -> None:
        self.signature, self.instance = signature(rule), instance
        self.reader = Reader(Concrete(self.signature, instance), self.signature)
        self.operands: dict[str, Positioned] = {}  # of the composite whose program runs

    def dims(self, groups: Any) -> tuple[Dimension, ...]:
        """Return the dimensions of groups in the order of names."""
        return tuple((g, k) for g in self.signature.groups if g in groups for k in range(self.instance.ranks[g]))

    def place(self, order: str) -> Callable[[Dimension], Any]:
        """Return the key by which dimensions are sorted."""
        if order:
            return self.instance.permutation[order].__getitem__
        return lambda d: (self.signature.groups.index(d[0]), d[1])

    def ordered(self, array: Any, dims: tuple[Dimension, ...], order: str) -> Positioned:
        """Bring the dimensions of an array into an order."""
        target = tuple(sorted(dims, key=self.place(order)))
        return Positioned(lax.transpose(array, [dims.index(d) for d in target]), target, order)

    def denoted(self, node: ast.expr) -> tuple[np.ndarray, np.ndarray, tuple[Dimension, ...]]:
        """Return the elements of a term by its denotation, where they are defined, and the dimensions."""
        domain = Concrete(self.signature, self.instance)
        tensor = Reader(domain, self.signature).tensor(node)
        return *domain.array(tensor), tuple((g, k) for g in tensor.sizes for k in range(self.instance.ranks[g]))

    def run(self, node: ast.expr) -> Positioned:
        """Run a term."""
        if isinstance(node, ast.Constant | ast.UnaryOp):
            return Positioned(jnp.asarray(elementwise("constant", self.signature.integers)(ast.literal_eval(node))), ())
        if isinstance(node, ast.Name) and node.id in ("least", "greatest"):
            return Positioned(jnp.asarray(elementwise(node.id, self.signature.integers)()), ())
        if isinstance(node, ast.Name) and node.id in self.operands:
            return self.operands[node.id]
        if isinstance(node, ast.Name | ast.Subscript):
            name = node.id if isinstance(node, ast.Name) else node.value.id  # type: ignore[attr-defined]
            dims = tuple((g, k) for g, _ in self.signature.tensors[name] for k in range(self.instance.ranks[g]))
            return self.ordered(jnp.asarray(self.instance.arrays[name]), dims, "")
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        operands = [self.run(x) for k, x in enumerate(node.args) if not is_group(x) and not (k == 0 and node.func.id in WORDED)]
        word = node.args[0].id if node.func.id in WORDED and isinstance(node.args[0], ast.Name) else ""
        bare = [is_group(x) for x in node.args if isinstance(x, ast.Name) and is_group(x)]
        fields = {g: self.reader.fields(g, x) for x in node.args if isinstance(x, ast.Subscript) and (g := is_group(x))}
        if node.func.id in COMPOSITES:
            return self.run_composite(node.func.id, operands, bare)
        run = getattr(self, f"run_{node.func.id}", None)
        if run is None:
            return self.run_elementwise(node.func.id, operands)
        return run(*operands, word=word, bare=bare, fields=fields)

    def run_composite(self, name: str, operands: list[Positioned], groups: list[str]) -> Positioned:
        """Run a composite by JAX's function, or its program where JAX has none for such dimensions."""
        ran = None if any(x.order for x in operands) else run_composite(name, groups, [(x.array, x.dims) for x in operands])
        if ran is not None:
            return self.ordered(*ran, "")
        outer, definition = self.operands, COMPOSITES[name]
        self.operands = dict(zip(definition.operands, operands, strict=True))
        result = self.run(with_groups(definition, groups))
        self.operands = outer
        return result

    def run_elementwise(self, name: str, operands: list[Positioned]) -> Positioned:
        """Apply a function to arrays; JAX broadcasts scalars."""
        like = next((x for x in operands if x.dims), operands[0])
        arrays = [x.array for x in operands]
        special = {
            "clamp": lambda lo, x, hi: (
                lax.clamp(lo, x, hi) if lo.shape in ((), x.shape) and hi.shape in ((), x.shape) else jnp.clip(x, lo, hi)
            ),
            "rem": lambda x, y: jnp.where(y == 0, jnp.nan, jnp.fmod(x, jnp.where(y == 0, 1, y))),
            "rsqrt": lax.rsqrt,
            "erf": jax.scipy.special.erf,
            "select": jnp.where,
            **dict.fromkeys(GENERIC, elementwise("f", self.signature.integers)),
        }
        function = special[name] if name in special else getattr(jnp, NAMES.get(name, name))
        return Positioned(function(*arrays), like.dims, like.order)

    def _each(self, x: Positioned, fields: dict, which: int, default: Callable[[int], int]) -> list[int]:
        """Return a field for every dimension by position."""
        values = []
        for (g, k), n in zip(x.dims, x.array.shape, strict=True):
            vector = fields[g][which] if g in fields and which < len(fields[g]) else None
            values.append(default(n) if vector is None else int(vector[k]))
        return values

    def _starts(self, x: Positioned, fields: dict) -> list[Any]:
        """Return starts as values of the program: JAX would refuse numbers that are out of range."""
        return [jnp.asarray(s) for s in self._each(x, fields, 0, lambda n: 0)]

    def run_slice(self, x: Positioned, fields: dict, **_: Any) -> Positioned:
        """Run a slice."""
        starts, ends, strides = (self._each(x, fields, k, f) for k, f in enumerate((lambda n: 0, lambda n: n, lambda n: 1)))
        return Positioned(lax.slice(x.array, starts, ends, strides), x.dims, x.order)

    def run_pad(self, x: Positioned, value: Positioned, fields: dict, **_: Any) -> Positioned:
        """Run a padding."""
        low, high, interior = (self._each(x, fields, k, lambda n: 0) for k in range(3))
        return Positioned(
            lax.pad(x.array, value.array.astype(x.array.dtype), list(zip(low, high, interior, strict=True))), x.dims, x.order
        )

    def run_dynamic_slice(self, x: Positioned, fields: dict, **_: Any) -> Positioned:
        """Run a dynamic slice."""
        starts, sizes = self._starts(x, fields), self._each(x, fields, 1, lambda n: n)
        return Positioned(lax.dynamic_slice(x.array, starts, sizes, allow_negative_indices=False), x.dims, x.order) if x.dims else x

    def run_dynamic_update_slice(self, x: Positioned, update: Positioned, fields: dict, **_: Any) -> Positioned:
        """Run an update."""
        starts = self._starts(x, fields)
        return (
            Positioned(
                lax.dynamic_update_slice(x.array, update.array.astype(x.array.dtype), starts, allow_negative_indices=False),
                x.dims,
                x.order,
            )
            if x.dims
            else update
        )

    def run_reverse(self, x: Positioned, bare: list[str], **_: Any) -> Positioned:
        """Run a reversal."""
        return Positioned(lax.rev(x.array, [k for k, d in enumerate(x.dims) if d[0] in bare]), x.dims, x.order)

    def run_transpose(self, x: Positioned, word: str, **_: Any) -> Positioned:
        """Run a transposition."""
        return self.ordered(x.array, x.dims, "" if word == "names" else word)

    def run_broadcast(self, x: Positioned, fields: dict, **_: Any) -> Positioned:
        """Run a broadcast."""
        dims = tuple(sorted(x.dims + self.dims(fields), key=self.place(x.order)))
        sizes = dict(zip(x.dims, x.array.shape, strict=True))
        shape = [sizes[d] if d in sizes else int(fields[d[0]][0][d[1]]) for d in dims]
        return Positioned(lax.broadcast_in_dim(x.array, shape, [dims.index(d) for d in x.dims]), dims, x.order)

    def run_squeeze(self, x: Positioned, bare: list[str], **_: Any) -> Positioned:
        """Run a squeeze."""
        removed = [k for k, d in enumerate(x.dims) if d[0] in bare]
        return Positioned(lax.squeeze(x.array, removed), tuple(d for d in x.dims if d[0] not in bare), x.order)

    def run_concat(self, *operands: Positioned, bare: list[str], **_: Any) -> Positioned:
        """Run a join."""
        axis = operands[0].dims.index((bare[0], 0))
        kind = jnp.result_type(*(x.array for x in operands))
        return Positioned(lax.concatenate([x.array.astype(kind) for x in operands], axis), operands[0].dims, operands[0].order)

    def run_iota(self, bare: list[str], fields: dict, **_: Any) -> Positioned:
        """Run an iota."""
        dims = self.dims(fields)
        shape = [int(fields[g][0][k]) for g, k in dims]
        return Positioned(lax.broadcasted_iota(jnp.int32, shape, dims.index((bare[0], 0))), dims)

    def run_reduce(self, x: Positioned, word: str, bare: list[str], **_: Any) -> Positioned:
        """Run a reduction."""
        name, unit = monoid_at_instances(word, self.signature.integers)
        axes = [k for k, d in enumerate(x.dims) if d[0] in bare]
        function = getattr(lax, name.replace("logical", "bitwise"))
        value = lax.reduce(x.array, np.asarray(unit, x.array.dtype), function, axes)
        return Positioned(value, tuple(d for d in x.dims if d[0] not in bare), x.order)

    def run_largest(self, x: Positioned, bare: list[str], **_: Any) -> Positioned:
        """Run a maximum."""
        axes = tuple(k for k, d in enumerate(x.dims) if d[0] in bare)
        return Positioned(jnp.max(x.array, axes), tuple(d for d in x.dims if d[0] not in bare), x.order)

    def run_like(self, x: Positioned, y: Positioned, **_: Any) -> Positioned:
        """Run a broadcast to another operand's shape."""
        return Positioned(lax.broadcast_in_dim(y.array, x.array.shape, [x.dims.index(d) for d in y.dims]), x.dims, x.order)

    def run_is_at(self, i: Positioned, fields: dict, **_: Any) -> Positioned:
        """Run a comparison of indices with places."""
        ((v, (size,)),) = fields.items()
        return self.ordered(i.array[..., None] == jnp.arange(int(size[0])), (*i.dims, (v, 0)), "")

    def run_lookup(self, x: Positioned, i: Positioned, bare: list[str], **_: Any) -> Positioned:
        """Run a look-up, separately at each index of the common dimensions."""
        common = tuple(d for d in x.dims if d in i.dims)
        rest = tuple(d for d in x.dims if d not in common and d[0] not in bare)
        own = tuple(d for d in i.dims if d not in common)
        table = lax.transpose(x.array, [x.dims.index(d) for d in (*common, (bare[0], 0), *rest)])
        places = lax.transpose(i.array, [i.dims.index(d) for d in (*common, *own)])

        def take(t: Any, k: Any) -> Any:
            return jnp.take(t, k, axis=0, mode="fill") if t.shape[0] else jnp.zeros((*k.shape, *t.shape[1:]), t.dtype)

        for _d in common:
            take = jax.vmap(take)
        return self.ordered(take(table, places), (*common, *own, *rest), "")

    def run_dot(self, x: Positioned, y: Positioned, bare: list[str], **_: Any) -> Positioned:
        """Run a product."""
        summed = self.dims(bare)
        batch = tuple(d for d in x.dims if d in y.dims and d not in summed)
        free = tuple(d for d in x.dims + y.dims if (d in x.dims) != (d in y.dims))
        numbers = [[tuple(v.dims.index(d) for d in dims) for v in (x, y)] for dims in (summed, batch)]
        value = lax.dot_general(x.array, y.array, ((*numbers[0],), (*numbers[1],)))  # type: ignore[arg-type]
        return self.ordered(value, batch + free, "")

    def run_conv(self, x: Positioned, w: Positioned, bare: list[str], fields: dict, **_: Any) -> Positioned:
        """Run a convolution, whose batch, features and channels are merged into one dimension each."""
        ((s, (stride, low, high, dilation, spread)),) = fields.items()
        windowed, features = self.dims([s]), self.dims(bare)
        batch = tuple(d for d in x.dims if d not in windowed + features)
        channels = tuple(d for d in w.dims if d not in windowed + features)
        sizes = dict(zip(w.dims + x.dims, w.array.shape + x.array.shape, strict=True))

        def merged(v: Positioned, first: tuple[Dimension, ...], second: tuple[Dimension, ...]) -> Any:
            array = lax.transpose(v.array, [v.dims.index(d) for d in first + second + windowed])
            lengths = [math.prod(sizes[d] for d in part) for part in (first, second)]
            return array.reshape(*lengths, *array.shape[len(first + second) :])

        rank = len(windowed)
        value = lax.conv_general_dilated(
            merged(x, batch, features),
            merged(w, channels, features),
            tuple(map(int, stride)),
            list(zip(map(int, low), map(int, high), strict=True)),
            tuple(map(int, dilation)),
            tuple(map(int, spread)),
            lax.ConvDimensionNumbers(*[tuple(range(rank + 2))] * 3),
        )
        return self.ordered(value.reshape(*(sizes[d] for d in batch + channels), *value.shape[2:]), batch + channels + windowed, "")


def difference_by_jax(rule: RankRule, instance: Instance) -> str:
    """Return how the sides differ when JAX runs them; an empty text if they do not, or if the instance is too large to be run."""
    runner = Runner(rule, instance)
    try:
        _, defined, dims = runner.denoted(rule.left)
        runner.denoted(rule.right)
    except TooLarge:
        return ""
    left, right = runner.run(rule.left), runner.run(rule.right)
    if left.dims != right.dims:
        return f"dimensions {left.dims} are not {right.dims}"
    a, b, where = np.asarray(left.array), np.asarray(right.array), defined.transpose([dims.index(d) for d in left.dims])
    if runner.signature.powers:  # an exponential of the right side alone may overflow
        where = where & ~np.isinf(b)
    if compare(a, b, where, TOLERANCE, infinite=False):
        return ""
    return f"{a.tolist()} is not {b.tolist()}"


def denotation_by_jax(rule: RankRule, instance: Instance) -> str:
    """Return where JAX gives another value for a side than the denotation; an empty text if nowhere, or if it is too large."""
    runner = Runner(rule, instance)
    for side in (rule.left, rule.right):
        try:
            array, defined, dims = runner.denoted(side)
        except TooLarge:
            return ""
        ran = runner.run(side)
        turned = np.asarray(lax.transpose(ran.array, [ran.dims.index(d) for d in dims]))
        if not compare(array, turned, defined, TOLERANCE, infinite=False):
            return f"{ast.unparse(side)}: {array.tolist()} is not {turned.tolist()}"
    return ""
