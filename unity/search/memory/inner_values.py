"""What the values inside of operators take on one device: found once for all operators that lie alike, and all their graphs."""

from __future__ import annotations

from functools import cached_property, lru_cache

from unity.pcg.analysis.residuals import Residuals, residuals
from unity.pcg.ir.program import Body
from unity.pcg.propagation.halos import extended
from unity.pcg.propagation.placement import placing
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type


class Inner:
    """The inner values of an operator whose ends lie in one way.

    `extended`: of each operand, the bytes of the copy that has what neighbours hold of it, too; none without a halo.
    """

    def __init__(self, body: Body, operands: tuple[Type, ...], results: tuple[Type, ...], axes: tuple[Axis, ...]) -> None:
        self.body = body
        found = placing(body, operands, results, len(axes))
        self.split = [(axis.size, s.states) for axis, s in zip(axes, found, strict=True) if s is not None]
        elements = extended(body, found, axes)
        self.extended = tuple(elements.get(v, 0) * body.tensors[v].itemsize for v in body.inputs)
        self.known: dict[tuple[tuple[bool, ...], bool], tuple[Residuals, tuple[float, ...]]] = {}

    def local(self, variable: int, nbytes: float) -> float:
        """Bytes on one device of a value that lies like this variable."""
        for size, states in self.split:
            state = states.get(variable)
            nbytes /= size if state is not None and state.kind == "P" else 1
        return nbytes

    @cached_property
    def largest(self) -> float:
        """Bytes of the largest on one device, but for what the last equation makes."""
        made = (v for e in self.body.equations[:-1] for v in e.results)
        return max((self.local(v, self.body.tensors[v].nbytes) for v in made), default=0.0)

    @cached_property
    def looked_up(self) -> float:
        """Bytes on one device of the inner values that elements are looked up in."""
        made = (e.operands[0] for e in self.body.equations if e.name == "gather")
        return sum(self.local(v, self.body.tensors[v].nbytes) for v in made if isinstance(v, int) and self.body.tensors[v].floating)

    def kept(self, differentiated: tuple[bool, ...], stacked: bool) -> tuple[Residuals, tuple[float, ...]]:
        """What the backward pass needs, as `pcg.residuals` has it, and the bytes on one device of each inner value among it."""
        key = differentiated, stacked
        if key not in self.known:
            found = residuals(self.body, differentiated, stacked)
            self.known[key] = found, tuple(self.local(v, nbytes) for v, nbytes in found.inner)
        return self.known[key]


@lru_cache(maxsize=65536)
def inner_of(body: Body, operands: tuple[Type, ...], results: tuple[Type, ...], axes: tuple[Axis, ...]) -> Inner:
    """The inner values of an operator."""
    return Inner(body, operands, results, axes)
