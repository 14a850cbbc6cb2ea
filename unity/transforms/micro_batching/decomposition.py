"""Decomposition of a program over samples: the part that can run one micro-batch at a time, and what comes before and after it.

    loss(w, x)  =  after(sum([part(w, x[m]) for m in micro_batches]))

By the operator table, an axis that partitions the samples must leave every value of the part partitioned in the samples, a partial
sum over them, or independent of them. Values that are independent of the samples are computed once, before the loop; so are sums
over the samples that no gradient flows through, such as the number of labels that count. Equations that need complete sums come
after the loop. An array with an entry for each sample that depends on no argument with samples, such as `jnp.linspace(0, 1, n)`, is
computed before the loop and divided like an argument, unless each device can compute its slice.

Of M micro-batches, number m has the samples m, m + M, m + 2 M and so on: a dimension of n samples, as `[n / M, M]`, is partitioned
in its inner digit. So a device with a slice of the samples has a slice of each micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import islice

from unity.pcg.capture.capture import Captured
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import extract, used
from unity.pcg.ir.gradient_flow import carrying, dependent, losses
from unity.pcg.ir.program import Body, Equation
from unity.pcg.parallel.stages import Mixed
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.propagation import Solution, Unmatched
from unity.pcg.propagation.solver import solve
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State
from unity.transforms.chosen_results import narrowed, with_results
from unity.transforms.cotangent_of_one import check_cotangents
from unity.transforms.splice import operator_at, variables_of

DIMENSIONS = 2  # the samples of an argument are along its first or its second dimension
ALONE = 16  # arrays that are tried alone
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
    for size, known in _batches(captured):
        try:
            return _decomposed(captured, size, known, count)
        except Mixed as reason:
            first = first or reason
    raise first or Mixed(NO_SAMPLES)


class Uneven(Mixed):
    """Raised for an operator that cannot work on micro-batches separately, but may be able to if there are fewer of them."""


def counts(captured: Captured) -> list[int]:
    """Return the numbers of micro-batches to try, ascending. The program decomposes into the last.

    Raises Mixed if the program does not decompose over its samples.
    """
    first: Mixed | None = None
    for size, known in _batches(captured):
        numbers = divisors(size)
        for k in reversed(range(len(numbers))):
            try:
                _decomposed(captured, size, known, numbers[k])
            except Uneven as reason:
                first = first or reason
            except Mixed as reason:
                first = first or reason
                break
            else:
                return numbers[: k + 1]
    raise first or Mixed(NO_SAMPLES)


def divisors(size: int) -> list[int]:
    """Return the numbers of micro-batches that may share the samples, ascending: powers of two, or else all divisors."""
    every = [n for n in range(2, size + 1) if size % n == 0]
    return [n for n in every if n & (n - 1) == 0] or every


def _batches(captured: Captured) -> Iterator[tuple[int, dict[int, int | None]]]:
    """Yield numbers of samples, each with the sample dimension of some inputs, None for those without samples.

    Sizes of the first dimension come first, and of these the size that most arrays have. For each size, all arrays of that size
    have samples at first, and then one array alone, from which the states of the others follow: the largest of each argument, then
    others, largest first. Weights that are not differentiated, such as a teacher's, may have as many rows as there are samples.
    """
    body = captured.body
    arguments = [k for k, tree in enumerate(captured.in_tree.children()) for _ in range(tree.num_leaves)]
    argument_of = dict(zip(body.inputs, arguments, strict=False))  # the inputs after them are constants
    data = [v for k, v in enumerate(body.inputs) if k not in captured.differentiated]
    weights = dict.fromkeys(v for k, v in enumerate(body.inputs) if k in captured.differentiated)
    for dim in range(DIMENSIONS):
        sizes = Counter(body.tensors[v].shape[dim] for v in data if body.tensors[v].ndim > dim)
        for size, _ in sizes.most_common():
            alike = [v for v in data if body.tensors[v].ndim > dim and body.tensors[v].shape[dim] == size]
            if size > 1:
                yield size, {**weights, **dict.fromkeys(alike, dim)}
                alike.sort(key=lambda v: body.tensors[v].nbytes, reverse=True)
                largest = dict[int | None, int]()  # of each argument
                for v in alike:
                    largest.setdefault(argument_of.get(v), v)
                for v in islice(dict.fromkeys((*largest.values(), *alike)), ALONE):
                    yield size, {v: dim}


def _decomposed(captured: Captured, size: int, dims: Mapping[int, int | None], count: int) -> Decomposition:
    body = captured.body
    if size % count:
        raise Mixed(f"{count} micro-batches cannot share {size} samples evenly")
    known = {v: REPLICATED if dim is None else State("P", dim, size // count) for v, dim in dims.items()}
    after, solution, arrays = _solved(body, known, _independent(captured, size))
    following = [i for i in range(len(body.equations)) if i not in after and i not in arrays]
    active = _active(captured)
    early = {v for i in following for v in _early(body, i, following, active, solution)}  # sums that are computed before the loop
    after = _needing_sums(body, following, after, solution.reduced.keys() - early, solution)
    inside = [i for i in following if i not in after and _has_samples(body, i, solution)]
    if len(dims) == 1:
        if any(dims.values()):
            _refuse_divided_weights(captured, solution)
        _refuse_whole_products(captured, [i for i in following if i not in after and i not in inside], size)
    own = [i for i in inside if not early.issuperset(body.equations[i].results)]
    before = _leading_to(body, early)  # the loop computes again what it needs of these
    computed = [v for i in own for v in body.equations[i].results if v not in before]
    later = {a for i in after for a in variables_of(body.equations[i].operands)}
    ends = [v for v in computed if v in later or v in variables_of(body.outputs)]
    for v in ends:
        if solution.states[v].kind == "P" and v in later:
            raise _needing_all(next(body.equations[i] for i in sorted(after) if v in body.equations[i].operands))
    sums = tuple(v for v in ends if solution.states[v].kind != "P")
    each = tuple((v, solution.states[v]) for v in ends if solution.states[v].kind == "P")
    part, _ = extract(_with_early_as_inputs(body, own, early), own, ends, _constants(body, arrays))
    part = with_results(part, range(len(ends)))
    inputs = [v for v in part.inputs if any(v in e.operands for e in part.equations)]
    read = tuple((v, s) for v in inputs if (s := solution.seen(v)).kind == "P")
    fixed = tuple(v for v in inputs if solution.seen(v).kind != "P")
    part = replace(part, inputs=(*fixed, *(v for v, _ in read)), outputs=(*sums, *(v for v, _ in each)))
    inactive = (frozenset(fixed) - active) | frozenset(sums).difference(dependent(body, _weights(captured)))
    result = Decomposition(part, fixed, inactive, read, sums, each, frozenset(after), _loss(captured, sums), size)
    if result.loss is not None:
        check_cotangents(part)
    _check(result, count)
    return result


def _refuse_divided_weights(captured: Captured, solution: Solution) -> None:
    """Refuse samples along an array's second dimension if they divide a weight, too, as the outputs of the last layer do.

    Raises Mixed.
    """
    for k in sorted(captured.differentiated):
        if (state := solution.states.get(captured.body.inputs[k])) is not None and state.kind == "P":
            raise Mixed(f"{captured.paths[k]} is differentiated, and has samples")


def _refuse_whole_products(captured: Captured, outside: Sequence[int], size: int) -> None:
    """Refuse samples of one array alone if a product of a weight and another array of their number would be computed whole.

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


