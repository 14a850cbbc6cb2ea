"""Measured operators: the database under crashes and crowds, what it says of shapes that were not measured, and of bad input."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from small_models import MACHINE, MODELS, counted, made, named, random_point

from unity.exec.measure.plan_profile import tasks_of_domains
from unity.machine.hardware import Curve, Device, Level, MachineError
from unity.machine.machine import Machine
from unity.machine.profiles.profile import SCHEMA, Measurement, Profile, Where
from unity.machine.profiles.store import ProfileError, Store
from unity.pcg.ir.program import Body, program_of
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.prediction import predict
from unity.search.cost.profile_lookup import CALIBRATED, INTERPOLATED, MEASURED, ROOFLINE, Piece, Seconds, kind_of, lookup
from unity.search.cost.roofline import dense_work, roofline

WHERE = Where("NVIDIA A100-SXM4-80GB", 8, 16, "0.10.2", "cuda 12")
DEVICE = Device("a100", {"float32": 1e12}, 2**30, 1e11, 0.5, 1e-6)


def body_of(n: int, m: int = 32) -> Body:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    shapes = jax.ShapeDtypeStruct((n, m), "float32"), jax.ShapeDtypeStruct((m, m), "float32")
    return program_of(jax.make_jaxpr(product)(*shapes))[0]


def measurement(body: Body, n: int, forward: float, backward: float = 1e-3, m: int = 32) -> Measurement:
    """A product of n local rows."""
    shapes = ((n, m), (m, m), (n, m))
    size = 2.0 * n * m * m, "float32", 4.0 * (2 * n * m + m * m), 0.0
    return Measurement(body.key, kind_of(body), shapes, (True, True), *size, forward, backward, 0.1)


def piece(n: int, m: int = 32) -> Piece:
    return Piece(((n, m), (m, m), (n, m)), 2.0 * n * m * m, 4.0 * (2 * n * m + m * m))


BODY = body_of(64)


# The database


def test_what_is_put_is_there_and_a_second_time_replaces_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "profiles.sqlite3")
    assert store.profile(WHERE) is None
    one, other = measurement(BODY, 8, 1e-3), measurement(BODY, 16, 2e-3)
    for m in (one, other, structs.replace(one, forward=3e-3)):
        store.put(WHERE, m)
    found = store.profile(WHERE)
    assert found == Profile(WHERE, (other, structs.replace(one, forward=3e-3)))


@pytest.mark.parametrize("change", [{"kind": "H100"}, {"devices": 4}, {"cores": 2}, {"jax": "0.11"}, {"platform": "cuda 13"}])
def test_other_devices_and_versions_see_nothing_of_it(tmp_path: Path, change: dict) -> None:
    store = Store(tmp_path / "profiles.sqlite3")
    store.put(WHERE, measurement(BODY, 8, 1e-3))
    assert store.profile(replace(WHERE, **change)) is None


def test_the_key_tells_programs_shapes_and_gradients_apart() -> None:
    one = measurement(BODY, 8, 1e-3)
    others = (measurement(body_of(128), 8, 1e-3), measurement(BODY, 16, 1e-3), structs.replace(one, differentiated=(False, True)))
    assert len({one.key, *(m.key for m in others)}) == 4
    assert structs.replace(one, forward=9.0).key == one.key


WRITER = """
import sys
from pathlib import Path
from unity.machine.profiles.profile import Measurement, Where
from unity.machine.profiles.store import Store
store, where = Store(Path(sys.argv[1])), Where("a", 1, 1, "x", "y")
first, count = int(sys.argv[2]), int(sys.argv[3])
for k in range(first, first + count):
    store.put(where, Measurement("b", "k", ((k,),), (), 1.0, "float32", 1.0, 0.0, float(k), 0.0, 0.0))
    print(k, flush=True)
