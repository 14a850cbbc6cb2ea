"""What a compiler holds beyond what a program names, as named properties of the backend.

XLA's CPU backend, as its buffer assignments tell (`benchmarks/memory.py` compares):

- *widened*: products of bfloat16 and float16 are computed in float32, and their operands kept for the backward pass as that; and so
  is all that a loop's steps keep, as each takes its slices of what was converted as a whole, once.
- *eager*: it schedules for concurrency. What waits for nothing but arguments is computed at the start, and held until it is used
  (`search.ahead`): weights that are gathered, zeros that gradients are added to, and the following. And a cotangent that a product
  reads in two orders of dimensions is made in both at once, if nothing else reads it: a bias's gradient, or a conversion.
- *turns*: convolutions want channels last. Kernels and images that are arguments are turned, in one way for the forward pass, in
  another for the backward pass; what comes from other devices is turned when it is there. Others are turned by what makes them, and
  kept so, beside what was made if something else reads that backward.
- *indexes*: the gradient of a maximum over windows is expanded to a scatter of indices, an int32 for every dimension: of each
  element of the operand, unless it is padded, from the start; of each of the result, from the forward pass on; and zeros to
  scatter into.

- *outermost*: collectives along a dimension want it outermost in memory, so operands and results that lie otherwise are copied.

On every backend a product in groups of rows reads the rows, and their cotangents in two orders of dimensions, once for each group,
with zeros in the rows of others.

GPU compilers schedule such things where they are used, and fuse them; nothing is added for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from unity.machine.machine import Machine
from unity.pcg.ir.graph import LOOPS, PARALLELIZATION, Node, Value
from unity.pcg.ir.program import Tensor
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import local_shape

CONVOLUTION, POOLS = "conv_general_dilated", ("reduce_window_max", "reduce_window_min")
LOOKUPS = ("embedding", "gather")
RAGGED = "ragged_dot_general"
ACCUMULATING = (*LOOPS, *LOOKUPS)  # their operands' gradients start from zeros
INDEX = 4  # bytes


@dataclass(frozen=True)
class Extra:
    """Bytes on one device, of one operator: held until its backward pass is done; while that runs; from the start, some of them
    until its forward pass is done (`first`), the others until its backward pass is."""

    kept: float = 0.0
    working: float = 0.0
    start: float = 0.0
    first: float = 0.0


@dataclass(frozen=True)
class Backend:
    """The properties above. `widened`: dtypes."""

    name: str
    widened: frozenset[str] = frozenset()
    eager: bool = False
    turns: bool = False
    indexes: bool = False
    outermost: bool = False

    def narrow(self, tensor: Tensor) -> bool:
        """Whether it is computed with in float32; and kept so, if it is kept by a loop's steps."""
        return bool(self.widened) and str(tensor.dtype) in self.widened  # numpy takes long to name a type

    def widens(self, reader: Node, v: Value) -> bool:
        """Whether an operator reads a value in float32, though it is narrower."""
        return facts_of(reader.kind).product and self.narrow(v.tensor)

    def turned(self, reader: Node, v: Value) -> bool:
        """Whether an operator's gradient reads an operand in another order of dimensions than anything else does."""
        return self.turns and reader.kind == CONVOLUTION and v in reader.operands

    def relays(self, node: Node, axes: tuple[Axis, ...]) -> bool:
        """Whether a change of type is a collective along dimensions that do not lie outermost."""
        v, states = node.operands[0], zip(node.operands[0].type, node.types[0], strict=True)
        dims = {s.dim for pair in states for s in pair if pair[0] != pair[1] and s.kind == "P"}
        return self.outermost and any(n > 1 for n in local_shape(v.tensor.shape, v.type, axes)[: max(dims, default=0)])

    def pads(self, node: Node) -> bool:
        """Whether a change of type has a slice's gradient written into zeros that are there from the start."""
        types = zip(node.operands[0].type, node.types[0], strict=True)
        return self.eager and node.kind == "partition" and any(s.kind == "R" and t.kind == "P" for s, t in types)

    def knows(self, node: Node) -> bool:
        """Whether the indices that it keeps are all that an operator's derivative needs."""
        return self.indexes and node.kind in POOLS

    def extra(
        self, node: Node, local: Callable[[Value], float], argument: Callable[[Value], bool], looked_up: float = 0.0
    ) -> Extra:
        """What an operator costs that is differentiated. `local`: a value's bytes on one device; `argument`: whether it is one;
        `looked_up`: bytes of values inside of it that elements are looked up in."""
        if self.knows(node):
            return _indices(node, local)
        if node.kind == RAGGED:
            return self._grouped(node, local)
        if self.eager and node.kind in LOOKUPS:
            zeros = sum(local(v) for v in node.operands if v.tensor.floating and not argument(v))
            return Extra(zeros, -zeros, zeros)
        if self.eager and looked_up:
            return Extra(looked_up, start=looked_up)
        wide = sum(local(v) for v in (*node.operands, *node.results) if self.widens(node, v))
        if self.turns and node.kind == CONVOLUTION and len(node.operands) > 1 and prod(node.operands[1].tensor.shape[2:]) > 1:
            turned = sum(local(v) for v in node.operands if argument(v))
            moved = sum(local(v) for v in node.operands if v.node.kind in PARALLELIZATION and not argument(v))
            return Extra(turned, wide + moved, turned, turned)
        return Extra(working=wide)

    def _grouped(self, node: Node, local: Callable[[Value], float]) -> Extra:
        assert node.body is not None
        product = next(e for e in node.body.equations if e.name == RAGGED)  # what follows it may be in the same operator
        groups = node.body.tensor(product.operands[2]).shape[0]
        given, made = groups * local(node.operands[0]), groups * local(node.results[0])
        return Extra(given, 2 * made) if self.eager else Extra(working=given + 2 * made)


def _indices(node: Node, local: Callable[[Value], float]) -> Extra:
    operand, result = node.operands[0], node.results[0]
    each = INDEX * operand.tensor.ndim / operand.tensor.dtype.itemsize
    assert node.body is not None
    padded = any(any(map(any, e.params.get("padding", ()))) for e in node.body.equations)
    start = local(operand) * (1 if padded else 1 + each)
    return Extra(start + each * local(result), -local(operand), start)


GPU = Backend("gpu")
CPU = Backend("cpu", frozenset({"bfloat16", "float16"}), eager=True, turns=True, indexes=True, outermost=True)


def backend_of(machine: Machine) -> Backend:
    """What compiles programs for a machine."""
    return CPU if machine.device.name == CPU.name else GPU
