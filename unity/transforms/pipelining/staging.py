"""A chain that is cut into stages of different operators, and the program in micro-batches.

Each micro-batch goes through all stages, one after the other, and between two of them lies in buffers:

    scan(micro-batches:  buffers → first → buffers → second → buffers)

That is a program like any other. What leads from the last stage's buffers to the loss can be computed one micro-batch at a time,
too, where it adds up over the samples: the *tail* (`unity.transforms.pipelining.tails`), without which there is no 1F1B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body, Tensor, close
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.stages import Mixed
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL
from unity.pcg.types.varying_axes import TIME
from unity.search.joint.segments import flows
from unity.transforms.pipelining.balance import Cuts
from unity.transforms.pipelining.buffers import Layout, layouts
from unity.transforms.pipelining.chain import Chain, Part
from unity.transforms.pipelining.micro import WALK, in_order, joined, split, sums
from unity.transforms.pipelining.splice import spliced
from unity.transforms.pipelining.tails import Tail, tail_of


def tail_after(captured: Captured, chain: Chain) -> Tail:
    """The tail of a chain of a program. Raises Mixed, naming the operator, if there is none."""
    samples = [chain.samples[v] for v in chain.results]
    return tail_of(replace(captured, body=chain.whole), chain.members[0], samples, chain.size)


@dataclass(frozen=True, eq=False)
class Staging:
    """A chain that is cut into stages, for micro-batches of which every stage is given so many; and its tail, if it is in
    micro-batches, too."""

    captured: Captured
    chain: Chain
    cuts: Cuts
    rounds: int
    tail: Tail | None = None

    @cached_property
    def parts(self) -> list[Part]:
        """The stages' programs. Raises Mixed if one does not work on each sample by itself."""
        ends = [0, *self.cuts.places, len(self.chain)]
        return [self.chain.part(a, b) for a, b in pairwise(ends)]

    @cached_property
    def layouts(self) -> list[Layout]:
        """What lies in the buffers before each stage, and after the last."""
        ends = [0, *self.cuts.places, len(self.chain)]
        return layouts([self.chain.crossing(p) for p in ends], self.chain.body.tensors, self.chain.samples, self.chain.size)

    @cached_property
    def kinds(self) -> list[str]:
        """Of the buffers, those first in which something leaves the last stage."""
        return sorted(self.layouts[0].widths, key=lambda kind: kind not in self.leaving)

    @cached_property
    def leaving(self) -> list[str]:
        """Of the buffers in which something leaves the last stage."""
        return [kind for kind, own in self.layouts[-1].of_kind.items() if own]

    def buffer(self, kind: str) -> Tensor:
        """A buffer with one sample of each micro-batch that starts at the same time on all stages."""
        return Tensor((self.chain.size // self.rounds, self.layouts[0].widths[kind]), jnp.dtype(kind))

    def fixed(self, stage: int) -> list[int]:
        """What a stage reads without samples."""
        return [v for v in self.parts[stage].inputs if v not in self.chain.samples]

    @cached_property
    def everything(self) -> list[int]:
        """What any stage reads without samples."""
        return list(dict.fromkeys(v for k in range(len(self.parts)) for v in self.fixed(k)))

    @cached_property
    def still(self) -> bool:
        """Whether no gradient is wanted of what the first stage is given."""
        moving = flows(self.captured.body, self.captured.differentiated)
        return moving.isdisjoint(self.layouts[0].places)

    def unpack(self, stage: int, kind: str, rows: Any) -> list[Any]:
        """What a stage finds in a buffer."""
        return self.layouts[stage].unpacked(kind, lax.stop_gradient(rows) if stage == 0 and self.still else rows)

    def left(self, buffers: Sequence[Any]) -> list[Any]:
        """The chain's results, of the buffers in which they leave the last stage."""
        last, found = self.layouts[-1], dict[int, Any]()
        for kind, rows in zip(self.leaving, buffers, strict=True):
            found.update(zip(last.of_kind[kind], last.unpacked(kind, rows), strict=True))
        return [found[v] for v in self.chain.results]

    def run(self, stage: int, given: Sequence[Any]) -> list[Any]:
        """A stage's program on a micro-batch, of its inputs."""
        part, chain = self.parts[stage], self.chain
        types, results = ([(s,) for s in chain.states(variables)] for variables in (part.inputs, part.outputs))
        return run_body(part.body, given, types, results, (Axis(TIME, self.rounds, 0),))

    def summed(self, tail: Tail, given: Sequence[Any]) -> list[Any]:
        """The tail's program on a micro-batch: of its constants, of what it reads, and of the chain's results."""
        states = (*tail.states, *self.chain.states(self.chain.results))
        return run_body(tail.body, given, [(s,) for s in states], [(PARTIAL,)] * len(tail.sums), (Axis(TIME, self.rounds, 0),))

    def local(self, variable: int, dim: int | None = None) -> jax.ShapeDtypeStruct:
        """A variable as a stage finds it in a micro-batch. `dim`: its samples, if that is not for the chain to say."""
        tensor, dim = self.chain.body.tensors[variable], self.chain.samples.get(variable) if dim is None else dim
        shape = tuple(n // self.rounds if k == dim else n for k, n in enumerate(tensor.shape))
        return jax.ShapeDtypeStruct(shape, tensor.dtype)

    def through(self, buffers: Sequence[Any], fixed: Mapping[int, Any]) -> list[Any]:
        """A micro-batch's buffers after all stages."""
        for k, part in enumerate(self.parts):
            before, after, values = self.layouts[k], self.layouts[k + 1], dict(fixed)
            for kind, rows in zip(self.kinds, buffers, strict=True):
                values.update(zip(before.of_kind[kind], self.unpack(k, kind, rows), strict=True))
            values.update(zip(part.outputs, self.run(k, [values[v] for v in part.inputs]), strict=True))
            pairs = zip(self.kinds, buffers, strict=True)
            buffers = [after.packed(kind, values) if self.changed(k, kind) else rows for kind, rows in pairs]
        return list(buffers)

    def changed(self, stage: int, kind: str) -> bool:
        """Whether a stage puts anything else in a buffer than it finds there."""
        before, after = self.layouts[stage : stage + 2]
        return bool(after.of_kind[kind]) and not before.alike(after, kind)

    def walked(self) -> Captured:
        """The program in micro-batches. Raises Mixed if an operator must know which it has."""
        chain, tail, body = self.chain, self.tail, self.chain.whole
        given = [*self.everything, *self.layouts[0].places]
        more, gone, results = list[int](), set(chain.results), chain.results
        if tail is not None:
            more, results = [*tail.constants, *(v for v, _ in tail.read)], tail.sums
            gone |= {v for k in tail.equations for v in body.equations[k].results}
            body = in_order(body, chain.members[0], tail)

        def program(*operands: Any) -> list[Any]:
            ends = self.ends(dict(zip(given, operands, strict=False)))
            if tail is None:
                return self.left([joined(rows, 0) for rows in ends])
            return self.followed(tail, ends, operands[len(given) :])

        made = traced(program, [chain.body.tensors[v].struct for v in (*given, *more)])
        body = spliced(body, gone, (*given, *more), results, made, chain.equations[-1], WALK)
        return self.captured.of(body, self.captured.bodies)

    def ends(self, values: Mapping[int, Any]) -> Sequence[Any]:
        """Of all micro-batches, stacked, the buffers in which something leaves the last stage."""
        stacks = [self.stack(kind, values) for kind in self.kinds]
        return lax.scan(lambda _, buffers: (None, self.through(buffers, values)[: len(self.leaving)]), None, stacks)[1]

    def followed(self, tail: Tail, stacks: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """The tail's sums, of all micro-batches' buffers after the last stage, and of what more it reads."""
        first = len(tail.states)

        def end(parts: Sequence[Any]) -> list[Any]:
            return self.summed(tail, (*parts[:first], *self.left(parts[first:])))

        return sums(tail, self.rounds, self.chain.size, end, stacks, operands)

    def stack(self, kind: str, values: Mapping[int, Any]) -> Any:
        """A buffer of the first stage, those of all micro-batches stacked."""
        if self.layouts[0].of_kind[kind]:
            return split(self.layouts[0].packed(kind, values), 0, self.rounds)
        buffer = self.buffer(kind)
        return jnp.zeros((self.rounds, *buffer.shape), buffer.dtype)


def traced(run: Any, given: Sequence[jax.ShapeDtypeStruct]) -> Body:
    """A program of samples that do not know where they stand in the batch."""
    try:
        return close(jax.make_jaxpr(run)(*given))
    except NameError:  # of the axis of time: a local program asks where its piece lies
        why = "positions, or random numbers"
        raise Mixed(f"what the stages compute, or what follows, depends on where a sample stands in the batch ({why})") from None
