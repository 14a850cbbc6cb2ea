"""The meaning of operators: a tensor is a function from indices to elements, its sizes are functions of its operands' sizes.

An index gives each group of dimensions a vector with one integer for each of its dimensions. An operator is written once, by
arithmetic on the integers of one dimension, and evaluated by an `EvaluationDomain`: on symbols by the prover (`symbolic.py`), where
a vector is its generic dimension, and on arrays at a concrete rank (`instances.py`), where tests compare it with `jax.lax`
(`execution.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from unity.verify.ranks.forms import Inexpressible

if TYPE_CHECKING:
    from unity.verify.ranks.denotation import Reader

Vector = tuple[Any, ...]  # an integer, or a truth value, for each dimension of a group
Index = Mapping[str, Vector]


class EvaluationDomain(Protocol):
    """The integers and elements over which terms are evaluated."""

    def rank(self, group: str) -> int:
        """Return the length of a group's vectors."""
        ...

    def number(self, name: str, group: str) -> Vector:
        """Return a size or an attribute of every dimension of a group."""
        ...

    def scalar(self, name: str) -> Any:
        """Return a scalar as a number."""
        ...

    def every(self, group: str, conditions: Vector) -> Any:
        """Return whether conditions hold of all dimensions of a group."""
        ...

    def both(self, *conditions: Any) -> Any:
        """Return the conjunction of conditions."""
        ...

    def choose(self, condition: Any, yes: Any, no: Any) -> Any:
        """Return one of two integers or elements."""
        ...

    def whole(self, number: Any) -> Any:
        """Return whether an element is a whole number."""
        ...

    def quotient(self, number: Any, divisor: Any) -> tuple[Any, Any]:
        """Return the quotient, rounded down, and the remainder of a division by a positive number."""
        ...

    def element(self, number: Any) -> Any:
        """Return an integer as an element."""
        ...

    def shared(self, tensor: RankTensor) -> RankTensor:
        """Return a tensor whose elements are read several times, so that a domain may evaluate each once."""
        ...

    def look_up(self, index: Any, size: Any, element: Callable[[Any], Any]) -> Any:
        """Return the element at an index, undefined where the index is undefined, negative or not below a size."""
        ...

    def access(self, tensor: str, index: Index) -> Any:
        """Return an element of a variable."""
        ...

    def apply(self, name: str, *elements: Any) -> Any:
        """Return an elementwise function of elements."""
        ...

    def reduce(self, monoid: str, boxes: Sequence[tuple[str, Vector]], body: Callable[[tuple[Vector, ...]], Any]) -> Any:
        """Combine the elements of a body over all indices of boxes, which are groups and sizes."""
        ...

    def require(self, group: str, conditions: Vector) -> None:
        """Note a condition under which an operator is defined."""
        ...


PARTIAL: dict[str, Callable[..., Any]] = {  # functions of elements that are not defined everywhere, and where they are
    "div": lambda d, a, b: b != 0,
    "rem": lambda d, a, b: b != 0,
    "sqrt": lambda d, a: a >= 0,
    "rsqrt": lambda d, a: a > 0,
    "log": lambda d, a: a > 0,
    "pow": lambda d, a, b: d.choose(a > 0, True, d.choose(a == 0, b >= 0, d.whole(b))),
}


@dataclass(frozen=True)
class RankTensor:
    """A tensor: the sizes of its groups, its elements, and the order of its dimensions.

    Dimensions have names, so an operator's meaning does not depend on their order. They lie in the order of their names unless a
    `transpose` gave them another, which is a variable of the rule: any order of all dimensions of all groups.
    """

    sizes: dict[str, Vector]
    at: Callable[[Index], Any]
    order: str = ""


@dataclass(frozen=True)
class Attributes:
    """The attributes of an application: words, groups, and fields of groups."""

    words: list[str]
    groups: list[str]
    fields: dict[str, tuple[Vector | None, ...]]


OPERATORS: dict[str, FunctionType] = {}  # those of `forms.FORMS`


def define(function: FunctionType) -> FunctionType:
    """Add an operator to the language, by the name of its function."""
    OPERATORS[function.__name__.removesuffix("_")] = function
    return function


