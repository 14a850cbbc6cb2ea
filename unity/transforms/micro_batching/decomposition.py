"""Decomposition of a program over samples: the part that can run one micro-batch at a time, and what comes before and after it.

    loss(w, x)  =  after(sum([part(w, x[m]) for m in micro_batches]))

The states of its values along an axis that partitions the samples (`sample_states`) say which equations can be in the part. Values
that are independent of the samples are computed once, before the loop; so are sums over the samples that no gradient flows through,
such as the number of labels that count. Equations that need complete sums come after the loop.

Of M micro-batches, number m has the samples m, m + M, m + 2 M and so on: a dimension of n samples, as `[n / M, M]`, is partitioned
in its inner digit. So a device with a slice of the samples has a slice of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from unity.pcg.capture.capture import Captured
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import descendants, extract
from unity.pcg.ir.gradient_flow import carrying, dependent, losses
from unity.pcg.ir.program import Body, Equation
from unity.pcg.parallel.stages import Mixed
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State
from unity.transforms.chosen_results import narrowed, with_results
from unity.transforms.cotangent_of_one import check_cotangents
from unity.transforms.micro_batching.sample_dimensions import DIMENSIONS, SampleDimensions, candidates, divisors
from unity.transforms.micro_batching.sample_states import SampleStates, sample_states
from unity.transforms.splice import operator_at, variables_of
from unity.transforms.strided_micro_batches import Uneven, check_separable

NO_SAMPLES = "no argument that is not differentiated has samples"


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The part of a program that runs one micro-batch at a time, in terms of the program's variables.

    Attributes:
        body: the part, from `constants` and `read` to `sums` and `each`.
        constants: inputs without samples.
        inactive: those of `constants` through which no gradient flows, such as the number of labels that count, and those of `sums`
            that depend on nothing that is differentiated. (Gradients of others, such as auxiliary results, are refused.)
        read: inputs with samples, with their states along the axis of micro-batches. They are inputs of the program, or computed
            before the loop.
        sums: results that are sums over the samples.
        each: results with samples, with their states.
        after: the equations that need complete sums, by number.
        loss: the number of the only sum that has a gradient; None without gradients.
        size: the number of samples.
    """

    body: Body
    constants: tuple[int, ...]
    inactive: frozenset[int]
    read: tuple[tuple[int, State], ...]
    sums: tuple[int, ...]
    each: tuple[tuple[int, State], ...]
    after: frozenset[int]
    loss: int | None
    size: int

    @property
    def operands(self) -> tuple[State, ...]:
        """States of the part's inputs along the axis of micro-batches."""
        return (*(REPLICATED for _ in self.constants), *(s for _, s in self.read))

    @property
    def results(self) -> tuple[State, ...]:
        """States of the part's results along that axis."""
        return (*(PARTIAL for _ in self.sums), *(s for _, s in self.each))


def decomposed(captured: Captured, count: int) -> Decomposition:
    """Decompose a program into `count` micro-batches.

    Raises Mixed, naming the operator and the user's line, if the program does not decompose over its samples.
    """
    first: Mixed | None = None
    for samples in candidates(captured):
        try:
            return _decomposed(captured, samples, count)
        except Mixed as reason:
            first = first or reason
    raise first or Mixed(NO_SAMPLES)


def counts(captured: Captured) -> list[int]:
    """Return the numbers of micro-batches to try, ascending. The program decomposes into the last.

    Raises Mixed if the program does not decompose over its samples.
    """
    first: Mixed | None = None
    for samples in candidates(captured):
        numbers = divisors(samples.size)
        for k in reversed(range(len(numbers))):
            try:
                _decomposed(captured, samples, numbers[k])
            except Uneven as reason:
                first = first or reason
            except Mixed as reason:
                first = first or reason
                break
            else:
                return numbers[: k + 1]
    raise first or Mixed(NO_SAMPLES)


@dataclass(frozen=True, eq=False)
class _Schedule:
    """The equations of a program by when they run, by number; those in neither `inside` nor `after` run before the loop.

    Attributes:
        states: the states of the program's values.
        early: sums over the samples that are computed before the loop.
        inside: the equations of the loop over micro-batches. It may compute again what leads to the early sums.
        after: the equations that run after the loop.
    """

    states: SampleStates
    early: frozenset[int]
    inside: list[int]
    after: frozenset[int]

    @property
    def body(self) -> Body:
        return self.states.body


