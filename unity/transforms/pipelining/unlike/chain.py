"""The chain of a program: consecutive operators that work sample by sample, so that stages may be cut between any two of them.

    f(x)  =  rest(last(... second(first(x))))

The operator table identifies the samples: an axis that partitions them in an argument must go through every operator, with nothing
reduced. A value with samples that is computed before a cut and read after it crosses the cut. Skip connections, encoders that every
layer of a decoder reads, and layers of different shapes are therefore possible. Random bits are drawn for each sample by its number
(`unity.transforms.pipelining.sample_bits`), which crosses cuts with the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice

import jax
import jax.numpy as jnp
from jax.extend import core

from unity.pcg.capture.capture import Captured
from unity.pcg.capture.heavy_operators import constants, light
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.gradient_flow import dependent
from unity.pcg.ir.program import Body, Equation, Tensor
from unity.pcg.ir.tracing import trace
from unity.pcg.parallel.stages import Mixed
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.propagation.solved_prefix import longest_solved_prefix
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned
from unity.transforms.pipelining.sample_bits import NUMBERED, by_sample, sample_bits
from unity.transforms.splice import operator_at, spliced, variables_of
from unity.transforms.strided_micro_batches import sample_state

CHAIN = core.Primitive("chain")  # stands for the chain as one equation
TRIED = 6  # dimensions of arguments that are tried as samples


@dataclass(frozen=True, eq=False)
class ChainPart:
    """Consecutive operators of a chain as a program. `inputs` and `outputs` are variables of the whole program."""

    body: Body
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SampleChain:
    """The chain of a program.

    Attributes:
        body: the program, reordered so that the chain's equations are consecutive.
        members: the chain's equations, by number.
        samples: for every variable with samples, their dimension.
        size: the number of samples.
        copied: variables computed from weights alone, wherever they are read, with their equations.
        end: the reason why the chain ends where it does.
    """

    body: Body
    members: tuple[int, ...]
    samples: Mapping[int, int]
    size: int
    copied: Mapping[int, int]
    end: str

    def __len__(self) -> int:
        return len(self.members)

    @property
    def equations(self) -> list[Equation]:
        """The chain's equations, in order."""
        return [self.body.equations[k] for k in self.members]

    @property
    def heavy(self) -> int:
        """The number of products and convolutions."""
        return sum(facts_of(e.name).product for e in self.equations)

    @cached_property
    def made(self) -> Mapping[int, int]:
        """For each of the chain's results, the place after which it exists. Inputs exist at place 0."""
        return {v: k + 1 for k, e in enumerate(self.equations) for v in e.results}

    @cached_property
    def lasts(self) -> Mapping[int, int]:
        """For each variable with samples, the last place that reads it; for results, the place beyond the last equation."""
        last_reader = {v: k for k, e in enumerate(self.equations) for v in variables_of(e.operands) if v in self.samples}
        return last_reader | dict.fromkeys(self.results, len(self.members))

    @cached_property
    def results(self) -> tuple[int, ...]:
        """The variables that the rest of the program reads."""
        mine = set(self.members)
        read = {v for k, e in enumerate(self.body.equations) if k not in mine for v in variables_of(e.operands)}
        read.update(variables_of(self.body.outputs))
        return tuple(v for e in self.equations for v in e.results if v in read)

    @cached_property
    def inactive(self) -> frozenset[int]:
        """The results of real numbers that have no gradient, whatever is differentiated, such as a mask made of labels."""
        floating = tuple(self.body.tensors[v].floating for v in self.body.inputs)
        return frozenset(v for v in self.results if self.body.tensors[v].floating) - dependent(self.body, floating)

    @cached_property
    def whole(self) -> Body:
        """The program with the chain as one equation."""
        read = dict.fromkeys(v for e in self.equations for v in variables_of(e.operands) if v not in self.made)
        one = Equation(CHAIN, {}, tuple(read), self.results, self.equations[-1].source)
        before, after = self.body.equations[: self.members[0]], self.body.equations[self.members[-1] + 1 :]
        return replace(self.body, equations=(*before, one, *after))

    def crossing(self, place: int) -> tuple[int, ...]:
        """Return the variables that cross a cut after `place` equations."""
        return tuple(v for v, last in sorted(self.lasts.items()) if self.made.get(v, 0) <= place <= last)

    def part(self, start: int, end: int) -> ChainPart:
        """Return the equations between two places as a program. Raises Mixed if they do not work sample by sample."""
        outputs = tuple(v for v in self.crossing(end) if self.made.get(v, 0) > start)
        body, inputs = extract(self.body, self.members[start:end], outputs, self.copied)
        states, results = self.states(inputs), self.states(outputs)
        where = f"what is between {operator_at(self.equations[start])} and {operator_at(self.equations[end - 1])}"
        try:
            solution = along_axis(body, states, results)
        except Unmatched:
            solution = None
        if solution is None or solution.reduced or solution.results != results or PARTIAL in solution.states.values():
            raise Mixed(f"{where} does not work on each sample by itself")
        if solution.communicates:
            raise Mixed(f"{where} looks at neighbouring samples, or at all of them before it decides what to do")
        return ChainPart(body, inputs, outputs)

    def states(self, variables: Sequence[int], count: int = 1) -> tuple[State, ...]:
        """Return the states of variables along an axis that partitions the samples, if `count` is above 1 into micro-batches."""
        dims = self.samples
        return tuple(sample_state(dims[v], self.size, count) if v in dims else REPLICATED for v in variables)


