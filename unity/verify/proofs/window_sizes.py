"""How large images must be for the windows that a rule moves over them: convolutions and pools, alone and one after the other.

In a smaller one windows see nothing but the border: those of 3 and of 5 are the same window of an image of two rows, and a window
that is not padded has no place there. How a window moves is asked of the operator table, on the operator's own body.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from unity.pcg.operators.table.sliding import Window
from unity.pcg.propagation.solver import spec_of
from unity.substitutions.language.term import Apply, Attribute, Term, Variable, applications, subterms
from unity.substitutions.language.typecheck import REFUSALS, TensorType, body_of, concrete, tensor
from unity.substitutions.language.vocabulary import VOCABULARY

SIDE = 16  # of the image by which windows are asked for; how they move does not depend on it


@lru_cache(maxsize=1 << 16)
def windows(name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...]) -> tuple[Window, ...]:
    """The windows that an operator moves over its operands: those of more than one element, or more than one step."""
    operator = VOCABULARY[name]
    if operator.parallel:
        return ()
    try:
        body = body_of(name, concrete(operator, attributes, operands), tuple((t.shape, t.dtype) for t in operands))
    except REFUSALS:
        return ()
    specs = (spec_of(body, e) for e in body.equations)
    return tuple(w for spec in specs if spec is not None for w in spec.windows if (w.span, w.stride) != (1, 1))


def roomy(name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...]) -> bool:
    """Whether two neighbours of every window lie inside what it moves over, so that none is all border."""
    return all(w.n >= w.least(2) for w in windows(name, attributes, operands))


def over_images(term: Apply, kernel: int) -> tuple[Window, ...]:
    """The windows of an operator that takes an image, and with it kernels of this side."""
    groups = max([1, *(v for v in term.attributes if isinstance(v, int))])
    for channels in range(1, groups + 1):
        image, other = tensor((1, channels, SIDE, SIDE)), tensor((channels, 1, kernel, kernel))
        if found := windows(term.operator, term.attributes, (image, *(other for _ in term.operands[1:]))):
            return found
    return ()


def kernel_sides(terms: Sequence[Term]) -> set[int]:
    """The sides of the kernels that operators without windows make: what they are enlarged to, for one."""
    made = (t for t in applications(terms) if not over_images(t, 1))
    places = ((v, kind) for t in made for v, kind in zip(t.attributes, VOCABULARY[t.operator].attributes, strict=True))
    return {v for v, kind in places if kind == "size" and isinstance(v, int)}


def side(terms: Sequence[Term], kernel: int) -> tuple[int, int]:
    """The least side of variables at which two windows of every operator lie inside of its operand; and the longest stride.

    From the results back: to make n elements of its result inside, a window needs as many more of its operand.
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
