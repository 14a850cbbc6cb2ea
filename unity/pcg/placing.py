"""Where every variable of an operator's body lies, given the types at its ends."""

from __future__ import annotations

from functools import lru_cache

from unity.pcg.body import Body
from unity.pcg.solve import Solution, solve
from unity.pcg.state import REPLICATED, UNUSED, State, Type

Placing = tuple[Solution | None, ...]  # one for each axis; None: unused by all


@lru_cache(maxsize=65536)
def placing(body: Body, operands: tuple[Type, ...], results: tuple[Type, ...], n_axes: int) -> Placing:
    """The states of all variables along each axis. Raises Unmatched where the operator cannot be parallelized so."""
    return tuple(along_axis(body, tuple(t[k] for t in operands), tuple(t[k] for t in results)) for k in range(n_axes))


@lru_cache(maxsize=65536)
def along_axis(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> Solution | None:
    """The states of a body's variables along one axis, given those at its ends. None where the axis is unused."""
    states = operands + results
    if all(s == UNUSED for s in states):
        return None
    if all(s == REPLICATED for s in states):
        return Solution(dict.fromkeys(body.tensors, REPLICATED), {}, (), operands, results)
    known = dict(zip(body.inputs, operands, strict=True))
    ends = zip(body.outputs, results, strict=True)
    known |= {a: s for a, s in ends if isinstance(a, int) and s != UNUSED}
    return solve(body, known)
