"""The products whose results recomputed layers may save: sets of them, from all to none, by the operations that a byte spares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unity.pcg.capture.heavy_operators import is_fused_product
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.propagation.scan_programs import inside
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import facts_of
from unity.transforms.recomputing.layers import Span, equations_in_layers

FEW = 4096  # the most combinations of numbers of products that are compared

SavedProducts = Mapping[str, tuple[int, ...]]  # places of products in a program and in the steps of its scans, by content hash


@dataclass(frozen=True)
class RepeatedProduct:
    """A product in a recomputed span.

    Args:
        program: The content hash of its program.
        place: Its number among the equations in layers of that program.
        flops: The floating-point operations of its recomputation, in all steps of the scan if it is in one.
        nbytes: The bytes of its results, likewise.
    """

    program: str
    place: int
    flops: float
    nbytes: int


def repeated_products(body: Body, spans: Mapping[str, Sequence[Span]], times: int = 1) -> list[RepeatedProduct]:
    """Return the products that the backward pass computes again if spans of a program, and of steps of its scans, save nothing.

    Args:
        body: The program.
        spans: The recomputed spans of each program.
        times: How often the program runs.
    """
    numbers, products = equations_in_layers(body), list[RepeatedProduct]()
    for start, stop in spans.get(body.key, ()):
        for k in _read_again(body, numbers, (start, stop)):
            e = body.equations[numbers[k]]
            spec = spec_of(body, e)
            nbytes = sum(body.tensors[v].nbytes for v in e.results)
            products += [RepeatedProduct(body.key, k, times * spec.flops, times * nbytes)] if spec is not None else []
    for e in body.equations:
        step = inside(e) if e.name in SCANNED else None
        products += repeated_products(step, spans, times * e.params["length"]) if step is not None else []
    return products


def saved_sets(products: Sequence[RepeatedProduct]) -> list[SavedProducts]:
    """Return sets of products that may be saved, from all of them to none; a smaller one spares fewer operations.

    Of products that are equally large, the last ones are saved, for the results of the first would be live the longest. Where the
    numbers of each kind have few combinations, as in the steps of a scan, all are compared. Otherwise the products that spare the
    fewest operations for their bytes are left out one after the other.
    """
    kinds = dict[tuple[float, int], list[RepeatedProduct]]()
    for p in sorted(products, key=lambda p: (p.flops / max(p.nbytes, 1), p.place)):
        kinds.setdefault((p.flops, p.nbytes), []).append(p)
    if prod(len(kind) + 1 for kind in kinds.values()) > FEW:
        order = [p for kind in kinds.values() for p in kind]
        return [_by_program(order[k:]) for k in range(len(order) + 1)]
    every = [_SavedCounts.of(kinds, counts) for counts in product(*(range(len(kind) + 1) for kind in kinds.values()))]
    best, most = list[_SavedCounts](), -1.0
    for saved in sorted(every, key=lambda saved: (saved.nbytes, -saved.flops)):
        if saved.flops > most:
            best.append(saved)
            most = saved.flops
    return [
        _by_program(p for kind, count in zip(kinds.values(), saved.counts, strict=True) for p in kind[len(kind) - count :])
        for saved in reversed(best)
    ]


@dataclass(frozen=True)
class _SavedCounts:
    """How many products of each kind are saved, their bytes, and the operations that they spare."""

    counts: tuple[int, ...]
    nbytes: int
    flops: float

    @classmethod
    def of(cls, kinds: Iterable[tuple[float, int]], counts: tuple[int, ...]) -> _SavedCounts:
        pairs = list(zip(kinds, counts, strict=True))
        return cls(counts, sum(n * nbytes for (_, nbytes), n in pairs), sum(n * flops for (flops, _), n in pairs))


def is_product(body: Body, equation: Equation) -> bool:
    """Return whether an equation is a product or a convolution that is compiled to one kernel."""
    return facts_of(equation.name).product and not is_fused_product(body, equation)


def _by_program(products: Iterable[RepeatedProduct]) -> SavedProducts:
    places = dict[str, tuple[int, ...]]()
    for p in sorted(products, key=lambda p: p.place):
        places[p.program] = (*places.get(p.program, ()), p.place)
    return places


def _read_again(body: Body, numbers: Sequence[int], span: Span) -> list[int]:
    """Return the places of the products in a span whose results its recomputation reads.

    A derivative reads no operand of an equation that is linear in all of them together. So the last product before a sum with
    the residual stream is not computed again.
    """
    read, places = set[int](), list[int]()
    for k in reversed(range(*span)):
        e = body.equations[numbers[k]]
        again = not read.isdisjoint(e.results)
        if again and is_product(body, e):
            places.append(k)
        if again or not _is_jointly_linear(body, e):
            read.update(a for a in e.operands if isinstance(a, int))
    return places


def _is_jointly_linear(body: Body, e: Equation) -> bool:
    spec = spec_of(body, e)
    groups = (*(spec.linear if spec is not None else ()), *facts_of(e.name).linear_in)
    return any(all(p in group for p, a in enumerate(e.operands) if isinstance(a, int)) for group in groups)
