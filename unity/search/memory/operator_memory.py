"""The memory that an operator or a change of type adds: residuals, working sets, and values that are live ahead of its turn."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from unity.pcg.analysis.residuals import Residuals, invariant
from unity.pcg.ir.graph import Node, Value
from unity.pcg.types.factors import facts_of, is_convolution
from unity.search.cost.inner_values import Inner
from unity.search.memory.eager_forward import Ahead
from unity.search.memory.residuals import ResidualCollector
from unity.search.space.live_buffers import BACKEND, CHANGED, KEPT, OFFLOADED, WORKING, Buffer

PRODUCT = "dot_general"


@dataclass(frozen=True)
class OperatorMemory:
    """The memory of one device that a node of a graph needs beside its operands and results.

    Attributes:
        node: the node.
        kept: its residuals.
        working: its working set: what is live at its turn in the backward pass, or, without gradients, in the only pass.
        own: the bytes of its working set without operands, results and their cotangents.
        forward: the bytes of its working set in the forward pass; None if none is counted there, as of nodes with a graph inside.
        values: the values among the residuals.
        ahead: values that the backend computes at the start of the program.
        saved: values that policies of remats around the graph save, each with the depth of the outermost such remat.
        offloaded: values that such policies save in the memory of the host.
        fetched: the bytes of offloaded values that the operator itself reads, whose copies are live while it does.
        invariant: the bytes of values that derivatives read and that depend on no operand.
        momentary: the bytes of residuals inside of it that are not live beside those of other nodes. Of a remat it is a share,
            1 / n of n remats, as one is open at a time.
        zeros_inside: inside of a remat, the bytes of zeros that are live from the start of the program.
    """

    node: Node
    kept: tuple[Buffer, ...] = ()
    working: tuple[Buffer, ...] = ()
    own: float = 0.0
    forward: float | None = None
    values: frozenset[Value] = frozenset()
    ahead: tuple[Ahead, ...] = ()
    saved: tuple[tuple[int, Buffer], ...] = ()
    offloaded: tuple[Buffer, ...] = ()
    fetched: float = 0.0
    invariant: float = 0.0
    momentary: float = 0.0
    zeros_inside: float = 0.0


def memory_of_change(node: Node, collector: ResidualCollector) -> OperatorMemory:
    """Return the memory of a change of type.

    The working set is both sides at once, unless nothing moves, or one side twice if it is copied for a collective or a
    product. A slice's gradient may be added to zeros that are live from the start.
    """
    if collector.stays(node):
        return OperatorMemory(node)
    before, after = node.operands[0], Value(node)
    both = collector.own_bytes[before] + collector.own_bytes[after]
    if collector.backend.copies_for_collective(node, collector.graph.axes) and not collector.at_products.isdisjoint(
        {before, after}
    ):
        both = max(both, 2 * collector.own_bytes[before], 2 * collector.own_bytes[after])
    is_padded = collector.nesting.straight and collector.training and collector.backend.pads(node)
    zeros = collector.own_bytes[before] if is_padded else 0.0
    kept, inside = zeros_from_start(node, zeros, collector)
    return OperatorMemory(
        node,
        working=(Buffer(WORKING, node, both - zeros),),
        forward=both,
        kept=kept,
        ahead=ahead_of_turn(node, kept, collector),
        saved=tuple(
            (depth, Buffer(CHANGED, node, collector.local(after))) for _, depth in collector.setting.recomputed.saved_of(node)
        ),
        zeros_inside=inside,
    )


def zeros_from_start(node: Node, nbytes: float, collector: ResidualCollector) -> tuple[tuple[Buffer, ...], float]:
    """Return zeros that are live from the start of the program.

    In the outermost graph they are buffers; inside of a remat, bytes that the graph around it counts.
    """
    if not nbytes:
        return (), 0.0
    return ((Buffer(BACKEND, node, nbytes),), 0.0) if collector.nesting.outermost else ((), nbytes)


def ahead_of_turn(node: Node, zeros: tuple[Buffer, ...], collector: ResidualCollector) -> tuple[Ahead, ...]:
    """Return zeros as buffers that are live from the start until a node's turn."""
    here = collector.numbers[id(node)]
    return tuple(Ahead(buffer, here, here) for buffer in zeros)


