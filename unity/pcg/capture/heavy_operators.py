"""Def-use chains of a body, and the classes of its equations: light, reducing, constant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unity.pcg.ir.program import Body, Equation
from unity.pcg.operators.table import TABLE
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import Shape

PLATFORM = "platform_index"  # a primitive without operands: the index by which a `cond` selects the platform's branch
REPEATED = 48  # the most equations of a constant that every user recomputes; a larger constant is a separate operator
Reduction = tuple[Shape, tuple[int, ...]]  # the shape of an operand, and the axes that are reduced
SMALL = 8  # statistics are at least this factor smaller than their operand


def light(body: Body, equation: Equation) -> bool:
    """Return whether an equation may be part of a composite."""
    if equation.name == "dot_general":
        return is_fused_product(body, equation)
    return equation.name == "custom_jvp_call" or (equation.name in TABLE and not TABLE[equation.name].facts.alone)


def is_fused_product(body: Body, equation: Equation) -> bool:
    """Return whether XLA fuses a product like elementwise work: it is an inner product, or sums nothing (`nhc,nc->nhc`)."""
    return is_inner_product(body, equation) or multiplies(equation)


def is_inner_product(body: Body, equation: Equation) -> bool:
    """Return whether a product multiplies elementwise and sums: it has no free dimensions, and XLA fuses it like a sum."""
    if equation.name != "dot_general" or multiplies(equation):
        return False
    summed, kept = equation.params["dimension_numbers"]
    return all(body.tensor(a).ndim == len(summed[k]) + len(kept[k]) for k, a in enumerate(equation.operands))


def multiplies(equation: Equation) -> bool:
    """Return whether an equation is a product that sums nothing: XLA compiles it to a multiplication of broadcast operands."""
    return equation.name == "dot_general" and not equation.params["dimension_numbers"][0][0]


def reduces(body: Body, equation: Equation) -> bool:
    """Return whether a light equation reduces a dimension, to a sum or another statistic."""
    facts = facts_of(equation.name)
    return (facts.reads_buffers and not facts.alone) or is_inner_product(body, equation)


def reductions(body: Body, equations: Iterable[Equation]) -> frozenset[Reduction]:
    """Return the shapes that some equations reduce, each with the axes."""
    reducing = (e for e in equations if reduces(body, e) and "axes" in e.params)
    return frozenset((body.tensor(e.operands[0]).shape, tuple(e.params["axes"])) for e in reducing)


def crosses(one: Iterable[Reduction], other: Iterable[Reduction]) -> bool:
    """Return whether some reductions are over the rows, and others over the columns, of tensors of one shape."""
    return any(a == b and set(rows).isdisjoint(columns) for a, rows in one for b, columns in other)


class Uses:
    """The def-use chains of a body.

    ends: the variables that are outputs of the body.
    users: the equations that read each variable.
    maker: the equation that computes each variable.
    statistics: small variables that depend on a reduction of something large, each with the large variables.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.ends = {a for a in body.outputs if isinstance(a, int)}
        self.users: dict[int, list[int]] = {}
        self.maker: dict[int, int] = {}
        for i, e in enumerate(body.equations):
            for a in e.operands:
                if isinstance(a, int):
                    self.users.setdefault(a, []).append(i)
            self.maker.update((v, i) for v in e.results)
        self.statistics = self._statistics()

    def _statistics(self) -> dict[int, frozenset[int]]:
        tensors = self.body.tensors
        statistics: dict[int, frozenset[int]] = {}
        roots: dict[int, frozenset[int]] = {}  # variable with a single user → the variables that it depends on
        for e in self.body.equations:
            operands = [a for a in e.operands if isinstance(a, int)]
            is_light = light(self.body, e)
            sources = (statistics.get(a) or roots.get(a) or {a} for a in operands if is_light)
            below = frozenset[int]().union(*sources)
            largest = max((tensors[a].nbytes for a in operands), default=0)
            statistic = reduces(self.body, e) and all(SMALL * tensors[v].nbytes <= largest for v in e.results)
            from_statistics = [a in statistics for a in operands]
            small = any(from_statistics) and all(a in statistics or SMALL * tensors[a].nbytes <= largest for a in operands)
            small = small or (bool(operands) and all(from_statistics))
            for v in e.results:
                if is_light and tensors[v].floating and (statistic or (small and tensors[v].nbytes <= largest)):
                    statistics[v] = below
                elif len(self.users.get(v, ())) == 1 and len(below) <= 8:
                    roots[v] = below
        return statistics

    def is_used_often(self, v: int, inside: set[int]) -> bool:
        """Return whether several equations of a cluster read a variable, as it is or in another precision."""
        users = [u for u in self.users.get(v, ()) if u in inside]
        if len(users) == 1 and self.body.equations[users[0]].name == "convert_element_type":
            return self.is_used_often(self.body.equations[users[0]].results[0], inside)
        return len(users) > 1

    def outputs(self, members: Iterable[int], inside: set[int]) -> tuple[int, ...]:
        """Return the results of the equations `members` that are outputs of the body or read outside of `inside`."""
        results = [v for i in members for v in self.body.equations[i].results]
        return tuple(v for v in results if v in self.ends or any(u not in inside for u in self.users.get(v, ())))


def constants(body: Body) -> Mapping[int, int]:
    """Return the cheap variables that depend on no input, each with its equation. Every user recomputes them."""
    producers: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for i, e in enumerate(body.equations):
        cheap = e.name == PLATFORM or (light(body, e) and not (facts_of(e.name).looks_up or facts_of(e.name).draws))
        if cheap and all(not isinstance(a, int) or a in producers for a in e.operands):
            size = 1 + sum(sizes[a] for a in e.operands if isinstance(a, int))
            if size <= REPEATED:
                producers.update((v, i) for v in e.results)
                sizes.update((v, size) for v in e.results)
    return producers
