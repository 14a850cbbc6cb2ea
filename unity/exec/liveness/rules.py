"""How JAX's primitives are said in operations, where they are no operation of their own; and the whole of a jaxpr so."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from jax.extend import core

from unity.exec.liveness import loops, products, random
from unity.exec.liveness.kinds import COLLECTIVES, ELEMENTWISE
from unity.exec.liveness.lower import Lowering, Rule, Values, tensors_of
from unity.exec.liveness.program import Origin, Program
from unity.pcg.capture.capture import tensor_of
from unity.pcg.ir.program import Tensor, tensor_type
from unity.search.memory.backend import Backend

RESHAPED = frozenset({"reshape", "squeeze", "expand_dims"})
REDUCTIONS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min"}
REDUCED = frozenset({"reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"})


def lowered(closed: core.ClosedJaxpr, backend: Backend) -> Program:
    """The operations of a jaxpr on a backend."""
    lowering = Lowering(backend, RULES)
    inputs = [lowering.new(tensor_of(v.aval)) for v in closed.jaxpr.invars]
    outputs = lowering.run(closed.jaxpr, inputs, [lowering.constant(x) for x in closed.consts], Origin())
    return lowering.program(inputs, outputs)


def _reshape(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    return [b.bitcast(operands[0], tensors_of(eqn)[0], origin)]


def _convert(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    return [b.converted(operands[0], tensors_of(eqn)[0].dtype, origin)]


def _broadcast(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    return [b.broadcast(operands[0], tensors_of(eqn)[0], eqn.params["broadcast_dimensions"], origin)]


def _transpose(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """A product that is turned as a whole is the product of the turned operands in the other order, which costs nothing."""
    order, op = tuple(eqn.params["permutation"]), b.made.get(operands[0])
    (given,) = operands
    while op is not None and op.kind == "convert":  # of a product on wide numbers
        op = b.made.get(op.operands[0])
    if order == (1, 0) and op is not None and op.kind == "dot":
        tensor = b.tensors[op.results[0]]
        if len(tensor.shape) == 2:
            turned = tensor_type(tensor.shape[::-1], tensor.dtype)
            made = b.emit("dot", op.operands[::-1], (turned,), ("turned", op.params), origin)[0]
            return [b.converted(made, b.tensors[given].dtype, origin)]
    return [b.transpose(given, order, origin)]


def _scaled(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """Products; by one they are nothing, and a division by a constant is one with its inverse (AlgebraicSimplifier)."""
    (tensor,), (x, y) = tensors_of(eqn), operands
    known = [b.scalar(v) for v in operands]
    multiply = eqn.primitive.name == "mul"
    if known[1] in ("1.0", "1") and b.tensors[x] == tensor:
        return [x]
    if multiply and known[0] in ("1.0", "1") and b.tensors[y] == tensor:
        return [y]
    kind = "multiply" if multiply else "multiply-inverse" if known[1] is not None else "divide"
    return list(b.emit(kind, operands, (tensor,), (), origin))


def _power(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    kind = "multiply" if eqn.params["y"] > 0 else "divide"
    return list(b.emit(kind, operands, tensors_of(eqn), ("power", eqn.params["y"]), origin))


def _square(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    return list(b.emit("multiply", (operands[0], operands[0]), tensors_of(eqn), (), origin))


def _reduce(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    (tensor,), axes = tensors_of(eqn), tuple(eqn.params["axes"])
    if tensor.shape and prod(b.tensors[operands[0]].shape[a] for a in axes) == 1 and tensor.dtype == b.tensors[operands[0]].dtype:
        return [b.bitcast(operands[0], tensor, origin)]
    name = eqn.primitive.name
    return list(b.emit("reduce", operands, (tensor,), (REDUCTIONS.get(name, name), axes), origin))


def _own(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """A reduction, over dimensions or in windows, by a function of the user's own: operands, and what each begins with."""
    kind, windows = ("reduce", "dimensions") if eqn.primitive.name == "reduce" else ("reduce-window", "window_dimensions")
    return list(b.emit(kind, operands, tensors_of(eqn), ("own", tuple(eqn.params[windows])), origin))


