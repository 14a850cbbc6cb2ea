"""Values that the policy of a checkpoint offloads: in the memory of the host until the checkpoint's backward pass."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpointed_models import saving
from jax.ad_checkpoint import checkpoint_name
from small_models import Small, arrays, f

import unity
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.parallel.parallelize import on_one_device
from unity.search.cost.cost import Training
from unity.search.cost.prediction import Prediction, predict
from unity.search.memory.backend import CPU, GPU, Backend, backend_of
from unity.search.memory.memory import MemoryPrediction, predict_memory
from unity.search.memory.timeline import memory_timeline
from unity.search.session import Search
from unity.search.simulator import simulate
from unity.search.space.live_buffers import KEPT as KEPT_BUFFER

LAYERS, ROWS, WIDE = 6, 512, 64
UP = ROWS * WIDE * 8  # bytes of the value of one layer
ALONE = unity.Machine.grid(1, 1, "h200")
UNLINKED = replace(ALONE, host=None)
OPTIONS: dict[str, Any] = {"budget": 0, "pipelines": False, "branches": False, "progress": False}


def layered(policy: Any, scanned: bool) -> Small:
    """Layers whose checkpoints have a policy for the value named "up"."""

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return x + jnp.tanh(checkpoint_name(x @ p["up"], "up")) @ p["down"]

        return stacked(jax.checkpoint(layer, policy=policy), params, x, scanned)

    return model(loss)


def stacked(layer: Any, params: Any, x: Any, scanned: bool) -> Any:
    """Layers one after the other, all of whose inputs have gradients, in a scan or not."""
    x, layers = x + params["first"], {"up": params["up"], "down": params["down"]}
    if scanned:
        return jnp.mean(jax.lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0] ** 2)
    for k in range(LAYERS):
        x = layer(x, jax.tree.map(lambda t, k=k: t[k], layers))
    return jnp.mean(x**2)


def model(loss: Any) -> Small:
    return Small(loss, {"first": f(16), "up": f(LAYERS, 16, WIDE), "down": f(LAYERS, WIDE, 16)}, f(ROWS, 16))


def planned(model: Small, machine: unity.Machine) -> unity.Plan:
    with jax.enable_x64(True):
        return unity.optimize(model.loss, model.params, model.batch, machine=machine, **OPTIONS)


KEPT = jax.checkpoint_policies.save_only_these_names("up")
OFFLOADED = {
    "names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["up"], offload_src="device", offload_dst="pinned_host"
    ),
    "products": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def captured(policy: Any, scanned: bool) -> Captured:
    with jax.enable_x64(True):
        model = layered(policy, scanned)
        return capture(model.loss, model.params, model.batch)


def priced(program: Captured, machine: unity.Machine, backend: Backend | None = None) -> tuple[Prediction, MemoryPrediction]:
    graph = on_one_device(program.graph)
    memory = predict_memory(graph, program.differentiated, Training(), backend or backend_of(machine))
    return predict(graph, machine, program.differentiated), memory


@pytest.mark.parametrize("policy", OFFLOADED)
@pytest.mark.parametrize("scanned", [False, True])
def test_offloaded_values_take_no_memory_of_the_device_and_cross_the_link_twice(policy: str, scanned: bool) -> None:
    kept, kept_memory = priced(captured(KEPT, scanned), ALONE)
    offloaded, memory = priced(captured(OFFLOADED[policy], scanned), ALONE)
    assert ALONE.host is not None
    assert not kept.transfers
    assert offloaded.offloading == pytest.approx(2 * LAYERS * ALONE.host.seconds(UP))
    assert offloaded.computing == pytest.approx(kept.computing)
    assert sum(h.nbytes for h in memory.offloaded) == LAYERS * UP
    assert kept_memory.additive - memory.additive == LAYERS * UP


def with_named_start(scanned: bool, computed: bool, policy: Any = OFFLOADED["names"]) -> Small:
    """Layers that offload the value that all of them start with: a value computed inside, or the checkpoint's own operand."""

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            x = checkpoint_name(1.5 * x if computed else x, "up")
            return x + jnp.tanh(jnp.sin(x) @ p["up"]) @ p["down"]

        return stacked(jax.checkpoint(layer, policy=policy), params, x, scanned)

    return model(loss)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("computed", [False, True])
