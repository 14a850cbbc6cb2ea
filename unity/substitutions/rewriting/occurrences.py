"""Occurrences of rules in captured programs: bindings of a rule's variables and outputs to a program's values.

One side of a rule is matched, and the other replaces it (`rewriting.py`). Rearrangements need no rules: operands are compared
through reshapes and transposes, so that a rule about matrices matches products of any dimension numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import jax.numpy as jnp

from unity.base.errors import IllTypedError
from unity.pcg.ir.gradient_flow import wanted_by
from unity.pcg.ir.program import Body
from unity.pcg.types.accumulation import limited
from unity.substitutions.language.matching import bind
from unity.substitutions.language.promises import PROMISED, computes_with_indices
from unity.substitutions.language.rearrangement import Rearrangement, after, resized, target_dimension
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import (
    Apply,
    Attribute,
    Term,
    Variable,
    applications,
    attribute_variables,
    subterms,
    transform,
    variables,
)
from unity.substitutions.language.typecheck import Seam, TensorType, typecheck
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.substitutions.rewriting.reading import READABLE, Application, Reading, Viewed, clamping
from unity.verify.proofs.instances import at_attributes, satisfies
from unity.verify.proofs.intermediates import contained

COMMUTATIVE = frozenset({"add", "mul"})  # the library's rules swap-terms and swap-factors
REARRANGING = frozenset({"transpose", "merge", "unmerge"})
LINEAR = REARRANGING | {"add", "sub", "bias", "concat", "split", "sum", "embedding"}  # derivatives do not depend on operands
DEPTH = 3  # operators between a result and the producer whose view of its own result it may be matched in


@dataclass(frozen=True)
class Pattern:
    """A rule in one direction: `left` is matched and replaced by `right`. With `backward`, `left` is the rule's right side."""

    rule: Rule
    backward: bool

    @property
    def left(self) -> tuple[Term, ...]:
        return self.rule.right if self.backward else self.rule.left

    @property
    def right(self) -> tuple[Term, ...]:
        return self.rule.left if self.backward else self.rule.right

    @cached_property
    def roots(self) -> tuple[Apply, ...]:
        """The matched outputs. In a usable pattern, all of them are operators."""
        return tuple(t for t in self.left if isinstance(t, Apply))

    @cached_property
    def usable(self) -> bool:
        """Whether the pattern can be matched in programs and is useful.

        It must be algebraic, bind every variable, and use only operators that programs are read in.
        """
        names = {a.operator for a in applications(self.left)}
        return (
            not self.rule.parallel
            and len(self.roots) == len(self.left)
            and names <= READABLE
            and REARRANGING.isdisjoint(a.operator for a in applications(self.rule.sides))
            and set(variables(self.right)) <= set(variables(self.left))
            and attribute_variables(self.right).keys() <= attribute_variables(self.left).keys()
            and not self.commutes
            and not self.inflates
        )

    @property
    def inflates(self) -> bool:
        """Whether the replacement contains the matched side and more, so that the rule could be applied without end."""
        return any(t in self.left for root in self.right for t in subterms((root,)) if t != root)

    @cached_property
    def dropped(self) -> tuple[Apply, ...]:
        """The nonlinear values that the replacement computes entirely, but of which it uses only one part.

        The other part has a cotangent of zero. Its product with an infinite derivative, such as that of a square root at 0, is NaN.
        """
        old, new = set(subterms(self.left)), set(subterms(self.right))
        splits = [t for t in new if isinstance(t, Apply) and t.operator == "split" and t.operands[0] not in old]
        partly_used = [t.operands[0] for t in splits if replace(t, result=1 - t.result) not in new]
        return tuple(t for t in partly_used if isinstance(t, Apply) and any(a.operator not in LINEAR for a in applications((t,))))

    @cached_property
    def other_parts(self) -> tuple[Term, ...]:
        """The matched side, with each part of a split exchanged for the other part."""

        def other(term: Term) -> Term:
            return replace(term, result=1 - term.result) if isinstance(term, Apply) and term.operator == "split" else term

        return transform(self.left, other)

    @property
    def commutes(self) -> bool:
        """Whether the rule only exchanges the operands of one operator, which matching does anyway."""
        if len(self.left) != 1 or not all(isinstance(t, Apply) for t in self.rule.sides):
            return False
        (a,), (b,) = self.roots, (t for t in self.right if isinstance(t, Apply))
        return a.operator == b.operator and a.operator in COMMUTATIVE and a.operands == b.operands[::-1]

    @cached_property
    def mirrors(self) -> tuple[tuple[str, ...], ...]:
        """The other orders of the variables under which the matched side stays the same, so that they match the same places."""
        names = variables(self.left)
        orders = (p for p in itertools.permutations(names) if p != names)
        own = sorted(_canonical(t) for t in self.left)
        return tuple(p for p in orders if sorted(_canonical(t, dict(zip(names, p, strict=True))) for t in self.left) == own)

    def __str__(self) -> str:
        return f"{self.rule.name}{' (backward)' if self.backward else ''}"