def chain_of(captured: Captured) -> SampleChain:
    """Return the longest chain of a program. Raises Mixed if no product or convolution works sample by sample."""
    best, work = None, sum(facts_of(e.name).product for e in captured.body.equations)
    for variable, dim in _starts(captured):
        candidate = _chain(captured.body, variable, dim)
        if best is None or candidate.heavy > best.heavy:
            best = candidate
        if best.heavy == work:
            break
    if best is None or not best.heavy:
        raise Mixed("no argument has samples that operators work on one by one" + (f": {best.end}" if best is not None else ""))
    return best


def _starts(captured: Captured) -> Iterator[tuple[int, int]]:
    """Yield dimensions of arguments that may be the samples, as (variable, dimension), for arguments other than weights.

    First dimensions come first, and among these the first leaf of each argument.
    """
    body, weights, paths = captured.body, captured.differentiated, captured.paths
    used = {v for e in body.equations for v in variables_of(e.operands)}
    count: Counter[str] = Counter()
    data: list[tuple[int, int]] = []  # (index among its argument's leaves, variable)
    for v, (k, path) in zip(body.inputs, enumerate(paths), strict=False):
        if k not in weights and v in used:
            data.append((count[path.partition("]")[0]], v))
            count[path.partition("]")[0]] += 1
    ranks = max((body.tensors[v].ndim for _, v in data), default=0)
    shapes = [(v, body.tensors[v].shape) for _, v in sorted(data)]
    yield from islice(((v, d) for d in range(ranks) for v, shape in shapes if d < len(shape) and shape[d] > 1), TRIED)


def _chain(body: Body, variable: int, dim: int) -> SampleChain:
    size = body.tensors[variable].shape[dim]
    body, numbers = _numbered(body, size)
    known = {variable: dim, **dict.fromkeys(numbers, 0)}
    solution, good = longest_solved_prefix(body, {v: partitioned(d) for v, d in known.items()})

    def fits(v: int) -> bool:
        state, shape = solution.states.get(v, REPLICATED), body.tensors[v].shape
        return state.kind == "P" and state.outer == 1 and shape[state.dim] % size == 0 and v not in solution.reduced

    touched = {v for v in body.inputs if solution.states.get(v, REPLICATED).kind == "P"}.union(known)
    samples = {v: solution.states[v].dim for v in touched if fits(v)}
    alone, members, rest = list[int](), list[int](), list[int]()
    for k, e in enumerate(body.equations):
        read = touched.intersection(variables_of(e.operands))
        if not read:
            alone.append(k)
            continue
        touched.update(e.results)
        if k < good and read <= samples.keys() and all(map(fits, e.results)):
            members.append(k)
            samples.update((v, solution.states[v].dim) for v in e.results)
        else:
            rest.append(k)
    order = [*alone, *members, *rest]
    after = replace(body, equations=tuple(body.equations[k] for k in order))
    copied = dict(constants(after))
    copied |= {v: k for k, e in enumerate(after.equations[: len(alone)]) if light(after, e) for v in e.results}
    copied = {v: k for v, k in copied.items() if v not in samples}  # the numbers of samples cross cuts
    end = f"{operator_at(body.equations[rest[0]])} does not work on each sample by itself" if rest else "it ends there"
    return SampleChain(after, tuple(range(len(alone), len(alone) + len(members))), samples, size, copied, end)


def _numbered(body: Body, size: int) -> tuple[Body, list[int]]:
    """Return the program with random bits drawn for each sample by its number, and the variable of the numbers, if there is one."""
    drawing = [e for e in body.equations if by_sample(body, e, size)]
    if not drawing:
        return body, []
    numbers, tensor = max(body.tensors) + 1, Tensor((size,), jnp.dtype("uint32"))
    (iota,) = trace(lambda: jnp.arange(size, dtype=tensor.dtype), []).equations
    first = replace(iota, results=(numbers,), source=drawing[0].source)
    body = replace(body, equations=(first, *body.equations), tensors={**body.tensors, numbers: tensor})
    for e in drawing:
        drawn = partial(_drawn, e.params["bit_width"], e.params["shape"])
        program = trace(drawn, [body.tensor(e.operands[0]).struct, tensor.struct], [body.tensors[v] for v in e.results])
        body = spliced(body, e.results, (e.operands[0], numbers), e.results, program, e, NUMBERED)
    return body, [numbers]


def _drawn(width: int, shape: Sequence[int], key: jax.Array, numbers: jax.Array) -> jax.Array:
    return sample_bits(key, width, shape, numbers)
