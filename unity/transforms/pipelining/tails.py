"""The tail of a pipeline: the operators from the last layer to the loss, if they can run one micro-batch at a time.

    loss(tail(scan(step, x)))  =  loss(sum([tail(scan(step, part)) for part in parts(x)]))

By the operator table, the *tail* works sample by sample up to sums over the samples: a final norm, logits, cross entropy and the
sum of its mean. With it a micro-batch's backward pass can follow its forward pass at once (1F1B). Functions of the sums come after
all micro-batches. So exactly one sum has a gradient, a scalar, and all gradients are known up to one factor: that sum's cotangent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import dependent_equations, extract
from unity.pcg.ir.gradient_flow import dependent, leading_to, losses
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.program import Body
from unity.pcg.parallel.stages import Mixed
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.propagation import Solution, Unmatched
from unity.pcg.propagation.solved_prefix import first_unmatched
from unity.pcg.propagation.solver import solve
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned
from unity.transforms.pipelining.straight_tails import straight
from unity.transforms.splice import operator_at, variables_of
from unity.transforms.strided_micro_batches import sample_state


@dataclass(frozen=True, eq=False)
class Tail:
    """The tail after a scan, in terms of a program's variables.

    Attributes:
        body: the tail's program, from `constants`, `read` and the scan's results to `sums`, its loops written out.
        constants: inputs without samples.
        read: inputs with samples, with their sample dimensions.
        sums: results, each a sum over the samples.
        equations: the program's equations that the tail replaces.
        after: the equations that depend on sums.
        loss: the number of the sum that has a gradient.
    """

    body: Body
    constants: tuple[int, ...]
    read: tuple[tuple[int, int], ...]
    sums: tuple[int, ...]
    equations: frozenset[int]
    after: frozenset[int]
    loss: int

    def states(self, size: int, count: int) -> tuple[State, ...]:
        """Return the states of the inputs, except the scan's results, along the axis of `count` micro-batches of `size` samples."""
        return (*(REPLICATED for _ in self.constants), *(sample_state(d, size, count) for _, d in self.read))

    @property
    def own(self) -> int:
        """The number of the body's inputs that are no results of the scan."""
        return len(self.constants) + len(self.read)

    @cached_property
    def graph(self) -> PCG:
        """The body as a graph of operators."""
        return graph_of(self.body, [f"operand {p}" for p in range(len(self.body.inputs))])


def tail_of(captured: Captured, number: int, samples: Sequence[int], size: int, inactive: Collection[int] = ()) -> Tail:
    """Return the tail after a scan.

    Args:
        captured: the program.
        number: the scan's equation.
        samples: the sample dimension of each of its results.
        size: the number of samples.
        inactive: those of its results that have no gradient, if it is an equation that stands for several.

    Raises:
        Mixed: the tail cannot be computed one micro-batch at a time; names the operator.
    """
    body, results = captured.body, captured.body.equations[number].results
    if not set(results).isdisjoint(variables_of(body.outputs)):
        raise Mixed("what leaves the last layer is a result of the function, and no sum over the samples")
    following = dependent_equations(body, results)
    ends = [v for v in variables_of(body.outputs) if any(v in body.equations[i].results for i in following)]
    whole, order = extract(body, following, ends, constants(body))
    solution = _solved(whole, {v: partitioned(d) for v, d in zip(results, samples, strict=True)})
    mine, after = _parted(body, following, solution)
    sums = tuple(v for i in mine for v in body.equations[i].results if v in ends or _read_by(body, after, v))
    for v in sums:
        if solution.states[v] != PARTIAL:
            raise Mixed(f"{_maker(body, mine, v)} gives results for each sample, and no sum over them")
    loss = _loss(captured, sums, inactive)
    part, order = extract(body, mine, sums, constants(body))
    inputs_before = [v for v in order if v not in results]
    read = tuple((v, solution.states[v].dim) for v in inputs_before if solution.states[v].kind == "P")
    for v, dim in read:
        if solution.states[v].outer > 1 or body.tensors[v].shape[dim] % size:
            raise Mixed("what it is computed from has samples in an order that cannot be divided")
    fixed = tuple(v for v in inputs_before if solution.states[v].kind != "P")
    inputs = (*fixed, *(v for v, _ in read), *results)
    part = straight(replace(part, inputs=inputs, tensors={**part.tensors, **{v: body.tensors[v] for v in results}}))
    tail = Tail(part, fixed, read, sums, frozenset(mine), frozenset(after), loss)
    states = (*tail.states(size, 1), *(partitioned(d) for d in samples))
    alone = along_axis(part, states, (PARTIAL,) * len(sums))
    if alone is None or alone.communicates or alone.results != (PARTIAL,) * len(sums):
        raise Mixed("what follows the last layer does not add up over the samples")
    return tail


