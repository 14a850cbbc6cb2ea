"""Dominated choices: those that another choice replaces, which with changes of type around the operator sends about as few bytes.

A choice that communicates inside is dominated by one that divides at least as much of the work, fits at least as many degrees, and
sends no more than an eighth more bytes, forward and backward. This must hold for every `reduce_in`, by which costs differ later.
"""

from __future__ import annotations

from collections.abc import Collection

from unity.pcg.ir.program import Body, Tensor
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.propagation import has_no_gradient
from unity.pcg.types.accumulation import growth, narrow
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State

# Copies of a tensor that a change of type sends, forward and backward, by the kinds of the states before and after.
COPIES = {
    "UP": (0, 1), "UR": (0, 2), "US": (0, 0), "PU": (1, 0), "PP": (1, 1), "PR": (1, 1), "PS": (0, 0),
    "RU": (0, 0), "RP": (0, 0), "RS": (0, 0), "SU": (2, 0), "SP": (1, 1), "SR": (2, 2),
}  # fmt: skip
REDUCE = 2  # copies that an all-reduce sends
SLIGHT = 1 / 8  # the fraction of more bytes that does not count
TINY = 1 / 1024  # the bytes that do not count, as a fraction of the largest tensor: those of a bias beside activations


def superfluous(body: Body, choice: Choice, others: Collection[Choice], users: int = 1) -> bool:
    """Return whether others dominate a choice that reduces, scatters, replicates or contributes values inside.

    A choice that reduces values but has no partial operands is dominated only by one that partitions the same operands, and either
    has the same results or a partial result in place of a whole one.

    Args:
        body: the operator's body.
        choice: the choice.
        others: the other choices.
        users: the number of operators that read a result, each of which would change its type.
    """
    if PARTIAL not in choice.operands and any(r.kind for r in choice.reduced):
        others = [c for c in others if _partitions(c) == _partitions(choice) and _leaves_results(c, choice)]
    largest = max((body.tensor(a).nbytes for a in (*body.inputs, *body.outputs)), default=0)
    for reduce_in in ("", *{t.dtype.name for t in body.tensors.values() if narrow(t.dtype)}):
        forward, backward = (sent * (1 + SLIGHT) + largest * TINY for sent in _inside(body, choice, reduce_in))
        if not any(_replaces(body, other, choice, (forward, backward), reduce_in, users) for other in others):
            return False
    return True


def _partitions(choice: Choice) -> list[State | None]:
    return [s if s.kind == "P" else None for s in choice.operands]


def _leaves_results(choice: Choice, other: Choice) -> bool:
    """Return whether a choice has the results of another one, or a partial result where that has a whole one."""
    return choice.results == other.results or any(s == PARTIAL != t for s, t in zip(choice.results, other.results, strict=True))


def _replaces(body: Body, choice: Choice, other: Choice, limits: tuple[float, float], reduce_in: str, users: int) -> bool:
    """Return whether a choice with changes of type around it does what another does.

    Args:
        body: the operator's body.
        choice: the choice.
        other: the choice that it would replace.
        limits: the bytes that it may send, forward and backward.
        reduce_in: the narrow type whose partial sums are sent in that type; "" for none.
        users: the number of operators that read a result, each of which would change its type.
    """
    if choice.halos or choice.divided < other.divided or (choice.size and (not other.size or choice.size % other.size)):
        return False
    sent = list(_inside(body, choice, reduce_in))
    operands = ((1, *x) for x in zip(body.inputs, other.operands, choice.operands, strict=True))
    results = ((users, *x) for x in zip(body.outputs, choice.results, other.results, strict=True))
    for times, atom, before, after in (*operands, *results):
        forward, backward = _changed(body.tensor(atom), before, after, reduce_in)
        sent[0] += times * forward
        sent[1] += times * backward if isinstance(atom, int) and not has_no_gradient(body, atom) else 0.0
    return all(nbytes <= limit for nbytes, limit in zip(sent, limits, strict=True))


def _changed(tensor: Tensor, before: State, after: State, reduce_in: str) -> tuple[float, float]:
    """Return the bytes that a change of type sends, forward and backward."""
    if before == after:
        return 0.0, 0.0
    forward, backward = COPIES[before.kind + after.kind]
    wide = tensor.nbytes * growth(tensor.dtype, reduce_in)
    return forward * (wide if before == PARTIAL else tensor.nbytes), backward * (wide if after == REPLICATED else tensor.nbytes)


def _inside(body: Body, choice: Choice, reduce_in: str) -> tuple[float, float]:
    """Return the bytes that a choice sends inside, forward and backward."""
    sums = [(r, REDUCE * r.nbytes * growth(r.dtype, reduce_in)) for r in choice.reduced]
    sent = [(nbytes if r.kind else 0.0, nbytes if r.users else 0.0) for r, nbytes in sums]
    sent += [_changed(body.tensors[x.variable], x.before, x.after, reduce_in) for x in choice.scattered]
    return sum(forward for forward, _ in sent), sum(backward for _, backward in sent)
