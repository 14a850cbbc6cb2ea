"""Writing down an occurrence of a rule as a step of a derivation, which names values by their normal forms."""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body
from unity.substitutions.language.derivation import RewriteStep, Seen
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
    """The step that an occurrence is, in a program of these normal forms.

    None where it changes nothing, as no output of the program needs its own, or where a step could not say it: if the value of an
    output is computed twice, of which the step would change both (see `shared`), or if one is seen through two rearrangements that
    cannot be written as one.
    """
    rule = occurrence.pattern.rule
    tensors = {name: _seen(forms, x) for name, x in occurrence.tensors.items()}
    roots = [_root(forms, occurrence, k) for k in range(len(occurrence.roots))]
    found = {name: x for name, x in tensors.items() if x is not None}
    there = tuple(Seen(x.node.hash, x.view) for x in roots if x is not None)
    known = all(x.value in forms.nodes for x in found.values())
    alive = any(x.value in forms.nodes for x in there)
    once = all(x is not None and forms.makers[x.node] == 1 for x in roots) and len({x.value for x in there}) == len(roots)
    if not (known and alive and once) or len(found) < len(tensors):
        return None
    return RewriteStep(
        rule.name,
        content_hash(print_body(rule)),
        occurrence.pattern.backward,
        found,
        there,
        dict(occurrence.attributes),
        {name: x.manner for name, x in occurrence.examples.items() if x.manner},
        {name: cuts for name in found if (cuts := _cuts(occurrence, name))},
    )


def shared(forms: CanonicalForms) -> CanonicalForms:
    """The program with equal values computed once, however each was computed: so nothing of it is in the way of a step."""
    body, first = forms.body, dict[str, int]()
    same = {v: first.setdefault(forms.values[v].text, v) for v in forms.values}

    def of(a: Atom) -> Atom:
        return same[a] if isinstance(a, int) else a

    equations = tuple(e.reading(tuple(map(of, e.operands))) for e in body.equations)
    return replace(forms, body=used(Body(body.inputs, tuple(map(of, body.outputs)), equations, body.tensors)))


def _seen(forms: CanonicalForms, x: Viewed) -> Seen | None:
    value = _value(forms, x)
    return Seen(value.node.hash, value.view) if value is not None else None


def _value(forms: CanonicalForms, x: Viewed) -> CanonicalValue | None:
    value = forms.of(x.atom)
    view = after(x.view, value.view)
    return CanonicalValue(value.node, view) if view is not None else None


def _root(forms: CanonicalForms, occurrence: Occurrence, k: int) -> CanonicalValue | None:
    """A root as a step names it: instead of a look-up that is promised, the one that clamps, of which it is made."""
    root, term = occurrence.roots[k], occurrence.sides[0][k]
    if root.atom not in occurrence.promised:
        return _value(forms, root)
    assert isinstance(term, Apply)
    table, ids = (occurrence.tensors[x.name] for x in term.operands if isinstance(x, Variable))
    given = [forms.store.rearranged(x.view, forms.of(x.atom)) for x in (table, ids)]
    return rows_of(forms.store, given[0], given[1], CLIPPED)


def _cuts(occurrence: Occurrence, name: str) -> tuple[tuple[int, int], ...]:
    seams = occurrence.types[Variable(name)].seams
    return tuple((d - len(seams), seam[0]) for d, seam in enumerate(seams) if seam is not None)