"""


def writer(path: Path, first: int, count: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def kept(path: Path) -> set[int]:
    found = Store(path).profile(Where("a", 1, 1, "x", "y"))
    return {m.shapes[0][0] for m in found.measurements} if found else set()


def test_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    running = [writer(path, 0, 60), writer(path, 40, 60)]  # twenty of them are written by both
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    assert kept(path) == set(range(100))


def test_a_run_that_is_killed_keeps_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    process = writer(path, 0, 100_000)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert set(said) <= kept(path)


def test_processes_find_a_corrupt_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    path.write_bytes(b"no database " * 1000)
    running = [writer(path, k * 30, 30) for k in range(2)]
    environment_warns = [process.communicate() for process in running]
    assert len(kept(path)) >= 30  # the process that set it aside raised its warning; the other wrote all
    assert any("set aside" in err for _, err in environment_warns)


@pytest.mark.parametrize("damage", ["text", "cut", "overwritten"])
def test_a_corrupt_file_is_set_aside_and_begun_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "profiles.sqlite3"
    store = Store(path)
    for k in range(200):
        store.put(WHERE, measurement(BODY, 8 + k, 1e-3))
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    whole = path.read_bytes()
    spoiled = {"text": b"{}" * 4096, "cut": whole[: len(whole) // 2], "overwritten": whole[:4096] + b"\xff" * (len(whole) - 4096)}
    path.write_bytes(spoiled[damage])
    with pytest.warns(UserWarning, match="set aside"):
        store.put(WHERE, measurement(BODY, 8, 5e-3))
    assert store.profile(WHERE) == Profile(WHERE, (measurement(BODY, 8, 5e-3),))
    assert path.with_name(path.name + ".corrupt").exists()


def test_a_damaged_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    store, good, bad = Store(path), measurement(BODY, 8, 1e-3), measurement(BODY, 16, 1e-3)
    store.put(WHERE, good)
    store.put(WHERE, bad)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE measurements SET row = ? WHERE content = ?", ("[1, 2", bad.key))
    database.close()
    assert store.profile(WHERE) == Profile(WHERE, (good,))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="file"):
        Store(tmp_path / "file" / "profiles.sqlite3").put(WHERE, measurement(BODY, 8, 1e-3))


def test_a_path_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cache"):
        Store(tmp_path).profile(WHERE)


def test_a_damaged_file_that_cannot_be_set_aside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    path.write_text("no database, and long enough to be seen as none" * 10)
    (tmp_path / "profiles.sqlite3.corrupt" / "in the way").mkdir(parents=True)  # it cannot be moved there, whoever runs this
    with pytest.raises(ProfileError, match=r"profiles\.sqlite3.*XDG_CACHE_HOME"):
        Store(path).profile(WHERE)
    assert Store(tmp_path / ("long" * 100) / "profiles.sqlite3").profile(WHERE) is None  # no such name can be looked up


# What it says


def test_marks() -> None:
    other = body_of(256)  # of the same kind
    sine = program_of(jax.make_jaxpr(jax.numpy.sin)(jax.ShapeDtypeStruct((8,), "float32")))[0]
    profile = Profile(WHERE, (measurement(BODY, 8, 1e-3, 2e-3), measurement(BODY, 32, 4e-3, 8e-3)))
    assert lookup(profile, DEVICE, BODY, piece(8), (True, True)) == Seconds(1e-3, 2e-3, MEASURED)
    assert lookup(profile, DEVICE, BODY, piece(16), (True, True)).how == INTERPOLATED
    assert lookup(profile, DEVICE, other, piece(16), (True, True)).how == CALIBRATED
    plain = roofline(DEVICE, 0.0, "float32", 64.0, 1)
    light = lookup(profile, DEVICE, sine, Piece(((8,), (8,)), 0.0, 64.0), (True,))
    assert light == Seconds(float(plain[0]), float(plain[1]), ROOFLINE)


def conditional(k: bool, x: jax.Array) -> jax.Array:
    return jax.lax.cond(k, lambda x: jax.numpy.sin(x @ x), jax.numpy.sin, x)


called = jax.custom_vjp(conditional)
called.defvjp(lambda k, x: (called(k, x), x), lambda x, g: (None, g))


@pytest.mark.parametrize("fn", [conditional, called])
def test_a_conditional_calibrates_no_other_operator(fn: Callable[..., jax.Array]) -> None:
    """Its seconds are those of its branches, of which its kind says nothing."""

    def switch(n: int) -> Body:
        return program_of(jax.make_jaxpr(lambda k, x: fn(k, x))(True, np.zeros((n, n), "float32")))[0]

    shapes: tuple = ((), (8, 8), (8, 8))
    slow = Measurement(switch(8).key, kind_of(switch(8)), shapes, (False, True), 0.0, "float32", 512.0, 0.0, 1.0, 1.0, 0.0)
    assert "cond" in slow.kind.split()
    conditional = lookup(Profile(WHERE, (slow,)), DEVICE, switch(16), Piece(((), (16, 16), (16, 16)), 0.0, 2048.0), (False, True))
    plain = roofline(DEVICE, 0.0, "float32", 2048.0, 1)
    assert conditional == Seconds(float(plain[0]), float(plain[1]), ROOFLINE)


def test_another_set_of_gradients_is_another_operator() -> None:
    profile = Profile(WHERE, (measurement(BODY, 8, 1e-3),))
    assert lookup(profile, DEVICE, BODY, piece(8), (False, True)).how == CALIBRATED
    alone = lookup(profile, DEVICE, BODY, piece(8), (False, False))
    assert alone.backward == 0


rows = st.integers(1, 1 << 14)
times = st.floats(1e-7, 10)


@given(st.lists(st.tuples(rows, times, times), min_size=1, max_size=8, unique_by=lambda t: t[0]), rows, st.booleans())
def test_what_is_not_measured_lies_between_what_is(found: list, n: int, same: bool) -> None:
    """In the number of times as long as the roofline says, for the same program and for others of its kind."""
    profile = Profile(WHERE, tuple(measurement(BODY, k, there, back) for k, there, back in found))
    body = BODY if same else body_of(512)
    seconds = lookup(profile, DEVICE, body, piece(n), (True, True))

    def factors(which: int, at: Piece, seconds: float) -> float:
        return seconds / float(roofline(DEVICE, at.work, "float32", at.nbytes, 2)[which])

    for which, one in ((0, seconds.forward), (1, seconds.backward)):
        known = [factors(which, piece(k), (there, back)[which]) for k, there, back in found]
        assert min(known) * (1 - 1e-9) <= factors(which, piece(n), one) <= max(known) * (1 + 1e-9)


@given(st.permutations([measurement(BODY, n, 1e-3 * n) for n in (8, 16, 32, 64)]), rows)
def test_the_order_of_measurements_does_not_matter(found: list, n: int) -> None:
    usual = Profile(WHERE, tuple(measurement(BODY, n, 1e-3 * n) for n in (8, 16, 32, 64)))
    profile = Profile(WHERE, tuple(found))
    assert profile == usual
    assert hash(profile) == hash(usual)
    assert lookup(profile, DEVICE, BODY, piece(n), (True, True)) == lookup(usual, DEVICE, BODY, piece(n), (True, True))


def test_a_measured_neighbour_says_more_than_one_far_away() -> None:
    profile = Profile(WHERE, tuple(measurement(BODY, n, seconds) for n, seconds in ((8, 1e-6), (4096, 1.0))))
    near, far = (lookup(profile, DEVICE, BODY, piece(n), (True, True)).forward for n in (9, 4000))
    plain_near, plain_far = (float(roofline(DEVICE, piece(n).work, "float32", piece(n).nbytes, 2)[0]) for n in (9, 4000))
    assert near / plain_near < far / plain_far


# In costs


def profiled(name: str, part: float = 0.5) -> Machine:
    """The usual machine, with figures for some of a model's operators, that no roofline would give."""
    _, assembled = named(name)
    rng = np.random.default_rng(0)
    found = []
    for (key, shapes, flags), task in tasks_of_domains(assembled, every=True).items():
        if rng.random() < part:
            body = task.operator.body
            flops, dtype = dense_work(body)
            forward, backward = rng.lognormal(-8, 1, 2)
            size = flops * task.share, dtype, *task.traffic
            found.append(Measurement(key, kind_of(body), shapes, flags, *size, forward, backward if any(flags) else 0.0, 0.0))
    return MACHINE.with_profile(Profile(WHERE, tuple(found)))