def _default(vector: Vector | None, like: Vector, value: Any) -> Vector:
    return (value,) * len(like) if vector is None else vector


def _moved(x: RankTensor, index: Index, moves: dict[str, Vector]) -> Any:
    return x.at({**index, **moves})


def _check_groups(attributes: Attributes, x: RankTensor) -> None:
    if missing := {*attributes.groups, *attributes.fields} - set(x.sizes):
        raise Inexpressible(f"an operand lacks the dimensions {', '.join(sorted(missing))}")


@define
def slice_(r: Reader, a: Attributes, x: RankTensor) -> RankTensor:
    """`slice(G[start:end:stride], x)`."""
    _check_groups(a, x)
    sizes, steps = dict(x.sizes), {}
    for g, fields in a.fields.items():
        start, end, stride = (_default(f, x.sizes[g], d) for f, d in zip((*fields, None)[:3], (0, None, 1), strict=True))
        r.domain.require(
            g,
            tuple(r.domain.both(s >= 0, s <= e, e <= n, p >= 1) for s, e, p, n in zip(start, end, stride, x.sizes[g], strict=True)),
        )
        sizes[g] = tuple(
            e - s if _is_one(p) else r.domain.quotient(e - s + p - 1, p)[0] for s, e, p in zip(start, end, stride, strict=True)
        )
        steps[g] = start, stride

    def at(i: Index) -> Any:
        return _moved(
            x, i, {g: tuple(s + k * p for k, s, p in zip(i[g], start, stride, strict=True)) for g, (start, stride) in steps.items()}
        )

    return RankTensor(sizes, at, x.order)


def _is_one(number: Any) -> bool:
    return isinstance(number, int) and number == 1


@define
def pad(r: Reader, a: Attributes, x: RankTensor, value: RankTensor) -> RankTensor:
    """`pad(G[low:high:interior], x, value)`; negative padding removes elements."""
    _check_groups(a, x)
    if value.sizes:
        raise Inexpressible("the value of a padding is a scalar")
    sizes, shifts = dict(x.sizes), {}
    for g, fields in a.fields.items():
        low, high, interior = (_default(f, x.sizes[g], 0) for f in (*fields, None)[:3])
        inner = tuple(r.domain.choose(n >= 1, (n - 1) * (h + 1) + 1, 0) for n, h in zip(x.sizes[g], interior, strict=True))
        sizes[g] = tuple(lo + m + hi for lo, m, hi in zip(low, inner, high, strict=True))
        r.domain.require(g, tuple(r.domain.both(h >= 0, n >= 0) for h, n in zip(interior, sizes[g], strict=True)))
        shifts[g] = low, interior

    def at(i: Index) -> Any:
        inside, index = True, {}
        for g, (low, interior) in shifts.items():
            places = [
                (k - lo, 0) if isinstance(h, int) and h == 0 else r.domain.quotient(k - lo, h + 1)
                for k, lo, h in zip(i[g], low, interior, strict=True)
            ]
            within = tuple(r.domain.both(q >= 0, q < n, rest == 0) for (q, rest), n in zip(places, x.sizes[g], strict=True))
            inside, index[g] = r.domain.both(inside, r.domain.every(g, within)), tuple(q for q, _ in places)
        return r.domain.choose(inside, _moved(x, i, index), value.at({}))

    return RankTensor(sizes, at, x.order)


def _clamped(r: Reader, start: Vector, part: Vector, whole: Vector) -> Vector:
    """Move starts so that the parts lie within the whole, as XLA does."""
    last = tuple(n - m for m, n in zip(part, whole, strict=True))
    above = tuple(r.domain.choose(s <= e, s, e) for s, e in zip(start, last, strict=True))
    return tuple(r.domain.choose(s >= 0, s, 0) for s in above)