def memory_of_operator(node: Node, collector: ResidualCollector) -> OperatorMemory:
    """Return the memory of an operator.

    The working set has its operands and results, or their cotangents, and the largest inner value. A convolution, or on some
    backends a product with more than two dimensions, also needs the cotangent of its result in another order of dimensions.
    """
    inner = collector.inner(node)
    needed, _ = inner.residuals(collector.flows(node), collector.nesting.stacks, collector.backend.buffered)
    residuals = collector.kept_by(node, needed, inner)
    saved, offloaded = _saved_by_policies(node, collector, inner)
    fetched = sum(h.nbytes for h in offloaded)
    ends = dict.fromkeys((*node.operands, *node.results))
    away = {v: 0.0 if collector.is_live(v) else collector.nbytes[v] for v in ends}
    values = sum(away.values())
    cotangents = sum(collector.own_bytes[v] for v in ends) if collector.training else 0.0
    turned = _transposed_bytes(node, collector) if cotangents else 0.0
    largest = _largest_bytes(node, collector, inner, needed)
    if not cotangents:
        working = (Buffer(WORKING, node, values + turned + largest),)
        own = turned + largest
        return OperatorMemory(node, tuple(residuals), working, own, saved=saved, offloaded=offloaded, fetched=fetched)
    largest += collector.recomputed_inner_bytes(node) + collector.recomputed_operand_bytes(node)
    if collector.backend.offloads:
        fetched_again = collector.setting.recomputed.in_branches.get(id(node), ())
        largest += sum(inner.local(v, nbytes) for v, nbytes in fetched_again)
    more = collector.backend.extra(node, collector.graph.axes, collector.local, collector.argument, inner.looked_up)
    residuals += [collector.buffer(BACKEND, node, more.kept)] if more.kept else []
    # In a loop's step, residuals are first sliced out of their stacks.
    read = {v for v, flag in zip(node.operands, needed.operands, strict=True) if flag}
    back = (values if collector.nesting.stacks else sum(away[v] for v in read)) + cotangents + turned
    # Values of the forward pass alone are dead before any gradient is computed.
    here, last = collector.numbers[id(node)], len(collector.nodes)
    early = ((more.start, here), (more.first, last))
    return OperatorMemory(
        node,
        tuple(residuals),
        (Buffer(WORKING, node, max(values, back) + largest + more.working),),
        own=turned + largest + more.working,
        forward=values + largest,
        ahead=tuple(Ahead(Buffer(BACKEND, node, nbytes), here, reader) for nbytes, reader in early if nbytes),
        saved=saved,
        offloaded=offloaded,
        fetched=fetched,
        invariant=sum(inner.local(v, inner.body.tensors[v].nbytes) for v in invariant(inner.body, collector.flows(node))),
    )


def _saved_by_policies(
    node: Node, collector: ResidualCollector, inner: Inner
) -> tuple[tuple[tuple[int, Buffer], ...], tuple[Buffer, ...]]:
    """Return the inner values that policies of remats around the graph save, by their depth, and those saved on the host."""
    recomputed, tensors = collector.setting.recomputed, inner.body.tensors
    saved = (
        recomputed.saved_of(node) if collector.backend.offloads else (*recomputed.saved_of(node), *recomputed.offloaded_of(node))
    )
    hosted = recomputed.host_values(node) if collector.backend.offloads else ()
    on_device = tuple((depth, Buffer(KEPT, node, inner.local(v, tensors[v].nbytes))) for v, depth in saved)
    return on_device, tuple(Buffer(OFFLOADED, node, inner.local(v, nbytes)) for v, nbytes, _ in hosted)


def _largest_bytes(node: Node, collector: ResidualCollector, inner: Inner, needed: Residuals) -> float:
    """Return the bytes of an operator's largest inner value, and of its operands' halos or those of their cotangents."""
    halos = zip(node.operands, needed.operands, inner.extended, strict=True)
    extended = sum(n for v, flag, n in halos if n and (not flag or collector.flow(v)))  # of a residual, only its cotangent's
    return (_largest_inner_bytes(node, collector, inner) if collector.training else 0.0) + extended


def _largest_inner_bytes(node: Node, collector: ResidualCollector, inner: Inner) -> float:
    """Return the bytes of an operator's largest inner value, or of its cotangent.

    A fusion writes the cotangent of an operand in the place of one of its size, such as the gradient of a cross-entropy in
    the place of the scattered cotangent of the logarithms. A compiler whose reductions read no buffers writes no elementwise
    inner value to memory either.
    """
    facts, backend = facts_of(node.kind), collector.backend
    fuses = not (facts.product or facts.alone or (inner.looked_up and backend.scatters_apart))
    if fuses and inner.largest in {collector.own_bytes[v] for v in node.operands}:
        return 0.0
    return inner.largest if backend.buffered else inner.largest_unfused


def _transposed_bytes(node: Node, collector: ResidualCollector) -> float:
    """Return the bytes of cotangents that an operator reads or produces in another order of dimensions."""
    copied = is_convolution(node.kind) or (facts_of(node.kind).product and collector.backend.turns)
    results = sum(collector.local(v) for v in node.results if v.tensor.ndim > 2) if copied else 0.0
    return results + _transposed_bytes_for_products(node, collector)


def _transposed_bytes_for_products(node: Node, collector: ResidualCollector) -> float:
    """Return the bytes of cotangents that an operator also produces in another order of dimensions, for products before it.

    An eager backend schedules so, unless something else reads such a cotangent, or rows are added to it: then it is transposed
    at the product's turn.
    """
    if not collector.backend.eager or facts_of(node.kind).product or collector.inner(node).adds_rows:
        return 0.0
    values = (collector.aliases.unmoved[v] for v in dict.fromkeys(node.operands))
    turned = (v for v in values if v.node.kind == PRODUCT and v.tensor.ndim > 2 and not _is_read_in_order(node, v, collector))
    return sum(collector.own_bytes[v] for v in turned)


def _is_read_in_order(node: Node, product: Value, collector: ResidualCollector) -> bool:
    """Return whether more than a product itself reads the cotangent that an operator produces for its result.

    That is a conversion to the dtype of the product's operands, or a sum: the gradient of another operand that was broadcast.
    """
    converted = any(v.tensor.dtype != product.tensor.dtype for v in product.node.operands)
    size = prod(product.tensor.shape)
    return converted or any(collector.flow(v) and prod(v.tensor.shape) < size for v in node.operands)
