"""The products whose results recomputed layers may save: sets of them, from all to none, by the time that a byte spares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod

from unity.machine.machine import Machine
from unity.pcg.capture.heavy_operators import is_fused_product
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.propagation.nested.scan_programs import inside
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import facts_of
from unity.search.cost.operator_seconds import seconds, single_piece
from unity.transforms.recomputing.layers import Span, equations_in_layers

FEW = 4096  # the most combinations of numbers of products that are compared

SETS = 32  # about how many sets are offered

SavedProducts = Mapping[str, tuple[int, ...]]  # places of products in a program and in the steps of its scans, by content hash


@dataclass(frozen=True)
class RecomputedProduct:
    """A product in a recomputed span.

    Args:
        program: The content hash of its program.
        place: Its number among the equations in layers of that program.
        seconds: The time of its recomputation on one device, in all steps of the scan if it is in one.
        nbytes: The bytes of its results, likewise.
    """

    program: str
    place: int
    seconds: float
    nbytes: int


def recomputed_products(
    body: Body, spans: Mapping[str, Sequence[Span]], machine: Machine, times: int = 1
) -> list[RecomputedProduct]:
    """Return the products that the backward pass computes again if spans of a program, and of steps of its scans, save nothing.

    Those of programs nested in an equation of a span are not among them. Scans with the same step share its products.

    Args:
        body: The program.
        spans: The recomputed spans of each program.
        machine: The devices, which say how long a product takes.
        times: How often the program runs.
    """
    numbers, products = equations_in_layers(body), list[RecomputedProduct]()
    for start, stop in spans.get(body.key, ()):
        for k in _recomputed(body, numbers, (start, stop)):
            e = body.equations[numbers[k]]
            nbytes = sum(body.tensors[v].nbytes for v in e.results)
            products.append(RecomputedProduct(body.key, k, times * _seconds(body, e, machine), times * nbytes))
    for e in body.equations:
        step = inside(e) if e.name in SCANNED else None
        products += recomputed_products(step, spans, machine, times * e.params["length"]) if step is not None else []
    return _added_up(products)


def _added_up(products: Iterable[RecomputedProduct]) -> list[RecomputedProduct]:
    """Return products with the time and bytes of all scans that have the same step."""
    added = dict[tuple[str, int], RecomputedProduct]()
    for p in products:
        before = added.get((p.program, p.place), replace(p, seconds=0.0, nbytes=0))
        added[p.program, p.place] = replace(p, seconds=before.seconds + p.seconds, nbytes=before.nbytes + p.nbytes)
    return list(added.values())


def saved_sets(products: Sequence[RecomputedProduct]) -> list[SavedProducts]:
    """Return sets of products that may be saved, from all to none; each has fewer bytes, and spares less time, than the one before.

    Of products that are equally large, the last ones are saved, for the results of the first would be live the longest. Where the
    numbers of each kind have few combinations, as in the steps of a scan, all are compared. Otherwise the products that spare the
    least time for their bytes are left out, a few at a time.
    """
    kinds = dict[tuple[float, int], list[RecomputedProduct]]()
    for p in sorted(products, key=lambda p: (p.seconds / max(p.nbytes, 1), p.place)):
        kinds.setdefault((p.seconds, p.nbytes), []).append(p)
    if prod(len(kind) + 1 for kind in kinds.values()) > FEW:
        order = [p for kind in kinds.values() for p in kind]
        return [_by_program(order[k:]) for k in range(0, len(order), ceil(len(order) / SETS))] + [{}]
    every = [_SavedCounts.of(kinds, counts) for counts in product(*(range(len(kind) + 1) for kind in kinds.values()))]
    best, most = list[_SavedCounts](), -1.0
    for saved in sorted(every, key=lambda saved: (saved.nbytes, -saved.seconds)):
        if saved.seconds > most:
            best.append(saved)
            most = saved.seconds
    fewer = [*best[: -1 : ceil(len(best) / SETS)], best[-1]]
    return [
        _by_program(p for kind, count in zip(kinds.values(), saved.counts, strict=True) for p in kind[len(kind) - count :])
        for saved in reversed(fewer)
    ]


@dataclass(frozen=True)
class _SavedCounts:
    """How many products of each kind are saved, their bytes, and the time that they spare."""

    counts: tuple[int, ...]
    nbytes: int
    seconds: float

    @classmethod
    def of(cls, kinds: Iterable[tuple[float, int]], counts: tuple[int, ...]) -> _SavedCounts:
        pairs = list(zip(kinds, counts, strict=True))
        return cls(counts, sum(n * nbytes for (_, nbytes), n in pairs), sum(n * seconds for (seconds, _), n in pairs))


def _seconds(body: Body, e: Equation, machine: Machine) -> float:
    """Return the time that an equation takes on one device."""
    inputs = tuple(dict.fromkeys(a for a in e.operands if isinstance(a, int)))
    alone = Body(inputs, e.results, (e,), {v: body.tensors[v] for v in (*inputs, *e.results)})
    shapes, flows = [t.shape for t in alone.tensors.values()], [False] * len(inputs)
    forward, *_ = seconds(alone, shapes, single_piece(alone, shapes, 1.0, flows), flows, machine)
    return float(forward[0])


def _is_product(body: Body, equation: Equation) -> bool:
    """Return whether an equation is a product or a convolution that is not fused with operators around it."""
    return facts_of(equation.name).product and not is_fused_product(body, equation)


def _by_program(products: Iterable[RecomputedProduct]) -> SavedProducts:
    places = dict[str, tuple[int, ...]]()
    for p in sorted(products, key=lambda p: p.place):
        places[p.program] = (*places.get(p.program, ()), p.place)
    return places


def _recomputed(body: Body, numbers: Sequence[int], span: Span) -> list[int]:
    """Return the places of the products in a span that are computed again: those that a derivative, or what it reads, depends on.

    A derivative reads no operand of an equation that is linear in all of them together. So the last product before a sum with
    the residual stream is not computed again.
    """
    read, places = set[int](), list[int]()
    for k in reversed(range(*span)):
        e = body.equations[numbers[k]]
        again = not read.isdisjoint(e.results)
        if again and _is_product(body, e):
            places.append(k)
        if again or not _is_jointly_linear(body, e):
            read.update(a for a in e.operands if isinstance(a, int))
    return places


def _is_jointly_linear(body: Body, e: Equation) -> bool:
    spec = spec_of(body, e)
    groups = (*(spec.linear if spec is not None else ()), *facts_of(e.name).linear_in)
    return any(all(p in group for p, a in enumerate(e.operands) if isinstance(a, int)) for group in groups)
