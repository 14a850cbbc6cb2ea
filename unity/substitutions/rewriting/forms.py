"""The forms of programs for the search of rewritings and for planning.

For the search, concatenations and splits are binary, from the left, as in the vocabulary; for planning, they have all parts at
once. Both forms omit needless rearrangements: transposes that cancel are dropped, and equal rearrangements of a value are computed
once.
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


def opened(body: Body) -> Body:
    """Return a program in the form for the search, in which equal values are computed once, so that a step changes all of them."""
    return distinct(in_pairs(straight(body)))


def distinct(body: Body) -> Body:
    """Return a program in which no two equations compute the same value."""
    return settled(body)[0]


def settled(body: Body) -> tuple[Body, tuple[str, ...]]:
    """Return a program as `distinct` does, with the canonical forms of its outputs as text.

    The texts are equal for programs that compute the same, whatever the layout of their tensors.
    """
    forms = canonical_forms(tidy(body))
    return tidy(shared(forms).body), tuple(x.text for x in forms.outputs)


def closed(body: Body) -> Body:
    """Return a program in the form for planning."""
    return tidy(whole(straight(body)))


def straight(body: Body) -> Body:
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


def whole(body: Body) -> Body:
    """Return a program with nested concatenations, and splits of a split's first part, merged into one equation each.

    They are merged only if nothing else reads the intermediate value.
    """
    readers = Counter(a for e in body.equations for a in e.operands if isinstance(a, int))
    readers.update(a for a in body.outputs if isinstance(a, int))
    slots: list[Equation | None] = []
    slot: dict[int, int] = {}  # by variable, of the equation that produces it

    def inner(e: Equation, a: Atom) -> Equation | None:
        """Return the producer of an operand, if it is of the same primitive and the operand has no other user."""
        producer = slots[slot[a]] if isinstance(a, int) and a in slot and readers[a] == 1 else None
        return producer if producer is not None and producer.name == e.name else None

    for e in body.equations:
        at = len(slots)
        if e.name == "concatenate":
            e = _merged_concatenation(e, inner, slots, slot)
        elif e.name == "split" and (first := inner(e, e.operands[0])) is not None:
            merged = _merged_split(first, e)
            if merged is not None:
                at, e = slot[first.results[0]], merged
        slots[at:] = [e, *slots[at + 1 :]]
        slot.update((v, at) for v in e.results)
    return Body(body.inputs, body.outputs, tuple(e for e in slots if e is not None), body.tensors)


def _merged_concatenation(e: Equation, inner: Inner, slots: list[Equation | None], slot: Mapping[int, int]) -> Equation:
    """Return a concatenation with that of its first operand merged into it, whose slot is cleared."""
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
