"""A chain cut into stages of different operators, and the program over micro-batches.

Each micro-batch goes through all stages, one after the other, and is stored in buffers between two of them:

    scan(micro-batches:  buffers → first → buffers → second → buffers)

The result is an ordinary program. The operators from the last stage's buffers to the loss run one micro-batch at a time, too, if
they add up over the samples: they are the *tail* (`unity.transforms.pipelining.tails`), which 1F1B requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body, Tensor
from unity.pcg.ir.tracing import trace
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.stages import Mixed
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, State
from unity.pcg.types.varying_axes import TIME, NoPosition
from unity.search.joint.segments import flows
from unity.transforms.pipelining.micro_batches import WALK, sums
from unity.transforms.pipelining.tails import Tail, tail_of
from unity.transforms.pipelining.unlike.balance import Cuts
from unity.transforms.pipelining.unlike.buffers import BufferLayout, layouts
from unity.transforms.pipelining.unlike.chain import ChainPart, SampleChain
from unity.transforms.splice import in_order, spliced
from unity.transforms.strided_micro_batches import check_separable, joined, split


def tail_after(captured: Captured, chain: SampleChain) -> Tail:
    """Return the tail after a chain. Raises Mixed, naming the operator, if a tail is impossible."""
    samples = [chain.samples[v] for v in chain.results]
    return tail_of(replace(captured, body=chain.whole), chain.members[0], samples, chain.size, chain.inactive)


@dataclass(frozen=True, eq=False)
class Staging:
    """A chain cut into stages.

    Attributes:
        captured: the program.
        chain: its chain.
        cuts: the places of the cuts.
        rounds: the number of micro-batches for each stage.
        tail: the tail, if it runs over micro-batches, too.
    """

    captured: Captured
    chain: SampleChain
    cuts: Cuts
    rounds: int
    tail: Tail | None = None

    @cached_property
    def parts(self) -> list[ChainPart]:
        """The stages' programs. Raises Mixed if one does not work sample by sample."""
        ends = [0, *self.cuts.places, len(self.chain)]
        return [self.chain.part(a, b) for a, b in pairwise(ends)]

    @cached_property
    def layouts(self) -> list[BufferLayout]:
        """The layout of the buffers before each stage, and after the last."""
        ends = [0, *self.cuts.places, len(self.chain)]
        return layouts([self.chain.crossing(p) for p in ends], self.chain.body.tensors, self.chain.samples, self.chain.size)

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of buffers, those first that have results of the last stage."""
        return sorted(self.layouts[0].widths, key=lambda kind: kind not in self.leaving)

    @cached_property
    def leaving(self) -> list[str]:
        """The kinds of buffers that have results of the last stage."""
        return [kind for kind, own in self.layouts[-1].of_kind.items() if own]

    def buffer(self, kind: str) -> Tensor:
        """Return the type of a buffer for one micro-batch on every stage."""
        return Tensor((self.chain.size // self.rounds, self.layouts[0].widths[kind]), jnp.dtype(kind))

    def fixed(self, stage: int) -> list[int]:
        """Return the variables without samples that a stage reads."""
        return [v for v in self.parts[stage].inputs if v not in self.chain.samples]

    @cached_property
    def everything(self) -> list[int]:
        """The variables without samples that any stage reads."""
        return list(dict.fromkeys(v for k in range(len(self.parts)) for v in self.fixed(k)))

    @cached_property
    def first_is_inactive(self) -> bool:
        """Whether the inputs of the first stage are inactive for differentiation."""
        active = flows(self.captured.body, self.captured.differentiated)
        return active.isdisjoint(self.layouts[0].places)

    def unpack(self, stage: int, kind: str, rows: Any) -> list[Any]:
        """Unpack a stage's variables from a buffer."""
        return self.layouts[stage].unpacked(kind, lax.stop_gradient(rows) if stage == 0 and self.first_is_inactive else rows)

    def left(self, buffers: Sequence[Any]) -> list[Any]:
        """Unpack the chain's results from the last stage's buffers.

        A buffer has a gradient if one of its variables has, so it is stopped for those that have none.
        """
        last, values, inactive = self.layouts[-1], dict[int, Any](), self.chain.inactive
        for kind, rows in zip(self.leaving, buffers, strict=True):
            values.update(zip(last.of_kind[kind], last.unpacked(kind, rows), strict=True))
        return [lax.stop_gradient(values[v]) if v in inactive else values[v] for v in self.chain.results]

    def run(self, stage: int, given: Sequence[Any]) -> list[Any]:
        """Run a stage on a micro-batch."""
        part = self.parts[stage]
        types, results = ([(s,) for s in states] for states in self._ends(part))
        return run_body(part.body, given, types, results, (Axis(TIME, self.rounds, 0),))

    def summed(self, tail: Tail, given: Sequence[Any]) -> list[Any]:
        """Run the tail on a micro-batch, from its constants, its further inputs and the chain's results."""
        states, results = ([(s,) for s in states] for states in (self._tail_states(tail), [PARTIAL] * len(tail.sums)))
        return run_body(tail.body, given, states, results, (Axis(TIME, self.rounds, 0),))

    def _ends(self, part: ChainPart) -> tuple[tuple[State, ...], tuple[State, ...]]:
        """Return the states of a stage's inputs and outputs along the axis of micro-batches."""
        return self.chain.states(part.inputs, self.rounds), self.chain.states(part.outputs, self.rounds)

    def _tail_states(self, tail: Tail) -> tuple[State, ...]:
        """Return the states of a tail's inputs along the axis of micro-batches."""
        own = tail.states(self.chain.size, self.rounds)
        return (*own, *self.chain.states(self.chain.results, self.rounds))

    def _check_separable(self) -> None:
        """Raise Mixed if a stage, or the tail, needs samples of several micro-batches at once."""
        for part in self.parts:
            check_separable(part.body, *self._ends(part), self.rounds)
        if self.tail is not None:
            check_separable(self.tail.body, self._tail_states(self.tail), (PARTIAL,) * len(self.tail.sums), self.rounds)

    def local(self, variable: int, dim: int | None = None) -> jax.ShapeDtypeStruct:
        """Return a variable's type in a micro-batch. `dim` is its sample dimension, if the chain does not have it."""
        tensor, dim = self.chain.body.tensors[variable], self.chain.samples.get(variable) if dim is None else dim
        shape = tuple(n // self.rounds if k == dim else n for k, n in enumerate(tensor.shape))
        return jax.ShapeDtypeStruct(shape, tensor.dtype)

    def through(self, buffers: Sequence[Any], fixed: Mapping[int, Any]) -> list[Any]:
        """Run all stages on a micro-batch's buffers."""
        for k, part in enumerate(self.parts):
            before, after, values = self.layouts[k], self.layouts[k + 1], dict(fixed)
            for kind, rows in zip(self.kinds, buffers, strict=True):
                values.update(zip(before.of_kind[kind], self.unpack(k, kind, rows), strict=True))
            values.update(zip(part.outputs, self.run(k, [values[v] for v in part.inputs]), strict=True))
            pairs = zip(self.kinds, buffers, strict=True)
            buffers = [after.packed(kind, values) if self.changed(k, kind) else rows for kind, rows in pairs]
        return list(buffers)

    def changed(self, stage: int, kind: str) -> bool:
        """Whether a stage changes the content of a buffer."""
        before, after = self.layouts[stage : stage + 2]
        return bool(after.of_kind[kind]) and not before.alike(after, kind)

    def walked(self) -> Captured:
        """Return the program over micro-batches.

        Raises Mixed if an operator depends on the micro-batch's number, or on samples of another one.
        """
        self._check_separable()
        chain, tail, body = self.chain, self.tail, self.chain.whole
        inputs = [*self.everything, *self.layouts[0].places]
        more, replaced, results = list[int](), set(chain.results), chain.results
        if tail is not None:
            more, results = [*tail.constants, *(v for v, _ in tail.read)], tail.sums
            replaced |= {v for k in tail.equations for v in body.equations[k].results}
            body = in_order(body, (chain.members[0], *tail.equations), tail.after)

        def program(*operands: Any) -> list[Any]:
            ends = self.ends(dict(zip(inputs, operands, strict=False)))
            if tail is None:
                return self.left([joined(rows, 0) for rows in ends])
            return self.followed(tail, ends, operands[len(inputs) :])

        traced_program = traced(program, [chain.body.tensors[v].struct for v in (*inputs, *more)], body.tensors.values())
        body = spliced(body, replaced, (*inputs, *more), results, traced_program, chain.equations[-1], WALK)
        return self.captured.of(body, self.captured.bodies)

    def ends(self, values: Mapping[int, Any]) -> Sequence[Any]:
        """Run all micro-batches, and return the last stage's buffers, stacked."""
        stacks = [self.stack(kind, values) for kind in self.kinds]
        return lax.scan(lambda _, buffers: (None, self.through(buffers, values)[: len(self.leaving)]), None, stacks)[1]

    def followed(self, tail: Tail, stacks: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Run the tail over all micro-batches, from the last stage's stacked buffers and the tail's further inputs."""
        first = tail.own

        def end(parts: Sequence[Any]) -> list[Any]:
            return self.summed(tail, (*parts[:first], *self.left(parts[first:])))

        return sums(tail, self.rounds, self.chain.size, end, stacks, operands)

    def stack(self, kind: str, values: Mapping[int, Any]) -> Any:
        """Return a buffer of the first stage, stacked over all micro-batches."""
        if self.layouts[0].of_kind[kind]:
            return split(self.layouts[0].packed(kind, values), 0, self.rounds)
        buffer = self.buffer(kind)
        return jnp.zeros((self.rounds, *buffer.shape), buffer.dtype)


def traced(run: Any, operands: Sequence[jax.ShapeDtypeStruct], types: Iterable[Tensor] = ()) -> Body:
    """Trace a program over samples. Raises Mixed if it depends on a sample's position in the batch."""
    try:
        return trace(run, operands, types)
    except NoPosition:
        why = "positions, or random numbers"
        raise Mixed(f"what the stages compute, or what follows, depends on where a sample stands in the batch ({why})") from None
