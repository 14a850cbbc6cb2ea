"""Memory that a compiler needs in addition to the buffers of the graph, as named properties of backends.

XLA's CPU backend, according to its buffer assignments (`benchmarks/memory.py` compares):

- *widened*: products of bfloat16 and float16 are computed in float32, and their operands are kept for the backward pass in float32;
  so are all residuals of a loop's steps, as each step slices stacks that were converted as a whole, once.
- *buffered*: its reductions read what they reduce from memory, so that it is kept for the backward pass beside what it is computed
  from, such as the centered values of a normalization beside its operand.
- *eager*: it schedules for concurrency. Operators that depend on arguments alone run at the start, and their results are live
  until they are used (`search.memory.eager_forward`): gathered weights, zeros that gradients are added to, indices. A
  cotangent that a product reads in two orders of dimensions is produced in both at once, unless something else reads it, such as a
  bias's gradient or a conversion.
- *turns*: a product reads the cotangent of its result in two orders of dimensions, and copies it for the second.
- *scatters apart*: no fusion writes a result in the place of the scattered cotangent of a looked-up value.
- *transposes*: convolutions read channels last. Kernels and images that are arguments are transposed, in one way for the forward
  pass and in another for the backward pass; a tensor from other devices is transposed when it arrives. Other tensors are transposed
  by their producer, and are residuals in that order, beside the original if the backward pass of another operator reads that.
- *indexes*: the gradient of a maximum over windows is expanded to a scatter with int32 indices, one for every dimension. Indices of
  each element of the operand, unless it is padded, and zeros to scatter into are live from the start; indices of each element of
  the result are live from the forward pass on.
- *outermost*: collectives along a dimension need it outermost in memory; otherwise their operands and results are copied.

XLA's GPU backend, likewise (`benchmarks/gpu_programs.py` compares):

- *turns images*: convolutions read channels last. An image that is an argument is transposed, and is a residual in that order.
- *scatters*: the gradient of a maximum over windows is a scatter into zeros that the forward pass writes beside the operand,
  unless that is padded. Its int32 indices, one for every dimension, are computed in the backward pass, together with the maximum.
- not *buffered*: elementwise values inside of an operator take no memory.

On every backend a product in groups of rows reads the rows, and their cotangents in two orders of dimensions, once for each group,
with zeros in the rows of others.

Where the host's memory is separate (*offloads*), values that a checkpoint policy offloads take no memory of the device until the
checkpoint's backward pass. The CPU backend keeps them where they are.

GPU compilers schedule operators where their results are used, and fuse them, reductions with what they reduce included; their
products read any order of dimensions. Nothing else is added for them. They start collectives on streams beside the one that
computes (*overlaps*: XLA's latency-hiding scheduler); those of a CPU use its cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from unity.machine.machine import Machine
from unity.pcg.capture.operator_names import LOOKUPS
from unity.pcg.ir.graph import LOOPS, PARALLELIZATION, Node, Value
from unity.pcg.ir.program import Tensor
from unity.pcg.operators.routed_product import ROUTED, block_rows, multiplied_rows
from unity.pcg.operators.table.ragged import Ragged
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import facts_of, is_convolution
from unity.pcg.types.parallel_type import local_shape

RAGGED = "ragged_dot_general"
ACCUMULATING = (*LOOPS, *LOOKUPS)  # the gradients of their operands are accumulated from zeros
INDEX = 4  # bytes of an index


@dataclass(frozen=True)
class Extra:
    """Additional bytes of one operator on one device.

    Args:
        kept: Live from its forward until the end of its backward pass.
        working: Live while its backward pass runs.
        start: Live from the start of the step until the end of its backward pass.
        first: Live from the start of the step until the end of its forward pass.
    """

    kept: float = 0.0
    working: float = 0.0
    start: float = 0.0
    first: float = 0.0


@dataclass(frozen=True)
class Backend:
    """A compiler with the properties that the module's docstring describes; `widened` has the dtypes that it widens."""

    name: str
    widened: frozenset[str] = frozenset()
    buffered: bool = False
    eager: bool = False
    turns: bool = False
    scatters_apart: bool = False
    transposes: bool = False
    indexes: bool = False
    outermost: bool = False
    turns_images: bool = False
    scatters: bool = False
    overlaps: bool = True
    offloads: bool = True

    def is_narrow(self, tensor: Tensor) -> bool:
        """Return whether the backend widens a tensor to float32 where a product reads it or a loop stacks it as a residual."""
        return bool(self.widened) and str(tensor.dtype) in self.widened  # str of a dtype is slow, so only if needed

    def widens(self, reader: Node, v: Value) -> bool:
        """Return whether an operator reads a narrower value in float32."""
        return facts_of(reader.kind).product and self.is_narrow(v.tensor)

    def reads_transposed(self, reader: Node, v: Value) -> bool:
        """Return whether an operator's gradient reads an operand in another order of dimensions than other users."""
        return self.transposes and is_convolution(reader.kind) and v in reader.operands

    def copies_for_collective(self, node: Node, axes: tuple[Axis, ...]) -> bool:
        """Return whether a change of type is a collective along a dimension that is not outermost, so that it copies."""
        v, states = node.operands[0], zip(node.operands[0].type, node.types[0], strict=True)
        dims = {s.dim for pair in states for s in pair if pair[0] != pair[1] and s.kind == "P"}
        return self.outermost and any(n > 1 for n in local_shape(v.tensor.shape, v.type, axes)[: max(dims, default=0)])

    def pads(self, node: Node) -> bool:
        """Return whether a change of type writes a slice's gradient into zeros that are live from the start."""
        types = zip(node.operands[0].type, node.types[0], strict=True)
        return self.eager and node.kind == "partition" and any(s.kind == "R" and t.kind == "P" for s, t in types)

    def keeps_indices(self, node: Node) -> bool:
        """Return whether an operator's derivative needs only the indices that the backend stores in the forward pass."""
        return self.indexes and facts_of(node.kind).picks

    def extra(
        self,
        node: Node,
        axes: tuple[Axis, ...],
        local: Callable[[Value], float],
        argument: Callable[[Value], bool],
        looked_up: float = 0.0,
    ) -> Extra:
        """Return the additional memory of a differentiated operator.

        Args:
            node: The operator.
            axes: The mesh.
            local: Returns a value's bytes on one device.
            argument: Returns whether a value is an argument.
            looked_up: Bytes of the inner values that gathers read from.
        """
        if self.keeps_indices(node):
            return _indices(node, local)
        if self.scatters and facts_of(node.kind).picks:
            zeros = 0.0 if _is_padded(node) else local(node.operands[0])
            return Extra(zeros, local(node.results[0]) * (1 + _indices_each(node)))
        if self.turns_images and is_convolution(node.kind) and argument(node.operands[0]):
            return Extra(local(node.operands[0]))
        if node.kind == RAGGED:
            return self._grouped(node, axes, local)
        if node.kind == ROUTED:
            return self._routed(node, axes, local)
        if self.eager and node.kind in LOOKUPS:
            zeros = sum(local(v) for v in node.operands if v.tensor.floating and not argument(v))
            return Extra(zeros, -zeros, zeros)
        if self.eager and looked_up:
            return Extra(looked_up, start=looked_up)
        wide = sum(local(v) for v in (*node.operands, *node.results) if self.widens(node, v))
        if self.transposes and is_convolution(node.kind) and len(node.operands) > 1 and prod(node.operands[1].tensor.shape[2:]) > 1:
            turned = sum(local(v) for v in node.operands if argument(v))
            moved = sum(local(v) for v in node.operands if v.node.kind in PARALLELIZATION and not argument(v))
            return Extra(turned, wide + moved, turned, turned)
        return Extra(working=wide)

    def _grouped(self, node: Node, axes: tuple[Axis, ...], local: Callable[[Value], float]) -> Extra:
        assert node.body is not None
        product = next(e for e in node.body.equations if e.name == RAGGED)  # its users may be fused into the same operator
        y, ragged = node.operands[1], Ragged.of(product.params, node.operands[0].tensor.ndim)
        groups = node.body.tensor(product.operands[2]).shape[0]
        if ragged is not None and not ragged.contracted:
            groups = local_shape(y.tensor.shape, y.type, axes)[ragged.groups]
        rows, results = groups * local(node.operands[0]), groups * local(node.results[0])
        return Extra(rows, 2 * results) if self.eager else Extra(working=rows + 2 * results)

    def _routed(self, node: Node, axes: tuple[Axis, ...], local: Callable[[Value], float]) -> Extra:
        """Return what a product of rows with labels holds: its rows in blocks, and a matrix for each block."""
        assert node.body is not None
        (x, y, *_), (result, *_) = node.operands, node.results
        params = next(e for e in node.body.equations if e.name == ROUTED).params
        rows = local_shape(x.tensor.shape, x.type, axes)[0]
        matrices = result if params["contracted"] else y
        count = local_shape(matrices.tensor.shape, matrices.type, axes)[0]
        block = block_rows(rows, count)
        if not block:
            groups, results = count * local(x), count * local(result)
            return Extra(groups, 2 * results) if self.eager else Extra(working=groups + 2 * results)
        padded = multiplied_rows(rows, count, block)
        others = y if params["contracted"] else result
        wide = max(1.0, 4 / matrices.tensor.itemsize)  # products of blocks are added up in float32
        return Extra(working=padded / rows * (local(x) + local(others)) + wide * padded / block / count * local(matrices))