def test_a_saved_value_takes_the_memory_that_offloading_it_spares(scanned: bool, computed: bool) -> None:
    figures = []
    for policy in (KEPT, OFFLOADED["names"]):
        with jax.enable_x64(True):
            start = with_named_start(scanned, computed, policy)
            program = capture(start.loss, start.params, start.batch)
        _, point = Search(program.graph, program.differentiated, ALONE, Training()).fastest_point
        figures.append((priced(program, ALONE)[1].additive, point.memory))
    assert [kept - offloaded for kept, offloaded in zip(*figures, strict=True)] == pytest.approx([LAYERS * UP / 4] * 2)


@pytest.mark.parametrize("scanned", [False, True])
def test_a_saved_product_counts_if_several_operators_read_it(scanned: bool) -> None:
    """Its name is then an operator of its own, which aliases the product, but is kept for the backward pass."""

    def figures(policy: Any) -> tuple[float, float]:
        def loss(params: Any, x: Any) -> Any:
            def layer(x: Any, p: Any) -> Any:
                up = checkpoint_name(x @ p["up"], "up")
                return x + jax.nn.softmax(up) @ p["down"] + up @ p["down"]

            return stacked(jax.checkpoint(layer, policy=policy), params, x, scanned)

        with jax.enable_x64(True):
            program = capture(loss, model(loss).params, model(loss).batch)
        _, point = Search(program.graph, program.differentiated, ALONE, Training()).fastest_point
        return priced(program, ALONE)[1].additive, point.memory

    none, kept, offloaded = map(figures, (None, KEPT, OFFLOADED["names"]))
    assert [a - b for a, b in zip(kept, none, strict=True)] == pytest.approx([LAYERS * UP] * 2)
    assert offloaded == pytest.approx(none)


@pytest.mark.parametrize("scanned", [False, True])
def test_an_offloaded_operand_of_a_checkpoint_counts_as_a_value_computed_inside(scanned: bool) -> None:
    figures = []
    for computed in (False, True):
        with jax.enable_x64(True):
            start = with_named_start(scanned, computed)
            program = capture(start.loss, start.params, start.batch)
        prediction, memory = priced(program, ALONE)
        _, point = Search(program.graph, program.differentiated, ALONE, Training()).fastest_point
        on_host = sum(h.nbytes for h in memory.offloaded)
        figures.append((on_host, prediction.offloading, memory.additive, memory.total, point.memory))
        stacks = [h for h in memory.held if h.why == KEPT_BUFFER and h.nbytes >= LAYERS * UP / 4]
        assert not stacks
    assert ALONE.host is not None
    assert figures[0] == figures[1]
    assert figures[0][:2] == (LAYERS * UP / 4, pytest.approx(2 * LAYERS * ALONE.host.seconds(UP / 4)))


def test_an_operand_that_the_backward_pass_reads_beside_its_offloaded_value_stays_on_the_device() -> None:
    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return jnp.cos(x) + jnp.tanh(checkpoint_name(x, "up") @ p["up"]) @ p["down"]

        return stacked(jax.checkpoint(layer, policy=OFFLOADED["names"]), params, x, True)

    with jax.enable_x64(True):
        _, memory = priced(capture(loss, model(loss).params, model(loss).batch), ALONE)
    assert sum(h.nbytes for h in memory.offloaded) == LAYERS * UP / 4
    assert LAYERS * UP / 4 in [h.nbytes for h in memory.held if h.why == KEPT_BUFFER]


@pytest.mark.parametrize("scanned", [False, True])
def test_a_plan_with_an_offloaded_operand_has_the_values_of_the_function(scanned: bool) -> None:
    start = with_named_start(scanned, False)
    plan = planned(start, unity.Machine.grid(1, 4, "h200"))
    with jax.enable_x64(True):
        args = arrays(start.params), arrays(start.batch)
        values = jax.jit(jax.value_and_grad(plan))(*args)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10), values, jax.value_and_grad(start.loss)(*args))
    assert sum(buffer.nbytes for buffer in plan.inspect.memory_timeline().offloaded) == LAYERS * UP / 4 / 4


def with_branches(policy: Any, scanned: bool, around: Any = lambda layer: layer) -> Small:
    """Layers in a branch of a conditional each, with a checkpoint inside of the branch."""

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return x + jnp.tanh(checkpoint_name(jnp.sin(x) @ p["up"], "up")) @ p["down"]

        def either(x: Any, p: Any) -> Any:
            return jax.lax.cond(x[0, 0] > 0, jax.checkpoint(layer, policy=policy), lambda x, _: 2 * x, x, p)

        return stacked(around(either), params, x, scanned)

    return model(loss)


