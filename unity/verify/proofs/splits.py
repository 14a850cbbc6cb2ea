"""Which rules of a library say that an operator may be split as it is: rules of axes, held against one operator along one axis.

The operator is spelled in the vocabulary first, as it is seen through its own dimensions: a product of any dimension numbers as a
`matmul`. A rule says it if one of its sides applies that operator to operands in these states, gives the result in its state, and
the other side applies it to whole ones. Both sides must be well-typed there, and the rule's conditions hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from unity.base.errors import IllTypedError
from unity.pcg.ir.program import Body, Equation
from unity.pcg.operators.pointwise import pointwise
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, Shape, State
from unity.substitutions.language.rule import Placed, Rule
from unity.substitutions.language.term import Apply, Attribute, Term, applications
from unity.substitutions.language.typecheck import REFUSALS, TensorType, typecheck
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.instances import at_attributes, satisfies

SAME = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul"}  # element by element, of equal shapes
WHOLE = (UNUSED, REPLICATED)


@dataclass(frozen=True)
class Spelled:
    """An operator in the vocabulary. Of each operand and then of the result: its shape as it is seen, its dtype, and which of
    those dimensions each of its own is the outermost part of."""

    operator: str
    attributes: tuple[Attribute, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    places: tuple[tuple[int | None, ...], ...]

    def seen(self, states: Sequence[State]) -> tuple[State, ...] | None:
        """The states of operands and result where they are seen so. None if one is a slice of no dimension there."""
        found = []
        for state, places in zip(states, self.places, strict=True):
            place = places[state.dim] if state.kind == "P" and state.outer == 1 else None
            if state.kind == "P" and place is None:
                return None
            found.append(state if place is None else State("P", place))
        return tuple(found)


def says(rule: Rule, body: Body, states: Sequence[State], axis: Axis) -> bool:
    """Whether a rule says that an operator may be in these states, operands' and then results', along an axis."""
    spelled = spelled_of(body)
    seen = None if spelled is None else spelled.seen(states)
    return spelled is not None and seen is not None and _says(rule, spelled, seen, axis)


@lru_cache(maxsize=1 << 14)
def _says(rule: Rule, spelled: Spelled, states: tuple[State, ...], axis: Axis) -> bool:
    axes = rule.named("axis")
    if len(axes) != 1:
        return False
    mesh = (replace(axis, name=axes[0]),)
    return any(_at(one, wide, spelled, states, mesh) for one, wide in _instances(rule, spelled))


def _instances(rule: Rule, spelled: Spelled) -> Iterator[tuple[Rule, bool]]:
    """The rule with all that it leaves open of an operator written in; and whether the operator is split on its right side."""
    rank = max(map(len, spelled.shapes))
    for right in (False, True):
        split = _operator(rule.right if right else rule.left, spelled.operator)
        if split is None or _operator(rule.left if right else rule.right, spelled.operator) is None:
            continue
        bound = dict(_bound(split, spelled.attributes))
        if tuple(bound.get(str(a), a) for a in split.attributes) != spelled.attributes:
            continue
        free = [name for name in rule.named("dim") if name not in bound]
        for dims in product(range(-rank, 0), repeat=len(free)):
            one = at_attributes(rule, bound | dict(zip(free, dims, strict=True)))
            if one is not None:
                yield one, right


def _bound(split: Apply, attributes: Sequence[Attribute]) -> Iterator[tuple[str, Attribute]]:
    """What the rule's variables in an operator's attributes stand for."""
    for position, (said, value) in enumerate(zip(split.attributes, attributes, strict=True)):
        if VOCABULARY[split.operator].variable(position, said):
            yield str(said), value


def _operator(side: Sequence[Term], name: str) -> Apply | None:
    """The only operator of a side that is none of parallelization, if it is this one."""
    found = [a for a in applications(side) if not VOCABULARY[a.operator].parallel]
    return found[0] if len(side) == 1 and len(found) == 1 and found[0].operator == name else None


def _at(rule: Rule, right: bool, spelled: Spelled, states: tuple[State, ...], mesh: tuple[Axis, ...]) -> bool:
    """Whether the operator of one side has these states, where the other side's is whole."""
    split = _operator(rule.right if right else rule.left, spelled.operator)
    other = _operator(rule.left if right else rule.right, spelled.operator)
    assert split is not None
    assert other is not None
    known: dict[str, TensorType] = {}
    for term, shape, dtype, state in zip(split.operands, spelled.shapes, spelled.dtypes, states, strict=False):
        found = _before(term, state, len(shape))
        if found is None or known.setdefault(found[0], TensorType(shape, (found[1],), dtype)).states != (found[1],):
            return False
    if set(known) != set(rule.variables) or not _placed(rule, known) or not satisfies(rule, known):
        return False
    try:
        types = typecheck(rule.sides, known, mesh)
    except (IllTypedError, *REFUSALS):
        return False
    agree = types[rule.left[0]] == types[rule.right[0]]
    whole = {s for t in (*other.operands, other) for s in types[t].states}
    return agree and types[split].states == (states[-1],) and len(whole) == 1 and whole <= set(WHOLE)


