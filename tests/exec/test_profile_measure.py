"""What measures an operator compiles what will run, and nothing that can be thrown away. Figures need only be figures."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from small_models import named, random_point

from unity.exec.lowering import mesh_of
from unity.exec.measure import collective_curves as curves
from unity.exec.measure import operators as profile
from unity.exec.measure.local_machine import where
from unity.exec.measure.operator_programs import LocalOperator, local_operands, without_views
from unity.exec.measure.operators import CompiledOperator, Timing, measure, traced
from unity.exec.measure.plan_profile import MeasurementTask, fill, measurement, missing, tasks_of_domains, tasks_of_graph
from unity.machine.collectives import KINDS, TURNING, collective
from unity.machine.machine import Machine
from unity.machine.profiles.profile import Profile
from unity.machine.profiles.store import Store
from unity.pcg.capture.capture import capture
from unity.pcg.ir.program import program_of
from unity.pcg.parallel.parallelize import on_one_device, parallelize
from unity.pcg.propagation.nested.programs import branch_indices
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, Type, partitioned

AXES = (Axis("d0", 2, 0), Axis("d1", 2, 0))
ROWS, COLUMNS = partitioned(0), partitioned(1)


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def operator(
    fn: Callable[..., Any], args: tuple, operands: tuple[Type, ...], results: tuple[Type, ...], flags: tuple
) -> LocalOperator:
    body, _ = program_of(jax.make_jaxpr(fn)(*args))
    return LocalOperator(body, operands, results, flags, AXES)


def softmax(x: jax.Array) -> jax.Array:
    y = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return y / y.sum(-1, keepdims=True)


def product(flags: tuple[bool, ...]) -> LocalOperator:
    types = ((ROWS, UNUSED), (REPLICATED, UNUSED)), ((ROWS, UNUSED),)
    return operator(lambda x, w: x @ w, (f(16, 8), f(8, 4)), *types, flags)


def inner_reduce() -> LocalOperator:
    """A soft-max over a dimension that is partitioned along both axes."""
    return operator(softmax, (f(4, 16),), ((COLUMNS, COLUMNS),), ((COLUMNS, COLUMNS),), (True,))


def lookup_rows() -> LocalOperator:
    """Indices, and a table whose rows are partitioned: each device asks where its piece lies."""
    types = ((REPLICATED, UNUSED), (ROWS, UNUSED)), ((PARTIAL, UNUSED),)
    return operator(lambda i, t: t[i], (jax.ShapeDtypeStruct((6,), "int32"), f(8, 4)), *types, (False, True))


def random_bits() -> LocalOperator:
    body, _ = program_of(jax.make_jaxpr(lambda k: jax.random.bits(k, (8,)))(jax.eval_shape(lambda: jax.random.key(0))))
    return LocalOperator(body, ((UNUSED, UNUSED),), ((UNUSED, UNUSED),), (False,), AXES)


def convolution() -> LocalOperator:
    def fn(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.relu(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"))

    types = ((ROWS, UNUSED), (REPLICATED, UNUSED)), ((ROWS, UNUSED),)
    return operator(fn, (f(4, 2, 8, 8), f(4, 2, 3, 3)), *types, (True, True))


def alone(fn: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> LocalOperator:
    """All devices do the same."""
    body, _ = program_of(jax.make_jaxpr(fn)(*args))
    unused = (UNUSED, UNUSED)
    return LocalOperator(body, (unused,) * len(args), (unused,) * len(body.outputs), (True,) * len(args), AXES)


OPERATORS = {
    "product": lambda: product((True, True)),
    "product, forward": lambda: product((False, False)),
    "product, weights' gradient": lambda: product((False, True)),
    "inner reduce": inner_reduce,
    "sum": lambda: operator(lambda x, y: x + y, (f(8), f(8)), ((ROWS, ROWS),) * 2, ((ROWS, ROWS),), (True, True)),
    "two results": lambda: operator(
        lambda x: (x.argmax(0), jnp.sin(x)), (f(4, 8),), ((COLUMNS, UNUSED),), ((ROWS, UNUSED), (COLUMNS, UNUSED)), (True,)
    ),
    "lookup": lookup_rows,
    "random bits": random_bits,
    "convolution": convolution,
    "convolution, forward": lambda: replace(convolution(), differentiated=(False, False)),
    "nothing is split": lambda: alone(jax.nn.relu, f(4, 4)),  # a custom rule, with constants inside
    "a custom rule": lambda: operator(jax.nn.relu, (f(4, 4),), ((ROWS, UNUSED),), ((ROWS, UNUSED),), (True,)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_measured(name: str) -> None:
    found = OPERATORS[name]()
    timing = measure(traced(found, jax.devices()[:4]).compile(), rounds=1)
    assert all(math.isfinite(x) and x >= 0 for x in (timing.forward, timing.backward, timing.spread))
    assert timing.backward == 0 or any(found.differentiated)


def test_devices_need_not_be_all_that_there_are() -> None:
    found = product((True, True))
    assert measure(traced(found, jax.devices()[4:8]).compile(), rounds=1).forward >= 0
    with pytest.raises(ValueError, match="reshape"):
        mesh_of(AXES, jax.devices()[:3])


@dataclass(frozen=True)
class Instant:
    """A program of no time at all, on a host that takes its time for every repetition of nothing. Notes what it is asked for."""

    traced: profile.Traced
    asked: list[tuple[int, ...]]

    def run(self, _: int) -> Callable[..., Any]:
        def run(*times: int) -> None:
            self.asked.append(times)
            time.sleep(1e-5 * times[2])

        return run


def test_what_takes_no_time_is_measured_in_no_time() -> None:
    """Nothing is repeated as often as nothing takes, however often an operator of no results (a view) is."""
    program = Instant(traced(product((True, True)), jax.devices()[:4]), [])
    assert measure(cast(CompiledOperator, program), rounds=1).forward == 0
    assert max(times[0] for times in program.asked) == profile.MOST
    assert 1e-5 * max(times[2] for times in program.asked) < 10 * profile.RUN


def test_a_conditional_is_measured_in_its_slowest_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither the first, nor the last, which runs where an index is out of range."""

    def fn(x: Any) -> Any:
        return jnp.sum(jax.lax.switch(jnp.int32(x[0]), [jnp.negative, jnp.exp, jnp.sin], x))

    captured = capture(fn, f(256))
    tasks = tasks_of_graph(on_one_device(captured.graph), captured.differentiated).values()
    operator = next(t.operator for t in tasks if t.operator.body.primitives == ("cond",))
    drawn = [list(local_operands(operator, branch)) for branch in range(3)]
    position = list(operator.body.inputs).index(next(iter(branch_indices(operator.body))))
    assert [int(operands[position]) for operands in drawn] == [0, 1, 2]

    of_branch = [Timing(1.0, 5.0, 0.0), Timing(3.0, 2.0, 0.1), Timing(2.0, 4.0, 0.0)]
    monkeypatch.setattr(profile, "_measure_branch", lambda program, branch, rounds: of_branch[branch])
    program = Instant(traced(operator, jax.devices()[:1]), [])
    assert measure(cast(CompiledOperator, program)) == Timing(3.0, 5.0, 0.1)