@define
def dynamic_slice(r: Reader, a: Attributes, x: RankTensor) -> RankTensor:
    """`dynamic_slice(G[start:size], x)`; starts are moved so that the slice lies within the operand."""
    _check_groups(a, x)
    starts = {g: _clamped(r, f[0], f[1], x.sizes[g]) for g, f in a.fields.items()}  # type: ignore[arg-type]
    for g, f in a.fields.items():
        r.domain.require(g, tuple(r.domain.both(m >= 0, m <= n) for m, n in zip(f[1], x.sizes[g], strict=True)))  # type: ignore[arg-type]
    sizes = {**x.sizes, **{g: f[1] for g, f in a.fields.items()}}

    def at(i: Index) -> Any:
        return _moved(x, i, {g: tuple(k + s for k, s in zip(i[g], start, strict=True)) for g, start in starts.items()})

    return RankTensor(sizes, at, x.order)  # type: ignore[arg-type]


@define
def dynamic_update_slice(r: Reader, a: Attributes, x: RankTensor, update: RankTensor) -> RankTensor:
    """`dynamic_update_slice(G[start], x, update)`; dimensions without a start have start 0."""
    _check_groups(a, x)
    if set(update.sizes) != set(x.sizes) or update.order != x.order:
        raise Inexpressible("an update has other dimensions than its operand")
    starts = {g: _clamped(r, f[0], update.sizes[g], x.sizes[g]) for g, f in a.fields.items()}  # type: ignore[arg-type]
    for g in x.sizes:
        r.domain.require(g, tuple(m <= n if g in starts else m == n for m, n in zip(update.sizes[g], x.sizes[g], strict=True)))

    def at(i: Index) -> Any:
        moved = {g: tuple(k - s for k, s in zip(i[g], start, strict=True)) for g, start in starts.items()}
        inside: Any = True
        for g in starts:
            within = tuple(r.domain.both(k >= 0, k < m) for k, m in zip(moved[g], update.sizes[g], strict=True))
            inside = r.domain.both(inside, r.domain.every(g, within))
        return r.domain.choose(inside, _moved(update, i, moved), x.at(i))

    return RankTensor(x.sizes, at, x.order)


@define
def reverse(r: Reader, a: Attributes, x: RankTensor) -> RankTensor:
    """`reverse(G, x)`."""
    _check_groups(a, x)
    return RankTensor(
        x.sizes,
        lambda i: _moved(x, i, {g: tuple(n - 1 - k for k, n in zip(i[g], x.sizes[g], strict=True)) for g in a.groups}),
        x.order,
    )


@define
def transpose(r: Reader, a: Attributes, x: RankTensor) -> RankTensor:
    """`transpose(o, x)`: the dimensions in the order `o`; `transpose(names, x)` puts them back into the order of their names."""
    return RankTensor(x.sizes, x.at, "" if a.words[0] == "names" else a.words[0])


@define
def broadcast(r: Reader, a: Attributes, x: RankTensor) -> RankTensor:
    """`broadcast(G[n], x)`: further groups of dimensions."""
    if both := set(a.fields) & set(x.sizes):
        raise Inexpressible(f"a broadcast's operand has the dimensions {', '.join(sorted(both))} already")
    added = {g: f[0] for g, f in a.fields.items()}
    for g, sizes in added.items():
        r.domain.require(g, tuple(n >= 0 for n in sizes))  # type: ignore[union-attr]
    return RankTensor({**x.sizes, **added}, lambda i: x.at({g: v for g, v in i.items() if g not in added}), x.order)  # type: ignore[arg-type]


@define
def squeeze(r: Reader, a: Attributes, x: RankTensor) -> RankTensor:
    """`squeeze(G, x)`: without a group of dimensions of size 1."""
    _check_groups(a, x)
    for g in a.groups:
        r.domain.require(g, tuple(n == 1 for n in x.sizes[g]))
    zeros = {g: (0,) * len(x.sizes[g]) for g in a.groups}
    return RankTensor({g: n for g, n in x.sizes.items() if g not in zeros}, lambda i: _moved(x, i, zeros), x.order)


