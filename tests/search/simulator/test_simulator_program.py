"""The simulation of a parallel graph's step: it agrees with the prediction, and one device may stand for all."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from small_models import MACHINE, MODELS, Small, made, named, random_point

from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.parallelize import on_one_device, parallelize
from unity.search.cost.assembly import Assembled
from unity.search.cost.prediction import predict
from unity.search.simulator import DirectedLink, Simulation, SimulationError, Topology, simulate
from unity.search.simulator.program import program_of
from unity.search.solver.minimizer import Minimizer

DRAWN = {"name": st.sampled_from(sorted(MODELS)), "seed": st.integers(0, 2**32 - 1)}


def drawn(name: str, seed: int) -> tuple[PCG, Captured]:
    captured, assembled = named(name)
    point = random_point(assembled, np.random.default_rng(seed))
    return parallelize(captured.graph, assembled.assignment(point)), captured


@settings(max_examples=fewer(20))
@given(training=st.booleans(), **DRAWN)
def test_without_overlap_a_step_takes_the_predicted_time(name: str, seed: int, training: bool) -> None:
    graph, captured = drawn(name, seed)
    differentiated = captured.differentiated if training else ()
    found = simulate(graph, MACHINE, differentiated, overlap=False)
    assert found.makespan == pytest.approx(predict(graph, MACHINE, differentiated).time, rel=1e-9)


@settings(max_examples=fewer(10))
@given(overlap=st.booleans(), **DRAWN)
def test_one_device_stands_for_all(name: str, seed: int, overlap: bool) -> None:
    graph, captured = drawn(name, seed)
    one, all_ = (simulate(graph, MACHINE, captured.differentiated, overlap=overlap, folded=folded) for folded in (True, False))
    assert one.makespan == all_.makespan
    n = len(one.busy)
    assert [*one.busy.values()] * MACHINE.devices == pytest.approx([*by_device(all_, n)])


def by_device(found: Simulation, each: int) -> Iterator[float]:
    """Busy seconds, device by device: first of computing, then of its links."""
    busy = list(found.busy.values())
    n = MACHINE.devices
    for d in range(n):
        yield busy[d]
        yield from busy[n + d * (each - 1) : n + (d + 1) * (each - 1)]


@settings(max_examples=fewer(10))
@given(**DRAWN)
def test_overlap_never_lengthens_a_step(name: str, seed: int) -> None:
    graph, captured = drawn(name, seed)
    with_, without = (simulate(graph, MACHINE, captured.differentiated, overlap=o) for o in (True, False))
    terms = predict(graph, MACHINE, captured.differentiated)
    compute = sum(t.forward + t.backward for t in terms.operators)
    assert compute * (1 - 1e-9) <= with_.makespan <= without.makespan * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("weight", [0.0, 1e-12, np.inf])
def test_repeated_gathers_and_recomputation_are_counted(name: str, weight: float) -> None:
    """Lean plans keep little: they gather weights and compute inner values once more."""
    captured, assembled = named(name)
    (point,) = Minimizer(assembled.problem).at([weight])
    graph = parallelize(captured.graph, assembled.assignment(point))
    found = simulate(graph, MACHINE, captured.differentiated, overlap=False)
    assert found.makespan == pytest.approx(predict(graph, MACHINE, captured.differentiated).time, rel=1e-9)


def layers(n: int) -> Small:
    def loss(params: list, x: jax.Array) -> jax.Array:
        for p in params:
            x = jnp.tanh(x @ p)
        return jnp.mean(x**2)

    return Small(loss, [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * n, jax.ShapeDtypeStruct((4096, 512), jnp.float32))


def data_parallel(model: Small) -> tuple[PCG, Captured, Assembled]:
    captured, assembled = made(model)
    (point,) = Minimizer(assembled.problem).at([0.0])
    return parallelize(captured.graph, assembled.assignment(point)), captured, assembled


def test_a_weights_gradient_is_sent_while_the_backward_pass_goes_on() -> None:
    graph, captured, _ = data_parallel(layers(6))
    terms = predict(graph, MACHINE, captured.differentiated)
    sends = [t for t in terms.collectives if t.collective.direction == "backward"]
    assert len(sends) >= 6
    found = simulate(graph, MACHINE, captured.differentiated, overlap=True)
    compute = sum(t.forward + t.backward for t in terms.operators)
    # all but the first layer's gradient, which is the last, may be sent meanwhile
    hidden = sum(t.seconds for t in terms.collectives) - max(t.seconds for t in terms.collectives)
    assert hidden > 0.5 * max(t.seconds for t in terms.collectives)
    assert found.makespan < terms.time - 0.5 * min(hidden, compute)
    link = next(k for k, r in enumerate(found.timeline.graph.devices) if found.timeline.order[k] and r.kind == "link")
    first = found.timeline.order[link][0]
    assert found.timeline.start[first] < max(found.timeline.end[n] for n in found.timeline.order[0])


def test_a_scan_takes_length_times_its_step() -> None:
    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, _: (jnp.tanh(x @ params), None), x, None, length=17)
        return jnp.mean(y**2)

    model = Small(loss, jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32))
    graph, captured, _ = data_parallel(model)
    found = simulate(graph, MACHINE, captured.differentiated, overlap=True)
    loops = [n for n, label in found.labels.items() if label.startswith("17 × scan")]
    assert len({found.labels[n] for n in loops}) == 2  # forward and backward
    assert found.makespan >= sum(found.timeline.graph.tasks[n].seconds for n in loops if found.timeline.graph.tasks[n].device == 0)


def uneven(slow: float) -> Topology:
    """The machine's devices, one of them slower, all joined by equal links."""
    links = {(i, j): (50e9, 1e-6) for i in range(8) for j in range(i)}
    return Topology.joined("uneven", MACHINE, [slow, *[1.0] * 7], links)