# What is compiled


def hlo(found: LocalOperator, monkeypatch: pytest.MonkeyPatch, which: int = -1) -> str:
    """The last program that is compiled, or another one."""
    texts = []
    usual = jax.stages.Lowered.compile

    def compile_(self: Any, *args: Any, **kwargs: Any) -> Any:
        program = usual(self, *args, **kwargs)
        texts.append(program.as_text())
        return program

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    traced(found, jax.devices()[:4]).compile()
    return texts[which]


def in_loops(text: str, what: str) -> int:
    """Instructions that stand inside a loop, by the name that JAX gave them."""
    return len(re.findall(rf'{what}.*op_name="[^"]*while/body/', text))


@pytest.mark.parametrize(("flags", "products"), [((False, False), 1), ((False, True), 2), ((True, True), 3)])
def test_products_are_in_the_loops(flags: tuple, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward and one for each gradient, all of them inside the loops: nothing is hoisted out, or thrown away."""
    text = hlo(product(flags), monkeypatch)
    assert in_loops(text, r" dot\(") == products


def test_cotangents_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What adds them up is not computed when the program is compiled, as it would be if they were known then."""
    added = operator(lambda x, b: x + b, (f(8, 4), f(4)), ((ROWS, UNUSED), (REPLICATED, UNUSED)), ((ROWS, UNUSED),), (True, True))
    assert in_loops(hlo(added, monkeypatch), r" reduce\(") == 1


def test_convolutions_are_in_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    text = hlo(convolution(), monkeypatch, -2)  # the last program is empty
    assert text.count(" convolution(") == 2
    assert " while(" not in text
    assert not profile.convolves(product((True, True)).body)


def test_nothing_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Reduces inside a composite are priced apart."""
    text = hlo(inner_reduce(), monkeypatch)
    assert not re.search(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute", text)
    assert in_loops(text, "exponential") >= 1


def test_shapes_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inner_reduce().shapes == ((4, 4), (4, 4))
    assert "f32[4,16]" not in hlo(inner_reduce(), monkeypatch)


def views(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return jax.eval_shape(without_views(lambda *x: list(fn(*x)), args), *args)


def test_views_are_not_counted() -> None:
    x = np.zeros((2, 3), np.float32)
    assert views(lambda x: (x.reshape(6), x, x.T, x + 1), x) == [f(3, 2), f(2, 3)]
    assert views(lambda x: (x + 1, (x + 1).reshape(3, 2)), x) == [f(2, 3), f(3, 2)]  # two sums, as JAX has them

    def twice(x: Any) -> Any:
        y = x + 1
        return y, y.reshape(6)

    assert views(twice, x) == [f(2, 3)]


# Which operators


@cache
def drawn() -> tuple[Any, Any]:
    captured, assembled = named("gpt_scanned")
    point = random_point(assembled, np.random.default_rng(0))
    return captured, parallelize(captured.graph, assembled.assignment(point))


def test_all_operators_of_a_plan_are_listed_once() -> None:
    captured, graph = drawn()
    found = tasks_of_graph(graph, captured.differentiated)
    bodies = {n.body.key for n, _ in graph.walk() if n.body is not None and n.body.equations and n.kind not in ("view",)}
    assert {content[0] for content in found} == bodies
    _, assembled = named("gpt_scanned")
    assert set(found) <= set(tasks_of_domains(assembled, every=True))
    assert set(tasks_of_domains(assembled)) < set(tasks_of_domains(assembled, every=True))


def test_what_was_measured_is_not_missing(tmp_path: Any) -> None:
    machine = Machine.grid(1, 4, "a100")
    task = MeasurementTask(product((True, True)), 0.5)
    large = MeasurementTask(operator(jnp.sin, (f(1 << 16, 1 << 16),), ((ROWS, UNUSED),), ((ROWS, UNUSED),), (True,)), 0.5)
    wanted = {t.content: t for t in (task, large)}
    assert missing(wanted, None, machine) == ([task], 1)
    place, store = where(jax.devices()[:4]), Store(tmp_path / "profiles.sqlite3")
    assert list(fill([task], jax.devices()[:4], store, place)) == [(task, "")]
    profile = store.profile(place)
    assert missing({task.content: task}, profile, machine) == ([], 0)
    assert profile is not None
    (kept,) = profile.measurements
    assert kept.work == 2 * 16 * 8 * 4 / 2
    assert kept.nbytes == 4 * (8 * 8 + 8 * 4 + 8 * 4)


def test_what_does_not_run_is_said_and_the_rest_is_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = MeasurementTask(inner_reduce(), 0.25), MeasurementTask(product((True, True)), 0.5)

    def fails(program: CompiledOperator) -> Timing:
        if program.traced.operator is bad.operator:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")
        return Timing(1e-3, 2e-3, 0.0)

    monkeypatch.setattr("unity.exec.measure.plan_profile.measure", fails)
    place, store = where(jax.devices()[:4]), Store(tmp_path / "profiles.sqlite3")
    assert list(fill([bad, good], jax.devices(), store, place)) == [(bad, "RESOURCE_EXHAUSTED: Out of memory"), (good, "")]
    assert store.profile(place) == Profile(place, (measurement(good, Timing(1e-3, 2e-3, 0.0)),))


def test_what_does_not_compile_is_said_and_the_rest_is_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, worse, good = (
        MeasurementTask(inner_reduce(), 0.25),
        MeasurementTask(lookup_rows(), 0.25),
        MeasurementTask(product((True, True)), 0.5),
    )
    usual = profile.Traced.compile

    def traced(operator: LocalOperator, devices: Any) -> profile.Traced:
        if operator is worse.operator:
            raise NotImplementedError("no such code here")
        return profile.traced(operator, devices)

    def fails(program: profile.Traced) -> CompiledOperator:
        if program.operator is bad.operator:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return usual(program)

    monkeypatch.setattr("unity.exec.measure.plan_profile.traced", traced)
    monkeypatch.setattr(profile.Traced, "compile", fails)
    place, store = replace(where(jax.devices()[:4]), cores=2), Store(tmp_path / "profiles.sqlite3")
    found = list(fill([bad, worse, good], jax.devices()[:4], store, place))
    assert found == [(bad, "RESOURCE_EXHAUSTED: Out of memory"), (worse, "no such code here"), (good, "")]
    assert len(store.profile(place) or ()) == 1


# Collectives


def test_curves_of_every_kind_and_size() -> None:
    groups = (2, *by_hand(4))
    found = curves.curves(jax.devices()[: groups[-1]], sizes=(1 << 10, 1 << 12), rounds=1)
    kinds = {(kind, turned) for kind in KINDS for turned in (False, kind in TURNING)}
    assert {(c.kind, c.turned, c.size) for c in found} == {(*kind, size) for kind in kinds for size in groups}
    for c in found:
        assert c.alpha > 0
        assert c.beta > 0
        assert {n for n, _ in c.points} <= {1 << 10, 1 << 12}


def test_a_line_through_points_on_a_line_is_that_line() -> None:
    points = [(n, 1e-5 + 2e-9 * n) for n in (1 << 10, 1 << 16, 1 << 22)]
    found = curves.line("all-reduce", 4, points)
    assert (found.alpha, found.beta) == (pytest.approx(1e-5), pytest.approx(2e-9))
    assert found.error == pytest.approx(0, abs=1e-9)
    assert found.points == tuple(points)


@pytest.mark.parametrize("points", [[(1024, 2.0), (4096, 1.0)], [(1024, 1e-9), (4096, 1.0)], [(1024, 0.0), (4096, 1.0)]])
def test_noise_gives_no_impossible_line(points: list) -> None:
    found = curves.line("all-reduce", 4, points)
    assert found.alpha > 0
    assert found.beta > 0


def test_a_measured_curve_is_what_a_group_on_its_level_costs() -> None:
    plain = Machine.grid(2, 4, "a100")
    curve = curves.line("all-gather", 2, [(n, 1e-3 + 1e-8 * n) for n in (1 << 10, 1 << 20)])
    inner = plain.levels[1]
    machine = Machine("measured", plain.device, (plain.levels[0], replace(inner, curves=(curve,))))
    for axis in machine.axes[1:]:
        line = collective(machine, "all-gather", [axis])
        assert (line.alpha, line.beta) == (curve.alpha, curve.beta)
    for kind, axes in (("all-reduce", machine.axes[1:2]), ("all-gather", machine.axes[1:]), ("all-gather", machine.axes[:2])):
        assert collective(machine, kind, axes) == collective(plain, kind, axes)
        assert collective(machine, kind, axes, turned=True) == collective(plain, kind, axes, turned=True)
    assert Machine.from_json(machine.to_json()) == machine


def test_what_is_turned_is_read_and_written_once_more_unless_that_was_measured() -> None:
    plain = Machine.grid(1, 4, "a100")
    curve = curves.line("all-gather", 4, [(n, 1e-3 + 1e-8 * n) for n in (1 << 10, 1 << 20)], turned=True)
    machine = Machine("measured", plain.device, (replace(plain.levels[-1], curves=(curve,)),))
    once, turned = (collective(plain, "all-gather", plain.axes, t) for t in (False, True))
    assert turned.alpha - once.alpha == pytest.approx(plain.device.launch, rel=1e-9, abs=0)
    assert turned.beta - once.beta == pytest.approx(2 / plain.device.bandwidth, rel=1e-9, abs=0)
    assert collective(plain, "all-reduce", plain.axes, True) == collective(plain, "all-reduce", plain.axes)
    assert collective(machine, "all-gather", machine.axes, True).alpha == pytest.approx(1e-3)
    assert collective(machine, "all-gather", machine.axes).beta == pytest.approx(once.beta, rel=1e-9, abs=0)
    assert Machine.from_json(machine.to_json()) == machine


# Together


def test_a_plan_is_predicted_by_what_was_measured(tmp_path: Any) -> None:
    """From a graph to measurements to the same graph's seconds: every operator of it is found again."""

    def small(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w).sum()

    from unity.pcg.capture.capture import capture
    from unity.search.cost.assembly import assemble
    from unity.search.cost.cost import Training
    from unity.search.cost.prediction import predict
    from unity.search.solver.minimizer import Minimizer

    captured = capture(small, f(8, 4), f(4, 8))
    machine = Machine.grid(1, 4, "a100")
    assembled = assemble(captured.graph, captured.differentiated, machine, Training())
    (point,) = Minimizer(assembled.problem).at([0.0])
    graph = parallelize(captured.graph, assembled.assignment(point))
    tasks = tasks_of_graph(graph, captured.differentiated)
    place = where(jax.devices()[:4])
    profile = Profile(
        place, tuple(measurement(t, measure(traced(t.operator, jax.devices()[:4]).compile())) for t in tasks.values())
    )
    known = Machine(machine.name, machine.device, machine.levels, profile)
    found = predict(graph, known, captured.differentiated)
    assert [t.how for t in found.operators] == ["measured"] * len(found.operators)
    assert {t.forward for t in found.operators} == {m.forward for m in profile.measurements}