def _decomposed(captured: Captured, samples: SampleDimensions, count: int) -> Decomposition:
    """Decompose a program into `count` micro-batches under an assumption about its samples. Raises Mixed if it does not."""
    if samples.size % count:
        raise Mixed(f"{count} micro-batches cannot share {samples.size} samples evenly")
    states = sample_states(captured, samples, count)
    schedule = _scheduled(captured, states)
    if samples.of_one_input:
        _refuse_one_input(captured, samples, schedule)
    ends = _results_of_loop(schedule)
    end_states = {v: states.solution.states[v] for v in ends}
    sums = tuple(v for v, s in end_states.items() if s.kind != "P")
    each = tuple((v, s) for v, s in end_states.items() if s.kind == "P")
    part = _part(schedule, (*sums, *(v for v, _ in each)))
    read = tuple((v, s) for v in part.inputs if (s := states.solution.seen(v)).kind == "P")
    fixed = tuple(v for v in part.inputs if not states.is_partitioned(v))
    part = replace(part, inputs=(*fixed, *(v for v, _ in read)))
    inactive = (frozenset(fixed) - _active(captured)) | frozenset(sums).difference(dependent(captured.body, _weights(captured)))
    result = Decomposition(part, fixed, inactive, read, sums, each, schedule.after, _loss(captured, sums), samples.size)
    if result.loss is not None:
        check_cotangents(part)
    check_separable(result.body, result.operands, result.results, count)
    return result


def _scheduled(captured: Captured, states: SampleStates) -> _Schedule:
    """Divide a program's equations among the loop, what comes before it, and what comes after it.

    Raises Mixed, naming an operator that needs a complete sum beside single samples.
    """
    body, active = captured.body, _active(captured)
    early = frozenset(v for i in states.solved_equations for v in _early(states, i, active))
    after = _needing_sums(states, states.solution.reduced.keys() - early)
    inside = [i for i in states.solved_equations if i not in after and states.has_samples(i)]
    return _Schedule(states, early, [i for i in inside if not early.issuperset(body.equations[i].results)], after)


def _early(states: SampleStates, number: int, active: AbstractSet[int]) -> list[int]:
    """Return the inactive sums among an equation's results that are computed for all samples before the loop.

    A loop or a checkpoint that also computes a part of the loss would run a second time for them. So of its sums only those come
    first that are read beside samples; the loop adds up the others.
    """
    e = states.body.equations[number]
    sums = [v for v in e.results if v in states.solution.reduced and v not in active]
    return [v for v in sums if active.isdisjoint(e.results) or any(reads_samples for _, reads_samples in states.dependents_of([v]))]


def _needing_sums(states: SampleStates, sums: Iterable[int]) -> frozenset[int]:
    """Return the equations that need complete sums, by number. Raises Mixed if one of these also reads samples."""
    numbers = set(states.after)
    for i, reads_samples in states.dependents_of(sums):
        if reads_samples:
            raise _needing_all(states.body.equations[i])
        numbers.add(i)
    return frozenset(numbers)


def _needing_all(e: Equation) -> Mixed:
    """Return the refusal of an equation that reads single samples beside a sum over all."""
    return Mixed(f"{operator_at(e)} needs a sum over all samples to go on with each")


def _refuse_one_input(captured: Captured, samples: SampleDimensions, schedule: _Schedule) -> None:
    """Refuse an assumption about one input alone if it divides a weight, or leaves a product of samples whole. Raises Mixed."""
    states = schedule.states
    if any(samples.dims.values()):
        _refuse_divided_weights(captured, states)
    outside = [i for i in states.solved_equations if i not in schedule.after and not states.has_samples(i)]
    _refuse_whole_products(captured, outside, samples.size)


def _refuse_divided_weights(captured: Captured, states: SampleStates) -> None:
    """Refuse samples along an input's second dimension if they divide a weight, too, as the outputs of the last layer do.

    Raises Mixed.
    """
    for k in sorted(captured.differentiated):
        if (state := states.solution.states.get(captured.body.inputs[k])) is not None and state.kind == "P":
            raise Mixed(f"{captured.paths[k]} is differentiated, and has samples")


