"""Parallelization rules matched with an operator that is split along one axis.

The operator is translated into the vocabulary first, with its dimensions merged as needed: a product of any dimension numbers
becomes a `matmul`. A rule justifies the split if one of its sides applies that operator to operands in the given states, with the
result in its state, and the other side applies it to whole operands. Both sides must be well-typed, and the rule's conditions hold.
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
from unity.pcg.types.factors import TABLE
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, Shape, State
from unity.substitutions.language.rule import HasState, Rule
from unity.substitutions.language.term import Apply, Attribute, Term, applications
from unity.substitutions.language.typecheck import REFUSALS, TensorType, typecheck
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.instances import at_attributes, satisfies

ELEMENTWISE = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul"}  # of equal shapes
WHOLE = (UNUSED, REPLICATED)


@dataclass(frozen=True)
class VocabularyOperator:
    """An operator in terms of the vocabulary, with its operands and then its result.

    `shapes` are in the vocabulary's dimensions. `places` maps each original dimension to the vocabulary's dimension that it is the
    outermost part of, if any.
    """

    operator: str
    attributes: tuple[Attribute, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    places: tuple[tuple[int | None, ...], ...]

    def translate(self, states: Sequence[State]) -> tuple[State, ...] | None:
        """Return the states in the vocabulary's dimensions. None if one of them does not slice such a dimension."""
        translated = []
        for state, places in zip(states, self.places, strict=True):
            place = places[state.dim] if state.kind == "P" and state.outer == 1 else None
            if state.kind == "P" and place is None:
                return None
            translated.append(state if place is None else State("P", place))
        return tuple(translated)


def justifies(rule: Rule, body: Body, states: Sequence[State], axis: Axis) -> bool:
    """Return whether a rule allows an operator these states, of its operands and then of its results, along an axis."""
    operator = vocabulary_operator(body)
    translated = None if operator is None else operator.translate(states)
    return operator is not None and translated is not None and _justifies(rule, operator, translated, axis)


@TABLE.clears
@lru_cache(maxsize=1 << 14)
def _justifies(rule: Rule, operator: VocabularyOperator, states: tuple[State, ...], axis: Axis) -> bool:
    axes = rule.of_kind("axis")
    if len(axes) != 1:
        return False
    mesh = (Axis(axes[0], axis.size, axis.level, axis.reduce_in),)
    return any(_instance_justifies(instance, right, operator, states, mesh) for instance, right in _instances(rule, operator))


def _instances(rule: Rule, operator: VocabularyOperator) -> Iterator[tuple[Rule, bool]]:
    """Yield the rule with the operator's attributes for its variables, and whether the operator is split on the right side."""
    rank = max(map(len, operator.shapes))
    for right in (False, True):
        split = _only_operator(rule.right if right else rule.left, operator.operator)
        if split is None or _only_operator(rule.left if right else rule.right, operator.operator) is None:
            continue
        bound = dict(_bind(split, operator.attributes))
        if tuple(bound.get(str(a), a) for a in split.attributes) != operator.attributes:
            continue
        free = [name for name in rule.of_kind("dim") if name not in bound]
        for dims in product(range(-rank, 0), repeat=len(free)):
            instance = at_attributes(rule, bound | dict(zip(free, dims, strict=True)))
            if instance is not None:
                yield instance, right


def _bind(split: Apply, attributes: Sequence[Attribute]) -> Iterator[tuple[str, Attribute]]:
    """Yield the values of the variables among the attributes of a rule's operator."""
    for position, (variable, value) in enumerate(zip(split.attributes, attributes, strict=True)):
        if VOCABULARY[split.operator].is_variable(position, variable):
            yield str(variable), value


def _only_operator(side: Sequence[Term], name: str) -> Apply | None:
    """Return the operator of this name, if it is the only one of a side apart from parallelization operators; else None."""
    computing = [a for a in applications(side) if not VOCABULARY[a.operator].parallel]
    return computing[0] if len(side) == 1 and len(computing) == 1 and computing[0].operator == name else None