def _independent(captured: Captured, size: int) -> frozenset[int]:
    """Return the computed variables of the samples' size that depend on no weight, and on no input of that size."""
    body = captured.body

    def sized(v: int) -> bool:
        return size in body.tensors[v].shape[:DIMENSIONS]

    excluded = {v for k, v in enumerate(body.inputs) if k in captured.differentiated or sized(v)}
    for e in body.equations:
        if not excluded.isdisjoint(e.operands):
            excluded.update(e.results)
    return frozenset(v for e in body.equations for v in e.results if v not in excluded and sized(v))


def _solved(body: Body, known: Mapping[int, State], independent: frozenset[int]) -> tuple[set[int], Solution, set[int]]:
    """Return three: the equations that come after the loop; the solution of the rest; the equations before the loop.

    The solver does not reduce a sum for an equation that reads it: such an equation comes after the loop. Those before the loop
    compute arrays that are `independent` of the samples. These are then divided among micro-batches like arguments.

    Raises Mixed, naming the first operator that does not work sample by sample.
    """
    states, after, arrays = dict(known), set[int](), set[int]()
    while True:
        part = _without(body, after, arrays)
        try:
            solution = solve(part, states, patient=False)
        except Unmatched:
            number, sums = _first_unmatched(body, after, arrays, states)
            if sums:
                after |= _dependent(body, number)
            elif (more := _producers(body, independent.intersection(body.equations[number].operands))) <= arrays:
                raise Mixed(f"{operator_at(body.equations[number])} does not work on each sample by itself") from None
            else:
                arrays |= more
            continue
        partial = [v for v in part.inputs if solution.states.get(v) == PARTIAL]
        if not partial:
            return after, solution, arrays
        states |= dict.fromkeys(partial, REPLICATED)


