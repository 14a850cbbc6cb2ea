"""Image sizes with room for the windows of a rule: convolutions and pools, alone and one after the other.

A smaller image is all border: windows of 3 and of 5 cover the same elements of an image of two rows, and a window without padding
does not fit into it. The operator table tells how the windows of an operator's body move.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import TABLE, Window
from unity.substitutions.language.term import Apply, Attribute, Term, Variable, applications, subterms
from unity.substitutions.language.typecheck import REFUSALS, TensorType, body_of, concrete, tensor
from unity.substitutions.language.vocabulary import VOCABULARY

SIDE = 16  # of the image for which windows are computed; spans and strides do not depend on it


@TABLE.clears
@lru_cache(maxsize=1 << 16)
def windows(name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...]) -> tuple[Window, ...]:
    """Return the windows that an operator moves over its operands, of more than one element or with a stride."""
    operator = VOCABULARY[name]
    if operator.parallel:
        return ()
    try:
        body = body_of(name, concrete(operator, attributes, operands), tuple((t.shape, t.dtype) for t in operands))
    except REFUSALS:
        return ()
    specs = (spec_of(body, e) for e in body.equations)
    return tuple(w for spec in specs if spec is not None for w in spec.windows if (w.span, w.stride) != (1, 1))


def has_room(name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...]) -> bool:
    """Return whether two neighbouring positions of every window lie inside of its operand, so that not all are at the border."""
    return all(w.n >= w.least(2) for w in windows(name, attributes, operands))


def over_images(term: Apply, kernel: int) -> tuple[Window, ...]:
    """Return the windows of an operator on an image and kernels of this side."""
    groups = max([1, *(v for v in term.attributes if isinstance(v, int))])
    for channels in range(1, groups + 1):
        image, other = tensor((1, channels, SIDE, SIDE)), tensor((channels, 1, kernel, kernel))
        if moved := windows(term.operator, term.attributes, (image, *(other for _ in term.operands[1:]))):
            return moved
    return ()


def kernel_sides(terms: Sequence[Term]) -> set[int]:
    """Return the sides of the kernels that operators without windows compute, such as `enlarge`."""
    without = (t for t in applications(terms) if not over_images(t, 1))
    places = ((v, kind) for t in without for v, kind in zip(t.attributes, VOCABULARY[t.operator].attributes, strict=True))
    return {v for v, kind in places if kind == "size" and isinstance(v, int)}


def least_side(terms: Sequence[Term], kernel: int) -> tuple[int, int]:
    """Return the least image side at which two windows of every operator lie inside of its operand, and the longest stride.

    Sides are computed from results back to operands: n elements of a result need as many of the operand as n windows span.
    """
    needed: dict[Term, int] = {}
    stride = 1
    for term in reversed(list(subterms(terms))):
        n = needed.get(term, 2)
        if isinstance(term, Apply):
            moved = over_images(term, kernel)
            stride = max([stride, *(w.stride for w in moved)])
            n = max([n, *(w.least(n) for w in moved)])
            needed |= {x: max(needed.get(x, 0), n) for x in term.operands}
    return max((n for t, n in needed.items() if isinstance(t, Variable)), default=0), stride
