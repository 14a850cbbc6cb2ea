"""Timing of one operator as it runs in a plan: its local program, on all devices of this process at once.

One `shard_map` is compiled with three loops, whose trip counts are arguments: the operator forward, with its residuals written out;
backward, from residuals and cotangents to gradients; and an empty loop. All devices run it together, because virtual ones share a
host's cores. Collectives inside a composite are left out, because they are priced separately.

A compiler may shorten a loop that repeats one computation. So the operands of each run pass an optimization barrier together with
the results of the run before: they depend on these, and nothing is hoisted or eliminated. (Convolutions on CPUs are called one by
one instead.) Where devices are not the host, `INNER` runs form an inner loop. Its trip count is known at compile time, so that the
devices do not wait for the host after every run, as they do not in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.exec.lowering import mesh_of, platform_of
from unity.exec.measure.operator_programs import (
    LocalOperator,
    Program,
    is_key,
    local_operands,
    plain,
    plain_dtype,
    programs_of,
    with_keys,
)
from unity.exec.measure.timing import repetitions, seconds_of
from unity.pcg.ir.program import Body
from unity.pcg.propagation.nested.programs import branch_indices, nested_body, nests
from unity.pcg.types.factors import is_convolution
from unity.pcg.types.varying_axes import vary

ROUNDS = 5
RUN = 0.01  # target seconds of a run
MOST = 1 << 20  # repetitions
INNER = 16  # runs of a device other than the host between two checks of the trip count


@dataclass(frozen=True)
class Timing:
    """Median seconds of one forward and one backward run. `spread` is the larger of their relative interquartile ranges."""

    forward: float
    backward: float
    spread: float


Run = Callable[..., Any]  # takes the repetitions of each part (forward, backward, empty)


@dataclass(frozen=True, eq=False)
class Traced:
    """An operator's programs for a mesh, traced and not yet compiled. No operand is on a device yet."""

    operator: LocalOperator
    mesh: Mesh
    programs: tuple[jax.stages.Lowered, ...]

    def compile(self) -> CompiledOperator:
        """Compile the programs. Several operators may be compiled at once, in threads."""
        return CompiledOperator(self, tuple(program.compile() for program in self.programs))


@dataclass(frozen=True, eq=False)
class CompiledOperator:
    """An operator's compiled programs."""

    traced: Traced
    programs: tuple[jax.stages.Compiled, ...]

    def run(self, branch: int = 0) -> Run:
        """Place operands on the devices, and return a function that runs the programs on them.

        Args:
            branch: The number of the branch that conditionals run.
        """
        operator, mesh = self.traced.operator, self.traced.mesh
        pieces, sharding = _pieces(operator, mesh), _sharding(operator, mesh)
        operands = [_placed(x, pieces, sharding) for x in local_operands(operator, branch)]
        return (_run_loops if len(self.programs) == 1 else _run_calls)(self.programs, operands)


def traced(operator: LocalOperator, devices: Sequence[Any]) -> Traced:
    """Trace an operator's programs for `devices`, as many as its axes need."""
    mesh = mesh_of(operator.axes, devices)
    called = platform_of(mesh) == "cpu" and convolves(operator.body)
    return Traced(operator, mesh, (_trace_calls if called else _trace_loops)(operator, mesh))


def _inner(mesh: Mesh) -> int:
    """Return the number of runs in one repetition."""
    return 1 if platform_of(mesh) == "cpu" else INNER


def measure(program: CompiledOperator, rounds: int = ROUNDS) -> Timing:
    """Measure an operator on its devices, with conditionals in each of their branches: the slowest one counts."""
    every = range(max(branch_indices(program.traced.operator.body).values(), default=1))
    timings = [_measure_branch(program, branch, rounds) for branch in every]
    return Timing(*(max(getattr(t, name) for t in timings) for name in ("forward", "backward", "spread")))


def _measure_branch(program: CompiledOperator, branch: int, rounds: int) -> Timing:
    run = program.run(branch)

    def seconds(*times: int) -> float:
        return seconds_of(lambda: run(*times))

    seconds(1, 1, 1)  # the first touch of memory takes longer
    forward, backward, nothing = (_times(seconds, part) for part in range(3))
    samples = [[seconds(0, 0, 0), seconds(forward, 0, 0), seconds(0, backward, 0), seconds(0, 0, nothing)] for _ in range(rounds)]
    call = median(times[0] for times in samples)
    empty = max(0.0, median(times[3] for times in samples) - call) / nothing
    inner, differentiated = _inner(program.traced.mesh), any(program.traced.operator.differentiated)
    there = [((times[1] - call) / forward - empty) / inner for times in samples]
    back = [((times[2] - call) / backward - empty) / inner for times in samples] if differentiated else [0.0]
    return Timing(max(0.0, median(there)), max(0.0, median(back)), max(_spread(there), _spread(back)))


def _times(seconds: Callable[..., float], which: int) -> int:
    """Return the repetitions with which a part of an operator takes about `RUN` seconds."""
    call = min(seconds(0, 0, 0) for _ in range(3))
    return repetitions(lambda n: min(seconds(*(n if k == which else 0 for k in range(3))) for _ in range(2)) - call, RUN, MOST)