def _collective(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """One instruction for each operand. What a new dimension is made for, or is taken from, has the same bytes."""
    kind = COLLECTIVES[eqn.primitive.name]
    params = (eqn.primitive.name, *sorted((k, str(v)) for k, v in eqn.params.items()))
    dim = eqn.params.get("all_gather_dimension", eqn.params.get("scatter_dimension", 0))
    found = []
    for v, tensor in zip(operands, tensors_of(eqn), strict=True):
        shape = b.tensors[v].shape
        inner = b.backend.outermost and len(shape) == len(tensor.shape) and any(n > 1 for n in shape[:dim])
        found.append(
            _turned(b, kind, v, tensor, dim, params, origin) if inner else b.emit(kind, (v,), (tensor,), params, origin)[0]
        )
    return found


def _turned(b: Lowering, kind: str, v: int, tensor: Tensor, dim: int, params: tuple, origin: Origin) -> int:
    """A collective along an inner dimension, which lies outermost in memory while it runs (LayoutAssignment).

    What works element by element makes its result lie so; of others a copy is made, and of the result for who wants it otherwise.
    """

    def first(t: Tensor) -> Tensor:
        return tensor_type((t.shape[dim], *t.shape[:dim], *t.shape[dim + 1 :]), t.dtype)

    if b.kind(v) not in ELEMENTWISE:
        v = b.emit("relayout", (v,), (first(b.tensors[v]),), (dim, "in"), origin)[0]
    made = b.emit(kind, (v,), (first(tensor),), params, origin)[0]
    return b.emit("relayout", (made,), (tensor,), (dim, "out"), origin)[0]


def _pad(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """What is taken away at the edges is a slice, after what is put there and between (AlgebraicSimplifier)."""
    (tensor,), (given, value), config = tensors_of(eqn), operands, eqn.params["padding_config"]
    more = tuple((max(low, 0), max(high, 0), inner) for low, high, inner in config)
    if any(map(any, more)):
        spread = zip(b.tensors[given].shape, more, strict=True)
        shape = tuple(low + n + max(n - 1, 0) * inner + high for n, (low, high, inner) in spread)
        given = b.emit("pad", (given, value), (tensor_type(shape, tensor.dtype),), (str(more),), origin)[0]
    if b.tensors[given] == tensor:
        return [given]
    starts = tuple(max(-low, 0) for low, _, _ in config)
    limits = tuple(n - max(-high, 0) for n, (_, high, _) in zip(b.tensors[given].shape, config, strict=True))
    params = (("limit_indices", str(limits)), ("start_indices", str(starts)), ("strides", "None"))  # as those that JAX cuts
    return list(b.emit("slice", (given,), (tensor,), params, origin))


def _split(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    return [b.emit("slice", operands, (t,), ("part", k, eqn.params["axis"]), origin)[0] for k, t in enumerate(tensors_of(eqn))]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(RESHAPED, _reshape),
    **dict.fromkeys((*REDUCTIONS, *(REDUCED)), _reduce),
    **dict.fromkeys(("reduce", "reduce_window"), _own),
    **dict.fromkeys(COLLECTIVES, _collective),
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "mul": _scaled,
    "div": _scaled,
    "integer_pow": _power,
    "square": _square,
    "pad": _pad,
    "split": _split,
    "dot_general": products.dot,
    "ragged_dot_general": products.ragged,
    "random_bits": random.drawn,
    "threefry2x32": random.hashed,
    "conv_general_dilated": products.convolution,
    "select_and_scatter_add": products.select_and_scatter,
    "scan": loops.scan,
    "while": loops.while_loop,
    "cond": loops.cond,
}
