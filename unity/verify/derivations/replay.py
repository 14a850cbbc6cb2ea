"""Replay of derivations: each step is checked on canonical forms, from one program to the other.

The search is not trusted, and none of its code is used. Every step is compared with the program at that point: the library must
have the rule, its conditions and types must hold, and the program must contain one side of it. Then the other side replaces that
one. In the end the outputs must be those of the derived program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from unity.base.errors import DerivationError, RuleError
from unity.base.formatting import with_article
from unity.pcg.capture.binary_joins import in_pairs
from unity.pcg.ir.program import Body
from unity.pcg.propagation.nested.scan_programs import programs, with_inside
from unity.substitutions.language.derivation import Derivation, RewriteStep, ValueReference
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

MANNERED = frozenset({"matmul", "conv2d", "embedding"})  # operators whose equations have parameters beyond the vocabulary


def check(before: Body, after: Body, derivation: Derivation, library: Library) -> None:
    """Check that a derivation leads from one program to the other. Raises DerivationError where it does not."""
    before, after = in_pairs(with_inside(before, _derived_programs(before, after, derivation, library))), in_pairs(after)
    store = NodeStore()
    start, end = canonical_forms(before, store), canonical_forms(after, store)
    types_before, types_after = ([str(b.tensors[v]) for v in b.inputs] for b in (before, after))
    if types_before != types_after:
        raise DerivationError(f"the derived program takes {', '.join(types_after)}, and the program {', '.join(types_before)}")
    if len(start.outputs) != len(end.outputs):
        raise DerivationError(f"the derived program has {len(end.outputs)} outputs, and the program {len(start.outputs)}")
    for k, (output, expected) in enumerate(zip(replay(start, derivation.steps, library), end.outputs, strict=True)):
        if output != expected:
            raise DerivationError(
                f"the derivation does not lead to the derived program: output {k} is something else\n"
                "    Every step was right, so steps are missing, or the program was changed after they were made."
            )


def _derived_programs(before: Body, after: Body, derivation: Derivation, library: Library) -> dict[str, Body]:
    """Check the derivations of nested programs, of scans and remats, and return their replacements by key."""
    old, new = programs(before), programs(after)
    replacements: dict[str, Body] = {}
    for key, nested in derivation.inside.items():
        if key not in old or nested.to not in new:
            raise DerivationError(
                f"the derivation leads inside from {key} to {nested.to}, and one of the two is not in the programs"
            )
        check(old[key], new[nested.to], nested.derivation, library)
        replacements[key] = new[nested.to]
    return replacements


def replay(start: CanonicalForms, steps: Iterable[RewriteStep], library: Library) -> tuple[CanonicalValue, ...]:
    """Return the outputs of a program after some steps. Raises DerivationError, naming the step that is wrong."""
    outputs = start.outputs
    for number, step in enumerate(steps, 1):
        try:
            outputs = _apply_step(start.store, outputs, step, library)
        except _InvalidStep as problem:
            direction = ", backward" if step.backward else ""
            raise DerivationError(f"step {number} of the derivation (rule {step.rule}{direction}): {problem}") from None
    return outputs


class _InvalidStep(Exception):
    """A step does not apply. The message says why."""


@dataclass(frozen=True, eq=False)
class _Match:
    """A rule that a step applies: the side that is replaced, the new side, and the values and types of their variables."""

    old: tuple[Term, ...]
    new: tuple[Term, ...]
    tensors: Mapping[str, CanonicalValue]
    types: Mapping[Term, TensorType]
    manners: Mapping[str, str]


def _apply_step(
    store: NodeStore, outputs: tuple[CanonicalValue, ...], step: RewriteStep, library: Library
) -> tuple[CanonicalValue, ...]:
    """Return the outputs after one step."""
    nodes = {node.hash: node for node in reachable(outputs)}
    match = _match(nodes, step, _rule(step, library))
    values = _evaluate_sides(store, match)
    replacements: dict[CanonicalNode, CanonicalValue] = {}
    for k, (root, old, new) in enumerate(zip(step.roots, match.old, match.new, strict=True)):
        value = _named(root, values[old])
        if value is None:
            raise _InvalidStep(f"output {k} of the side to be replaced, {_shown(old)}, is not the value that the step names")
        if value.node in replacements:
            raise _InvalidStep("two of its outputs are one value")
        replacements[value.node] = store.rearranged(value.view.inverse(), values[new])
    if not any(node.hash in nodes for node in replacements):
        raise _InvalidStep("the program has no such value then: it does not contain the side to be replaced")
    return substituted(store, outputs, replacements)


def _named(root: ValueReference, x: CanonicalValue) -> CanonicalValue | None:
    """Return a value in the form that a step names, with the operands of a commutative node in either order, or None."""
    forms = (x, exchanged(x))
    return next((form for form in forms if form is not None and ValueReference(form.node.hash, form.view) == root), None)


def _shown(term: Term) -> str:
    return f"{term.operator}(…)" if isinstance(term, Apply) else str(term)


def _rule(step: RewriteStep, library: Library) -> Rule:
    """Return the step's rule with values for its attributes."""
    try:
        entry = library[step.rule]
    except RuleError:
        raise _InvalidStep("the library has no such rule. Use the library that the plan was made with") from None
    if entry.hash != step.hash:
        raise _InvalidStep(f"the library's rule has hash {entry.hash}, and the step was made with {step.hash}")
    rule = entry.rule
    if rule.parallel:
        raise _InvalidStep("the rule speaks of axes; a derivation is of programs before they are parallelized")
    if set(rule.attributes) != set(step.attributes):
        raise _InvalidStep(f"it binds the attributes {_names(step.attributes)}, and the rule has {_names(rule.attributes)}")
    for name, kind in rule.attributes.items():
        if not _is_possible(kind, step.attributes[name]):
            raise _InvalidStep(f"attribute {name} is not {with_article(kind)}: {step.attributes[name]!r}")
    instance = at_attributes(rule, step.attributes)
    if instance is None:
        raise _InvalidStep("two dimensions are equal, and the rule requires that they differ")
    return instance


