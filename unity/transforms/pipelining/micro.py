"""A scan over layers, walked in micro-batches: the same results, a part of the samples at a time.

    scan(step, carry, weights)  =  joined([scan(step, part, weights) for part in parts(carry)])

That holds where a step works on each sample by itself, which the operator table knows: the step's program must allow an axis that
partitions the samples of what it carries, with nothing reduced and weights replicated. Its program on a micro-batch is then its
local program along such an axis, which lies in time.

Constants may have samples too, as a mask of padding has: these are taken in parts as well.

A micro-batch takes every M-th sample: whoever holds a slice of the samples holds a slice of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.base.formatting import short
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body, Equation, Tensor, close
from unity.pcg.jaxprs.scan_operands import constants_and_carry
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.stages import Mixed, first_mixed
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.scan_programs import SCANNED
from unity.pcg.propagation.solver import Unmatched, nested_body, solve
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned
from unity.pcg.types.varying_axes import TIME
from unity.transforms.pipelining.splice import spliced
from unity.transforms.pipelining.tails import Tail

WALK = "unity:micro-batches"  # the scope of what walks a scan, which no model has
WAYS = 64  # in which tensors that are carried may share a dimension, looked at for each size


class Positioned(Mixed):
    """A step must know which samples it has."""


@dataclass(frozen=True)
class Scan:
    """A scan of a program that can be walked in micro-batches.

    `equation`: its number. `steps`: how many. `samples`: of each carried tensor, which dimension its samples are; `size`: how many.
    `read`: the same of each constant that has samples, by its position.
    """

    equation: int
    steps: int
    samples: tuple[int, ...]
    size: int
    read: tuple[tuple[int, int], ...] = ()


def scans(captured: Captured) -> tuple[list[Scan], list[str]]:
    """The scans of a program that can be walked in micro-batches; and of the others: where, and why not."""
    found, refused = list[Scan](), list[str]()
    for k, e in enumerate(captured.body.equations):
        if e.name in SCANNED:
            try:
                found.append(_scan(captured, k))
            except Mixed as reason:
                refused.append(f"the scan at {short(e.source) or 'an unknown line'}: {reason}")
    return found, refused


def _scan(captured: Captured, number: int) -> Scan:
    body, e = captured.body, captured.body.equations[number]
    step, steps = nested_body(e), int(e.params["length"])
    consts, carry = constants_and_carry(e.params)
    if e.params["reverse"]:
        raise Mixed("it runs in reverse")
    if not steps:
        raise Mixed("it has no steps")
    if len(e.results) > carry:
        raise Mixed("each of its steps leaves a result of its own")
    if not carry:
        raise Mixed("it carries nothing from step to step")
    carried = [body.tensor(a) for a in e.operands[consts : consts + carry]]
    for samples in _samples(carried):
        scan = Scan(number, steps, samples, carried[0].shape[samples[0]])
        scan = replace(scan, read=_read(step, consts, scan))
        if _legal(step, consts, scan):
            return scan
    for node in captured.graph.nodes:
        if node.kind == "scan" and node.source == e.source and node.attributes["length"] == steps:
            first_mixed(node)
    raise Mixed("no dimension of what it carries is one of samples, each worked on by itself, with the same weights for all")


def _samples(carried: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
    """Dimensions of equal size, one of each tensor; first ones first. Of very many, some."""
    for size in dict.fromkeys(carried[0].shape):
        alike = [[d for d, n in enumerate(t.shape) if n == size] for t in carried]
        yield from islice(product(*alike), WAYS if size > 1 else 0)


def _states(step: Body, consts: int, scan: Scan) -> tuple[State, ...]:
    """Of a step's operands, along an axis that partitions the samples."""
    dims = dict(scan.read) | {consts + k: d for k, d in enumerate(scan.samples)}
    return tuple(partitioned(dims[p]) if p in dims else REPLICATED for p in range(len(step.inputs)))


def _read(step: Body, consts: int, scan: Scan) -> tuple[tuple[int, int], ...]:
    """The constants that must have samples too, if what is carried has."""
    states = _states(step, consts, scan)
    try:
        found = solve(step, dict(zip(step.inputs[consts:], states[consts:], strict=True)))
    except Unmatched:
        return ()
    wanted = [(p, found.operands[p]) for p in range(consts)]
    return tuple((p, s.dim) for p, s in wanted if s.kind == "P" and step.tensors[step.inputs[p]].shape[s.dim] == scan.size)


def _legal(step: Body, consts: int, scan: Scan) -> bool:
    """Whether a step works on each sample by itself, so that it may run along an axis that partitions them."""
    results = tuple(partitioned(d) for d in scan.samples)
    try:
        found = along_axis(step, _states(step, consts, scan), results)
    except Unmatched:
        return False
    return found is not None and not found.communicates and found.results == results and PARTIAL not in found.states.values()