def _constants(body: Body, arrays: Collection[int]) -> dict[int, int]:
    """Return the cheap variables that depend on no input, nor on the results of `arrays`, each with its equation."""
    numbers = {k for i in arrays for k in _dependent(body, i)}
    return {v: i for v, i in constants(body).items() if i not in numbers}


def _producers(body: Body, variables: AbstractSet[int]) -> set[int]:
    """Return the numbers of the equations that compute some variables."""
    return {i for i, e in enumerate(body.equations) if not variables.isdisjoint(e.results)}


def _without(body: Body, after: Collection[int], arrays: Collection[int]) -> Body:
    """Return the program without some equations.

    The operands of `after` and the other outputs are its outputs, and the results of `arrays` its further inputs.
    """
    equations = tuple(e for i, e in enumerate(body.equations) if i not in after and i not in arrays)
    inputs = (*body.inputs, *(v for i in sorted(arrays) for v in body.equations[i].results))
    computed = {*inputs, *(v for e in equations for v in e.results)}
    ends = [*variables_of(body.outputs), *(a for i in sorted(after) for a in variables_of(body.equations[i].operands))]
    outputs = tuple(dict.fromkeys(v for v in ends if v in computed))
    return used(replace(body, inputs=inputs, equations=equations, outputs=outputs))


def _first_unmatched(body: Body, after: Collection[int], arrays: Collection[int], known: Mapping[int, State]) -> tuple[int, bool]:
    """Return the first equation, by bisection, up to which the program has no solution, and whether it reads a partial sum."""
    numbers = [i for i in range(len(body.equations)) if i not in after and i not in arrays]
    inputs = _without(body, after, arrays).inputs

    def prefix(count: int) -> Solution | None:
        equations = tuple(body.equations[i] for i in numbers[:count])
        outputs = tuple(v for e in equations for v in e.results)
        try:
            return solve(replace(body, inputs=inputs, equations=equations, outputs=outputs), known, patient=False)
        except Unmatched:
            return None

    good, bad = 0, len(numbers)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if prefix(middle) is None else (middle, bad)
    number, solution = numbers[bad - 1], prefix(good)
    operands = variables_of(body.equations[number].operands)
    return number, solution is not None and any(solution.seen(a) == PARTIAL for a in operands if a in solution.states)


def _dependent(body: Body, number: int) -> set[int]:
    """Return the numbers of an equation and of those that depend on it."""
    known, numbers = set(body.equations[number].results), {number}
    for i, e in enumerate(body.equations):
        if not known.isdisjoint(variables_of(e.operands)):
            known.update(e.results)
            numbers.add(i)
    return numbers


def _leading_to(body: Body, variables: Collection[int]) -> set[int]:
    """Return some variables and those that they depend on."""
    known = set(variables)
    for e in reversed(body.equations):
        if wanted := [k for k, v in enumerate(e.results) if v in known]:
            known.update(variables_of(narrowed(e, wanted).operands))
    return known


