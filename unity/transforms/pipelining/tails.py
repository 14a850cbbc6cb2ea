"""What leads from the last layer to the loss, if that can be done one micro-batch at a time.

    loss(tail(scan(step, x)))  =  loss(sum([tail(scan(step, part)) for part in parts(x)]))

The *tail* is what the operator table lets work on each sample by itself, up to sums over the samples: a final norm, logits, cross
entropy and the sum of its mean. With it a micro-batch's backward pass can follow its forward pass at once (1F1B). What is computed
of the sums comes after all of them; so one sum has a gradient, a scalar, and all gradients are known up to one factor: that sum's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unity.base.formatting import short
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.gradient_flow import leading_to, losses, reached
from unity.pcg.ir.program import Body, Equation
from unity.pcg.parallel.stages import Mixed
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.solver import Solution, Unmatched, solve
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned


@dataclass(frozen=True, eq=False)
class Tail:
    """What follows a scan, by a program's variables.

    `body`: of `constants`, of what is `read` with samples (with the dimension that they are), and of the scan's results; it makes
    `sums`. `equations`: those of the program that it stands for; `after`: those that read sums. `loss`: the sum with a gradient.
    """

    body: Body
    constants: tuple[int, ...]
    read: tuple[tuple[int, int], ...]
    sums: tuple[int, ...]
    equations: frozenset[int]
    after: frozenset[int]
    loss: int

    @property
    def states(self) -> tuple[State, ...]:
        """Of what it reads, along an axis that partitions the samples; those of the scan's results left out."""
        return (*(REPLICATED for _ in self.constants), *(partitioned(d) for _, d in self.read))


def tail_of(captured: Captured, number: int, samples: Sequence[int], size: int) -> Tail:
    """The tail of a scan of a program (by its equation's number), whose results have `size` samples in these dimensions.

    Raises Mixed, naming the operator, if it cannot be computed one micro-batch at a time.
    """
    body, results = captured.body, captured.body.equations[number].results
    if not set(results).isdisjoint(_variables(body.outputs)):
        raise Mixed("what leaves the last layer is a result of the function, and no sum over the samples")
    following = _following(body, results)
    ends = [v for v in _variables(body.outputs) if any(v in body.equations[i].results for i in following)]
    whole, order = extract(body, following, ends, constants(body))
    found = _solved(whole, {v: partitioned(d) for v, d in zip(results, samples, strict=True)})
    mine, after = _parted(body, following, found)
    sums = tuple(v for i in mine for v in body.equations[i].results if v in ends or _read_by(body, after, v))
    for v in sums:
        if found.states[v] != PARTIAL:
            raise Mixed(f"{_maker(body, mine, v)} gives results for each sample, and no sum over them")
    loss = _loss(captured, sums)
    part, order = extract(body, mine, sums, constants(body))
    given = [v for v in order if v not in results]
    read = tuple((v, found.states[v].dim) for v in given if found.states[v].kind == "P")
    for v, dim in read:
        if found.states[v].outer > 1 or body.tensors[v].shape[dim] % size:
            raise Mixed("what it is computed from has samples in an order that cannot be divided")
    fixed = tuple(v for v in given if found.states[v].kind != "P")
    inputs = (*fixed, *(v for v, _ in read), *results)
    part = replace(part, inputs=inputs, tensors={**part.tensors, **{v: body.tensors[v] for v in results}})
    tail = Tail(part, fixed, read, sums, frozenset(mine), frozenset(after), loss)
    states = (*tail.states, *(partitioned(d) for d in samples))
    alone = along_axis(part, states, (PARTIAL,) * len(sums))
    if alone is None or alone.communicates or alone.results != (PARTIAL,) * len(sums):
        raise Mixed("what follows the last layer does not add up over the samples")
    return tail


def _variables(atoms: Sequence[object]) -> list[int]:
    return [a for a in atoms if isinstance(a, int)]


def _following(body: Body, results: Sequence[int]) -> list[int]:
    """The equations that depend on these variables."""
    known, found = set(results), []
    for i, e in enumerate(body.equations):
        if not known.isdisjoint(_variables(e.operands)):
            known.update(e.results)
            found.append(i)
    return found


def _solved(body: Body, known: Mapping[int, State]) -> Solution:
    """Where what follows the last layer is partitioned in the samples, partial or reduced. What is read from elsewhere is no part
    of a sum. Raises Mixed, naming the first operator that does not work on each sample by itself."""
    states = dict(known)
    while True:
        try:
            found = solve(body, states)
        except Unmatched:
            raise Mixed(_first_mixed(body, known)) from None
        partial = [v for v in body.inputs if found.states[v] == PARTIAL]
        if not partial:
            break
        states |= dict.fromkeys(partial, REPLICATED)
    for v, kind in found.reduced.items():
        if kind != "sum":
            raise Mixed(f"{_where(next(e for e in body.equations if v in e.results))} takes the {kind} over the samples")
    return found


def _first_mixed(body: Body, known: Mapping[int, State]) -> str:
    """The first equation up to which the program cannot be solved: they are looked for by bisection."""
    good, bad = 0, len(body.equations)
    while bad - good > 1:
        middle = (good + bad) // 2
        equations = body.equations[:middle]
        made = tuple(v for e in equations for v in e.results)
        try:
            solve(replace(body, equations=equations, outputs=made), known)
            good = middle
        except Unmatched:
            bad = middle
    return f"{_where(body.equations[bad - 1])} does not work on each sample by itself"


def _parted(body: Body, following: Sequence[int], found: Solution) -> tuple[list[int], list[int]]:
    """The equations of the tail, and those that need whole sums. Raises Mixed if one of these looks at single samples again."""
    whole, mine, after = set(found.reduced), list[int](), list[int]()
    for i in following:
        e = body.equations[i]
        operands = set(_variables(e.operands))
        if whole.isdisjoint(operands):
            mine.append(i)
            continue
        if any(found.states.get(v, REPLICATED).kind == "P" for v in operands - whole):
            raise Mixed(f"{_where(e)} needs a sum over all samples to go on with each")
        after.append(i)
        whole.update(e.results)
    return mine, after


def _loss(captured: Captured, sums: Sequence[int]) -> int:
    """The one sum that has a gradient."""
    body, weights = captured.body, captured.differentiated
    flags = tuple(k in weights and body.tensors[v].floating for k, v in enumerate(body.inputs))
    moving = reached(replace(body, outputs=tuple(sums)), flags)
    found = [k for k, flag in enumerate(moving) if flag and body.tensors[sums[k]].floating]
    if len(found) != 1:
        lines = ", ".join(_maker(body, range(len(body.equations)), sums[k]) for k in found) or "none"
        raise Mixed(f"of the sums over the samples one must have a gradient, but {lines} {'has' if not found else 'have'} one")
    v = sums[found[0]]
    if body.tensors[v].shape:
        raise Mixed(f"{_maker(body, range(len(body.equations)), v)} is the last that adds up over the samples, and no scalar")
    ends = losses(captured.graph)
    used = Body((v,), body.outputs, body.equations, body.tensors)
    if not leading_to(used, tuple(k in ends for k in range(len(body.outputs))))[0]:
        raise Mixed("nothing that is differentiated depends on it")
    return found[0]


def _read_by(body: Body, equations: Sequence[int], variable: int) -> bool:
    return any(variable in body.equations[i].operands for i in equations)


def _maker(body: Body, among: Sequence[int], variable: int) -> str:
    return next(_where(body.equations[i]) for i in among if variable in body.equations[i].results)


def _where(equation: Equation) -> str:
    return f"{equation.name} at {short(equation.source)}" if equation.source else equation.name
