"""Writing down an occurrence of a rule as a step of a derivation, which names values by their normal forms."""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.body import Atom, Body
from unity.pcg.pruning import used
from unity.substitutions.derivation import Seen, Step
from unity.substitutions.occurrences import Occurrence
from unity.substitutions.reading import Viewed
from unity.substitutions.rearrangement import after
from unity.substitutions.rule import content_hash
from unity.substitutions.term import Variable
from unity.substitutions.text import print_body
from unity.verify.normal import NormalForms


def step_of(forms: NormalForms, occurrence: Occurrence) -> Step | None:
    """The step that an occurrence is, in a program of these normal forms.

    None where it changes nothing, as no output of the program needs its own, or where a step could not say it: if the value of an
    output is computed twice, of which the step would change both (see `shared`), or if one is seen through two rearrangements that
    cannot be written as one.
    """
    rule = occurrence.pattern.rule
    tensors = {name: _seen(forms, x) for name, x in occurrence.tensors.items()}
    roots = [_seen(forms, x) for x in occurrence.roots]
    found = {name: x for name, x in tensors.items() if x is not None}
    there = tuple(x for x in roots if x is not None)
    known = all(x.value in forms.nodes for x in found.values())
    alive = any(x.value in forms.nodes for x in there)
    once = all(forms.makers[forms.of(x.atom).node] == 1 for x in occurrence.roots) and len({x.value for x in there}) == len(roots)
    if not (known and alive and once) or len(found) < len(tensors):
        return None
    return Step(
        rule.name,
        content_hash(print_body(rule)),
        occurrence.pattern.backward,
        found,
        there,
        dict(occurrence.attributes),
        {name: x.manner for name, x in occurrence.examples.items() if x.manner},
        {name: cuts for name in found if (cuts := _cuts(occurrence, name))},
    )


def shared(forms: NormalForms) -> NormalForms:
    """The program with equal values computed once, however each was computed: so nothing of it is in the way of a step."""
    body, first = forms.body, dict[str, int]()
    same = {v: first.setdefault(forms.values[v].text, v) for v in forms.values}

    def of(a: Atom) -> Atom:
        return same[a] if isinstance(a, int) else a

    equations = tuple(e.reading(tuple(map(of, e.operands))) for e in body.equations)
    return replace(forms, body=used(Body(body.inputs, tuple(map(of, body.outputs)), equations, body.tensors)))


def _seen(forms: NormalForms, x: Viewed) -> Seen | None:
    value = forms.of(x.atom)
    view = after(x.view, value.view)
    return Seen(value.node.hash, view) if view is not None else None


def _cuts(occurrence: Occurrence, name: str) -> tuple[tuple[int, int], ...]:
    seams = occurrence.types[Variable(name)].seams
    return tuple((d - len(seams), seam[0]) for d, seam in enumerate(seams) if seam is not None)
