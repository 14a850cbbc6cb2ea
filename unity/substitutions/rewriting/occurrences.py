"""Where a rule applies in a captured program: which variables its own stand for, and which results its outputs are.

One side of a rule is looked for; the other takes its place (`rewriting.py`). Rearrangements need no rules: operands are compared
as they are seen through reshapes and transposes, so a rule of matrices finds products of any dimension numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import jax.numpy as jnp

from unity.base.errors import IllTypedError
from unity.pcg.ir.program import Body
from unity.pcg.types.accumulation import limited
from unity.substitutions.language.matching import bind
from unity.substitutions.language.promises import PROMISED, counts
from unity.substitutions.language.rearrangement import Rearrangement, after, kept, resized
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

COMMUTATIVE = frozenset({"add", "mul"})  # the library's rules add.is.add and mul.is.mul
REARRANGING = frozenset({"transpose", "merge", "unmerge"})
LINEAR = REARRANGING | {"add", "sub", "bias", "concat", "split", "sum", "embedding"}  # no derivative depends on an operand
DEPTH = 3  # of elementwise operators through which a root is seen as a product is


@dataclass(frozen=True)
class Pattern:
    """A rule in one direction: `left` is looked for. `backward` says that it is the rule's right side."""

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
        """The outputs that are looked for: operators, all of them."""
        return tuple(t for t in self.left if isinstance(t, Apply))

    @cached_property
    def usable(self) -> bool:
        """Whether it can be looked for: algebraic, every variable bound, every operator one that programs are read in."""
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
        """Whether what takes the place contains what was there, and more: it would apply for ever, and to no end."""
        return any(t in self.left for root in self.right for t in subterms((root,)) if t != root)

    @cached_property
    def dropped(self) -> tuple[Apply, ...]:
        """The products and functions that only the new side computes whole, to take one part of the results.

        The other part has a cotangent of zero, which is NaN times an infinite derivative, such as that of a square root at 0.
        """
        before, after = set(subterms(self.left)), set(subterms(self.right))
        splits = [t for t in after if isinstance(t, Apply) and t.operator == "split" and t.operands[0] not in before]
        alone = [t.operands[0] for t in splits if replace(t, result=1 - t.result) not in after]
        return tuple(t for t in alone if isinstance(t, Apply) and any(a.operator not in LINEAR for a in applications((t,))))

    @cached_property
    def rest(self) -> tuple[Term, ...]:
        """What is looked for, of the other part of everything that is split."""

        def other(term: Term) -> Term:
            return replace(term, result=1 - term.result) if isinstance(term, Apply) and term.operator == "split" else term

        return transform(self.left, other)

    @property
    def commutes(self) -> bool:
        """Whether it only exchanges the operands of one operator: occurrences are found in either order anyway."""
        if len(self.left) != 1 or not all(isinstance(t, Apply) for t in self.rule.sides):
            return False
        (a,), (b,) = self.roots, (t for t in self.right if isinstance(t, Apply))
        return a.operator == b.operator and a.operator in COMMUTATIVE and a.operands == b.operands[::-1]

    @cached_property
    def mirrors(self) -> tuple[tuple[str, ...], ...]:
        """The other orders of its variables that leave what is looked for the same: what they find is the same place mirrored."""
        names = variables(self.left)
        orders = (p for p in itertools.permutations(names) if p != names)
        same = sorted(_canonical(t) for t in self.left)
        return tuple(p for p in orders if sorted(_canonical(t, dict(zip(names, p, strict=True))) for t in self.left) == same)

    def __str__(self) -> str:
        return f"{self.rule.name}{' (backward)' if self.backward else ''}"


def _canonical(term: Term, names: Mapping[str, str] | None = None) -> str:
    """A term as text, variables renamed, the same for operands that commute."""
    if isinstance(term, Variable):
        return (names or {}).get(term.name, term.name)
    operands = [_canonical(t, names) for t in term.operands]
    shown = sorted(operands) if term.operator in COMMUTATIVE else operands
    return f"{term.operator}.{term.result}({', '.join([*map(str, term.attributes), *shown])})"


