"""Loops and branches: what a loop reads, carries and stacks is its state; its step is a program of its own."""

from __future__ import annotations

import numpy as np
from jax.extend import core

from unity.exec.liveness.invariant import moved_out
from unity.exec.liveness.lower import Lowering, Values, opened, tensors_of
from unity.exec.liveness.program import Origin
from unity.pcg.capture.capture import tensor_of
from unity.pcg.ir.program import tensor_type
from unity.pcg.jaxprs.scan_operands import constants_and_carry

INT = np.dtype(np.int32)


def scan(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """A loop whose state is what it reads, what it carries, and stacks that each step writes a slice of."""
    (c, k), length = constants_and_carry(eqn.params), eqn.params["length"]
    jaxpr, closed = opened(eqn.params["jaxpr"])
    tensors = tensors_of(eqn)
    step = Lowering(b.backend, b.rules)
    counter = step.new(tensor_type((), INT))
    state = [step.new(b.tensors[v]) for v in operands]
    stacks = [step.new(t) for t in tensors[k:]]
    slices = []
    for v, var in zip(state[c + k :], jaxpr.invars[c + k :], strict=True):
        one = tensor_of(var.aval)
        cut = step.emit("dynamic-slice", (v, counter), (tensor_type((1, *one.shape), one.dtype),), (), origin)[0]
        slices.append(step.bitcast(cut, one, origin))
    out = step.run(jaxpr, [*state[: c + k], *slices], [step.constant(x) for x in closed], origin)
    written = []
    for stack, v in zip(stacks, out[k:], strict=True):
        one = step.tensors[v]
        row = step.bitcast(v, tensor_type((1, *one.shape), one.dtype), origin)
        written.append(step.emit("dynamic-update-slice", (stack, row, counter), (step.tensors[stack],), (), origin)[0])
    body = step.program([counter, *state, *stacks], [*out[:k], *written])
    moved = moved_out(b, step, body, operands, range(c, c + k))
    c = len(moved.made) + sum(p < c for p in moved.left)
    given = [*moved.made, *(operands[p] for p in moved.left)]
    zeros = [b.zeros(t, origin) for t in tensors[k:]]
    if b.after is not None and zeros:
        _, *zeros = _together(b, [b.after, *zeros], origin)
    return list(b.emit("while", (*given, *zeros), tensors, (c, k, len(given) - c - k, length), origin, moved.step))


def while_loop(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """A loop of any length, whose state is what it reads and what it carries. Its condition needs but scalars."""
    test, c = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    step = Lowering(b.backend, b.rules)
    counter, state = step.new(tensor_type((), INT)), [step.new(b.tensors[v]) for v in operands]
    jaxpr, closed = opened(eqn.params["body_jaxpr"])
    out = step.run(jaxpr, state[test:], [step.constant(x) for x in closed], origin)
    params = (test + c, len(out), 0, 0)
    return list(b.emit("while", operands, tensors_of(eqn), params, origin, step.program([counter, *state], out)))


def cond(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """One branch of several runs, when all operands are there; as if all did, one after the other, and one's results were taken.

    Where all others give constants, one's result lies where the whole's does: constants are written there when it is their turn.
    """
    index, *given = _together(b, operands, origin)
    made, outside = list[Values](), b.after
    b.after = index
    for branch in eqn.params["branches"]:
        jaxpr, closed = opened(branch)
        made.append(b.run(jaxpr, given, [b.constant(x) for x in closed], origin))
    b.after = outside
    found = []
    for options, tensor in zip(zip(*made, strict=True), tensors_of(eqn), strict=True):
        computed = [v for v in options if b.kind(v) not in ("broadcast", "constant")]
        alone = len(computed) == 1 and computed[0] not in given
        found.append(computed[0] if alone else b.emit("conditional", (index, *options), (tensor,), (), origin)[0])
    return found


def _together(b: Lowering, values: Values, origin: Origin) -> Values:
    return list(b.emit("barrier", values, [b.tensors[v] for v in values], (), origin))