def _solved(body: Body, known: Mapping[int, State]) -> Solution:
    """Solve for states along an axis that partitions the samples. Inputs from elsewhere never count as partial sums.

    Raises Mixed, naming the first operator that does not work sample by sample.
    """
    states = dict(known)
    while True:
        try:
            solution = solve(body, states)
        except Unmatched:
            first = body.equations[first_unmatched(body, known)[0]]
            raise Mixed(f"{operator_at(first)} does not work on each sample by itself") from None
        partial = [v for v in body.inputs if solution.states[v] == PARTIAL]
        if not partial:
            break
        states |= dict.fromkeys(partial, REPLICATED)
    for v, kind in solution.reduced.items():
        if kind != "sum":
            raise Mixed(f"{operator_at(next(e for e in body.equations if v in e.results))} takes the {kind} over the samples")
    return solution


def _parted(body: Body, following: Sequence[int], solution: Solution) -> tuple[list[int], list[int]]:
    """Return the equations of the tail, and those that need complete sums. Raises Mixed if one of these also reads samples."""
    whole, mine, after = set(solution.reduced), list[int](), list[int]()
    for i in following:
        e = body.equations[i]
        operands = set(variables_of(e.operands))
        if whole.isdisjoint(operands):
            mine.append(i)
            continue
        if any(solution.states.get(v, REPLICATED).kind == "P" for v in operands - whole):
            raise Mixed(f"{operator_at(e)} needs a sum over all samples to go on with each")
        after.append(i)
        whole.update(e.results)
    return mine, after


def _loss(captured: Captured, sums: Sequence[int], inactive: Collection[int]) -> int:
    """Return the number of the only sum that has a gradient. Raises Mixed if there are none, or several.

    Sums that lead to auxiliary results alone have none; nor do those of variables that are `inactive`.
    """
    body, weights, ends = captured.body, captured.differentiated, losses(captured.graph)
    flags = tuple(k in weights and body.tensors[v].floating for k, v in enumerate(body.inputs))
    with_tangent = dependent(body, flags, frozenset(inactive))
    later = Body(tuple(sums), body.outputs, body.equations, body.tensors)
    leading = leading_to(later, tuple(k in ends for k in range(len(body.outputs))))
    active = [k for k, v in enumerate(sums) if v in with_tangent and leading[k] and body.tensors[v].floating]
    lines = [_maker(body, range(len(body.equations)), sums[k]) for k in active]
    if not active:
        raise Mixed("of the sums over the samples one must have a gradient, but none has one")
    if len(active) > 1:
        raise Mixed(
            f"of the sums over the samples one must have a gradient, but {', '.join(lines)} have one: if they are added up, add up"
            " what they are sums of, so sum(a + c * b) / n for sum(a) / n + c * sum(b) / n"
        )
    if body.tensors[sums[active[0]]].shape:
        raise Mixed(f"{lines[0]} is the last that adds up over the samples, and no scalar")
    return active[0]


def _read_by(body: Body, equations: Sequence[int], variable: int) -> bool:
    return any(variable in body.equations[i].operands for i in equations)


def _maker(body: Body, among: Sequence[int], variable: int) -> str:
    return next(operator_at(body.equations[i]) for i in among if variable in body.equations[i].results)
