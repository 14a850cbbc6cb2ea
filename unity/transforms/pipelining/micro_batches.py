"""A scan over layers, run over micro-batches: the same results, one part of the samples at a time.

    scan(step, carry, weights)  =  joined([scan(step, part, weights) for part in parts(carry)])

This holds where a step works sample by sample, by the operator table: the step's program must allow an axis that partitions the
samples of its carry, with nothing reduced and weights replicated. Its program on a micro-batch is then its local program along such
an axis, an axis in time.

Constants may have samples, too, such as a padding mask: they are split as well.

Of M micro-batches, number m has the samples m, m + M, m + 2 M and so on, so that a device with a slice of the samples has a slice
of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import jax
from jax import lax

from unity.base.formatting import short
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.payloads import Scan
from unity.pcg.ir.program import Atom, Body, Equation, Tensor
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.stages import Mixed, check_samples_independent
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.nested.scan_programs import SCANNED, inside
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.propagation.solver import solve
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned
from unity.pcg.types.varying_axes import TIME, NoPosition
from unity.transforms.pipelining.independent_carries import StepCarries, carries_of, is_ahead, with_values_by_step
from unity.transforms.pipelining.tails import Tail
from unity.transforms.splice import in_order, operator_at, spliced
from unity.transforms.strided_micro_batches import check_separable, joined, sample_state, split

WALK = "unity:micro-batches"  # scope of the loop over micro-batches; no model has it
WAYS = 64  # combinations of the carries' dimensions that are tried for each size


class PositionDependent(Mixed):
    """Raised for a step that depends on the positions of its samples."""


@dataclass(frozen=True)
class LayerScan:
    """A scan of a program that can run over micro-batches.

    Attributes:
        equation: the scan's equation, by number.
        steps: the number of steps.
        samples: the sample dimension of each carry.
        size: the number of samples.
        read: (position, sample dimension) of each constant with samples.
    """

    equation: int
    steps: int
    samples: tuple[int, ...]
    size: int
    read: tuple[tuple[int, int], ...] = ()

    def state(self, dim: int, rounds: int | None) -> State:
        """Return the state of samples in a dimension along an axis of slices, or, if their number is given, of micro-batches."""
        return partitioned(dim) if rounds is None else sample_state(dim, self.size, rounds)

    def results(self, rounds: int | None = None) -> tuple[State, ...]:
        """Return the states of what a step carries on."""
        return tuple(self.state(d, rounds) for d in self.samples)


def scans(captured: Captured) -> tuple[list[LayerScan], list[str]]:
    """Return the scans of a program that can run over micro-batches, and for the others their lines and the reasons."""
    usable, refused = list[LayerScan](), list[str]()
    for k, e in enumerate(captured.body.equations):
        if e.name in SCANNED and not is_ahead(e):
            try:
                usable.append(_scan(captured, k))
            except Mixed as reason:
                refused.append(f"the scan at {short(e.source) or 'an unknown line'}: {reason}")
    return usable, refused


def with_usable_scans(captured: Captured) -> Captured:
    """Return the program, in which scans have no carries that depend on no samples where only these prevent micro-batches."""
    for v in [e.results[0] for e in captured.body.equations if e.name in SCANNED and _reason(e) is None]:
        number, e = next((k, e) for k, e in enumerate(captured.body.equations) if v in e.results)
        carries = carries_of(e)
        if _usable(number, e, carries.step, carries.consts) is not None:
            continue
        sample_carries = _with_samples(number, e, carries)
        captured = captured if sample_carries is None else with_values_by_step(captured, number, sample_carries)
    return captured


def _with_samples(number: int, e: Equation, carries: StepCarries) -> list[int] | None:
    """Return the carries, by number, with which a scan can run over micro-batches if its steps read the others."""
    for size in _sizes(carries):
        for sample_carries in carries.sample_carry_candidates(size):
            step, consts = carries.with_constants(sample_carries)
            scan = _usable(number, e, step, consts) if len(sample_carries) < carries.carry else None
            ahead = range(consts - carries.carry + len(sample_carries), consts)
            if scan is not None and not any(p in ahead for p, _ in scan.read):
                return sample_carries
    return None


def _sizes(carries: StepCarries) -> list[int]:
    """Return the numbers of samples that carries of real numbers may have."""
    tensors = [carries.step.tensors[v] for v in carries.step.inputs[carries.consts : carries.consts + carries.carry]]
    return [n for n in dict.fromkeys(n for t in tensors if t.floating for n in t.shape) if n > 1]


def _scan(captured: Captured, number: int) -> LayerScan:
    e = captured.body.equations[number]
    if reason := _reason(e):
        raise Mixed(reason)
    carries = carries_of(e)
    scan = _usable(number, e, carries.step, carries.consts)
    if scan is None:
        raise Mixed(_without_samples(carries) or _mixing(captured, e, carries))
    return scan


def _reason(e: Equation) -> str | None:
    """Return the reason why a scan has not the form of layers that carry samples, or None."""
    step, (consts, carry) = nested_body(e), constants_and_carry(e.params)
    if e.params["reverse"]:
        return "it runs in reverse"
    if not e.params["length"]:
        return "it has no steps"
    if len(e.results) > carry:
        return "each of its steps leaves a result of its own"
    if not carry:
        return "it carries nothing from step to step"
    if not any(step.tensors[v].floating for v in step.inputs[consts : consts + carry]):
        return "it carries no real numbers, as layers do"
    return None


def _usable(number: int, e: Equation, step: Body, consts: int) -> LayerScan | None:
    """Return how a step can run over micro-batches, if it can. It carries all of its results."""
    carried = [step.tensors[v] for v in step.inputs[consts : consts + len(step.outputs)]]
    for samples in _samples(carried):
        scan = LayerScan(number, int(e.params["length"]), samples, carried[0].shape[samples[0]])
        scan = replace(scan, read=_read(step, consts, scan))
        if _legal(step, consts, scan):
            return scan
    return None


def _without_samples(carries: StepCarries) -> str:
    """Return a message about a carry that has no samples but depends on them; "" without such a carry."""
    tensors = [carries.step.tensors[v] for v in carries.step.inputs[carries.consts :][: carries.carry]]
    layers = next((t.shape for t in tensors if t.floating and t.ndim), ())
    independent = carries.independent(layers[0]) if layers else range(carries.carry)
    for k, (t, a) in enumerate(zip(tensors, carries.step.outputs, strict=True)):
        if k not in independent and set(layers).isdisjoint(t.shape):
            maker = _maker(carries.step, a)
            where = "" if maker is None else f", the result of {operator_at(maker)},"
            return (
                f"it carries {t}{where} which is computed from the samples, but has no value for each of them: "
                "carry one for each, and add them up after the scan"
            )
    return ""


def _maker(body: Body, atom: Atom) -> Equation | None:
    """Return the equation that computes an atom, inside of checkpoints, too; None for inputs and literals."""
    e = next((e for e in body.equations if atom in e.results), None)
    program = None if e is None or e.name in SCANNED else inside(e)
    return e if e is None or program is None else _maker(program, program.outputs[e.results.index(atom)]) or e


def _mixing(captured: Captured, e: Equation, carries: StepCarries) -> str:
    """Return a message about the operator that mixes samples in a step, where the first dimension of carries has the samples."""
    sizes = _sizes(carries)
    independent = carries.independent(sizes[0]) if sizes else []
    tensors = [carries.step.tensors[v] for v in carries.step.inputs[carries.consts :][: carries.carry]]
    sampled = dict.fromkeys(str(t) for k, t in enumerate(tensors) if k not in independent)
    assumed = f" (taking {' and '.join(sampled)} to have samples in their first dimensions; what has none must not depend on them)"
    for node in captured.graph.nodes:
        if isinstance(node.payload, Scan) and node.source == e.source and node.payload.length == e.params["length"]:
            try:
                check_samples_independent(node, independent)
            except Mixed as reason:
                return f"{reason}{assumed if len(sampled) > 1 else ''}"
    return "no dimension of what it carries is one of samples, each worked on by itself, with the same weights for all"


def _samples(carried: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
    """Yield combinations of dimensions of equal size, one of each tensor, first dimensions first, at most `WAYS` for each size."""
    for size in dict.fromkeys(carried[0].shape):
        alike = [[d for d, n in enumerate(t.shape) if n == size] for t in carried]
        yield from islice(product(*alike), WAYS if size > 1 else 0)


def _states(step: Body, consts: int, scan: LayerScan, rounds: int | None = None) -> tuple[State, ...]:
    """Return the states of a step's operands along an axis that partitions the samples: of slices, or of micro-batches."""
    dims = dict(scan.read) | {consts + k: d for k, d in enumerate(scan.samples)}
    return tuple(scan.state(dims[p], rounds) if p in dims else REPLICATED for p in range(len(step.inputs)))


