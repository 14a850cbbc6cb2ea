"""Dominated choices: those that another choice replaces, which with changes of type around the operator sends about as few bytes.

A choice that communicates inside is dominated by one that divides at least as much of the work, fits at least as many degrees, and
sends no more than an eighth more bytes, forward and backward. This must hold for every `reduce_in`, by which costs differ later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from unity.pcg.ir.program import Atom, Body, Tensor
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.propagation import has_no_gradient
from unity.pcg.types.accumulation import growth, narrow
from unity.pcg.types.parallel_type import PARTIAL, State

# Copies of a tensor that a change of type sends, forward and backward, by the kinds of the states before and after.
COPIES = {
    "UP": (0, 1), "UR": (0, 2), "US": (0, 0), "PU": (1, 0), "PP": (1, 1), "PR": (1, 1), "PS": (0, 0),
    "RU": (0, 0), "RP": (0, 0), "RS": (0, 0), "SU": (2, 0), "SP": (1, 1), "SR": (2, 2),
}  # fmt: skip
REDUCE = 2  # copies that an all-reduce sends
SLIGHT = 1 / 8  # the fraction of more bytes that does not count
TINY = 1 / 1024  # the bytes that do not count, as a fraction of the largest tensor: those of a bias beside activations


class Dominance:
    """Decides which choices of a body are dominated. What choices send, inside and by changes of type, is computed once.

    Args:
        body: the operator's body.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        sizes = (body.tensor(a).nbytes for a in (*body.inputs, *body.outputs))
        self.slight = max(sizes, default=0) * TINY
        self.reduce_in = ("", *{t.dtype.name for t in body.tensors.values() if narrow(t.dtype)})
        self.inside: dict[
            tuple[int, str], tuple[Choice, tuple[float, float]]
        ] = {}  # the choice is kept, so that its id stays its own
        self.around: dict[tuple[str, int], Sequence[Mapping[str, tuple[float, float]]]] = {}

    def superfluous(self, choice: Choice, others: Collection[Choice], users: int = 1) -> bool:
        """Return whether others dominate a choice that reduces, scatters, replicates or contributes values inside.

        A choice that reduces values but has no partial operands is dominated only by one that partitions the same operands, and
        either has the same results or a partial result in place of a whole one.

        Args:
            choice: the choice.
            others: the other choices.
            users: the number of operators that read a result, each of which would change its type.
        """
        if PARTIAL not in choice.operands and any(r.kind for r in choice.reduced):
            others = [c for c in others if _partitions(c) == _partitions(choice) and _leaves_results(c, choice)]
        others = [c for c in others if _may_replace(c, choice) and not self._reduces_more(c, choice)]
        for reduce_in in self.reduce_in:
            forward, backward = (sent * (1 + SLIGHT) + self.slight for sent in _inside(self.body, choice, reduce_in))
            if not any(self._replaces(other, choice, (forward, backward), reduce_in, users) for other in others):
                return False
        return True

    def _reduces_more(self, choice: Choice, other: Choice) -> bool:
        """Return whether another choice adds to a small partial sum, as to a loop's carry, that has to be reduced for this one.

        Its bytes do not count, but in every step of a loop it is a message.
        """
        places = zip(self.body.inputs, other.operands, choice.operands, strict=True)
        carried = [v for v, s, t in places if s == PARTIAL != t and self.body.tensor(v).nbytes <= self.slight]
        return PARTIAL in other.results and bool(carried)

    def _replaces(self, choice: Choice, other: Choice, limits: tuple[float, float], reduce_in: str, users: int) -> bool:
        """Return whether a choice with changes of type around it sends no more than some limits, forward and backward.

        Args:
            choice: the choice.
            other: the choice that it would replace.
            limits: the bytes.
            reduce_in: the narrow type whose partial sums are sent in that type; "" for none.
            users: the number of operators that read a result, each of which would change its type.
        """
        forward, backward = self._sent_inside(choice, reduce_in)
        operands = zip(other.operands, choice.operands, strict=True)
        results = zip(choice.results, other.results, strict=True)
        for (before, after), changes in zip((*operands, *results), self._changes(reduce_in, users), strict=True):
            if before != after:
                more_forward, more_backward = changes[before.kind + after.kind]
                forward, backward = forward + more_forward, backward + more_backward
                if forward > limits[0] or backward > limits[1]:
                    return False
        return forward <= limits[0] and backward <= limits[1]

    def _sent_inside(self, choice: Choice, reduce_in: str) -> tuple[float, float]:
        """Return the bytes that another choice sends inside, forward and backward."""
        key = id(choice), reduce_in
        if key not in self.inside:
            self.inside[key] = choice, _inside(self.body, choice, reduce_in)
        return self.inside[key][1]

    def _changes(self, reduce_in: str, users: int) -> Sequence[Mapping[str, tuple[float, float]]]:
        """Return, for each operand and result, the bytes that its changes of type send, by the kinds of the states."""
        if (reduce_in, users) not in self.around:
            atoms = (*((1, v) for v in self.body.inputs), *((users, a) for a in self.body.outputs))
            self.around[reduce_in, users] = [self._changes_of(a, times, reduce_in) for times, a in atoms]
        return self.around[reduce_in, users]

    def _changes_of(self, atom: Atom, times: int, reduce_in: str) -> Mapping[str, tuple[float, float]]:
        """Return the bytes that changes of type of an operand or a result send `times` times, by the kinds of the states."""
        tensor = self.body.tensor(atom)
        has_gradient = isinstance(atom, int) and not has_no_gradient(self.body, atom)
        sent = {kinds: _sent(tensor, kinds, reduce_in) for kinds in COPIES}
        return {kinds: (times * forward, times * backward if has_gradient else 0.0) for kinds, (forward, backward) in sent.items()}


def _partitions(choice: Choice) -> list[State | None]:
    return [s if s.kind == "P" else None for s in choice.operands]


def _leaves_results(choice: Choice, other: Choice) -> bool:
    """Return whether a choice has the results of another one, or a partial result where that has a whole one."""
    return choice.results == other.results or any(s == PARTIAL != t for s, t in zip(choice.results, other.results, strict=True))


def _may_replace(choice: Choice, other: Choice) -> bool:
    """Return whether a choice divides as much of the work as another one, and fits as many degrees."""
    return not (choice.halos or choice.divided < other.divided or (choice.size and (not other.size or choice.size % other.size)))


def _sent(tensor: Tensor, kinds: str, reduce_in: str) -> tuple[float, float]:
    """Return the bytes that a change of type sends, by the kinds of the states before and after."""
    forward, backward = COPIES[kinds]
    wide = tensor.nbytes * growth(tensor.dtype, reduce_in)
    return forward * (wide if kinds[0] == "S" else tensor.nbytes), backward * (wide if kinds[1] == "R" else tensor.nbytes)


def _inside(body: Body, choice: Choice, reduce_in: str) -> tuple[float, float]:
    """Return the bytes that a choice sends inside, forward and backward."""
    wide = ((r, growth(r.dtype, reduce_in) if not r.kind or r.kind == "sum" else 1.0) for r in choice.reduced)
    sums = [(r, REDUCE * r.nbytes * factor) for r, factor in wide]
    sent = [(nbytes if r.kind else 0.0, nbytes if r.users else 0.0) for r, nbytes in sums]
    moved = (x for x in choice.scattered if x.before != x.after)
    sent += [_sent(body.tensors[x.variable], x.before.kind + x.after.kind, reduce_in) for x in moved]
    return sum(forward for forward, _ in sent), sum(backward for _, backward in sent)