def _indices_each(node: Node) -> float:
    """Return the bytes of the indices of an element of a maximum over windows, as a multiple of the element's."""
    return INDEX * node.operands[0].tensor.ndim / node.operands[0].tensor.dtype.itemsize


def _is_padded(node: Node) -> bool:
    """Return whether windows of an operator reach into a padding."""
    assert node.body is not None
    return any(any(map(any, e.params.get("padding", ()))) for e in node.body.equations)


def _indices(node: Node, local: Callable[[Value], float]) -> Extra:
    operand, result = node.operands[0], node.results[0]
    each = _indices_each(node)
    start = local(operand) * (1 if _is_padded(node) else 1 + each)
    return Extra(start + each * local(result), -local(operand), start)


GPU = Backend("gpu", turns_images=True, scatters=True)
UNLINKED = replace(GPU, offloads=False)
CPU = Backend(
    "cpu",
    frozenset({"bfloat16", "float16"}),
    buffered=True,
    eager=True,
    turns=True,
    scatters_apart=True,
    transposes=True,
    indexes=True,
    outermost=True,
    overlaps=False,
    offloads=False,
)


def backend_of(machine: Machine) -> Backend:
    """Return the compiler of programs for a machine. Without a link to the host, nothing is offloaded."""
    if machine.device.name == CPU.name:
        return CPU
    return UNLINKED if machine.host is None else GPU