def _instance_justifies(
    rule: Rule, right: bool, operator: VocabularyOperator, states: tuple[State, ...], mesh: tuple[Axis, ...]
) -> bool:  # fmt: skip
    """Return whether an instance is well-typed with the operator of one side in these states and that of the other side whole."""
    split = _only_operator(rule.right if right else rule.left, operator.operator)
    other = _only_operator(rule.left if right else rule.right, operator.operator)
    assert split is not None
    assert other is not None
    variables: dict[str, TensorType] = {}
    for term, shape, dtype, state in zip(split.operands, operator.shapes, operator.dtypes, states, strict=False):
        variable = _variable_before(term, state, len(shape))
        if variable is None:
            return False
        name, before = variable
        if variables.setdefault(name, TensorType(shape, (before,), dtype)).states != (before,):
            return False
    if set(variables) != set(rule.variables) or not _is_placed(rule, variables) or not satisfies(rule, variables):
        return False
    try:
        types = typecheck(rule.sides, variables, mesh)
    except (IllTypedError, *REFUSALS):
        return False
    agree = types[rule.left[0]] == types[rule.right[0]]
    whole = {s for t in (*other.operands, other) for s in types[t].states}
    return agree and types[split].states == (states[-1],) and len(whole) == 1 and whole <= set(WHOLE)


def _variable_before(term: Term, state: State, rank: int) -> tuple[str, State] | None:
    """Return the variable that parallelization operators bring into a state, and the state that it has before them."""
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


def _is_placed(rule: Rule, variables: Mapping[str, TensorType]) -> bool:
    """Return whether variables are in the states of the rule's conditions, and unused without a condition."""
    required: dict[str, State] = {}
    for c in rule.conditions_of(HasState):
        rank = len(variables[c.tensor].shape)
        required[c.tensor] = c.state._replace(dim=int(c.state.dim) % rank) if c.state.kind == "P" else c.state
    return all(t.states == (required.get(name, UNUSED),) for name, t in variables.items())


@lru_cache(maxsize=8192)
def vocabulary_operator(body: Body) -> VocabularyOperator | None:
    """Return an operator of one equation in terms of the vocabulary. None if the vocabulary lacks it."""
    if len(body.equations) != 1 or tuple(body.inputs) != body.equations[0].operands or len(body.outputs) != 1:
        return None
    (e,) = body.equations
    translate = TRANSLATIONS.get(e.name)
    operator = translate(e, body) if translate is not None else None
    return operator if operator is not None else _function(e, body)


def _with_same_dimensions(operator: str, attributes: tuple[Attribute, ...], e: Equation, body: Body) -> VocabularyOperator:
    tensors = [body.tensor(a) for a in (*e.operands, *e.results)]
    places = tuple(tuple(range(t.ndim)) for t in tensors)
    shapes, dtypes = tuple(t.shape for t in tensors), tuple(str(t.dtype) for t in tensors)
    return VocabularyOperator(operator, attributes, shapes, dtypes, places)


def _elementwise(e: Equation, body: Body) -> VocabularyOperator | None:
    shapes = {body.tensor(a).shape for a in (*e.operands, *e.results)}
    return _with_same_dimensions(ELEMENTWISE[e.name], (), e, body) if len(shapes) == 1 else None


def _function(e: Equation, body: Body) -> VocabularyOperator | None:
    name = pointwise(e)
    return _with_same_dimensions("map", (name,), e, body) if name is not None else None


def _sum(e: Equation, body: Body) -> VocabularyOperator | None:
    axes, rank = e.params["axes"], body.tensor(e.operands[0]).ndim
    return _with_same_dimensions("sum", (int(axes[0]) - rank,), e, body) if len(axes) == 1 else None


def _lookup(e: Equation, body: Body) -> VocabularyOperator | None:
    """Translate a look-up of rows. JAX's indices have a last dimension of one, which the vocabulary lacks."""
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
    operator = _with_same_dimensions("embedding", (), e, body)
    table, _, result = operator.places
    ids = (*range(i.ndim - 1), None)
    return replace(operator, shapes=(t.shape, i.shape[:-1], z.shape), places=(table, ids, result))


def _product(e: Equation, body: Body) -> VocabularyOperator | None:
    """Translate a product: batch dimensions stay, free and contracted ones are merged, in their order."""
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
    shapes = tuple(tuple(prod(shape[d] for d in group) for group in merged) for shape, merged in groups)
    places = tuple(_outermost(len(shape), merged) for shape, merged in groups)
    return VocabularyOperator("matmul", (), shapes, tuple(str(t.dtype) for t in (x, y, z)), places)


def _outermost(rank: int, groups: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    """Return for each dimension the group in which it is the outermost one, if any."""
    outermost: list[int | None] = [None] * rank
    for k, group in enumerate(groups):
        if group:
            outermost[group[0]] = k
    return tuple(outermost)


TRANSLATIONS = {"dot_general": _product, "reduce_sum": _sum, "gather": _lookup} | dict.fromkeys(ELEMENTWISE, _elementwise)