def _is_possible(kind: str, value: Attribute) -> bool:
    """Return whether an attribute can have a value. Dimensions count from the end only, so that each has one name."""
    if kind == "function":
        return isinstance(value, str)
    if kind in WORDS:
        return value in WORDS[kind]
    least = {"size": 1, "groups": 0}
    return type(value) is int and (value < 0 if kind == "dim" else value >= least.get(kind, 0))


def _match(nodes: Mapping[str, CanonicalNode], step: RewriteStep, rule: Rule) -> _Match:
    """Bind the variables of a rule to the values that a step names. Raises _InvalidStep where it does not apply."""
    old, new = (rule.right, rule.left) if step.backward else (rule.left, rule.right)
    if set(step.tensors) != set(rule.variables):
        raise _InvalidStep(f"it binds the variables {_names(step.tensors)}, and the rule has {_names(rule.variables)}")
    if len(step.roots) != len(old):
        raise _InvalidStep(f"it has {len(step.roots)} outputs, and the rule {len(old)}")
    if not set(step.manners) <= MANNERED & {a.operator for a in applications(old)}:
        raise _InvalidStep(f"it has manners of {_names(step.manners)}, and not all of these are on the side to be replaced")
    tensors = {name: _value(nodes, seen, f"variable {name}") for name, seen in step.tensors.items()}
    variables = {name: _type(x, step.cuts.get(name, ()), name) for name, x in tensors.items()}
    types = _types(rule, variables)
    for a, b in zip(old, new, strict=True):
        if types[a] != types[b]:
            raise _InvalidStep("its two sides have different types here")
        if not jnp.issubdtype(jnp.dtype(types[a].dtype), jnp.floating):
            raise _InvalidStep(f"rules are about floating numbers, and this one computes {types[a].dtype}")
    return _Match(old, new, tensors, types, step.manners)


def _types(rule: Rule, variables: Mapping[str, TensorType]) -> Mapping[Term, TensorType]:
    """Return the types of all terms of a rule. Raises _InvalidStep where it is ill-typed."""
    try:
        types = typecheck(rule.sides, variables)
        if not satisfies(rule, variables):
            raise _InvalidStep("the rule's conditions on ranks and sizes do not hold here")
    except (RuleError, *REFUSALS) as problem:
        raise _InvalidStep(f"it is ill-typed here: {problem}") from None
    return types


def _value(nodes: Mapping[str, CanonicalNode], seen: ValueReference, what: str) -> CanonicalValue:
    """Return the value that a step names."""
    if seen.value not in nodes:
        raise _InvalidStep(f"{what} is {seen.value}, and the program has no such value then")
    node = nodes[seen.value]
    if seen.view.source != node.shape or not well_formed(seen.view):
        raise _InvalidStep(f"{what} is viewed through an invalid rearrangement of {node.tensor}")
    return CanonicalValue(node, seen.view)


def _type(x: CanonicalValue, cuts: Iterable[tuple[int, int]], name: str) -> TensorType:
    """Return the type of a variable. Cuts, other than in halves, are seams."""
    seams: list[Seam | None] = [None] * len(x.shape)
    for dim, at in cuts:
        if not (-len(x.shape) <= dim < 0 and 0 < at < x.shape[dim]):
            raise _InvalidStep(f"variable {name} of shape {list(x.shape)} cannot be cut at {at} of dimension {dim}")
        seams[dim] = (at, None, None)
    return TensorType(x.shape, (), str(x.node.tensor.dtype), tuple(seams) if any(seams) else ())


def _evaluate_sides(store: NodeStore, match: _Match) -> Mapping[Term, CanonicalValue]:
    """Return the values of all terms of both sides."""
    values: dict[Term, CanonicalValue] = {}
    results: dict[Apply, tuple[CanonicalValue, ...]] = {}
    for term in subterms((*match.old, *match.new)):
        if isinstance(term, Variable):
            values[term] = match.tensors[term.name]
            continue
        if term.node not in results:
            results[term.node] = _apply_operator(store, match, term, [values[x] for x in term.operands])
        values[term] = results[term.node][term.result]
    return values


def _apply_operator(store: NodeStore, match: _Match, term: Apply, operands: list[CanonicalValue]) -> tuple[CanonicalValue, ...]:
    """Apply an operator of the vocabulary by its program.

    Two are applied directly: a function whose name only the program knows, and a look-up in a given manner.
    """
    manner = match.manners.get(term.operator)
    if term.operator == "map" and term.attributes[0] not in FUNCTIONS:
        return (function_of(store, str(term.attributes[0]), operands[0]),)
    if term.operator == "embedding" and manner is not None:
        table, ids = operands
        return (rows_of(store, table, ids, manner),)
    types = [match.types[x] for x in term.operands]
    operator = VOCABULARY[term.operator]
    structs = tuple((t.shape, t.dtype) for t in types)
    return apply_body(store, body_of(term.operator, concrete(operator, term.attributes, types), structs), operands, manner).outputs


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