@define
def concat(r: Reader, a: Attributes, *operands: RankTensor) -> RankTensor:
    """`concat(C, x, y, ...)` along one dimension."""
    (c,) = a.groups
    first, total = operands[0], (0,)
    for x in operands:
        if set(x.sizes) != set(first.sizes) or x.order != first.order or c not in x.sizes:
            raise Inexpressible("the operands of concat have different dimensions")
        for g in first.sizes:
            if g != c:
                r.same(g, first.sizes[g], x.sizes[g])
        total = (total[0] + x.sizes[c][0],)

    def at(i: Index) -> Any:
        starts = [0]
        for x in operands[:-1]:
            starts.append(starts[-1] + x.sizes[c][0])
        value = _moved(operands[-1], i, {c: (i[c][0] - starts[-1],)})
        for x, start, end in reversed(list(zip(operands, starts, starts[1:], strict=False))):
            value = r.domain.choose(i[c][0] < end, _moved(x, i, {c: (i[c][0] - start,)}), value)
        return value

    return RankTensor({**first.sizes, c: total}, at, first.order)


@define
def iota(r: Reader, a: Attributes) -> RankTensor:
    """`iota(C, C[n], G[m])`: the index along one dimension."""
    (c,) = a.groups
    for g, fields in a.fields.items():
        r.domain.require(g, tuple(n >= 0 for n in fields[0]))  # type: ignore[union-attr]
    return RankTensor({g: f[0] for g, f in a.fields.items()}, lambda i: r.domain.element(i[c][0]))  # type: ignore[misc]


@define
def reduce(r: Reader, a: Attributes, x: RankTensor) -> RankTensor:
    """`reduce(add, G, x)`: with a commutative monoid, over groups of dimensions."""
    _check_groups(a, x)
    boxes = [(g, x.sizes[g]) for g in a.groups]
    sizes = {g: n for g, n in x.sizes.items() if g not in a.groups}

    def at(i: Index) -> Any:
        return r.domain.reduce(a.words[0], boxes, lambda j: _moved(x, i, dict(zip(a.groups, j, strict=True))))

    return RankTensor(sizes, at, x.order)


def _joined(r: Reader, x: RankTensor, y: RankTensor, apart: Sequence[str] = ()) -> dict[str, Vector]:
    """Return the sizes of both operands of a product; those of shared groups must be equal."""
    if x.order or y.order:
        raise Inexpressible("a product of transposed operands; transpose its result")
    for g in x.sizes:
        if g in y.sizes and g not in apart:
            r.same(g, x.sizes[g], y.sizes[g])
    return {**x.sizes, **y.sizes}


@define
def dot(r: Reader, a: Attributes, x: RankTensor, y: RankTensor) -> RankTensor:
    """`dot(K, x, y)`: the product summed over groups; other groups of both operands are batch dimensions."""
    sizes = _joined(r, x, y)
    for operand in (x, y):
        _check_groups(a, operand)
    boxes = [(g, sizes[g]) for g in a.groups]

    def at(i: Index) -> Any:
        def body(j: tuple[Vector, ...]) -> Any:
            whole = {**i, **dict(zip(a.groups, j, strict=True))}
            return r.domain.apply("mul", x.at({g: whole[g] for g in x.sizes}), y.at({g: whole[g] for g in y.sizes}))

        return r.domain.reduce("add", boxes, body) if boxes else body(())

    return RankTensor({g: n for g, n in sizes.items() if g not in a.groups}, at)