def _spread(seconds: Sequence[float]) -> float:
    """Return the interquartile range divided by the median; 0 if the median is not positive."""
    middle = median(seconds)
    if middle <= 0:
        return 0.0
    low, high = np.quantile(seconds, [0.25, 0.75])
    return float(high - low) / middle


@lru_cache(maxsize=4096)
def convolves(body: Body) -> bool:
    """Return whether a program has convolutions, which XLA's CPU backend runs ten times as slowly in a loop as outside."""
    return any(is_convolution(e.name) or (nests(e) and convolves(nested_body(e))) for e in body.equations)


def _trace_loops(operator: LocalOperator, mesh: Mesh) -> tuple[jax.stages.Lowered]:
    """Trace one program with a loop for each part (forward, backward, empty)."""
    names, spec, inner = operator.used, PartitionSpec(operator.used or None), _inner(mesh)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(*[PartitionSpec()] * 3, *[spec] * len(operator.operands)), out_specs=spec)
    def run(forward: Any, backward: Any, empty: Any, *pieces: Any) -> Any:
        operands = with_keys(operator, [x[0] for x in pieces])
        there, back, linear = programs_of(operator, operands)
        ends = _repeated(there, operands, forward, inner, names)
        if back is not None:
            ends += _repeated(back, linear, backward, inner, names)
        ends += _repeated(lambda: [jnp.ones(())], (), empty, inner, names)
        return [plain(x)[None] for x in ends]

    count = jax.ShapeDtypeStruct((), jnp.int32)
    return (run.lower(count, count, count, *_abstract(operator, mesh)),)


def _run_loops(programs: Sequence[jax.stages.Compiled], operands: Sequence[Any]) -> Run:
    (program,) = programs
    return lambda *times: program(*map(np.int32, times), *operands)


def _trace_calls(operator: LocalOperator, mesh: Mesh) -> tuple[jax.stages.Lowered, ...]:
    """Trace a program for each part (forward, backward, empty), to be called repeatedly.

    Before them is a program that computes the operands of the backward part. The empty part measures the time of a call.
    """
    spec, sharding = PartitionSpec(operator.used or None), _sharding(operator, mesh)
    on_devices = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    programs: list[Program] = []

    @jax.jit
    @on_devices
    def prepare(*pieces: Any) -> Any:
        there, back, linear = programs_of(operator, [x[0] for x in pieces])
        programs[:] = [there, back or (lambda *_: [])]
        return [x[None] for x in linear]

    def part(program: Program, args: Sequence[Any]) -> jax.stages.Lowered:
        def run(*pieces: Any) -> Any:
            return [vary(x, operator.used)[None] for x in program(*(x[0] for x in pieces))]

        return jax.jit(on_devices(run)).lower(*args)

    operands = _abstract(operator, mesh)
    first = prepare.lower(*operands)
    linear = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in first.out_info]
    return first, part(programs[0], operands), part(programs[1], linear), part(lambda *_: [jnp.ones(())], operands)


def _run_calls(programs: Sequence[jax.stages.Compiled], operands: Sequence[Any]) -> Run:
    prepare, *parts = programs
    arguments = operands, prepare(*operands), operands

    def run(*times: int) -> Any:
        return [[part(*args) for _ in range(n)][-1:] for part, args, n in zip(parts, arguments, times, strict=True)]

    return run


def _repeated(program: Program, operands: Sequence[Any], times: Any, inner: int, names: Sequence[str]) -> list:
    """Run a program `times * inner` times, and return its last results."""
    first = [vary(jnp.zeros(x.shape, x.dtype), names) if not is_key(x) else x for x in program(*operands)]

    def step(_: Any, state: tuple[list, list]) -> tuple[list, list]:
        values, _ = lax.optimization_barrier(state)
        return values, [vary(x, names) for x in program(*values)]

    def some(_: Any, state: tuple[list, list]) -> tuple[list, list]:
        return lax.fori_loop(0, inner, step, state)

    return lax.fori_loop(0, times, some if inner > 1 else step, ([*operands], first))[1]


def _abstract(operator: LocalOperator, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Return the operands' shapes as they will be placed: dimension 0 has one piece for each device along the used axes."""
    pieces, sharding = _pieces(operator, mesh), _sharding(operator, mesh)
    operands = zip(operator.body.inputs, operator.shapes, strict=False)
    return [jax.ShapeDtypeStruct((pieces, *s), plain_dtype(operator.body.tensors[v]), sharding=sharding) for v, s in operands]


def _pieces(operator: LocalOperator, mesh: Mesh) -> int:
    return prod(mesh.shape[n] for n in operator.used)


def _sharding(operator: LocalOperator, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(operator.used or None))


def _placed(x: np.ndarray[Any, Any], pieces: int, sharding: NamedSharding) -> jax.Array:
    """Place the same piece on every device."""
    return jax.make_array_from_callback((pieces, *x.shape), sharding, lambda _: x[None])
