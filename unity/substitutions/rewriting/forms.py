"""The form that programs are searched in, and the form that they are planned in.

Searched, a program joins and splits two parts at a time, from the left, as the vocabulary does; planned, all at once. In neither
does it rearrange what it need not: a transpose that undoes another is left out, and what is rearranged alike is rearranged once.
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
    """A program as it is searched: what is the same is computed once, so that a step changes it everywhere."""
    return distinct(in_pairs(straight(body)))


def distinct(body: Body) -> Body:
    """A program in which no two equations compute the same."""
    return settled(body)[0]


def settled(body: Body) -> tuple[Body, tuple[str, ...]]:
    """The same, and names of its outputs: equal for programs that compute alike, however their tensors are laid out."""
    forms = canonical_forms(tidy(body))
    return tidy(shared(forms).body), tuple(x.text for x in forms.outputs)


def closed(body: Body) -> Body:
    """A program as it is planned."""
    return tidy(whole(straight(body)))


def straight(body: Body) -> Body:
    """Without chains of reshapes and transposes that end where they began, or where another chain did."""
    reading = Reading(body)
    names: dict[int, Atom] = {}
    known: dict[tuple, int] = {}
    equations = []
    for e in body.equations:
        if rearrangement_of(e, body) is not None:
            (v,) = e.results
            origin = reading.origin(v)
            same = origin.atom if origin.view.identity and origin.atom != v else known.setdefault(origin.key, v)
            if same != v:
                names[v] = names.get(same, same) if isinstance(same, int) else same
                continue
        equations.append(renamed(e, names))
    outputs = tuple(names.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return Body(body.inputs, outputs, tuple(equations), body.tensors)


def whole(body: Body) -> Body:
    """A join of a join and more, and a split of a split's first part, as one, where nothing else reads what is between."""
    readers = Counter(a for e in body.equations for a in e.operands if isinstance(a, int))
    readers.update(a for a in body.outputs if isinstance(a, int))
    slots: list[Equation | None] = []
    slot: dict[int, int] = {}  # of the equation that makes a variable

    def inner(e: Equation, a: Atom) -> Equation | None:
        """What makes an operand, if it is of the same kind and alone to be read."""
        found = slots[slot[a]] if isinstance(a, int) and a in slot and readers[a] == 1 else None
        return found if found is not None and found.name == e.name else None

    for e in body.equations:
        at = len(slots)
        if e.name == "concatenate":
            e = _with_joined(e, inner, slots, slot)
        elif e.name == "split" and (first := inner(e, e.operands[0])) is not None:
            both = _of_split(first, e)
            if both is not None:
                at, e = slot[first.results[0]], both
        slots[at:] = [e, *slots[at + 1 :]]
        slot.update((v, at) for v in e.results)
    return Body(body.inputs, body.outputs, tuple(e for e in slots if e is not None), body.tensors)


def _with_joined(e: Equation, inner: Inner, slots: list[Equation | None], slot: Mapping[int, int]) -> Equation:
    first, *others = e.operands
    found = inner(e, first)
    if found is None or found.params["dimension"] != e.params["dimension"]:
        return e
    slots[slot[found.results[0]]] = None
    return replace(e, operands=(*found.operands, *others), origin=None)


def _of_split(first: Equation, second: Equation) -> Equation | None:
    """A split of a split's first part: one split, where the first one was."""
    if first.params["axis"] != second.params["axis"] or first.results[0] != second.operands[0]:
        return None
    sizes = (*second.params["sizes"], *first.params["sizes"][1:])
    return replace(first, params={**first.params, "sizes": sizes}, results=(*second.results, *first.results[1:]), origin=None)
