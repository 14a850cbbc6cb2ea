"""Recording of an occurrence of a rule as a step of a derivation, which refers to values by their canonical forms."""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body
from unity.substitutions.language.derivation import RewriteStep, ValueReference
from unity.substitutions.language.promises import CLIPPED
from unity.substitutions.language.rearrangement import after
from unity.substitutions.language.rule import content_hash
from unity.substitutions.language.term import Apply, Variable
from unity.substitutions.language.text import print_body
from unity.substitutions.rewriting.occurrences import Occurrence
from unity.substitutions.rewriting.reading import Viewed
from unity.verify.derivations.canonical_form import CanonicalForms, rows_of
from unity.verify.derivations.nodes import CanonicalValue


def step_of(forms: CanonicalForms, occurrence: Occurrence) -> RewriteStep | None:
    """Return the step that applies a rule at an occurrence, in a program of these canonical forms.

    Returns None if the step would change nothing, because no output of the program depends on a root; if the value of a root is
    computed twice, as the step would change both (see `shared`); or if two rearrangements of a value do not compose.
    """
    rule = occurrence.pattern.rule
    tensors = {name: _reference(forms, x) for name, x in occurrence.tensors.items()}
    roots = [_root(forms, occurrence, k) for k in range(len(occurrence.roots))]
    references = {name: x for name, x in tensors.items() if x is not None}
    root_references = tuple(ValueReference(x.node.hash, x.view) for x in roots if x is not None)
    all_in_program = all(x.value in forms.nodes for x in references.values())
    any_alive = any(x.value in forms.nodes for x in root_references)
    different = len({x.value for x in root_references}) == len(roots)
    once = different and all(x is not None and forms.equation_counts[x.node] == 1 for x in roots)
    if not (all_in_program and any_alive and once) or len(references) < len(tensors):
        return None
    return RewriteStep(
        rule=rule.name,
        hash=content_hash(print_body(rule)),
        backward=occurrence.pattern.backward,
        tensors=references,
        roots=root_references,
        attributes=dict(occurrence.attributes),
        manners={name: x.manner for name, x in occurrence.examples.items() if x.manner},
        cuts={name: cuts for name in references if (cuts := _cuts(occurrence, name))},
    )


def shared(forms: CanonicalForms) -> CanonicalForms:
    """Return a program in which values of equal canonical form are computed once, so that a step can replace any of them."""
    body, first = forms.body, dict[str, int]()
    representative = {v: first.setdefault(forms.values[v].text, v) for v in forms.values}

    def of(a: Atom) -> Atom:
        return representative[a] if isinstance(a, int) else a

    equations = tuple(e.reading(tuple(map(of, e.operands))) for e in body.equations)
    return replace(forms, body=used(Body(body.inputs, tuple(map(of, body.outputs)), equations, body.tensors)))


def _reference(forms: CanonicalForms, x: Viewed) -> ValueReference | None:
    value = _value(forms, x)
    return ValueReference(value.node.hash, value.view) if value is not None else None


def _value(forms: CanonicalForms, x: Viewed) -> CanonicalValue | None:
    value = forms.of(x.atom)
    view = after(x.view, value.view)
    return CanonicalValue(value.node, view) if view is not None else None


def _root(forms: CanonicalForms, occurrence: Occurrence, k: int) -> CanonicalValue | None:
    """Return the value by which a step refers to a root: for a promised look-up, the clamping look-up that it consists of."""
    root, term = occurrence.roots[k], occurrence.sides[0][k]
    if root.atom not in occurrence.promised:
        return _value(forms, root)
    assert isinstance(term, Apply)
    table, ids = (occurrence.tensors[x.name] for x in term.operands if isinstance(x, Variable))
    table_value, ids_value = (forms.store.rearranged(x.view, forms.of(x.atom)) for x in (table, ids))
    return rows_of(forms.store, table_value, ids_value, CLIPPED)


def _cuts(occurrence: Occurrence, name: str) -> tuple[tuple[int, int], ...]:
    """Return the seams of a variable as `RewriteStep.cuts` has them."""
    seams = occurrence.types[Variable(name)].seams
    return tuple((d - len(seams), seam[0]) for d, seam in enumerate(seams) if seam is not None)