@pytest.mark.parametrize("part", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt", "gpt_scanned", "lstm"])
def test_the_search_and_the_parallel_graph_look_up_the_same(name: str, part: float) -> None:
    machine = profiled(name, part)
    captured, assembled = made(MODELS[name](), machine)
    _, plain = named(name)
    for seed in range(5):
        point = random_point(assembled, np.random.default_rng(seed))
        graph = parallelize(captured.graph, assembled.assignment(point))
        found = predict(graph, machine, captured.differentiated)
        seconds = sum(t.forward + t.backward for t in found.operators)
        own = sum(_own_time(assembled, s, point) for s in range(len(assembled.costs)))
        assert seconds == pytest.approx(own)
        assert counted(assembled, point, "time") >= found.time * (1 - 1e-9)
        hows = {t.how for t in found.operators if t.forward + t.backward > 0}  # views take nothing, and are not measured
        assert hows <= {MEASURED, INTERPOLATED, CALIBRATED} | (set() if part == 1.0 else {ROOFLINE})
        assert part < 1.0 or hows == {MEASURED}
        assert seconds != pytest.approx(
            sum(t.forward + t.backward for t in predict(graph, MACHINE, captured.differentiated).operators)
        )
    assert machine.with_profile(None) == plain.machine


def _own_time(assembled, s: int, point) -> float:
    cost, value = assembled.costs[s], point.values[s]
    again = cost.forward[value] if point.alternatives.unary[s] == 1 else 0.0
    return cost.forward[value] + cost.backward[value] + again


# Machines


def test_a_machine_is_saved_with_its_profile_and_its_key_changes(tmp_path: Path) -> None:
    plain = Machine.grid(1, 8, "a100")
    one, other = (plain.with_profile(Profile(WHERE, (measurement(BODY, 8, t),))) for t in (1e-3, 2e-3))
    assert len({plain, one, other}) == 3
    assert len({json.dumps(m.to_json()) for m in (plain, one, other)}) == 3
    one.save(tmp_path / "machine.json")
    loaded = Machine.load(tmp_path / "machine.json")
    assert loaded == one
    assert loaded.profile == one.profile
    assert one.with_profile(None) == plain
    assert "profile" not in plain.to_json()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda p: p | {"schema": SCHEMA + 1}, f"schema is version {SCHEMA + 1}"),
        (lambda p: {k: v for k, v in p.items() if k != "where"}, r"\$\.profile\.where: it is missing"),
        (lambda p: p | {"where": {"kind": "A100"}}, r"\$\.profile\.where\.devices: it is missing"),
        (lambda p: p | {"measurements": [["short"]]}, r"\$\.profile\.measurements\[0\]: expected array of"),
        (lambda p: p | {"measurements": [[*p["measurements"][0][:8], -1.0, *p["measurements"][0][9:]]]}, "forward.*-1"),
        (lambda p: p | {"where": p["where"] | {"kind": "NVIDIA H200"}}, "NVIDIA H200.*a100.*measure there"),
        (lambda p: [], r"\$\.profile: expected object, got array"),
    ],
)
def test_a_spoiled_profile_is_refused_by_name(tmp_path: Path, spoil, named: str) -> None:
    machine = Machine.grid(1, 8, "a100").with_profile(Profile(WHERE, (measurement(BODY, 8, 1e-3),)))
    data = json.loads(json.dumps(machine.to_json()))
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data | {"profile": spoil(data["profile"])}))
    with pytest.raises(MachineError, match=named) as caught:
        Machine.load(path)
    assert str(path) in str(caught.value)


