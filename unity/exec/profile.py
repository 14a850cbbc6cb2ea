"""What one operator takes on the devices of this process, as it will run: its local body on pieces, on all devices at once.

What is compiled is one `shard_map` with three loops, each repeated as often as an argument says: the operator forward, with what
its backward pass needs written out; backward, from that and from cotangents to the gradients; and nothing. All devices run it
together, because virtual ones share a host's cores. Collectives inside a composite are left out: they are priced apart.

A loop that computes the same again is the compiler's to shorten. So the operator stands in a branch that is always taken, which
only an argument says, and that hands on what the step before it computed otherwise: that depends on the loop, and nothing is moved
out of it or thrown away. (Convolutions on CPUs are called one by one instead.)
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

from unity.exec.lowering import mesh_of
from unity.exec.profile_programs import Operator, Program, is_key, local_operands, plain, programs_of, with_keys
from unity.exec.timing import repetitions, seconds_of
from unity.pcg.body import Body
from unity.pcg.solve import nested_body, nests
from unity.pcg.varying import vary

CONVOLUTION = "conv_general_dilated"
ROUNDS = 5
RUN = 0.01  # seconds that a run should take
MOST = 1 << 20  # repetitions


@dataclass(frozen=True)
class Timing:
    """Seconds of one run, medians; and the interquartile range over the median, the larger of both."""

    forward: float
    backward: float
    spread: float


def measure(operator: Operator, devices: Sequence[Any], rounds: int = ROUNDS) -> Timing:
    """Measures an operator on `devices`, of which there are as many as its axes need."""
    run = compiled(operator, mesh_of(operator.axes, devices))

    def seconds(*times: int) -> float:
        return seconds_of(lambda: run(*times))

    seconds(1, 1, 1)  # what is touched first takes longer
    forward, backward = _times(seconds, 0), _times(seconds, 1) if any(operator.differentiated) else 0
    most = max(forward, backward)
    found = [[seconds(0, 0, 0), seconds(forward, 0, 0), seconds(0, backward, 0), seconds(0, 0, most)] for _ in range(rounds)]
    call = median(times[0] for times in found)
    empty = max(0.0, median(times[3] for times in found) - call) / most
    there = [(times[1] - call) / forward - empty for times in found]
    back = [(times[2] - call) / backward - empty for times in found] if backward else [0.0]
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


def compiled(operator: Operator, mesh: Mesh) -> Callable[..., Any]:
    """The program: takes how often each part is repeated (forward, backward, nothing)."""
    names = operator.used
    spec = PartitionSpec(names or None)
    given = [_placed(x, prod(mesh.shape[n] for n in names), NamedSharding(mesh, spec)) for x in local_operands(operator)]
    on_devices = partial(jax.shard_map, mesh=mesh, out_specs=spec)
    called = mesh.devices.flat[0].platform == "cpu" and convolves(operator.body)
    return (_called if called else _looped)(operator, given, spec, on_devices)


@lru_cache(maxsize=4096)
def convolves(body: Body) -> bool:
    """Whether a program has convolutions. XLA's CPU backend lays them out only outside of loops, and is tenfold slower inside."""
    return any(e.name == CONVOLUTION or (nests(e) and convolves(nested_body(e))) for e in body.equations)


def _looped(operator: Operator, given: Sequence[Any], spec: PartitionSpec, on_devices: Callable[..., Any]) -> Callable[..., Any]:
    """One program with a loop for each part."""
    names = operator.used

    @jax.jit
    @partial(on_devices, in_specs=(*[PartitionSpec()] * 4, *[spec] * len(given)))
    def run(go: Any, forward: Any, backward: Any, empty: Any, *pieces: Any) -> Any:
        operands = with_keys(operator, [x[0] for x in pieces])
        there, back, linear = programs_of(operator, operands)
        ends = _repeated(there, operands, forward, go, names)
        if back is not None:
            ends += _repeated(back, linear, backward, go, names)
        ends += _repeated(lambda: [jnp.ones(())], (), empty, go, names)
        return [plain(x)[None] for x in ends]

    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in given]
    count = jax.ShapeDtypeStruct((), jnp.int32)
    program = run.lower(count, count, count, count, *abstract).compile()
    return lambda *times: program(np.int32(1), *map(np.int32, times), *given)


def _called(operator: Operator, given: Sequence[Any], spec: PartitionSpec, on_devices: Callable[..., Any]) -> Callable[..., Any]:
    """A program for each part, called as often. What a call takes by itself is what nothing takes."""
    programs: list[Program] = []

    @jax.jit
    @partial(on_devices, in_specs=spec)
    def prepare(*pieces: Any) -> Any:
        there, back, linear = programs_of(operator, [x[0] for x in pieces])
        programs[:] = [there, back or (lambda *_: [])]
        return [x[None] for x in linear]

    def part(program: Program, args: Sequence[Any]) -> Callable[[], Any]:
        def run(*pieces: Any) -> Any:
            return [vary(x, operator.used)[None] for x in program(*(x[0] for x in pieces))]

        whole = jax.jit(on_devices(run, in_specs=spec)).lower(*args).compile()
        return lambda: whole(*args)

    linear = prepare(*given)
    parts = part(programs[0], given), part(programs[1], linear), part(lambda *_: [jnp.ones(())], given)

    def run(*times: int) -> Any:
        return [[one() for _ in range(n)][-1:] for one, n in zip(parts, times, strict=True)]

    return run


def _repeated(program: Callable[..., list], operands: Sequence[Any], times: Any, go: Any, names: Sequence[str]) -> list:
    """The results of a program that is run so often; `go` is true."""
    first = [vary(jnp.zeros(x.shape, x.dtype), names) if not is_key(x) else x for x in program(*operands)]

    def step(_: Any, before: list) -> list:
        return lax.cond(go > 0, lambda old: [vary(x, names) for x in program(*operands)], lambda old: old, before)

    return list(lax.fori_loop(0, times, step, first))


def _placed(x: np.ndarray[Any, Any], pieces: int, sharding: NamedSharding) -> jax.Array:
    """The same piece on every device."""
    return jax.make_array_from_callback((pieces, *x.shape), sharding, lambda _: x[None])
