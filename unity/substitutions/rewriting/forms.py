"""Two forms of a program: one in which rewritings are searched for, one that is planned.

In the search form, concatenations and splits are binary, from the left, as in the vocabulary; in the planning form, they have all
parts at once. Both forms omit needless rearrangements: transposes that cancel are dropped, and equal rearrangements of a value are
computed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from unity.pcg.capture.binary_joins import in_pairs
from unity.pcg.ir.program import Atom, Body, Equation
from unity.substitutions.rewriting.reading import Reading, rearrangement_of
from unity.substitutions.rewriting.recording import shared
from unity.substitutions.rewriting.rewriting import renamed, tidy
from unity.verify.derivations.canonical_form import canonical_forms

Inner = Callable[[Equation, Atom], Equation | None]


def search_form(body: Body) -> Body:
    """Return a program in the search form, in which equal values are computed once, so that a step changes all of them."""
    return distinct(in_pairs(_without_redundant_rearrangements(body)))


def distinct(body: Body) -> Body:
    """Return a program in which no two equations compute the same value."""
    return distinct_with_texts(body)[0]


def distinct_with_texts(body: Body) -> tuple[Body, tuple[str, ...]]:
    """Return a program as `distinct` does, and the canonical forms of its outputs as text.

    The texts are equal for programs that compute the same, whatever the layout of their tensors.
    """
    forms = canonical_forms(tidy(body))
    return tidy(shared(forms).body), tuple(x.text for x in forms.outputs)


def planning_form(body: Body) -> Body:
    """Return a program in the planning form."""
    return tidy(_with_merged_joins(_without_redundant_rearrangements(body)))


def _without_redundant_rearrangements(body: Body) -> Body:
    """Return a program without chains of reshapes and transposes that are identities or equal to other chains."""
    reading = Reading(body)
    names: dict[int, Atom] = {}
    first: dict[tuple, int] = {}  # variables by origin and rearrangement
    equations = []
    for e in body.equations:
        if rearrangement_of(e, body) is not None:
            (v,) = e.results
            origin = reading.origin(v)
            same = origin.atom if origin.view.identity and origin.atom != v else first.setdefault(origin.key, v)
            if same != v:
                names[v] = names.get(same, same) if isinstance(same, int) else same
                continue
        equations.append(renamed(e, names))
    outputs = tuple(names.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return Body(body.inputs, outputs, tuple(equations), body.tensors)


def _with_merged_joins(body: Body) -> Body:
    """Return a program with nested concatenations, and splits of a split's first part, merged into one equation each.

    They are merged only if nothing else reads the intermediate value.
    """
    readers = Counter(a for e in body.equations for a in e.operands if isinstance(a, int))
    readers.update(a for a in body.outputs if isinstance(a, int))
    slots: list[Equation | None] = []  # the equations so far; None for one that was merged into a later one
    slot: dict[int, int] = {}  # by variable, the slot of the equation that produces it

    def inner(e: Equation, a: Atom) -> Equation | None:
        """Return the producer of an operand, if it is of the same primitive and the operand has no other user."""
        producer = slots[slot[a]] if isinstance(a, int) and a in slot and readers[a] == 1 else None
        return producer if producer is not None and producer.name == e.name else None

    for e in body.equations:
        first = inner(e, e.operands[0]) if e.name == "split" else None
        split = _merged_split(first, e) if first is not None else None
        if first is not None and split is not None:
            at = slot[first.results[0]]
            slots[at] = split
            slot.update((v, at) for v in split.results)
            continue
        slot.update((v, len(slots)) for v in e.results)
        slots.append(_merged_concatenation(e, inner, slots, slot) if e.name == "concatenate" else e)
    return Body(body.inputs, body.outputs, tuple(e for e in slots if e is not None), body.tensors)


def _merged_concatenation(e: Equation, inner: Inner, slots: list[Equation | None], slot: Mapping[int, int]) -> Equation:
    """Return a concatenation with the one that produces its first operand merged into it, and clear the slot of that one."""
    first, *others = e.operands
    producer = inner(e, first)
    if producer is None or producer.params["dimension"] != e.params["dimension"]:
        return e
    slots[slot[producer.results[0]]] = None
    return replace(e, operands=(*producer.operands, *others), origin=None)


def _merged_split(first: Equation, second: Equation) -> Equation | None:
    """Return one split for a split and the split of its first part, or None if they cannot be merged."""
    if first.params["axis"] != second.params["axis"] or first.results[0] != second.operands[0]:
        return None
    sizes = (*second.params["sizes"], *first.params["sizes"][1:])
    return replace(first, params={**first.params, "sizes": sizes}, results=(*second.results, *first.results[1:]), origin=None)