@define
def conv(r: Reader, a: Attributes, x: RankTensor, w: RankTensor) -> RankTensor:
    """`conv(F, S[stride, low, high, dilation, window_dilation], x, w)`: `F` is summed, `S` is windowed."""
    ((s, fields),) = a.fields.items()
    for operand in (x, w):
        _check_groups(a, operand)
    if s in a.groups:
        raise Inexpressible(f"{s} is summed and windowed")
    if grouped := set(x.sizes) & set(w.sizes) - {s, *a.groups}:
        raise Inexpressible(f"a convolution in groups: both operands have the dimensions {', '.join(sorted(grouped))}")
    sizes = _joined(r, x, w, (s,))
    n, m = x.sizes[s], w.sizes[s]
    stride, low, high, dilation, spread = (_default(f, n, 1) for f in fields)
    wide = tuple(r.domain.choose(k >= 1, (k - 1) * d + 1, 0) + lo + hi for k, d, lo, hi in zip(n, dilation, low, high, strict=True))
    window = tuple((k - 1) * d + 1 for k, d in zip(m, spread, strict=True))
    for steps in (stride, dilation, spread, m):
        r.domain.require(s, tuple(p >= 1 for p in steps))
    r.domain.require(s, tuple(v >= 0 for v in wide))
    out = tuple(
        r.domain.choose(v >= k, v - k + 1 if _is_one(p) else r.domain.quotient(v - k, p)[0] + 1, 0)
        for v, k, p in zip(wide, window, stride, strict=True)
    )
    summed = [*a.groups, s]

    def at(i: Index) -> Any:
        def body(j: tuple[Vector, ...]) -> Any:
            inner = dict(zip(summed, j, strict=True))
            places = [
                (k * p + q * e - lo, 0) if _is_one(d) else r.domain.quotient(k * p + q * e - lo, d)
                for k, q, p, e, lo, d in zip(i[s], inner[s], stride, spread, low, dilation, strict=True)
            ]
            inside = r.domain.every(
                s, tuple(r.domain.both(q >= 0, q < k, rest == 0) for (q, rest), k in zip(places, n, strict=True))
            )
            left = {**i, **inner, s: tuple(q for q, _ in places)}
            value = r.domain.choose(inside, x.at({g: left[g] for g in x.sizes}), r.domain.apply("constant", 0))
            right = {**i, **inner}
            return r.domain.apply("mul", value, w.at({g: right[g] for g in w.sizes}))

        return r.domain.reduce("add", [(g, {**sizes, s: m}[g]) for g in summed], body)

    return RankTensor({**{g: v for g, v in sizes.items() if g not in a.groups}, s: out}, at)


@define
def largest(r: Reader, a: Attributes, x: RankTensor) -> RankTensor:
    """`largest(K, x)`: the largest element over groups, in which there is one."""
    _check_groups(a, x)
    for g in a.groups:
        r.domain.require(g, tuple(n >= 1 for n in x.sizes[g]))
    return reduce(r, Attributes(["max"], a.groups, {}), x)


@define
def like(r: Reader, a: Attributes, x: RankTensor, y: RankTensor) -> RankTensor:
    """`like(x, y)`: `y`, repeated along the dimensions of `x` that it lacks."""
    if not set(y.sizes) <= set(x.sizes) or x.order or y.order:
        raise Inexpressible("like(x, y) repeats y, whose dimensions are some of those of x, in the order of their names")
    for g in y.sizes:
        r.same(g, x.sizes[g], y.sizes[g])
    return RankTensor(x.sizes, lambda i: y.at({g: i[g] for g in y.sizes}))


@define
def is_at(r: Reader, a: Attributes, i: RankTensor) -> RankTensor:
    """`is_at(V[n], i)`: whether the place along the new dimension is the index."""
    ((v, (size,)),) = a.fields.items()
    if v in i.sizes or i.order or size is None:
        raise Inexpressible(f"indices have the dimension {v} already, or were transposed")
    r.domain.require(v, (size[0] >= 0,))
    return RankTensor(
        {**i.sizes, v: size}, lambda k: r.domain.apply("eq", i.at({g: k[g] for g in i.sizes}), r.domain.element(k[v][0]))
    )


@define
def lookup(r: Reader, a: Attributes, x: RankTensor, i: RankTensor) -> RankTensor:
    """`lookup(V, x, i)`: the element of `x` at the index along one dimension, where the index is in range."""
    (v,) = a.groups
    _check_groups(a, x)
    if v in i.sizes:
        raise Inexpressible(f"indices have the dimension {v} already")
    sizes = _joined(r, x, i)

    def at(k: Index) -> Any:
        index = i.at({g: k[g] for g in i.sizes})
        return r.domain.look_up(index, x.sizes[v][0], lambda place: _moved(x, {g: k[g] for g in x.sizes if g != v}, {v: (place,)}))

    return RankTensor({g: n for g, n in sizes.items() if g != v}, at)