def walked(body: Body, scan: Scan, rounds: int, tail: Tail | None = None) -> Body:
    """The program, the samples of one of its scans taken in so many parts; so are then those of its tail, if given.

    Raises Mixed if a step, or the tail, must know which part it has.
    """
    e = body.equations[scan.equation]
    given = [body.tensor(a) for a in e.operands]
    if tail is None:
        program = _traced("its steps depend", lambda *operands: _joined(scan, _parts(e, scan, rounds, operands)), given)
        return spliced(body, e.results, e.operands, e.results, program, e, WALK)

    def both(*operands: Any) -> list[Any]:
        n = len(e.operands)
        return sums(tail, rounds, scan.size, end, _parts(e, scan, rounds, operands[:n]), operands[n:])

    def end(parts: Sequence[Any]) -> Sequence[Any]:
        types = [(s,) for s in (*tail.states, *(partitioned(d) for d in scan.samples))]
        return run_body(tail.body, parts, types, [(PARTIAL,)] * len(tail.sums), (Axis(TIME, rounds, 0),))

    more = (*tail.constants, *(v for v, _ in tail.read))
    _traced("its steps depend", lambda *operands: _parts(e, scan, rounds, operands), given)
    program = _traced("what follows them depends", both, [*given, *map(body.tensor, more)])
    gone = {v for k in (scan.equation, *tail.equations) for v in body.equations[k].results}
    return spliced(in_order(body, scan.equation, tail), gone, (*e.operands, *more), tail.sums, program, e, WALK)


def _traced(what: str, run: Callable[..., Sequence[Any]], given: Sequence[Tensor]) -> Body:
    try:
        return close(jax.make_jaxpr(run)(*(t.struct for t in given)))
    except NameError:  # of the axis: a local program asks where its piece lies
        why = "positions, or random numbers that are not drawn for each sample"
        raise Positioned(f"{what} on where a sample stands in the batch ({why})") from None


def in_order(body: Body, number: int, tail: Tail) -> Body:
    """The program, an equation of it and what is its tail after all that they could read, and before all that reads their sums."""
    order = sorted(range(len(body.equations)), key=lambda k: (k in tail.after, k == number or k in tail.equations, k))
    return replace(body, equations=tuple(body.equations[k] for k in order))


def sums(
    tail: Tail, rounds: int, size: int, end: Callable[[Sequence[Any]], Any], stacks: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """The tail's sums, part by part: `end` makes them of its constants, of what it reads with samples, and of what leaves the last
    layer, which is stacked. The last addition is an operator of its own, which pipelines know."""
    constants = operands[: len(tail.constants)]
    read = [split(x, d, rounds, size) for x, (_, d) in zip(operands[len(constants) :], tail.read, strict=True)]
    found = lax.scan(lambda _, parts: (None, end((*constants, *parts))), None, (*read, *stacks))[1]
    return jax.checkpoint(lambda *xs: [x.sum(0, dtype=x.dtype) for x in xs])(*found)


def _joined(scan: Scan, stacks: Sequence[Any]) -> list[Any]:
    return [joined(x, d) for x, d in zip(stacks, scan.samples, strict=True)]


def _parts(e: Equation, scan: Scan, rounds: int, operands: Sequence[Any]) -> list[Any]:
    """The scan's results, computed part by part, which are stacked."""
    consts, carry = constants_and_carry(e.params)
    step, time = nested_body(e), (Axis(TIME, rounds, 0),)
    types = [(s,) for s in _states(step, consts, scan)]
    results = [(partitioned(d),) for d in scan.samples]

    def whole(part: Any, read: dict[int, Any]) -> Any:
        constants = [read.get(p, operands[p]) for p in range(consts)]

        def one(carried: Any, weights: Any) -> Any:
            return run_body(step, (*constants, *carried, *weights), types, results, time), None

        length, unroll = e.params["length"], e.params["unroll"]
        return lax.scan(one, part, operands[consts + carry :], length, unroll=unroll)[0]

    stacks = [split(x, d, rounds) for x, d in zip(operands[consts : consts + carry], scan.samples, strict=True)]
    read = {p: split(operands[p], d, rounds) for p, d in scan.read}
    return list(lax.scan(lambda _, parts: (None, whole(*parts)), None, (stacks, read))[1])


def split(x: jax.Array, dim: int, parts: int, size: int | None = None) -> jax.Array:
    """`[parts, ..., n / parts, ...]`: every `parts`-th index of a dimension together. `size`: of samples, if the dimension has
    several indices of each, which then stay together."""
    n = x.shape[dim]
    block = n // (size or n)
    shape = (*x.shape[:dim], n // block // parts, parts, block, *x.shape[dim + 1 :])
    found = jnp.moveaxis(x.reshape(shape), dim + 1, 0)
    return found.reshape(parts, *x.shape[:dim], n // parts, *x.shape[dim + 1 :])


def joined(x: jax.Array, dim: int) -> jax.Array:
    """The inverse of `split`."""
    x = jnp.moveaxis(x, 0, dim + 1)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