def _canonical(term: Term, names: Mapping[str, str] | None = None) -> str:
    """Return a term as text, with variables renamed and operands that commute sorted."""
    if isinstance(term, Variable):
        return (names or {}).get(term.name, term.name)
    operands = [_canonical(t, names) for t in term.operands]
    shown = sorted(operands) if term.operator in COMMUTATIVE else operands
    return f"{term.operator}.{term.result}({', '.join([*map(str, term.attributes), *shown])})"


def patterns(rules: Iterable[Rule]) -> tuple[Pattern, ...]:
    """Return the usable directions of rules."""
    both = (Pattern(rule, backward) for rule in rules for backward in (False, True))
    return tuple(p for p in both if p.usable)


@dataclass(frozen=True, eq=False)
class Occurrence:
    """A place in a program where a rule applies.

    Attributes:
        pattern: the rule, in the direction in which it applies.
        tensors: the value of each tensor variable.
        attributes: the value of each attribute variable.
        roots: the program's values that match the pattern's outputs.
        examples: by operator, or by the name of an elementwise function, an equation whose parameters beyond the vocabulary (a
            precision, a function without a name) the replacement's equations copy.
        inner: the variables that the matched operators produce.
        types: the type of every subterm of both sides.
        promised: roots that are promised look-ups, of which the rule holds only as look-ups that clamp (`language/promises.py`).
    """

    pattern: Pattern
    tensors: Mapping[str, Viewed]
    attributes: Mapping[str, Attribute]
    roots: tuple[Viewed, ...]
    examples: Mapping[str, Application]
    inner: frozenset[int]
    types: Mapping[Term, TensorType]
    promised: frozenset[int] = frozenset()

    @cached_property
    def sides(self) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """The matched side and its replacement, with attribute variables replaced by their values."""
        rule = _at(self.pattern.rule, tuple(sorted(self.attributes.items())))
        assert rule is not None
        return (rule.right, rule.left) if self.pattern.backward else (rule.left, rule.right)


@dataclass
class _Binding:
    """A partial match. Fields are as in `Occurrence`.

    Attributes:
        cuts: by variable and dimension, the size of the first part of a variable that is split.
        must_clamp: whether the rule computes with indices, so that it holds only for look-ups that clamp.
    """

    tensors: dict[str, Viewed] = field(default_factory=dict)
    attributes: dict[str, Attribute] = field(default_factory=dict)
    examples: dict[str, Application] = field(default_factory=dict)
    cuts: dict[tuple[str, int], int] = field(default_factory=dict)
    inner: frozenset[int] = frozenset()
    must_clamp: bool = False
    promised: frozenset[int] = frozenset()

    def copy(self) -> _Binding:
        copies = dict(self.tensors), dict(self.attributes), dict(self.examples), dict(self.cuts)
        return _Binding(*copies, self.inner, self.must_clamp, self.promised)


