"""Bounded checks: a rule executed on symbols, at every small shape, attribute and degree. A false one is refuted with numbers.

A first-order proof believes its axioms; this believes nothing but the operators' own programs. Both sides run on all devices, on
pieces made of symbols (a partial sum's parts are free), and the tensors that the pieces stand for are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unity.pcg.axis import Axis
from unity.pcg.errors import IllTypedError
from unity.pcg.state import Shape
from unity.substitutions.rule import Rule
from unity.substitutions.term import Apply, Attribute, Term, Variable, applications, subterms, variables
from unity.substitutions.text import print_term
from unity.substitutions.typecheck import TensorType, result_types, shown, typecheck
from unity.verify.domains import Array, digest
from unity.verify.instances import Types, at_attributes, placed, satisfies
from unity.verify.interpret import NotInterpreted
from unity.verify.meaning import evaluate
from unity.verify.stacks import join, spread
from unity.verify.symbolic import Symbolic, TooLarge

VALUES: Mapping[str, tuple[Attribute, ...]] = {
    "dim": (-1, -2, -3, -4),
    "size": (1, 2, 3),
    "groups": (1, 2, 0),
    "padding": ("same", "valid"),
    "function": ("f",),
}
IMAGES = {"conv2d", "enlarge", "maxpool", "avgpool", "identity_kernel", "mean_kernel"}


@dataclass(frozen=True)
class Counterexample:
    """Where two sides differ: the variables' types, the symbols' values, and what both sides are there."""

    types: Mapping[str, str]
    attributes: Mapping[str, Attribute]
    why: str
    values: Mapping[str, float]
    decided: bool = True

    def __str__(self) -> str:
        given = ", ".join(f"{n}: {t}" for n, t in [*self.attributes.items(), *self.types.items()])
        numbers = ", ".join(f"{n} = {v}" for n, v in self.values.items() if v)
        return f"{given}: {self.why}" + (f", where {numbers} and all else is 0" if numbers else "")


@dataclass(frozen=True)
class Check:
    """ "proved" at so many instances; "refuted"; "open", where some instance was not decided; "ill-typed", where there is none."""

    status: str
    instances: int = 0
    counterexample: Counterexample | None = None
    why: str = ""


def executed(rule: Rule, sizes: Sequence[int] | None = None, limit: int = 24, degree: int = 2) -> Check:
    """A rule at small instances: all there are, or `limit` of them, evenly chosen."""
    axes = tuple(Axis(name, degree, 0) for name in rule.named("axis"))
    sizes = sizes or ((degree, 2 * degree) if axes else (1, 2))
    domain, count = Symbolic(), 0
    for instance, chosen, types in _chosen(small_instances(rule, axes, sizes), limit):
        domain.renew()
        try:
            found = _compare(instance, chosen, types, axes, domain)
        except (NotInterpreted, TooLarge):
            continue
        count += 1
        if found is not None:
            return Check("refuted" if found.decided else "open", count, found)
    return Check("proved", count) if count else Check("ill-typed", why="no small instance has both sides well-typed")


def _chosen(found: Iterator, limit: int) -> list:
    """All, or some spread over them."""
    kept = list(itertools.islice(found, 5 * limit))
    return kept if len(kept) <= limit else [kept[k * len(kept) // limit] for k in range(limit)]


def small_instances(rule: Rule, axes: tuple[Axis, ...], sizes: Sequence[int]) -> Iterator[tuple[Rule, dict, Types]]:
    """Every choice of attributes and shapes for which both sides are well-typed, with a rule's conditions met."""
    free = {name: kind for name, kind in rule.attributes.items() if kind != "axis"}
    images = any(t.operator in IMAGES for t in applications(rule.sides))
    ranks = (4, 0) if images else (2, 1, 3, 0)
    for values in itertools.product(*(VALUES[kind] for kind in free.values())):
        chosen = dict(zip(free, values, strict=True))
        instance = at_attributes(rule, chosen)
        if instance is not None:
            for types in _typed(instance, axes, ranks, sizes):
                if satisfies(instance, types):
                    yield instance, chosen, types


def _typed(rule: Rule, axes: tuple[Axis, ...], ranks: Sequence[int], sizes: Sequence[int]) -> Iterator[Types]:
    """Shapes of the variables for which every operator is well-typed: an operator is looked at as soon as it can be."""
    order, integers = list(subterms(rule.sides)), indices(rule.sides)
    shapes = [shape for rank in ranks for shape in itertools.product(sizes, repeat=rank)]
    found: dict[Term, TensorType] = {}

    def extend(k: int) -> Iterator[Types]:
        if k == len(order):
            if all(found[a] == found[b] for a, b in zip(rule.left, rule.right, strict=True)):
                yield {t.name: found[t] for t in order if isinstance(t, Variable)}
            return
        term = order[k]
        for type_ in _types(term, shapes, integers, found, rule, axes):
            found[term] = type_
            yield from extend(k + 1)

    yield from extend(0)


def _types(
    term: Term, shapes: Sequence[Shape], integers: set[str], found: Mapping[Term, TensorType], rule: Rule, axes: tuple[Axis, ...]
) -> Iterator[TensorType]:
    if isinstance(term, Apply):
        operands = tuple(found[x] for x in term.operands)
        try:
            yield result_types(term.operator, term.attributes, operands, axes)[term.result]
        except IllTypedError:
            return
    else:
        dtype = "int32" if term.name in integers else "float32"
        for shape in shapes:
            try:
                yield placed(rule.conditions, {term.name: (shape, dtype)}, axes)[term.name]
            except IllTypedError:
                continue


def indices(terms: Sequence[Term]) -> set[str]:
    """The variables that are looked up in a table."""
    return {name for t in applications(terms) if t.operator == "embedding" for name in variables((t.operands[1],))}


def _compare(
    rule: Rule, chosen: Mapping[str, Attribute], known: Types, axes: tuple[Axis, ...], domain: Symbolic
) -> Counterexample | None:
    types = typecheck(rule.sides, known, axes)
    pieces = {name: _symbols(name, t, axes, domain) for name, t in known.items()}
    values = evaluate(rule.sides, types, pieces, axes, domain)
    for left, right in zip(rule.left, rule.right, strict=True):
        a, b = (join(values[t], types[t].shape, types[t].states, axes, domain) for t in (left, right))
        found = domain.equal(a, b)
        if found.answer != "equal":
            why = f"{print_term(left)} is {found.left:g} at {list(found.at)}, and {print_term(right)} is {found.right:g}"
            said = {name: shown(t, axes) for name, t in known.items()}
            numbers = {n: float(v) for n, v in (found.values or {}).items()}
            if found.answer == "different":
                return Counterexample(said, chosen, why, numbers)
            return Counterexample(said, chosen, f"at {list(found.at)} neither equal nor told apart", {}, decided=False)
    return None


def _symbols(name: str, type_: TensorType, axes: tuple[Axis, ...], domain: Symbolic) -> Array:
    """Pieces made of symbols: those of the whole tensor, and free ones for the parts of a partial sum."""
    rank, sizes = len(type_.shape), tuple(a.size for a in axes)
    if not type_.dtype.startswith("float"):
        whole = np.random.default_rng(digest(name)).integers(0, 5, type_.shape)  # some rows twice, some beyond a small table
        return spread(whole, rank, type_.states, axes, domain)
    whole = domain.symbols(name, type_.shape)
    partial = any(s.kind == "S" for s in type_.states)
    parts = domain.symbols(f"{name}@", (*sizes, *type_.shape)) if partial else None
    return spread(whole, rank, type_.states, axes, domain, parts)
