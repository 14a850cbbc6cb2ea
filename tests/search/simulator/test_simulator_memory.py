"""Memory over a simulated step: the live buffers at every moment, and their agreement with the prediction for the whole step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MACHINE, MODELS, made
from test_simulator_program import DRAWN, data_parallel, drawn, layers, uneven

from unity.pcg.ir.graph import Value
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.cost import Training
from unity.search.memory.memory import predict_memory
from unity.search.simulator import simulate
from unity.search.simulator.memory import MemoryOverTime
from unity.search.solver.minimizer import Minimizer
from unity.search.space.live_buffers import ARGUMENTS, GRADIENTS, KEPT, RESULTS, SLOTS, local


def only(memory: Mapping[str, MemoryOverTime]) -> MemoryOverTime:
    (found,) = memory.values()
    return found


@settings(max_examples=fewer(20))
@given(overlap=st.booleans(), **DRAWN)
def test_memory_begins_with_arguments_and_ends_with_gradients(overlap: bool, name: str, seed: int) -> None:
    graph, captured = drawn(name, seed)
    found = only(simulate(graph, MACHINE, captured.differentiated, overlap=overlap).memory)
    weights = sum(local(Value(n), graph) for k, n in enumerate(graph.inputs) if k in captured.differentiated)
    assert found.times[0] == 0.0
    assert found.nbytes[-1] == pytest.approx(0.0, abs=1e-6 * found.peak)
    assert found.by_reason[ARGUMENTS][0] == pytest.approx(sum(local(Value(n), graph) for n in graph.inputs))
    assert found.by_reason[SLOTS][0] == pytest.approx(2 * weights)
    last = {s.buffer.why for s in found.spans if s.end == found.times[-1]}
    assert {ARGUMENTS, SLOTS} <= last
    gradients = sum(s.buffer.nbytes for s in found.spans if s.buffer.why == GRADIENTS)
    assert gradients <= weights * (1 + 1e-9)


@settings(max_examples=fewer(10))
@given(**DRAWN)
def test_bytes_are_those_of_the_spans(name: str, seed: int) -> None:
    graph, captured = drawn(name, seed)
    found = only(simulate(graph, MACHINE, captured.differentiated).memory)
    for k in np.linspace(0, len(found.times) - 2, 7).astype(int):
        middle = (found.times[k] + found.times[k + 1]) / 2
        there = sum(s.buffer.nbytes for s in found.spans if s.start <= middle < s.end)
        assert found.nbytes[k] == pytest.approx(there)
    assert sum(h.nbytes for h in found.held) == pytest.approx(found.peak)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("weight", [0.0, np.inf])
def test_the_peak_is_near_the_predicted_one(name: str, weight: float) -> None:
    """At most as if all gradients were live from the start, and at least the residuals at the end of the forward pass."""
    captured, assembled = made(MODELS[name]())
    (point,) = Minimizer(assembled.problem).at([weight])
    graph = parallelize(captured.graph, assembled.assignment(point))
    found = only(simulate(graph, MACHINE, captured.differentiated, overlap=False).memory)
    predicted = predict_memory(graph, captured.differentiated, Training())
    most = sum(h.nbytes for h in predicted.held if h.nbytes > 0)
    assert found.peak <= 1.3 * most
    assert found.peak >= 0.7 * predicted.total


def test_residuals_grow_and_shrink() -> None:
    graph, captured, _ = data_parallel(layers(6))
    simulation = simulate(graph, MACHINE, captured.differentiated, overlap=False)
    kept = only(simulation.memory).by_reason[KEPT]
    top = int(kept.argmax())
    assert (np.diff(kept[: top + 1]) >= -1e-6).all()
    assert (np.diff(kept[top:]) <= 1e-6).all()
    assert kept[top] >= 6 * 4096 * 512 * 4 / MACHINE.devices
    assert RESULTS in only(simulation.memory).by_reason


def test_the_forward_pass_alone_has_no_residuals() -> None:
    graph, captured, _ = data_parallel(layers(6))
    both, forward = (only(simulate(graph, MACHINE, d).memory) for d in (captured.differentiated, ()))
    assert not {KEPT, GRADIENTS, SLOTS} & set(forward.by_reason)
    assert forward.peak < both.peak


def test_overlap_never_lowers_the_peak() -> None:
    """Buffers stay live while they are sent, even if other operators run meanwhile."""
    graph, captured, _ = data_parallel(layers(6))
    without, with_ = (only(simulate(graph, MACHINE, captured.differentiated, overlap=o).memory) for o in (False, True))
    assert with_.peak >= without.peak * (1 - 1e-9)


def test_every_device_has_its_own_memory() -> None:
    graph, captured, _ = data_parallel(layers(2))
    found = simulate(graph, MACHINE, captured.differentiated, topology=uneven(0.5)).memory
    assert len(found) == MACHINE.devices
    slow, *others = found.values()
    assert all(other.peak == pytest.approx(others[0].peak) for other in others)
    assert slow.peak > 0
