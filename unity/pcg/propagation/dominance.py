"""Choices that another choice makes superfluous: with changes of type around it, it sends no more, and divides the work as well."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from unity.pcg.ir.program import Body, Tensor
from unity.pcg.propagation.propagation import has_no_gradient
from unity.pcg.types.accumulation import growth
from unity.pcg.types.parallel_type import PARTIAL, State

if TYPE_CHECKING:
    from unity.pcg.propagation.choices import Choice

# Copies of a tensor that a change of type sends, forward and backward, by the kinds of the states before and after.
COPIES = {
    "UP": (0, 1), "UR": (0, 2), "US": (0, 0), "PU": (1, 0), "PP": (1, 1), "PR": (1, 1), "PS": (0, 0),
    "RU": (0, 0), "RP": (0, 0), "RS": (0, 0), "SU": (2, 0), "SP": (1, 1), "SR": (2, 2),
}  # fmt: skip
REDUCE = 2  # copies that an all-reduce sends
SLIGHT = 1 / 8  # the fraction by which more bytes do not count as more
TINY = 1 / 1024  # the bytes that count as none, as a fraction of the largest tensor: a bias beside its activations


def superfluous(body: Body, choice: Choice, others: Collection[Choice]) -> bool:
    """Return whether one of several other choices does what a choice does that reduces or contributes values inside.

    One that reduces without partial operands is replaced only by a choice that partitions the same operands, and either has the
    same results or leaves one to be reduced.
    """
    if PARTIAL not in choice.operands and any(r.kind for r in choice.reduced):
        others = [c for c in others if _partitions(c) == _partitions(choice) and _leaves_results(c, choice)]
    largest = max((body.tensor(a).nbytes for a in (*body.inputs, *body.outputs)), default=0)
    forward, backward = (sent * (1 + SLIGHT) + largest * TINY for sent in _inside(choice))
    return any(_replaces(body, other, choice, (forward, backward)) for other in others)


def _partitions(choice: Choice) -> list[State | None]:
    return [s if s.kind == "P" else None for s in choice.operands]


def _leaves_results(choice: Choice, other: Choice) -> bool:
    """Return whether a choice has the results of another one, or a partial result where that has a whole one."""
    return choice.results == other.results or any(s == PARTIAL != t for s, t in zip(choice.results, other.results, strict=True))


def _replaces(body: Body, choice: Choice, other: Choice, limits: tuple[float, float]) -> bool:
    """Return whether a choice with changes of type around it sends no more than `limits` bytes, forward and backward."""
    if choice.halos or choice.divided < other.divided or (choice.size and (not other.size or choice.size % other.size)):
        return False
    sent = list(_inside(choice))
    operands = zip(body.inputs, other.operands, choice.operands, strict=True)
    results = zip(body.outputs, choice.results, other.results, strict=True)
    for atom, before, after in (*operands, *results):
        forward, backward = _changed(body.tensor(atom), before, after)
        sent[0] += forward
        sent[1] += backward if isinstance(atom, int) and not has_no_gradient(body, atom) else 0.0
    return all(nbytes <= limit for nbytes, limit in zip(sent, limits, strict=True))


def _changed(tensor: Tensor, before: State, after: State) -> tuple[float, float]:
    """Return the bytes that a change of type sends, forward and backward."""
    if before == after:
        return 0.0, 0.0
    forward, backward = COPIES[before.kind + after.kind]
    wide = growth(tensor.dtype) if tensor.floating else 1.0
    return forward * tensor.nbytes * (wide if before == PARTIAL else 1.0), backward * tensor.nbytes * (
        wide if after.kind == "R" else 1.0
    )


def _inside(choice: Choice) -> tuple[float, float]:
    """Return the bytes that a choice sends inside, forward and backward."""
    sums = [(r, REDUCE * r.nbytes * growth(r.dtype)) for r in choice.reduced]
    return sum(nbytes for r, nbytes in sums if r.kind), sum(nbytes for r, nbytes in sums if r.users)