def patterns(rules: Iterable[Rule]) -> tuple[Pattern, ...]:
    """All directions of rules that can be looked for in programs."""
    both = (Pattern(rule, backward) for rule in rules for backward in (False, True))
    return tuple(p for p in both if p.usable)


@dataclass(frozen=True, eq=False)
class Occurrence:
    """A place where a rule applies. `roots` are the program's results that are the pattern's outputs, each seen through a view.

    `examples` has for operators whose equations say more than the vocabulary does (a precision, a function without a name) an
    equation to make others like: by operator, or by the name of the function.
    """

    pattern: Pattern
    tensors: Mapping[str, Viewed]
    attributes: Mapping[str, Attribute]
    roots: tuple[Viewed, ...]
    examples: Mapping[str, Application]
    inner: frozenset[int]  # variables that the operators found make
    types: Mapping[Term, TensorType]  # of every term of both sides
    promised: frozenset[int] = frozenset()  # roots that the rule is not true of as they are: see `promises`

    @cached_property
    def sides(self) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """What is there and what takes its place, attributes written in."""
        rule = _at(self.pattern.rule, tuple(sorted(self.attributes.items())))
        assert rule is not None
        return (rule.right, rule.left) if self.pattern.backward else (rule.left, rule.right)


@dataclass
class _Binding:
    """What has been found so far of one occurrence."""

    tensors: dict[str, Viewed] = field(default_factory=dict)
    attributes: dict[str, Attribute] = field(default_factory=dict)
    examples: dict[str, Application] = field(default_factory=dict)
    cuts: dict[tuple[str, int], int] = field(default_factory=dict)  # where variables are split: (name, dimension) → at
    inner: frozenset[int] = frozenset()
    counts: bool = False  # whether look-ups must be those that clamp
    promised: frozenset[int] = frozenset()

    def copy(self) -> _Binding:
        found = dict(self.tensors), dict(self.attributes), dict(self.examples), dict(self.cuts)
        return _Binding(*found, self.inner, self.counts, self.promised)


def occurrences(reading: Reading, pattern: Pattern) -> Iterator[Occurrence]:
    """Every place in a program where a pattern is, and both sides have types that agree."""
    seen: set[tuple] = set()
    for roots, binding in _roots(reading, pattern, (), _Binding(counts=counts(pattern.rule))):
        place = frozenset(r.key for r in roots)
        orders = [tuple(binding.tensors[n].key for n in order) for order in (variables(pattern.left), *pattern.mirrors)]
        if any((place, order) in seen for order in orders):
            continue
        found = _typed(reading.body, pattern, roots, binding)
        if found is not None and _reads_all(reading, pattern, binding):
            seen.add((place, orders[0]))
            yield found


def _reads_all(reading: Reading, pattern: Pattern, binding: _Binding) -> bool:
    """Whether the program computes all that the new side does, whole or of the rest, or drops nothing."""
    wanted = (*pattern.dropped, *pattern.rest) if pattern.dropped else ()
    places = (
        (term, Viewed(v, view))
        for term in wanted
        if isinstance(term, Apply)
        for application in reading.by_operator.get(term.operator, ())
        for k, v in enumerate(application.results)
        for view in views_of(reading, application, k, DEPTH)
    )
    return not wanted or any(next(_match(reading, term, x, binding.copy()), None) is not None for term, x in places)


def _roots(
    reading: Reading, pattern: Pattern, done: tuple[Viewed, ...], binding: _Binding
) -> Iterator[tuple[tuple[Viewed, ...], _Binding]]:
    """Ways to place the outputs that follow those that are placed."""
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
            for found in _match(reading, root, place, binding):
                yield from _roots(reading, pattern, (*done, place), found)


