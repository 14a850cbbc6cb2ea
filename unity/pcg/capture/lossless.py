"""The condition for clustering equations into one operator: every way to partition one of them alone must remain legal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from unity.pcg.capture.heavy_operators import Uses, reduces
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor
from unity.pcg.propagation.choices import choices, operand_states
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.relaxation import Relaxed
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import TABLE, Slot, facts_of

LOSSLESS: dict[str, bool] = {}  # a cache of `lossless`, by the composite's pattern
# A dimension of at most `FEW` elements, such as the coordinates of a box, may stay whole beside one of `MANY` or more, a multiple
# of `DIVISOR`, such as a batch: the devices divide that one.
FEW, MANY, DIVISOR = 4, 1024, 64


def keeps(uses: Uses, members: Sequence[int], outputs: Sequence[int], constant: Mapping[int, int]) -> bool:
    """Return whether some equations of a body are lossless as one operator.

    Args:
        uses: the def-use chains of the body.
        members: the equations, by number.
        outputs: the variables that are read outside of them.
        constant: the equations that compute constants, by variable, which are copied into the operator.
    """
    if len(members) == 1:
        return True
    part, _ = extract(uses.body, members, outputs, constant)
    key = pattern(part)
    if key not in LOSSLESS:
        LOSSLESS[key] = lossless(part)
    return LOSSLESS[key]


def lossless(composite: Body) -> bool:
    """Return whether a composite can partition every dimension of its operands that one of its equations alone can.

    The digit may differ: a bias added before a split into query, key and value is partitioned as the split is. Optional factors may
    be lost, and dimensions that must be whole for a value that the equation meets: to write all of `roll(x)` takes longer than to
    compute all of `x - roll(x)` instead. So may dimensions of few elements beside one of many, which all devices can divide.
    """
    inputs = set(composite.inputs)
    whole = _whole_beside(composite)
    alone = [_partitioned_alone(composite, e) if inputs.intersection(_variables(e)) else [] for e in composite.equations]
    missing = {
        (v, dim)
        for i, partitioned in enumerate(alone)
        for v, dim in partitioned
        if v in inputs and (v, dim) not in whole[i] and not _is_minor(composite, v, dim, partitioned)
    }
    if not Relaxed(composite).may_partition(missing):
        return False
    joint = operand_states(composite)
    while missing:
        states = next(joint, None)
        if states is None:
            return False
        missing.difference_update((v, s.dim) for v, s in zip(composite.inputs, states, strict=True))
    return True


def _is_minor(composite: Body, v: int, dim: int, partitioned: Collection[tuple[int, int]]) -> bool:
    """Return whether a dimension of a variable has few elements, and another one of those that can be partitioned has many."""
    shape = composite.tensors[v].shape
    return shape[dim] <= FEW and any(u == v and _is_many(shape[d]) for u, d in partitioned)


def _is_many(size: int) -> bool:
    """Return whether devices can divide a dimension, so that a short one beside it may stay whole."""
    return size >= MANY and size % DIVISOR == 0


def _whole_beside(composite: Body) -> list[set[tuple[int, int]]]:
    """Return for every equation the dimensions of inputs that must be whole for a value of their rank that the equation meets.

    It does if it reads the value, or if all that is computed of its results does.
    """
    inputs, none = set(composite.inputs), frozenset[tuple[int, int]]()
    rank = {v: sum(n > 1 for n in tensor.shape) for v, tensor in composite.tensors.items()}
    below: dict[int, frozenset[tuple[int, int]]] = {}  # of each variable: the dimensions that are whole where it is computed
    whole: list[set[tuple[int, int]]] = []
    for e in composite.equations:
        read = inputs.intersection(_variables(e))
        large = [v for v in read if max(rank[u] for u in e.results) >= rank[v] and not reduces(composite, e)]
        own = {(v, dim) for v in large for dim in range(composite.tensors[v].ndim)}
        operands = none.union(*(below.get(a, none) for a in _variables(e)))
        computed = operands | (own.difference(_partitioned_alone(composite, e)) if own else none)
        below.update((u, frozenset((v, dim) for v, dim in computed if rank[u] >= rank[v])) for u in e.results)
        whole.append(set(operands))
    met: dict[int, set[tuple[int, int]]] = {v: set() for v in composite.outputs if isinstance(v, int)}
    for e, some in zip(reversed(composite.equations), reversed(whole), strict=True):
        users = [met[v] for v in e.results if v in met]
        some |= set.intersection(*users) if users else set()
        for a in _variables(e):
            met[a] = met[a] & some if a in met else set(some)
    return whole


def _variables(equation: Equation) -> list[int]:
    return [a for a in equation.operands if isinstance(a, int)]


def _partitioned_alone(composite: Body, equation: Equation) -> list[tuple[int, int]]:
    """Return the operands of an equation and the dimensions in which it can have them partitioned if it stands alone.

    Dimensions of optional factors are left out.
    """
    order = tuple(dict.fromkeys(_variables(equation)))
    atoms = tuple(order.index(a) if isinstance(a, int) else a.key for a in equation.operands)
    tensors = {v: composite.tensors[v] for v in (*order, *equation.results)}
    alone = Body(order, equation.results, (equation,), tensors)
    single = _SingleEquation(TABLE.version, equation.signature, equation.identity, atoms, tuple(tensors.values()), alone)
    return [(order[k], dim) for k, dim in _dimensions(single)]


@dataclass(frozen=True)
class _SingleEquation:
    """A body of one equation, as a cache key of everything that its choices depend on."""

    table: int  # the version of the operator table
    signature: str
    identity: tuple[int, ...]
    atoms: tuple[int | str, ...]
    tensors: tuple[Tensor, ...]
    body: Body = field(compare=False)


@lru_cache(maxsize=16384)
def _dimensions(single: _SingleEquation) -> frozenset[tuple[int, int]]:
    """Return the operands, by position, and the dimensions in which they can be partitioned."""
    body, (equation,) = single.body, single.body.equations
    spec = spec_of(body, equation)
    optional = {
        (body.inputs.index(a), place.dim)
        for f in (spec.factors if spec else ())
        if f.optional
        for a, place in zip(equation.operands, f.operands, strict=True)
        if isinstance(a, int) and isinstance(place, Slot)
    }
    return frozenset((k, s.dim) for c in choices(body) for k, s in enumerate(c.operands) if s.kind == "P") - optional


def pattern(composite: Body) -> str:
    """Return a key of a composite without its sizes: its factors depend on which sizes are equal, and which are 1.

    Sizes count only if one divides another (a reshape that splits or merges dimensions), or if they are parameters. Few elements
    and many are told apart.
    """
    names: dict[int, str] = {1: "1"}
    numbers: dict[int, int] = {v: k for k, v in enumerate(composite.inputs)}

    def shape(atom: Atom) -> str:
        tensor = composite.tensor(atom)
        return f"{_text(tensor.dtype)}{[names.setdefault(n, f'{_amount(n)}{len(names)}') for n in tensor.shape]}"

    text = [shape(v) for v in composite.inputs]
    for e in composite.equations:
        numbers.update((v, len(numbers) + k) for k, v in enumerate(e.results))
        operands = [shape(a) if isinstance(a, Literal) else numbers[a] for a in e.operands]
        text.append(f"{_sizeless(composite, e)} {operands} {[shape(v) for v in e.results]}")
    return "\n".join([*text, str([a if isinstance(a, Literal) else numbers[a] for a in composite.outputs])])


def _amount(size: int) -> str:
    """Return a letter for a size: few elements, many, or some."""
    return "f" if size <= FEW else "m" if _is_many(size) else "s"


@lru_cache(maxsize=256)
def _text(dtype: Any) -> str:
    """Return a dtype as text. Cached, since NumPy takes longer for this than everything else in `pattern`."""
    return str(dtype)


def _sizeless(composite: Body, equation: Equation) -> str:
    """Return an equation's signature without the sizes that its factors do not depend on."""
    if facts_of(equation.name).sizes_follow:
        return f"{equation.name} {[equation.params.get(k) for k in ('broadcast_dimensions', 'dimensions', 'dimension')]}"
    if equation.name == "reshape":
        before, after = composite.tensor(equation.operands[0]).shape, composite.tensor(equation.results[0]).shape
        if [n for n in before if n != 1] == [n for n in after if n != 1]:
            return "reshape"
    if equation.name == "custom_jvp_call":
        return f"{equation.name} {nested_body(equation).primitives}"
    return equation.signature