def occurrences(reading: Reading, pattern: Pattern) -> Iterator[Occurrence]:
    """Yield every occurrence of a pattern in a program at which both sides have equal types."""
    yielded: set[tuple] = set()
    for roots, binding in _roots(reading, pattern, (), _Binding(must_clamp=computes_with_indices(pattern.rule))):
        place = frozenset(r.key for r in roots)
        orders = [tuple(binding.tensors[n].key for n in order) for order in (variables(pattern.left), *pattern.mirrors)]
        if any((place, order) in yielded for order in orders):
            continue
        occurrence = _typed(reading.body, pattern, roots, binding)
        if occurrence is not None and _gradients_stay_finite(reading, pattern, binding):
            yielded.add((place, orders[0]))
            yield occurrence


def _gradients_stay_finite(reading: Reading, pattern: Pattern, binding: _Binding) -> bool:
    """Return whether the replacement makes no gradient NaN that the program has not (see `Pattern.dropped`).

    It does not if the program differentiates the dropped values already: as a whole, or those parts that the replacement drops.
    """
    if not pattern.dropped:
        return True
    differentiated = wanted_by(reading.body, (True,) * len(reading.body.outputs))

    def computes(term: Apply) -> bool:
        places = (
            Viewed(v, view)
            for application in reading.by_operator.get(term.operator, ())
            for k, v in enumerate(application.results)
            if v in differentiated
            for view in views_of(reading, application, k, DEPTH)
        )
        return any(next(_match(reading, term, place, binding.copy()), None) is not None for place in places)

    other_parts = [term for term in pattern.other_parts if isinstance(term, Apply)]
    return all(map(computes, pattern.dropped)) or all(map(computes, other_parts))


def _roots(
    reading: Reading, pattern: Pattern, done: tuple[Viewed, ...], binding: _Binding
) -> Iterator[tuple[tuple[Viewed, ...], _Binding]]:
    """Yield matches of the pattern's outputs that follow those already matched (`done`), with all outputs' values."""
    if len(done) == len(pattern.roots):
        yield done, binding
        return
    root = pattern.roots[len(done)]
    for application in reading.by_operator.get(root.operator, ()):
        index = root.result - application.first
        if not 0 <= index < len(application.results):
            continue
        variable = application.results[index]
        if any(variable == other.atom for other in done):
            continue
        for view in views_of(reading, application, index, DEPTH):
            place = Viewed(variable, view)
            for extended in _match(reading, root, place, binding):
                yield from _roots(reading, pattern, (*done, place), extended)


def views_of(reading: Reading, application: Application, index: int, depth: int) -> tuple[Rearrangement, ...]:
    """Return the rearrangements through which to match a result.

    These are its own, and those under which an operand has one of its producer's, from up to `depth` operators away.
    """
    natural = application.views[index]
    views = {natural: None}
    for operand in application.operands if depth else ():
        producer = reading.by_result.get(operand.atom) if isinstance(operand.atom, int) else None
        if producer is None:
            continue
        for view in views_of(reading, producer, producer.results.index(operand.atom), depth - 1):
            outer = _above(application, natural, operand, view)
            if outer is not None and application.under(index, outer) is not None:
                views[outer] = None
    return tuple(views)


def _above(application: Application, natural: Rearrangement, operand: Viewed, view: Rearrangement) -> Rearrangement | None:
    """Return the view of a result under which an operand's variable has a given view, or None if no view does that."""
    change = after(view, operand.view.inverse())
    if change is None or len(change.source) != len(natural.target):
        return None
    for d, (n, m) in enumerate(zip(change.source, natural.target, strict=True)):
        if n != m:
            if target_dimension(change, d) is None:
                return None
            change = resized(change, d, m)
    return after(change, natural)