def _before(term: Term, state: State, rank: int) -> tuple[str, State] | None:
    """The variable that parallelization operators bring into a state, and the state that it has before them."""
    while isinstance(term, Apply):
        change = VOCABULARY[term.operator].change
        if change is None:
            return None
        *dims, _ = term.attributes
        if any(not -rank <= int(d) < rank for d in dims):
            return None
        before, after = change(*(int(d) % rank for d in dims))
        if after != state:
            return None
        term, state = term.operands[0], before
    return term.name, state


def _placed(rule: Rule, known: Mapping[str, TensorType]) -> bool:
    """Whether variables are in the states that the rule says; of which it says nothing, they are unused."""
    said: dict[str, State] = {}
    for c in rule.where(Placed):
        rank = len(known[c.tensor].shape)
        said[c.tensor] = c.state._replace(dim=int(c.state.dim) % rank) if c.state.kind == "P" else c.state
    return all(t.states == (said.get(name, UNUSED),) for name, t in known.items())


@lru_cache(maxsize=8192)
def spelled_of(body: Body) -> Spelled | None:
    """An operator of one equation in the vocabulary, if it is of it."""
    if len(body.equations) != 1 or tuple(body.inputs) != body.equations[0].operands or len(body.outputs) != 1:
        return None
    (e,) = body.equations
    spell = SPELLED.get(e.name)
    found = spell(e, body) if spell is not None else None
    return found if found is not None else _function(e, body)


def _plain(operator: str, attributes: tuple[Attribute, ...], e: Equation, body: Body) -> Spelled:
    """Seen as it is."""
    tensors = [body.tensor(a) for a in (*e.operands, *e.results)]
    places = tuple(tuple(range(t.ndim)) for t in tensors)
    return Spelled(operator, attributes, tuple(t.shape for t in tensors), tuple(str(t.dtype) for t in tensors), places)


def _elementwise(e: Equation, body: Body) -> Spelled | None:
    shapes = {body.tensor(a).shape for a in (*e.operands, *e.results)}
    return _plain(SAME[e.name], (), e, body) if len(shapes) == 1 else None


def _function(e: Equation, body: Body) -> Spelled | None:
    name = pointwise(e)
    return _plain("map", (name,), e, body) if name is not None else None


def _sum(e: Equation, body: Body) -> Spelled | None:
    axes, rank = e.params["axes"], body.tensor(e.operands[0]).ndim
    return _plain("sum", (int(axes[0]) - rank,), e, body) if len(axes) == 1 else None


def _lookup(e: Equation, body: Body) -> Spelled | None:
    """Rows of a table; indices have a dimension of one at the end, which the vocabulary has not."""
    numbers, (t, i, z) = e.params["dimension_numbers"], (body.tensor(a) for a in (*e.operands, *e.results))
    rows = (
        t.ndim == 2
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == (z.ndim - 1,)
        and tuple(e.params["slice_sizes"]) == (1, t.shape[1])
        and i.shape[-1:] == (1,)
    )
    if not rows:
        return None
    found = _plain("embedding", (), e, body)
    ids = (*range(i.ndim - 1), None)
    return replace(found, shapes=(t.shape, i.shape[:-1], z.shape), places=(found.places[0], ids, found.places[2]))


def _product(e: Equation, body: Body) -> Spelled | None:
    """Batch dimensions stay, free and contracted ones are merged, in their order."""
    ((cx, cy), (bx, by)) = (tuple(tuple(map(int, dims)) for dims in pair) for pair in e.params["dimension_numbers"])
    x, y, z = (body.tensor(a) for a in (*e.operands, *e.results))
    if list(cx) != sorted(cx):
        return None
    free_x = tuple(d for d in range(x.ndim) if d not in cx + bx)
    free_y = tuple(d for d in range(y.ndim) if d not in cy + by)
    b, m = len(bx), len(bx) + len(free_x)
    groups = [
        (x.shape, [*((d,) for d in bx), free_x, cx]),
        (y.shape, [*((d,) for d in by), cy, free_y]),
        (z.shape, [*((d,) for d in range(b)), tuple(range(b, m)), tuple(range(m, z.ndim))]),
    ]
    shapes = tuple(tuple(prod(shape[d] for d in group) for group in found) for shape, found in groups)
    places = tuple(_outermost(len(shape), found) for shape, found in groups)
    return Spelled("matmul", (), shapes, tuple(str(t.dtype) for t in (x, y, z)), places)


def _outermost(rank: int, groups: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    """Of each dimension, the group that it is the outermost of."""
    found: list[int | None] = [None] * rank
    for k, group in enumerate(groups):
        if group:
            found[group[0]] = k
    return tuple(found)


SPELLED = {"dot_general": _product, "reduce_sum": _sum, "gather": _lookup} | dict.fromkeys(SAME, _elementwise)