def _refuse_whole_products(captured: Captured, outside: Sequence[int], size: int) -> None:
    """Refuse samples of one input alone if a product of a weight and another input of their number would be computed whole.

    Of a loss that picks its samples' scores in another order, the order alone could be shared by micro-batches.

    Raises Mixed.
    """
    body = captured.body
    weights = {v for k, v in enumerate(body.inputs) if k in captured.differentiated}
    others = {v for v in body.inputs if v not in weights and size in body.tensors[v].shape[:DIMENSIONS]}
    for i in outside:
        e = body.equations[i]
        read = variables_of(e.operands)
        if facts_of(e.name).product and not weights.isdisjoint(read) and not others.isdisjoint(read):
            raise Mixed(f"{operator_at(e)} does not work on each sample by itself")
        for known in (weights, others):
            if not known.isdisjoint(read):
                known.update(e.results)


def _results_of_loop(schedule: _Schedule) -> list[int]:
    """Return the variables that the loop computes for what comes after it, or for the program's results.

    Raises Mixed if an equation after the loop reads samples.
    """
    body, states = schedule.body, schedule.states
    needed_before = _leading_to(body, schedule.early)  # the loop may compute some of these again, but returns none of them
    computed = [v for i in schedule.inside for v in body.equations[i].results if v not in needed_before]
    later = {a for i in schedule.after for a in variables_of(body.equations[i].operands)}
    for v in computed:
        if v in later and states.solution.states[v].kind == "P":
            raise _needing_all(next(body.equations[i] for i in sorted(schedule.after) if v in body.equations[i].operands))
    outputs = variables_of(body.outputs)
    return [v for v in computed if v in later or v in outputs]


def _leading_to(body: Body, variables: Collection[int]) -> set[int]:
    """Return some variables and those that they depend on, result by result."""
    known = set(variables)
    for e in reversed(body.equations):
        if wanted := [k for k, v in enumerate(e.results) if v in known]:
            known.update(variables_of(narrowed(e, wanted).operands))
    return known


def _part(schedule: _Schedule, results: Sequence[int]) -> Body:
    """Return the program of the loop, with the inputs that it reads."""
    body, states = schedule.body, schedule.states
    divided = descendants(body, (v for i in states.before for v in body.equations[i].results))  # among the part's inputs
    duplicated = {v: i for v, i in constants(body).items() if v not in divided}
    part, _ = extract(_with_renamed_early_sums(schedule), schedule.inside, results, duplicated)
    part = with_results(part, range(len(results)))
    return replace(part, inputs=tuple(v for v in part.inputs if any(v in e.operands for e in part.equations)))


def _with_renamed_early_sums(schedule: _Schedule) -> Body:
    """Return the program, in which equations of the loop compute the early sums of their samples under other names."""
    body, early = schedule.body, schedule.early
    start = max(body.tensors, default=0) + 1
    other = {v: start + k for k, v in enumerate(sorted(early))}
    inside = set(schedule.inside)
    equations = (
        replace(e, results=tuple(other.get(v, v) for v in e.results)) if i in inside and not early.isdisjoint(e.results) else e
        for i, e in enumerate(body.equations)
    )
    return replace(body, equations=tuple(equations), tensors={**body.tensors, **{w: body.tensors[v] for v, w in other.items()}})


def _active(captured: Captured) -> frozenset[int]:
    """Return the variables through which a gradient flows."""
    ends = losses(captured.graph)
    return carrying(captured.body, _weights(captured), tuple(k in ends for k in range(len(captured.body.outputs))))


def _weights(captured: Captured) -> tuple[bool, ...]:
    """Return whether each input of the program is differentiated."""
    body = captured.body
    return tuple(k in captured.differentiated and body.tensors[v].floating for k, v in enumerate(body.inputs))


def _loss(captured: Captured, sums: Sequence[int]) -> int | None:
    """Return the number of the only sum that has a gradient; None if the program has no gradient.

    Raises Mixed if no sum has a gradient, or several have.
    """
    if not captured.differentiated:
        return None
    value = captured.graph.outputs[0].tensor
    if value.shape or not value.floating:
        raise Mixed(f"gradients are those of the first result, which is no scalar but {value}")
    active = _active(captured)
    numbers = [k for k, v in enumerate(sums) if v in active]
    makers = [next(operator_at(e) for e in captured.body.equations if sums[k] in e.results) for k in numbers]
    if len(numbers) != 1:
        lines = ", ".join(makers) or "none"
        raise Mixed(f"of the sums over the samples exactly one must have a gradient, but {lines} {'have' if makers else 'has'} one")
    if captured.body.tensors[sums[numbers[0]]].shape:
        raise Mixed(f"{makers[0]} is the last that adds up over the samples, and no scalar")
    return numbers[0]