def _match(reading: Reading, term: Term, x: Viewed, binding: _Binding) -> Iterator[_Binding]:
    """Yield the extensions of a binding under which a value is an instance of a term."""
    x = reading.seen(x)
    if isinstance(term, Variable):
        if term.name not in binding.tensors:
            extended = binding.copy()
            extended.tensors[term.name] = x
            yield extended
        elif binding.tensors[term.name].key == x.key:
            yield binding
        return
    application = reading.by_result.get(x.atom) if isinstance(x.atom, int) else None
    if application is None or application.operator != term.operator:
        return
    index = application.results.index(x.atom)
    under_view = application.under(index, x.view) if index + application.first == term.result else None
    if under_view is None:
        return
    attributes, operands = under_view
    extended = binding.copy()
    extended.inner |= {x.atom} if isinstance(x.atom, int) else set()
    if not _attributes(term, application, attributes, extended):
        return
    if term.operator == "split" and not _cut(term, int(attributes[0]), x.view, operands[0], extended):
        return
    for order in [operands, operands[::-1]] if term.operator in COMMUTATIVE else [operands]:
        yield from _match_all(reading, term.operands, order, extended)


def _match_all(reading: Reading, terms: Sequence[Term], values: Sequence[Viewed], binding: _Binding) -> Iterator[_Binding]:
    """Yield the extensions of a binding under which values are instances of terms, position by position."""
    if not terms:
        yield binding
        return
    for extended in _match(reading, terms[0], values[0], binding):
        yield from _match_all(reading, terms[1:], values[1:], extended)


def _attributes(term: Apply, application: Application, attributes: Sequence[Attribute], binding: _Binding) -> bool:
    """Return whether an application has a term's attributes, and add its attribute variables and example to the binding."""
    operator = VOCABULARY[term.operator]
    if binding.must_clamp and application.manner == PROMISED:
        binding.promised |= set(application.results)
        application = clamping(application)
    example = binding.examples.setdefault(term.operator, application)
    if example.manner != application.manner:
        return False
    for kind, value in zip(operator.attributes, attributes, strict=True):
        if kind == "function":
            binding.examples.setdefault(str(value), application)
    return bind(term, attributes, binding.attributes)


def _cut(term: Apply, dim: int, view: Rearrangement, operand: Viewed, binding: _Binding) -> bool:
    """Record where a variable is split. Return False if another split of it is at another place."""
    inner = term.operands[0]
    if not isinstance(inner, Variable):
        return True
    part = view.target[dim]
    at = part if term.result == 0 else operand.view.target[dim] - part
    return binding.cuts.setdefault((inner.name, dim), at) == at


def _typed(body: Body, pattern: Pattern, roots: tuple[Viewed, ...], binding: _Binding) -> Occurrence | None:
    """Return the occurrence, or None unless both sides have equal types, which are those of the program's values."""
    rule = _at(pattern.rule, tuple(sorted(binding.attributes.items())))
    if rule is None:
        return None
    variable_types = {name: _type(body, x, name, binding.cuts) for name, x in binding.tensors.items()}
    if not satisfies(rule, variable_types):
        return None
    try:
        types = typecheck(rule.sides, variable_types)
    except IllTypedError:
        return None
    left, right = (rule.right, rule.left) if pattern.backward else (rule.left, rule.right)
    for a, b, root in zip(left, right, roots, strict=True):
        actual = (root.view.target, str(body.tensor(root.atom).dtype))
        if types[a] != types[b] or (types[a].shape, types[a].dtype) != actual:
            return None
    if any(limited(jnp.dtype(t.dtype)) for t in types.values()) and not contained(pattern.rule, pattern.backward):
        return None  # an intermediate value of the replacement may overflow although the program's do not
    fields = binding.tensors, binding.attributes, roots, binding.examples, binding.inner
    return Occurrence(pattern, *fields, types, binding.promised)


def _type(body: Body, x: Viewed, name: str, cuts: Mapping[tuple[str, int], int]) -> TensorType:
    shape = x.view.target
    seams: list[Seam | None] = [None] * len(shape)
    for (variable, d), at in cuts.items():
        if variable == name and shape[d] != 2 * at:
            seams[d] = (at, None, None)
    return TensorType(shape, (), str(body.tensor(x.atom).dtype), tuple(seams) if any(seams) else ())


@lru_cache(maxsize=16384)
def _at(rule: Rule, attributes: tuple[tuple[str, Attribute], ...]) -> Rule | None:
    return at_attributes(rule, dict(attributes))