def priced_branches(policy: Any, scanned: bool, **more: Any) -> tuple[Prediction, MemoryPrediction, float]:
    """The figures of `priced`, and the bytes of the fastest strategy of a search."""
    with jax.enable_x64(True):
        branched = with_branches(policy, scanned, **more)
        program = capture(branched.loss, branched.params, branched.batch)
    _, point = Search(program.graph, program.differentiated, ALONE, Training()).fastest_point
    return *priced(program, ALONE), point.memory


@pytest.mark.parametrize("scanned", [False, True])
def test_values_that_a_checkpoint_in_a_branch_offloads_are_on_the_host(scanned: bool) -> None:
    assert ALONE.host is not None
    (_, memory_none, least), (kept, memory_kept, most) = (priced_branches(policy, scanned) for policy in (None, KEPT))
    offloaded, memory, counted = priced_branches(OFFLOADED["names"], scanned)
    assert memory_kept.additive - memory_none.additive == most - least == LAYERS * UP
    assert (memory.additive, counted) == (memory_none.additive, least)
    assert sum(h.nbytes for h in memory.offloaded) == LAYERS * UP
    assert offloaded.offloading == pytest.approx(2 * LAYERS * ALONE.host.seconds(UP))
    assert not kept.transfers
    assert memory.total > memory_none.total + UP / 2  # at its turn, the value is fetched, in part to where gradients will be


@pytest.mark.parametrize("scanned", [False, True])
def test_a_simulated_step_fetches_what_branches_offload(scanned: bool) -> None:
    with jax.enable_x64(True):
        branched = with_branches(OFFLOADED["names"], scanned)
        program = capture(branched.loss, branched.params, branched.batch)
    graph = on_one_device(program.graph)
    prediction, step = predict(graph, ALONE, program.differentiated), simulate(graph, ALONE, program.differentiated, overlap=True)
    (link,) = (name for name in step.busy if name.endswith("link to the host"))
    assert step.busy[link] == pytest.approx(prediction.offloading)
    assert step.sent[link] == 2 * LAYERS * UP


@pytest.mark.parametrize("scanned", [False, True])
def test_a_checkpoint_around_a_conditional_keeps_what_its_branches_would_offload(scanned: bool) -> None:
    prediction, memory, _ = priced_branches(OFFLOADED["names"], scanned, around=jax.checkpoint)
    assert not prediction.transfers
    assert not memory.offloaded


@pytest.mark.parametrize("scanned", [False, True])
def test_a_plan_that_offloads_in_branches_has_the_values_of_the_function(scanned: bool) -> None:
    branched = with_branches(OFFLOADED["names"], scanned)
    plan, unlinked = (planned(branched, replace(unity.Machine.grid(1, 2, "h200"), host=host)) for host in (ALONE.host, None))
    assert "cond (" in repr(unlinked)
    assert "stays on the device: h200-1x2 has no link" in repr(unlinked)
    assert unlinked.memory > plan.memory
    with jax.enable_x64(True):
        args = arrays(branched.params), arrays(branched.batch)
        values = jax.jit(jax.value_and_grad(plan))(*args)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10), values, jax.value_and_grad(branched.loss)(*args))


@pytest.mark.parametrize("scanned", [False, True])
def test_without_a_link_to_the_host_offloaded_values_stay_on_the_device(scanned: bool) -> None:
    kept, kept_memory = priced(captured(KEPT, scanned), UNLINKED)
    offloaded, memory = priced(captured(OFFLOADED["names"], scanned), UNLINKED)
    assert (offloaded.time, memory.total) == (kept.time, kept_memory.total)
    assert not memory.offloaded


def test_a_cpu_keeps_offloaded_values_where_they_are() -> None:
    kept, offloaded = (captured(policy, True) for policy in (KEPT, OFFLOADED["names"]))
    assert priced(offloaded, ALONE, CPU)[1].total == priced(kept, ALONE, CPU)[1].total > priced(offloaded, ALONE, GPU)[1].total


def test_a_value_that_an_outer_checkpoint_keeps_is_not_offloaded_by_an_inner_one() -> None:
    def loss(p: Any, x: Any) -> Any:
        inner = jax.checkpoint(lambda p, x: jnp.tanh(checkpoint_name(x @ p, "up")) @ p.T, policy=OFFLOADED["names"])
        return jnp.sum(jax.checkpoint(lambda p, x: jnp.sin(inner(p, x)), policy=KEPT)(p, x))

    with jax.enable_x64(True):
        prediction, memory = priced(capture(loss, f(16, WIDE), f(ROWS, 16)), ALONE)
    assert not prediction.transfers
    assert not memory.offloaded


