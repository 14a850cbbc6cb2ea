"""Who makes and who uses the variables of a body; which equations are light enough to be part of a composite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.operators.table import TABLE
from unity.pcg.types.factors import facts_of

PLATFORM = "platform_index"  # which has no operands: a number that a `cond` tells platforms apart by
REPEATED = 48  # equations of a constant that are computed again at every use; a larger one is an operator of its own
SMALL = 8  # statistics are smaller than what they are taken of by at least this


def light(body: Body, equation: Equation) -> bool:
    """Whether an equation may be part of a composite."""
    if equation.name == "dot_general":
        return is_inner_product(body, equation)
    return equation.name == "custom_jvp_call" or (equation.name in TABLE and not TABLE[equation.name].facts.alone)


def is_inner_product(body: Body, equation: Equation) -> bool:
    """Return whether a product has no free dimensions: it multiplies elementwise and sums, and XLA fuses it like a sum."""
    if equation.name != "dot_general":
        return False
    summed, kept = equation.params["dimension_numbers"]
    return all(body.tensor(a).ndim == len(summed[k]) + len(kept[k]) for k, a in enumerate(equation.operands))


def reduces(body: Body, equation: Equation) -> bool:
    """Return whether a light equation reduces a dimension, to a sum or another statistic."""
    facts = facts_of(equation.name)
    return (facts.reads_buffers and not facts.alone) or is_inner_product(body, equation)


def pure(equation: Equation) -> bool:
    """Return whether equal equations of the same operands are computed once: products, loops and other heavy work, too."""
    return equation.name in NESTING or (equation.name in TABLE and not TABLE[equation.name].facts.distinct)


class Uses:
    """Which equations use and make each variable of a body, found once."""

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
        """Small variables that come from a reduction of something large, and what large variables those are taken of."""
        tensors = self.body.tensors
        found: dict[int, frozenset[int]] = {}
        roots: dict[int, frozenset[int]] = {}  # of a variable used once: what its equation reads
        for e in self.body.equations:
            operands = [a for a in e.operands if isinstance(a, int)]
            easy = light(self.body, e)
            below = frozenset[int]().union(*(found.get(a) or roots.get(a) or {a} for a in operands)) if easy else frozenset()
            largest = max((tensors[a].nbytes for a in operands), default=0)
            statistic = reduces(self.body, e) and all(SMALL * tensors[v].nbytes <= largest for v in e.results)
            small = any(a in found for a in operands) and all(a in found or SMALL * tensors[a].nbytes <= largest for a in operands)
            small = small or (bool(operands) and all(a in found for a in operands))
            for v in e.results:
                if easy and tensors[v].floating and (statistic or (small and tensors[v].nbytes <= largest)):
                    found[v] = below
                elif len(self.users.get(v, ())) == 1 and len(below) <= 8:
                    roots[v] = below
        return found

    def often(self, v: int, inside: set[int]) -> bool:
        """Whether a variable is used more than once in a cluster, as it is or in another precision."""
        users = [u for u in self.users.get(v, ()) if u in inside]
        if len(users) == 1 and self.body.equations[users[0]].name == "convert_element_type":
            return self.often(self.body.equations[users[0]].results[0], inside)
        return len(users) > 1

    def outputs(self, members: Iterable[int], inside: set[int]) -> tuple[int, ...]:
        """Variables made by `members` and used elsewhere. An operator without any still has its last equation's."""
        made = [v for i in members for v in self.body.equations[i].results]
        return tuple(v for v in made if v in self.ends or any(u not in inside for u in self.users.get(v, ())))


def constants(body: Body) -> Mapping[int, int]:
    """Variables that depend on no input and are cheap → the equation that makes them. They are computed wherever they are used."""
    found: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for i, e in enumerate(body.equations):
        cheap = e.name == PLATFORM or (light(body, e) and e.name not in ("random_bits", "gather"))
        if cheap and all(not isinstance(a, int) or a in found for a in e.operands):
            size = 1 + sum(sizes[a] for a in e.operands if isinstance(a, int))
            if size <= REPEATED:
                found.update((v, i) for v in e.results)
                sizes.update((v, size) for v in e.results)
    return found