def test_a_slow_device_delays_all() -> None:
    graph, captured, _ = data_parallel(layers(4))
    times = [
        simulate(graph, MACHINE, captured.differentiated, topology=uneven(s), overlap=False).makespan for s in (1.0, 0.5, 0.25)
    ]
    compute = sum(t.forward + t.backward for t in predict(graph, MACHINE, captured.differentiated).operators)
    assert times[1] - times[0] == pytest.approx(compute, rel=1e-6)
    assert times[2] - times[0] == pytest.approx(3 * compute, rel=1e-6)


def test_a_slow_link_delays_the_rings_through_it() -> None:
    graph, captured, _ = data_parallel(layers(4))
    links = {(i, j): (50e9, 1e-6) for i in range(8) for j in range(8) if i != j}
    equal = Topology.joined("equal", MACHINE, [1.0] * 8, links)
    slow = Topology.joined("slow", MACHINE, [1.0] * 8, links | {(0, 1): (5e9, 1e-6)})
    a, b = (simulate(graph, MACHINE, captured.differentiated, topology=t, overlap=False).makespan for t in (equal, slow))
    assert b > 1.5 * a


def test_a_topology_of_another_machine_is_refused() -> None:
    graph, captured, _ = data_parallel(layers(1))
    other = Topology.uniform(Machine.grid(1, 4, "a100"))
    with pytest.raises(SimulationError, match=r"for 8 devices .* has 4"):
        simulate(graph, MACHINE, captured.differentiated, topology=other)
    with pytest.raises(SimulationError, match="not alike"):
        simulate(graph, MACHINE, captured.differentiated, topology=uneven(1.0), folded=True)


def test_links_carry_the_bytes_of_rings() -> None:
    graph, captured, _ = data_parallel(layers(2))
    found = simulate(graph, MACHINE, captured.differentiated)
    wanted = 0.0
    for t in predict(graph, MACHINE, captured.differentiated).collectives:
        c, size = t.collective, np.prod([MACHINE.axes[a].size for a in t.collective.axes])
        wanted += c.count * c.nbytes * (size - 1) / size * (2 if c.kind == "all-reduce" else 1)
    assert sum(found.sent.values()) == pytest.approx(wanted)
    assert DirectedLink("x", 1e9, 1e-6).seconds(1e6) == pytest.approx(1e-3 + 1e-6)


def test_a_simulation_is_shown_in_a_line() -> None:
    graph, captured = drawn(sorted(MODELS)[0], 0)
    one, all_ = (simulate(graph, MACHINE, captured.differentiated, folded=folded) for folded in (True, False))
    assert f"a step of {one.makespan * 1e3:.4g} ms, {len(one.timeline.graph.tasks)} tasks" in repr(one)
    assert f"each of {MACHINE.devices} devices {next(iter(one.busy.values())) * 1e3:.4g}" in repr(one)
    assert len(repr(all_)) < 600, "not all devices and links by name"
    assert repr(all_).endswith(", …>")


def test_a_value_that_is_recomputed_for_several_readers_is_computed_once_before_them() -> None:
    """A gate is read by the sum, which is recomputed too, and by the product behind that."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        gate = jnp.tanh(x @ w)
        both = jnp.sin(gate) + x
        return jnp.sum((both @ w) @ (gate @ w).T)

    captured = capture(loss, jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    rerun = frozenset(id(node) for node in captured.graph.nodes if node.kind in ("tanh", "sin", "add"))
    graph = on_one_device(captured.graph, rerun=rerun)
    program = program_of(graph, Machine.grid(1, 1, "h100"), captured.differentiated)
    names = [i.name for i in program.instructions]
    assert len(names) == len(set(names))
    assert all(set(i.before) <= set(names[:k]) for k, i in enumerate(program.instructions))
    assert sum(i.label == "tanh, again" for i in program.instructions) == 1