@pytest.mark.parametrize("scanned", [False, True])
def test_transfers_have_a_link_of_their_own_in_a_simulated_step(scanned: bool) -> None:
    program = captured(OFFLOADED["names"], scanned)
    graph = on_one_device(program.graph)
    prediction = predict(graph, ALONE, program.differentiated)
    apart, together = (simulate(graph, ALONE, program.differentiated, overlap=overlap) for overlap in (True, False))
    (link,) = (name for name in apart.busy if name.endswith("link to the host"))
    assert apart.busy[link] == pytest.approx(prediction.offloading)
    assert apart.sent[link] == 2 * LAYERS * UP
    assert prediction.computing < apart.makespan < together.makespan
    assert together.makespan == pytest.approx(prediction.time)


def test_every_device_has_a_link_to_its_host_in_a_simulation() -> None:
    machine = unity.Machine.grid(2, 2, "h200")
    plan = planned(layered(OFFLOADED["names"], False), machine)
    graph, differentiated = plan.program.pcg, plan.program.family.differentiated
    one, every = (simulate(graph, machine, differentiated, folded=folded) for folded in (True, False))
    links = [seconds for name, seconds in every.busy.items() if name.endswith("link to the host")]
    assert links == [one.busy["each of 4 devices, link to the host"]] * 4
    assert one.makespan == every.makespan


def test_a_slower_link_makes_only_the_transfers_slower() -> None:
    program = captured(OFFLOADED["products"], True)
    fast, slow = (priced(program, replace(ALONE, host=unity.HostLink(rate)))[0] for rate in (50e9, 10e9))
    assert slow.offloading == pytest.approx(5 * fast.offloading)
    assert slow.computing == fast.computing


def test_the_timeline_has_the_bytes_in_the_memory_of_the_host_beside_the_peak() -> None:
    program = captured(OFFLOADED["names"], True)
    timeline = memory_timeline(on_one_device(program.graph), program.differentiated, Training(), GPU)
    assert sum(buffer.nbytes for buffer in timeline.offloaded) == LAYERS * UP
    assert timeline.peak == sum(buffer.nbytes for buffer in timeline.held)
    assert f"{LAYERS * UP:,} bytes more in the memory of the host" in str(timeline)


def test_explain_says_what_is_offloaded_and_what_stays() -> None:
    model = saving("offloaded names")
    linked = unity.Machine.grid(1, 2, "h200")
    texts = []
    for machine in (linked, replace(linked, host=None)):
        plan = planned(model, machine)
        file = io.StringIO()
        plan.explain(file=file)
        texts.append((" ".join(file.getvalue().split()), repr(plan)))
    (full, brief), (full_without, brief_without) = texts
    assert "moving values to the host and back" in full
    assert "offloaded by a checkpoint policy: 2 × " in full
    assert "to the host and back" in brief
    assert "stays on the device: h200-1x2 has no link to the memory of a host" in full_without
    assert "stays on the device" in brief_without
    assert "moving values" not in full_without


def test_a_diff_of_plans_has_the_transfers_among_what_is_communicated() -> None:
    before, after = (planned(layered(policy, True), unity.Machine.grid(1, 2, "h200")) for policy in (KEPT, OFFLOADED["names"]))
    (transfers,) = (c for c in before.inspect.diff(after).collectives if c.alike.kind == "host-transfer")
    assert transfers.counts == (0, 2 * LAYERS)
    prediction = predict(after.program.pcg, after.inspect.machine, after.program.family.differentiated)
    assert transfers.seconds.after == pytest.approx(prediction.offloading)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_stages_of_a_pipeline_keep_their_values_on_the_device(schedule: str) -> None:
    kept, offloaded = (layered(policy, True) for policy in (KEPT, OFFLOADED["names"]))
    options: dict[str, Any] = {"machine": unity.Machine.grid(1, 4, "h200"), "pipeline": unity.PipelineShape(2, 4, schedule)}
    with jax.enable_x64(True):
        plans = [unity.optimize(m.loss, m.params, m.batch, budget=0, progress=False, **options) for m in (kept, offloaded)]
        args = arrays(offloaded.params), arrays(offloaded.batch)
        values = jax.jit(jax.value_and_grad(plans[1]))(*args)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10), values, jax.value_and_grad(offloaded.loss)(*args))
    assert (plans[1].time, plans[1].memory) == (plans[0].time, plans[0].memory)
    assert "stays on the device: values of pipelines and branches are not offloaded" in repr(plans[1])
