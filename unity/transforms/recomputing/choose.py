"""The choice of the layers that the backward pass recomputes: candidates, each priced by a search of its program.

When the backward pass reaches a layer, the residuals of all layers before it are live. So of equal layers the first ones are
recomputed: few residuals are then live while the inner values of a recomputed layer are. `least_number` chooses how many.
The very first may differ from the others, for nothing asks for the gradient of a batch; so those after it are a choice, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from types import MappingProxyType
from typing import TypeAlias

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED
from unity.search.session import Search
from unity.transforms.least_number import LimitedChoice, LimitedWish, Numbered, Programs, Way
from unity.transforms.recomputing.layers import Places, Span, equations_in_layers, layers, together
from unity.transforms.recomputing.products import SavedProducts, recomputed_products, saved_sets
from unity.transforms.recomputing.recomputing import Policy, Recomputing, Spans, recomputing, steps

RecomputingChoice: TypeAlias = LimitedChoice[Recomputing]


@dataclass(frozen=True, eq=False)
class RecomputingWish(LimitedWish):
    """The request for a program with recomputed layers.

    Args:
        offload: Whether products with weights inside of them may be offloaded to the host.
    """

    offload: bool = False


def best(captured: Captured, wish: RecomputingWish) -> RecomputingChoice:
    """Return the best program with recomputed layers that fits and is better than the plan to beat.

    If there is a plan to beat, the program fits without recomputation; then only single layers are recomputed, no groups or halves.
    """
    programs, layered = Programs[Recomputing](wish), LayeredProgram(captured.body)

    def numbered(spans: Callable[[int], Spans], count: int, saved: Policy = "nothing") -> Numbered[Recomputing]:
        return Numbered(lambda k: _way(captured, wish, spans(k), saved), count)

    number = programs.refine(numbered(layered.repeated, layered.count))
    for fewer in {number, number - 1} - {-1, 0, layered.count}:
        programs.worth(_way(captured, wish, layered.later(fewer)))
    programs.refine(numbered(layered.every, len(layered.chain.every)))
    programs.refine(numbered(layered.repeated, layered.count, "products"))
    repeated, every = layered.repeated(layered.count), layered.every(len(layered.chain.every))
    for spans in [repeated, every] if repeated != every else [every]:
        _refine_products(captured, wish, programs, spans)
    if wish.offload:
        programs.refine(numbered(layered.repeated, layered.count, "offloaded products"))
    if wish.than is None:
        programs.refine(numbered(layered.grouped, len(layered.groups)))
        for spans in layered.others():
            programs.worth(_way(captured, wish, spans))
    return programs.choice


def _refine_products(captured: Captured, wish: RecomputingWish, programs: Programs[Recomputing], spans: Spans) -> None:
    """Search programs whose checkpoints around some spans save products in them: all, or as many as fit.

    A number is how many more products are computed again, since a larger number has to need less memory.
    """
    whole = _way(captured, wish, spans)
    if whole is None:
        return
    machine = programs.program(whole)[1].machine
    sets = saved_sets(recomputed_products(captured.body, spans, machine))
    if len(sets) < 2:
        return
    chosen = Numbered(lambda k: _way(captured, wish, spans, "some products", sets[k]), len(sets) - 1)
    all_saved = chosen.way(0)
    if all_saved is not None and programs.suffices(programs.unrefined(programs.program(all_saved)[1])):
        programs.worth(all_saved)
    else:
        programs.refine(chosen)


def best_steps_of_scans(captured: Captured, wish: RecomputingWish) -> RecomputingChoice:
    """Return the program in which the steps of scans keep products alone, if it is better than the plan to beat.

    Fewer values are stacked then, which may be faster: of a GRU on eight A100s, 6 %.
    """
    programs, spans = Programs[Recomputing](wish), _of_steps(steps(captured.body.equations), 1)
    programs.worth(_way(captured, wish, spans, "products"))
    return programs.choice


def of_all_layers(captured: Captured) -> Recomputing | None:
    """Return the recomputation of all repeated layers of a program, and of the steps of its scans, or None if it has none."""
    layered = LayeredProgram(captured.body)
    spans = layered.repeated(layered.count)
    return recomputing(captured, spans, known=captured.bodies) if spans else None


def _way(
    captured: Captured,
    wish: RecomputingWish,
    spans: Spans,
    saved: Policy = "nothing",
    products: SavedProducts = MappingProxyType({}),
) -> Way[Recomputing] | None:
    """Return the recomputation of some spans; None if there are none."""
    if saved == "some products" and not products:
        saved = "nothing"

    def transform() -> tuple[Recomputing, Search]:
        transformation = recomputing(captured, spans, saved, captured.bodies, products)
        return transformation, wish.search(transformation.after)

    count = sum(map(len, products.values()))
    text = f"recomputing {sum(map(len, spans.values()))} parts of the program{f', saving {count} products' if count else ''}"
    return Way((frozenset(spans.items()), saved, frozenset(products.items())), text, transform) if spans else None


class LayeredProgram:
    """A program with its layers, and the steps of its scans: the spans of them that may be recomputed together."""

    def __init__(self, body: Body) -> None:
        self.body, self.equations = body, equations_in_layers(body)
        self.places = Places.of(body, self.equations)
        self.chain = layers(body, self.equations, self.places)
        inside = {i for span in self.chain.repeated for i in self.equations[slice(*span)]}
        self.scans = [e for i, e in enumerate(body.equations) if i not in inside and e.name in SCANNED]

    @property
    def count(self) -> int:
        """The number of repeated layers."""
        return len(self.chain.repeated)

    def repeated(self, count: int) -> Spans:
        """Return the first `count` repeated layers, and the steps of scans outside of layers."""
        return self.spans(self.chain.repeated[:count])

    def later(self, count: int) -> Spans:
        """Return `count` repeated layers after the first one, and the steps of scans outside of layers."""
        return self.spans(self.chain.repeated[1 : 1 + count])

    def every(self, count: int) -> Spans:
        """Return the first `count` of the layers and the parts beside them, and the steps of scans outside of layers."""
        return self.spans(self.chain.every[:count])

    @cached_property
    def groups(self) -> list[Span]:
        """The layers and the parts beside them in groups of about the root of their number."""
        return together(self.chain.every, round(sqrt(len(self.chain.every))))

    def grouped(self, count: int) -> Spans:
        """Return the first `count` groups, and the steps of scans outside of layers."""
        return self.spans(self.groups[:count])

    def others(self) -> Iterator[Spans]:
        """Yield other choices that recompute all layers.

        These are pairs, groups of about the root of their number, layers and steps in halves, layers with the steps of scans in
        them, and layers together with the parts of the program beside them in halves.
        """
        repeated, every = self.chain.repeated, self.chain.every
        yield self.spans(together(repeated, 2))
        yield self.spans(together(repeated, round(sqrt(self.count))))
        yield self.spans(self.halves(repeated), 2)
        yield self.spans(repeated) | _of_steps(steps(self.body.equations), 1)
        yield self.spans(self.halves(every), 2)

    def halves(self, spans: Sequence[Span]) -> list[Span]:
        """Divide each span into two."""
        return [half for span in spans for half in self.places.divided(span, 2)]

    def spans(self, own: Sequence[Span], parts: int = 1) -> dict[str, tuple[Span, ...]]:
        """Return spans of the outermost program, and the steps of scans outside of layers as a number of parts."""
        mine = _new(self.body, self.equations, own)
        return _of_steps(steps(self.scans), parts) | ({self.body.key: mine} if mine else {})


def _of_steps(bodies: Iterable[Body], parts: int) -> dict[str, tuple[Span, ...]]:
    """Return the steps of scans as a number of parts each."""
    spans = dict[str, tuple[Span, ...]]()
    for step in bodies:
        equations = equations_in_layers(step)
        divided = Places.of(step, equations).divided((0, len(equations)), parts) if equations else []
        spans |= {step.key: new} if (new := _new(step, equations, divided)) else {}
    return spans


def _new(body: Body, equations: Sequence[int], spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans that hold more than checkpoints of the user."""
    return tuple(span for span in spans if any(body.equations[i].name not in REMATERIALIZED for i in equations[slice(*span)]))