def test_virtual_devices_in_another_number_are_refused() -> None:
    device = replace(DEVICE, name="cpu")
    machine = Machine("mine", device, (Level("device", 4, 1e9, 0.0),))
    four = replace(WHERE, kind="cpu", devices=4)
    assert machine.with_profile(Profile(four, ())).profile is not None
    with pytest.raises(MachineError, match=r"8 x cpu.*4 x cpu.*share a host"):
        machine.with_profile(Profile(replace(four, devices=8), ()))
    a100 = Machine.grid(1, 4, "a100")
    assert a100.with_profile(Profile(WHERE, ())).profile is not None  # GPUs do not share


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"beta": 0.0}, "beta"),
        ({"alpha": -1.0}, "alpha"),
        ({"size": 0}, "size"),
        ({"error": float("nan")}, "error"),
        ({"points": ((0, 1.0),)}, "point"),
        ({"points": ((1, 0.0),)}, "point"),
    ],
)
def test_impossible_curves_are_refused(change: dict, named: str) -> None:
    with pytest.raises(MachineError, match=named):
        replace(Curve("all-reduce", 8, 1e-5, 1e-9), **change)


def test_a_database_of_these_devices_is_taken_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unity.exec.measure import local_machine as local

    class A100:
        device_kind, process_index, client = WHERE.kind, 0, None

        def memory_stats(self) -> None:
            return None

    devices = [A100() for _ in range(8)]
    store = Store(tmp_path / "profiles.sqlite3")
    monkeypatch.setattr(Store, "usual", staticmethod(lambda: store))
    assert Machine.local(devices).profile is None
    store.put(local.where(devices), measurement(BODY, 8, 1e-3))
    found = Machine.local(devices)
    assert found.profile == store.profile(local.where(devices))
    assert Machine.local(devices[:4]).profile is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.path.unlink()
        assert Machine.local(devices).profile is None
