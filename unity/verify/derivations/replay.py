"""Derivations, checked: each step replayed on normal forms, from one program to the other.

Nothing of the search is trusted, and none of its code is used. What a step says is held against the program as it is then: that the
library has the rule, that its conditions and types hold there, that what is found is the one side of it. Then the other side
takes its place. In the end the outputs must be those of the program that the derivation is said to lead to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from unity.base.errors import DerivationError, RuleError
from unity.pcg.capture.binary_joins import in_pairs
from unity.pcg.ir.program import Body
from unity.pcg.propagation.scan_programs import programs, with_inside
from unity.substitutions.language.derivation import Derivation, Seen, Step
from unity.substitutions.language.library import Library
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Attribute, Term, Variable, applications, subterms
from unity.substitutions.language.typecheck import REFUSALS, Seam, TensorType, body_of, concrete, typecheck
from unity.substitutions.language.vocabulary import FUNCTIONS, VOCABULARY, WORDS
from unity.verify.derivations.canonical_form import CanonicalForms, apply_body, canonical_forms, function_of, rows_of
from unity.verify.derivations.constructors import exchanged
from unity.verify.derivations.layouts import well_formed
from unity.verify.derivations.nodes import CanonicalNode, CanonicalValue, NodeStore, reachable, substituted
from unity.verify.proofs.instances import at_attributes, satisfies

MANNERED = frozenset({"matmul", "conv2d", "embedding"})  # operators whose equations say more than the vocabulary does


def check(before: Body, after: Body, derivation: Derivation, library: Library) -> None:
    """Whether a derivation leads from one program to the other. Raises DerivationError where it does not."""
    before, after = in_pairs(with_inside(before, _derived(before, after, derivation, library))), in_pairs(after)
    store = NodeStore()
    start, end = canonical_forms(before, store), canonical_forms(after, store)
    given, taken = ([str(b.tensors[v]) for v in b.inputs] for b in (before, after))
    if given != taken:
        raise DerivationError(f"the derived program takes {', '.join(taken)}, and the program {', '.join(given)}")
    if len(start.outputs) != len(end.outputs):
        raise DerivationError(f"the derived program has {len(end.outputs)} outputs, and the program {len(start.outputs)}")
    for k, (found, wanted) in enumerate(zip(replay(start, derivation.steps, library), end.outputs, strict=True)):
        if found != wanted:
            raise DerivationError(
                f"the derivation does not lead to the derived program: output {k} is something else\n"
                "    Every step was right, so steps are missing, or the program was changed after they were made."
            )


def _derived(before: Body, after: Body, derivation: Derivation, library: Library) -> dict[str, Body]:
    """What the programs inside of scans and remats become, each checked by itself: equal programs may take each other's place."""
    old, new = programs(before), programs(after)
    found: dict[str, Body] = {}
    for key, one in derivation.inside.items():
        if key not in old or one.to not in new:
            raise DerivationError(f"the derivation leads inside from {key} to {one.to}, and one of the two is not in the programs")
        check(old[key], new[one.to], one.derivation, library)
        found[key] = new[one.to]
    return found


def replay(start: CanonicalForms, steps: Iterable[Step], library: Library) -> tuple[CanonicalValue, ...]:
    """What the outputs of a program are after some steps. Raises DerivationError, naming the step that is wrong."""
    outputs = start.outputs
    for number, step in enumerate(steps, 1):
        try:
            outputs = _after(start.store, outputs, step, library)
        except _Wrong as problem:
            direction = ", backward" if step.backward else ""
            raise DerivationError(f"step {number} of the derivation (rule {step.rule}{direction}): {problem}") from None
    return outputs


class _Wrong(Exception):
    """What is wrong with a step."""


@dataclass(frozen=True, eq=False)
class _Place:
    """A step where it is: what is there, what takes its place, and what their variables are."""

    there: tuple[Term, ...]
    instead: tuple[Term, ...]
    tensors: Mapping[str, CanonicalValue]
    types: Mapping[Term, TensorType]
    manners: Mapping[str, str]


def _after(store: NodeStore, outputs: tuple[CanonicalValue, ...], step: Step, library: Library) -> tuple[CanonicalValue, ...]:
    """The outputs after one step."""
    nodes = {node.hash: node for node in reachable(outputs)}
    place = _place(nodes, step, _rule(step, library))
    values = _evaluated(store, place)
    instead: dict[CanonicalNode, CanonicalValue] = {}
    for k, (root, there, new) in enumerate(zip(step.roots, place.there, place.instead, strict=True)):
        found = _named(root, values[there])
        if found is None:
            raise _Wrong(f"output {k} of the side that is to be found, {_said(there)}, is not the value that the step names")
        if found.node in instead:
            raise _Wrong("two of its outputs are one value")
        instead[found.node] = store.rearranged(found.view.inverse(), values[new])
    if not any(node.hash in nodes for node in instead):
        raise _Wrong("the program has no such value then: what is to be found is not there")
    return substituted(store, outputs, instead)


def _named(root: Seen, x: CanonicalValue) -> CanonicalValue | None:
    """A value as a step names it, if it is that: a rule is found in the program, whatever the order of what commutes."""
    ways = (x, exchanged(x))
    return next((way for way in ways if way is not None and Seen(way.node.hash, way.view) == root), None)


def _said(term: Term) -> str:
    return f"{term.operator}(…)" if isinstance(term, Apply) else str(term)


