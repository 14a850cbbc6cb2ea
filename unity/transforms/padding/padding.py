"""The transformation that pads dimensions which the devices do not divide, and packs weights with the zeros behind them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unity.base.documents import Positive, Record
from unity.base.errors import PlanError
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.capture.packed_arguments import NOTHING, Packed, Packing
from unity.pcg.types.parallel_type import Shape
from unity.transforms.padding.fills import enlarged
from unity.transforms.padding.padded_program import padded_body
from unity.transforms.transformation import Transformation, TransformationRecord, TransformationSource


@dataclass(frozen=True)
class PaddedWeight(Packed):
    """A weight with zeros behind it.

    Attributes:
        true: its shape.
        padded: the shape with the zeros.
    """

    true: Shape
    padded: Shape

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.true,)

    @property
    def stacked(self) -> Shape:
        return self.padded

    def join(self, library: Any, arrays: Sequence[Any]) -> Any:
        return library.pad(arrays[0], [(0, m - n) for n, m in zip(self.true, self.padded, strict=True)])

    def parts(self, array: Any) -> list[Any]:
        return [array[tuple(slice(n) for n in self.true)]]


class PaddedSize(Record):
    """A size of dimensions, and the size to which they are padded."""

    size: Positive
    padded: Positive


class PaddingRecord(TransformationRecord, tag="padding"):
    """A `Padding` in a document: the padded sizes, whether weights are packed, and the hash of the graph after it."""

    graph: str
    sizes: tuple[PaddedSize, ...]
    stored: bool

    def apply(self, source: TransformationSource) -> Padding:
        sizes = {s.size: s.padded for s in self.sizes}
        if any(padded <= size for size, padded in sizes.items()):
            raise PlanError("it pads dimensions to sizes that are not larger")
        again = padding(source.program, sizes, self.stored)
        if again is None or again.after.graph.key != self.graph:
            raise PlanError("its padding leads to another graph: it was made by another version of unity")
        return again


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Transformation):
    """A program before and after dimensions of some sizes were padded.

    Attributes:
        sizes: the padded size of each size of a dimension of an input.
        stored: whether weights are stored with the padding, so that a step pads none.
    """

    kind = "padding"
    title = "Padded"
    effect = "Dimensions that the devices do not divide are padded to larger sizes"

    sizes: Mapping[int, int]
    stored: bool

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} to {m}" for n, m in self.sizes.items())
        return f"dimensions padded from {sizes}{', weights stored so' if self.packing else ''}"

    @property
    def record(self) -> PaddingRecord:
        sizes = tuple(PaddedSize(n, m) for n, m in self.sizes.items())
        return PaddingRecord(self.after.graph.key, sizes, self.stored)

    def check(self) -> None:
        self._check_same(padding(self.before, self.sizes, self.stored))


def padding(captured: Captured, sizes: Mapping[int, int], stored: bool, known: Bodies | None = None) -> Padding | None:
    """Return a program with all dimensions of inputs of some sizes padded, or None if no input has one.

    Args:
        captured: the program.
        sizes: the padded size of each size.
        stored: whether floating differentiated inputs are stored with the padding.
        known: see `graph_of`.
    """
    body = captured.body
    inputs = padded_inputs(captured, sizes)
    if not inputs or not body.equations:
        return None
    weights = [k for k in inputs if stored and k in captured.differentiated and body.tensors[body.inputs[k]].floating]
    after = captured.of(padded_body(body, inputs, weights, captured.differentiated), known)
    shapes = {k: body.tensors[body.inputs[k]].shape for k in weights}
    packing = Packing(tuple(PaddedWeight((k,), shape, enlarged(shape, inputs[k])) for k, shape in shapes.items()))
    return Padding(captured, after, dict(sizes), stored, packing=packing if weights else NOTHING)


def padded_inputs(captured: Captured, sizes: Collection[int] | Mapping[int, int]) -> dict[int, dict[int, int]]:
    """Return the padded sizes of the dimensions of inputs, by the number of the input."""
    table = dict(sizes) if isinstance(sizes, Mapping) else {n: n for n in sizes}
    tensors = [captured.body.tensors[v] for v in captured.body.inputs]
    dimensions = ({d: table[n] for d, n in enumerate(t.shape) if n in table} for t in tensors)
    return {k: dims for k, dims in enumerate(dimensions) if dims}