def views_of(reading: Reading, application: Application, index: int, depth: int) -> tuple[Rearrangement, ...]:
    """The rearrangements through which a result is worth looking at: its own, and those that show its operands as products."""
    natural = application.views[index]
    found = {natural: None}
    for operand in application.operands if depth else ():
        maker = reading.by_result.get(operand.atom) if isinstance(operand.atom, int) else None
        for view in views_of(reading, maker, maker.results.index(operand.atom), depth - 1) if maker is not None else ():
            whole = _above(application, natural, operand, view)
            if whole is not None and application.under(index, whole) is not None:
                found[whole] = None
    return tuple(found)


def _above(application: Application, natural: Rearrangement, operand: Viewed, view: Rearrangement) -> Rearrangement | None:
    """How a result is seen where an operand's variable is seen through `view`."""
    change = after(view, operand.view.inverse())
    if change is None or len(change.source) != len(natural.target):
        return None
    for d, (n, m) in enumerate(zip(change.source, natural.target, strict=True)):
        if n != m:
            if kept(change, d) is None:
                return None
            change = resized(change, d, m)
    return after(change, natural)


def _match(reading: Reading, term: Term, x: Viewed, binding: _Binding) -> Iterator[_Binding]:
    """The ways in which a value is an instance of a term, each the binding with what it adds."""
    x = reading.seen(x)
    if isinstance(term, Variable):
        if term.name not in binding.tensors:
            found = binding.copy()
            found.tensors[term.name] = x
            yield found
        elif binding.tensors[term.name].key == x.key:
            yield binding
        return
    application = reading.by_result.get(x.atom) if isinstance(x.atom, int) else None
    if application is None or application.operator != term.operator:
        return
    index = application.results.index(x.atom)
    seen = application.under(index, x.view) if index + application.first == term.result else None
    if seen is None:
        return
    attributes, operands = seen
    found = binding.copy()
    found.inner |= {x.atom} if isinstance(x.atom, int) else set()
    if not _attributes(term, application, attributes, found):
        return
    if term.operator == "split" and not _cut(term, int(attributes[0]), x.view, operands[0], found):
        return
    for order in [operands, operands[::-1]] if term.operator in COMMUTATIVE else [operands]:
        yield from _all(reading, term.operands, order, found)


def _all(reading: Reading, terms: Sequence[Term], values: Sequence[Viewed], binding: _Binding) -> Iterator[_Binding]:
    """The ways in which values are instances of the terms beside them."""
    if not terms:
        yield binding
        return
    for found in _match(reading, terms[0], values[0], binding):
        yield from _all(reading, terms[1:], values[1:], found)


def _attributes(term: Apply, application: Application, attributes: Sequence[Attribute], binding: _Binding) -> bool:
    operator = VOCABULARY[term.operator]
    if binding.counts and application.manner == PROMISED:
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
    """Notes where a variable is split: it is taken as made of two parts that meet there."""
    inner = term.operands[0]
    if not isinstance(inner, Variable):
        return True
    part = view.target[dim]
    at = part if term.result == 0 else operand.view.target[dim] - part
    return binding.cuts.setdefault((inner.name, dim), at) == at


def _typed(body: Body, pattern: Pattern, roots: tuple[Viewed, ...], binding: _Binding) -> Occurrence | None:
    """The occurrence, if both sides have equal types there, and the left one's are what the program has."""
    rule = _at(pattern.rule, tuple(sorted(binding.attributes.items())))
    if rule is None:
        return None
    known = {name: _type(body, x, name, binding.cuts) for name, x in binding.tensors.items()}
    if not satisfies(rule, known):
        return None
    try:
        types = typecheck(rule.sides, known)
    except IllTypedError:
        return None
    left, right = (rule.right, rule.left) if pattern.backward else (rule.left, rule.right)
    for a, b, root in zip(left, right, roots, strict=True):
        there = (root.view.target, str(body.tensor(root.atom).dtype))
        if types[a] != types[b] or (types[a].shape, types[a].dtype) != there:
            return None
    if any(limited(jnp.dtype(t.dtype)) for t in types.values()) and not contained(pattern.rule, pattern.backward):
        return None  # what it computes on the way may overflow although the program does not
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