def _rule(step: Step, library: Library) -> Rule:
    """The step's rule, its attributes written in."""
    try:
        entry = library[step.rule]
    except RuleError:
        raise _Wrong("the library has no such rule. Use the library that the plan was made with") from None
    if entry.hash != step.hash:
        raise _Wrong(f"the library's rule has hash {entry.hash}, and the step was made with {step.hash}")
    rule = entry.rule
    if rule.parallel:
        raise _Wrong("the rule speaks of axes; a derivation is of programs before they are parallelized")
    if set(rule.attributes) != set(step.attributes):
        raise _Wrong(f"it binds the attributes {_names(step.attributes)}, and the rule has {_names(rule.attributes)}")
    for name, kind in rule.attributes.items():
        if not _possible(kind, step.attributes[name]):
            raise _Wrong(f"attribute {name} is no {kind}: {step.attributes[name]!r}")
    found = at_attributes(rule, step.attributes)
    if found is None:
        raise _Wrong("two dimensions are the same one, and the rule says that they are not")
    return found


def _possible(kind: str, value: Attribute) -> bool:
    """Whether an attribute can have a value. Dimensions are counted from the end: from the front, one would have two names."""
    if kind == "function":
        return isinstance(value, str)
    if kind in WORDS:
        return value in WORDS[kind]
    least = {"size": 1, "groups": 0}
    return type(value) is int and (value < 0 if kind == "dim" else value >= least.get(kind, 0))


def _place(nodes: Mapping[str, CanonicalNode], step: Step, rule: Rule) -> _Place:
    """Where a rule applies, if it may. Raises _Wrong."""
    there, instead = (rule.right, rule.left) if step.backward else (rule.left, rule.right)
    if set(step.tensors) != set(rule.variables):
        raise _Wrong(f"it binds the variables {_names(step.tensors)}, and the rule has {_names(rule.variables)}")
    if len(step.roots) != len(there):
        raise _Wrong(f"it has {len(step.roots)} outputs, and the rule {len(there)}")
    if not set(step.manners) <= MANNERED & {a.operator for a in applications(there)}:
        raise _Wrong(f"it says how {_names(step.manners)} are computed, and not all of that is among what it finds")
    tensors = {name: _seen(nodes, seen, f"variable {name}") for name, seen in step.tensors.items()}
    known = {name: _type(x, step.cuts.get(name, ()), name) for name, x in tensors.items()}
    types = _types(rule, known)
    for a, b in zip(there, instead, strict=True):
        if types[a] != types[b]:
            raise _Wrong("its two sides have different types here")
        if not jnp.issubdtype(jnp.dtype(types[a].dtype), jnp.floating):
            raise _Wrong(f"rules are of floating numbers, and it makes {types[a].dtype}")
    return _Place(there, instead, tensors, types, step.manners)


def _types(rule: Rule, known: Mapping[str, TensorType]) -> Mapping[Term, TensorType]:
    try:
        types = typecheck(rule.sides, known)
        if not satisfies(rule, known):
            raise _Wrong("the rule's conditions on ranks and sizes do not hold here")
    except (RuleError, *REFUSALS) as problem:
        raise _Wrong(f"it is ill-typed here: {problem}") from None
    return types


def _seen(nodes: Mapping[str, CanonicalNode], seen: Seen, what: str) -> CanonicalValue:
    """A value that a step names, as it is seen."""
    if seen.value not in nodes:
        raise _Wrong(f"{what} is {seen.value}, and the program has no such value then")
    node = nodes[seen.value]
    if seen.view.source != node.shape or not well_formed(seen.view):
        raise _Wrong(f"{what} is seen through what is no rearrangement of {node.tensor}")
    return CanonicalValue(node, seen.view)


def _type(x: CanonicalValue, cuts: Iterable[tuple[int, int]], name: str) -> TensorType:
    """A variable's type: where it is cut, if not in halves, is a seam."""
    seams: list[Seam | None] = [None] * len(x.shape)
    for dim, at in cuts:
        if not (-len(x.shape) <= dim < 0 and 0 < at < x.shape[dim]):
            raise _Wrong(f"variable {name} of shape {list(x.shape)} cannot be cut at {at} of dimension {dim}")
        seams[dim] = (at, None, None)
    return TensorType(x.shape, (), str(x.node.tensor.dtype), tuple(seams) if any(seams) else ())


def _evaluated(store: NodeStore, place: _Place) -> Mapping[Term, CanonicalValue]:
    """The values of both sides, and of all that they are made of."""
    values: dict[Term, CanonicalValue] = {}
    results: dict[Apply, tuple[CanonicalValue, ...]] = {}
    for term in subterms((*place.there, *place.instead)):
        if isinstance(term, Variable):
            values[term] = place.tensors[term.name]
            continue
        if term.node not in results:
            results[term.node] = _applied(store, place, term, [values[x] for x in term.operands])
        values[term] = results[term.node][term.result]
    return values


def _applied(store: NodeStore, place: _Place, term: Apply, operands: list[CanonicalValue]) -> tuple[CanonicalValue, ...]:
    """What an operator of the vocabulary makes of values: what its own program does.

    But for two: a function may have a name that only the program knows, and indices are in range, so nothing is done to them.
    """
    manner = place.manners.get(term.operator)
    if term.operator == "map" and term.attributes[0] not in FUNCTIONS:
        return (function_of(store, str(term.attributes[0]), operands[0]),)
    if term.operator == "embedding" and manner is not None:
        table, ids = operands
        return (rows_of(store, table, ids, manner),)
    types = [place.types[x] for x in term.operands]
    operator = VOCABULARY[term.operator]
    structs = tuple((t.shape, t.dtype) for t in types)
    return apply_body(store, body_of(term.operator, concrete(operator, term.attributes, types), structs), operands, manner).outputs


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
