"""What one operator takes on the devices of this process, as it will run: its local body on pieces, on all devices at once.

What is compiled is one `shard_map` with three loops, each repeated as often as an argument says: the operator forward, with what
its backward pass needs written out; backward, from that and from cotangents to the gradients; and nothing. All devices run it
together, because virtual ones share a host's cores. Collectives inside a composite are left out: they are priced apart.

A loop that computes the same again is the compiler's to shorten. So the operands of each run pass a barrier together with what the
run before it computed: they depend on it, and nothing is moved out of the loop or thrown away. (Convolutions on CPUs are called one
by one instead.) Where devices are not the host, there is a loop of `INNER` runs inside of the loop. Its length is known when it is
compiled, so the host is not asked after every run: a step does not ask it either, and while it is asked, devices would wait.
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
    Operator,
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
from unity.pcg.propagation.solver import nested_body, nests
from unity.pcg.types.varying_axes import vary

CONVOLUTION = "conv_general_dilated"
ROUNDS = 5
RUN = 0.01  # seconds that a run should take
MOST = 1 << 20  # repetitions
INNER = 16  # runs that a device other than the host makes without being asked


@dataclass(frozen=True)
class Timing:
    """Seconds of one run, medians; and the interquartile range over the median, the larger of both."""

    forward: float
    backward: float
    spread: float


Run = Callable[..., Any]  # takes how often each part is repeated (forward, backward, nothing)


@dataclass(frozen=True, eq=False)
class Traced:
    """An operator's programs for a mesh, traced and not yet compiled; no operand is on a device yet."""

    operator: Operator
    mesh: Mesh
    programs: tuple[jax.stages.Lowered, ...]

    def compile(self) -> Compiled:
        """Compiles the programs. Several operators may be compiled at once, in threads."""
        return Compiled(self, tuple(program.compile() for program in self.programs))


@dataclass(frozen=True, eq=False)
class Compiled:
    """The same, compiled."""

    traced: Traced
    programs: tuple[jax.stages.Compiled, ...]

    def run(self) -> Run:
        """Places operands, and gives what runs the programs on them."""
        operator, mesh = self.traced.operator, self.traced.mesh
        pieces, sharding = _pieces(operator, mesh), _sharding(operator, mesh)
        given = [_placed(x, pieces, sharding) for x in local_operands(operator)]
        return (_looping if len(self.programs) == 1 else _calling)(self.programs, given)


def traced(operator: Operator, devices: Sequence[Any]) -> Traced:
    """An operator's programs for `devices`, of which there are as many as its axes need."""
    mesh = mesh_of(operator.axes, devices)
    called = platform_of(mesh) == "cpu" and convolves(operator.body)
    return Traced(operator, mesh, (_called if called else _looped)(operator, mesh))


def _inner(mesh: Mesh) -> int:
    """How many runs are one repetition."""
    return 1 if platform_of(mesh) == "cpu" else INNER


def measure(program: Compiled, rounds: int = ROUNDS) -> Timing:
    """Measures an operator on its devices."""
    run = program.run()

    def seconds(*times: int) -> float:
        return seconds_of(lambda: run(*times))

    seconds(1, 1, 1)  # what is touched first takes longer
    forward, backward, nothing = (_times(seconds, part) for part in range(3))
    found = [[seconds(0, 0, 0), seconds(forward, 0, 0), seconds(0, backward, 0), seconds(0, 0, nothing)] for _ in range(rounds)]
    call = median(times[0] for times in found)
    empty = max(0.0, median(times[3] for times in found) - call) / nothing
    inner, differentiated = _inner(program.traced.mesh), any(program.traced.operator.differentiated)
    there = [((times[1] - call) / forward - empty) / inner for times in found]
    back = [((times[2] - call) / backward - empty) / inner for times in found] if differentiated else [0.0]
    return Timing(max(0.0, median(there)), max(0.0, median(back)), max(_spread(there), _spread(back)))


def _times(seconds: Callable[..., float], which: int) -> int:
    """How often an operator is repeated to take as long as a run should."""
    call = min(seconds(0, 0, 0) for _ in range(3))
    return repetitions(lambda n: min(seconds(*(n if k == which else 0 for k in range(3))) for _ in range(2)) - call, RUN, MOST)


def _spread(found: Sequence[float]) -> float:
    """The interquartile range over the median; 0 of no time at all."""
    middle = median(found)
    if middle <= 0:
        return 0.0
    low, high = np.quantile(found, [0.25, 0.75])
    return float(high - low) / middle


@lru_cache(maxsize=4096)
def convolves(body: Body) -> bool:
    """Whether a program has convolutions. XLA's CPU backend lays them out only outside of loops, and is tenfold slower inside."""
    return any(e.name == CONVOLUTION or (nests(e) and convolves(nested_body(e))) for e in body.equations)


def _looped(operator: Operator, mesh: Mesh) -> tuple[jax.stages.Lowered]:
    """One program with a loop for each part."""
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


def _looping(programs: Sequence[jax.stages.Compiled], given: Sequence[Any]) -> Run:
    (program,) = programs
    return lambda *times: program(*map(np.int32, times), *given)


def _called(operator: Operator, mesh: Mesh) -> tuple[jax.stages.Lowered, ...]:
    """A program for each part, to be called as often; and first the one that computes what the backward part takes. What a call
    takes by itself is what nothing takes."""
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

    given = _abstract(operator, mesh)
    first = prepare.lower(*given)
    linear = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in first.out_info]
    return first, part(programs[0], given), part(programs[1], linear), part(lambda *_: [jnp.ones(())], given)


def _calling(programs: Sequence[jax.stages.Compiled], given: Sequence[Any]) -> Run:
    prepare, *parts = programs
    arguments = given, prepare(*given), given

    def run(*times: int) -> Any:
        return [[part(*args) for _ in range(n)][-1:] for part, args, n in zip(parts, arguments, times, strict=True)]

    return run


def _repeated(program: Program, operands: Sequence[Any], times: Any, inner: int, names: Sequence[str]) -> list:
    """The results of a program that is run `times * inner` times."""
    first = [vary(jnp.zeros(x.shape, x.dtype), names) if not is_key(x) else x for x in program(*operands)]

    def step(_: Any, state: tuple[list, list]) -> tuple[list, list]:
        given, _ = lax.optimization_barrier(state)
        return given, [vary(x, names) for x in program(*given)]

    def some(_: Any, state: tuple[list, list]) -> tuple[list, list]:
        return lax.fori_loop(0, inner, step, state)

    return lax.fori_loop(0, times, some if inner > 1 else step, ([*operands], first))[1]


def _abstract(operator: Operator, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """The operands, as they will be placed: one piece for each device along the axes that are used, in the first dimension."""
    pieces, sharding = _pieces(operator, mesh), _sharding(operator, mesh)
    operands = zip(operator.body.inputs, operator.shapes, strict=False)
    return [jax.ShapeDtypeStruct((pieces, *s), plain_dtype(operator.body.tensors[v]), sharding=sharding) for v, s in operands]


def _pieces(operator: Operator, mesh: Mesh) -> int:
    return prod(mesh.shape[n] for n in operator.used)


def _sharding(operator: Operator, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(operator.used or None))


def _placed(x: np.ndarray[Any, Any], pieces: int, sharding: NamedSharding) -> jax.Array:
    """The same piece on every device."""
    return jax.make_array_from_callback((pieces, *x.shape), sharding, lambda _: x[None])