def _active(captured: Captured) -> frozenset[int]:
    """Return the variables through which a gradient flows."""
    ends = losses(captured.graph)
    return carrying(captured.body, _weights(captured), tuple(k in ends for k in range(len(captured.body.outputs))))


def _weights(captured: Captured) -> tuple[bool, ...]:
    """Return whether each input of the program is differentiated."""
    body = captured.body
    return tuple(k in captured.differentiated and body.tensors[v].floating for k, v in enumerate(body.inputs))


def _early(body: Body, number: int, following: Sequence[int], active: AbstractSet[int], solution: Solution) -> list[int]:
    """Return the inactive sums among an equation's results that are computed for all samples first.

    A loop or a checkpoint that also computes a part of the loss would run a second time for them. So of its sums only those come
    first that are read beside samples; the loop adds up the others.
    """
    e = body.equations[number]
    sums = [v for v in e.results if v in solution.reduced and v not in active]
    return [v for v in sums if active.isdisjoint(e.results) or _read_with_samples(body, v, following, solution)]


def _with_early_as_inputs(body: Body, own: Collection[int], early: AbstractSet[int]) -> Body:
    """Return the program, in which equations of the loop compute the early sums of their samples under other names."""
    start = max(body.tensors, default=0) + 1
    other = {v: start + k for k, v in enumerate(sorted(early))}
    equations = (
        replace(e, results=tuple(other.get(v, v) for v in e.results)) if i in own and not early.isdisjoint(e.results) else e
        for i, e in enumerate(body.equations)
    )
    return replace(body, equations=tuple(equations), tensors={**body.tensors, **{w: body.tensors[v] for v, w in other.items()}})


def _read_with_samples(body: Body, variable: int, following: Sequence[int], solution: Solution) -> bool:
    """Return whether an equation reads samples beside a variable or a value computed from it."""
    known = {variable}
    for i in following:
        operands = set(variables_of(body.equations[i].operands))
        if known.isdisjoint(operands):
            continue
        if any(solution.seen(v).kind == "P" for v in operands - known):
            return True
        known.update(body.equations[i].results)
    return False


def _needing_sums(
    body: Body, following: Sequence[int], after: Collection[int], late: Collection[int], solution: Solution
) -> set[int]:
    """Return `after` with the equations that depend on `late` sums. Raises Mixed if one of these also reads samples."""
    complete, numbers = set(late), set(after)
    for i in following:
        e = body.equations[i]
        operands = set(variables_of(e.operands))
        if complete.isdisjoint(operands):
            continue
        if any(solution.seen(v).kind == "P" for v in operands - complete):
            raise _needing_all(e)
        numbers.add(i)
        complete.update(e.results)
    return numbers


def _needing_all(e: Equation) -> Mixed:
    """Return the refusal of an equation that reads single samples beside a sum over all."""
    return Mixed(f"{operator_at(e)} needs a sum over all samples to go on with each")


def _has_samples(body: Body, number: int, solution: Solution) -> bool:
    """Whether an equation reads or computes samples, or sums over them."""
    e = body.equations[number]
    if any(v not in solution.states for v in e.results):
        return False  # nothing reads them
    states = [*(solution.seen(a) for a in variables_of(e.operands)), *(solution.states[v] for v in e.results)]
    return any(s.kind == "P" or s == PARTIAL for s in states)


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


def _check(result: Decomposition, count: int) -> None:
    """Raise Mixed unless the part works along an axis of `count` devices that partitions the samples, without communication."""
    try:
        alone = along_axis(result.body, result.operands, result.results)
    except Unmatched:
        alone = None
    if alone is None or alone.changes or alone.results != result.results:
        raise Mixed("the program does not add up over its samples")
    for e, match in zip(result.body.equations, alone.matches, strict=True):
        if match.communicates:  # such as a loop that goes on until all samples have converged
            raise Mixed(f"{operator_at(e)} does not work on each sample by itself")
        if match.size % count:  # such as x[::2], or the reshaping of samples into pairs
            raise Uneven(f"{operator_at(e)} does not work on each of {count} micro-batches by itself")