def _read(step: Body, consts: int, scan: LayerScan) -> tuple[tuple[int, int], ...]:
    """Return the constants that must have samples if the carries have."""
    states = _states(step, consts, scan)
    try:
        solution = solve(step, dict(zip(step.inputs[consts:], states[consts:], strict=True)))
    except Unmatched:
        return ()
    states_of_constants = [(p, solution.operands[p]) for p in range(consts)]
    return tuple(
        (p, s.dim) for p, s in states_of_constants if s.kind == "P" and step.tensors[step.inputs[p]].shape[s.dim] == scan.size
    )


def _legal(step: Body, consts: int, scan: LayerScan) -> bool:
    """Whether a step works sample by sample, so that it may run along an axis that partitions the samples."""
    operands, results = _states(step, consts, scan), scan.results()
    inputs = dict(zip(step.inputs, operands, strict=True))
    handed_on = [(inputs[a], result) for a, result in zip(step.outputs, results, strict=True) if isinstance(a, int) and a in inputs]
    if any(state != result for state, result in handed_on):  # a weight becomes the carry
        return False
    try:
        solution = along_axis(step, operands, results)
    except Unmatched:
        return False
    return (
        solution is not None
        and not solution.communicates
        and solution.results == results
        and PARTIAL not in solution.states.values()
    )


def walked(body: Body, scan: LayerScan, rounds: int, tail: Tail | None = None) -> Body:
    """Return the program with one of its scans, and the tail if given, run over `rounds` micro-batches.

    Raises Mixed if a step, or the tail, depends on the micro-batch's number, or on samples of another one.
    """
    e = body.equations[scan.equation]
    step, consts = nested_body(e), constants_and_carry(e.params)[0]
    check_separable(step, _states(step, consts, scan, rounds), scan.results(rounds), rounds)
    operand_types, types = [body.tensor(a) for a in e.operands], body.tensors.values()

    def parts(*operands: Any) -> Sequence[Any]:
        return _parts(e, scan, rounds, operands)

    if tail is None:
        program = _traced("its steps depend", lambda *operands: _joined(scan, parts(*operands)), operand_types, types)
        return spliced(body, e.results, e.operands, e.results, program, e, WALK)

    def both(*operands: Any) -> list[Any]:
        n = len(e.operands)
        return sums(tail, rounds, scan.size, end, _parts(e, scan, rounds, operands[:n]), operands[n:])

    states, whole = (*tail.states(scan.size, rounds), *scan.results(rounds)), (PARTIAL,) * len(tail.sums)
    check_separable(tail.body, states, whole, rounds)

    def end(parts: Sequence[Any]) -> Sequence[Any]:
        return run_body(tail.body, parts, [(s,) for s in states], [(s,) for s in whole], (Axis(TIME, rounds, 0),))

    more = (*tail.constants, *(v for v, _ in tail.read))
    _traced("its steps depend", parts, operand_types, types)
    program = _traced("what follows them depends", both, [*operand_types, *map(body.tensor, more)], types)
    gone = (scan.equation, *tail.equations)
    replaced = {v for k in gone for v in body.equations[k].results}
    return spliced(in_order(body, gone, tail.after), replaced, (*e.operands, *more), tail.sums, program, e, WALK)


def _traced(what: str, run: Callable[..., Sequence[Any]], operands: Sequence[Tensor], types: Iterable[Tensor]) -> Body:
    try:
        return trace(run, (t.struct for t in operands), types)
    except NoPosition:
        why = "positions, or random numbers that are not drawn for each sample"
        raise PositionDependent(f"{what} on where a sample stands in the batch ({why})") from None


def sums(
    tail: Tail, rounds: int, size: int, end: Callable[[Sequence[Any]], Any], stacks: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """Compute a tail's sums over micro-batches.

    `end` computes the sums of one micro-batch from constants, further inputs with samples, and the last layer's results, which are
    `stacks`. The final addition is a separate operator (a remat), by which pipelines recognize it.
    """
    constants = operands[: len(tail.constants)]
    read = [split(x, d, rounds, size) for x, (_, d) in zip(operands[len(constants) :], tail.read, strict=True)]
    partial = lax.scan(lambda _, parts: (None, end((*constants, *parts))), None, (*read, *stacks))[1]
    return jax.checkpoint(lambda *xs: [x.sum(0, dtype=x.dtype) for x in xs])(*partial)


def _joined(scan: LayerScan, stacks: Sequence[Any]) -> list[Any]:
    return [joined(x, d) for x, d in zip(stacks, scan.samples, strict=True)]


def _parts(e: Equation, scan: LayerScan, rounds: int, operands: Sequence[Any]) -> list[Any]:
    """Compute the scan's results one micro-batch at a time, and return them stacked."""
    consts, carry = constants_and_carry(e.params)
    step, time = nested_body(e), (Axis(TIME, rounds, 0),)
    types = [(s,) for s in _states(step, consts, scan, rounds)]
    results = [(s,) for s in scan.results(rounds)]

    def whole(part: Any, read: dict[int, Any]) -> Any:
        constants = [read.get(p, operands[p]) for p in range(consts)]

        def one(carried: Any, weights: Any) -> Any:
            return run_body(step, (*constants, *carried, *weights), types, results, time), None

        length, unroll = e.params["length"], e.params["unroll"]
        return lax.scan(one, part, operands[consts + carry :], length, unroll=unroll)[0]

    stacks = [split(x, d, rounds) for x, d in zip(operands[consts : consts + carry], scan.samples, strict=True)]
    read = {p: split(operands[p], d, rounds) for p, d in scan.read}
    return list(lax.scan(lambda _, parts: (None, whole(*parts)), None, (stacks, read))[1])
