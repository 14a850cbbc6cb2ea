"""One program as several processes, each with its own devices: what they compute, what they agree on, and what they refuse.

The processes are real, started here, and meet over loopback; what they run is in `hosts_worker.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ci_cases import BY_HAND

import unity
from benchmarks.processes import ended, start
from unity.exec.hosts.device_order import in_mesh_order
from unity.exec.measure import collective_curves as curves

WORKER = Path(__file__).parents[1] / "support" / "hosts_worker.py"
SECONDS = 500  # until processes are given up


def together(names: str, devices: Sequence[int], cache: Path) -> list[dict[str, Any]]:
    """What each of the processes says of the named functions."""
    found = ended(start([str(WORKER), names], devices, cache), SECONDS)
    assert all(one.code == 0 for one in found), "\n\n".join(one.err[-4000:] for one in found)
    return [json.loads(one.out.splitlines()[-1]) for one in found]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together("values,sent,wrong,measured", (2, 2), tmp_path_factory.mktemp("pair"))


def test_values_and_gradients_are_those_of_one_device(pair: list[dict[str, Any]]) -> None:
    for said in (one["values"] for one in pair):
        value, _ = said["alone"]
        for way in ("whole", "parts"):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), said[way], said["alone"])
        np.testing.assert_allclose([said["bare"], said["jitted"], said["again"]], value, rtol=1e-5)
        assert said["agrees"]  # the compiled collectives with the plan's
        assert said["closing"] == 300 * sum(range(300))
        assert sum("plan.shard" in warning for warning in said["warned"]) == 1
    first, second = ({k: v for k, v in one["values"].items() if k != "crossing"} for one in pair)
    assert first == second


def test_the_outermost_axes_cross_hosts(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["values"]["crossing"] == [[0], [1]]
    assert any("n0" in spec for spec in pair[0]["values"]["specs"])  # and are used


def test_rows_are_sent_where_the_plan_wants_them(pair: list[dict[str, Any]]) -> None:
    assert all(all(one["sent"]) for one in pair)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("plan", "PlanError: the processes differ in the plan:\n    process 0: "),
        ("function", "PlanError: the processes differ in the function, or the shapes of its arguments:"),
        ("closed over", "PlanError: the processes differ in the arrays that it closes over:"),
        ("flat", "but here are 2 hosts with 2 devices each"),
        ("fewer", "but here are 2 hosts with 2 devices each"),
        ("seeds", "PlanError: args[0]['b'] is not the same in processes 0 and 1"),
        ("unplaced", "PlanError: args[0]['b'] is not the same in processes 0 and 1"),
        ("part as whole", "use plan.shard.local"),
        ("rows", "PlanError: process 1: args[1]['x'] is [3, 8]; of the [16, 8] that the plan is for, each of 2 processes has"),
        ("argument", "there is no argument 2"),
        ("seconds", "OptionError: seconds=1.0 would find something else in every process"),
        ("version", "PlanError: the processes differ in the version of JAX:"),
        ("version, local", "PlanError: the processes differ in the version of JAX:"),
        ("afterwards", "no error"),
        ("own devices", "no error"),
    ],
)
def test_every_process_says_what_is_wrong(pair: list[dict[str, Any]], what: str, named: str) -> None:
    for one in pair:
        assert named in one["wrong"][what]


def test_what_is_measured_is_the_first_process_s(pair: list[dict[str, Any]]) -> None:
    first, second = (one["measured"] for one in pair)
    assert first == second
    assert [(level["name"], level["size"]) for level in first["machine"]["levels"]] == [("node", 2), ("device", 2)]
    assert first["again"]
    assert first["fewest"][0] == 1
    assert "2 hosts with 2 devices" in first["fewest"][1]  # the second process would have no part
    found, recalled, searched = first["tried"]
    assert found
    assert not recalled  # from both caches
    assert searched  # in both, as one cache was lost


def test_processes_with_different_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    for one in together("uneven", (2, 1), tmp_path):
        for said in one["uneven"].values():
            assert "PlanError: the processes have different numbers of devices:\n    process 0: 2 devices\n    process 1: 1" in said


@BY_HAND
def test_four_processes_train_as_one_device(tmp_path: Path) -> None:
    first, *others = (one["trained"] for one in together("trained", (2, 2, 2, 2), tmp_path))
    np.testing.assert_allclose(first["together"], first["alone"], rtol=1e-10)
    assert len(set(first["together"])) > 1
    assert all(one["together"] == first["together"] for one in others)
    assert any("n0" in spec for spec in first["specs"])


def test_a_pipeline_and_branches_in_one_plan_train_as_one_device(tmp_path: Path) -> None:
    first, second = (one["both"] for one in together("both", (4, 4), tmp_path))
    assert first == second
    assert first["branching"].startswith("2 branches on 2 groups of devices")
    assert first["pipelining"].startswith("2 stages")
    np.testing.assert_allclose(first["together"], first["alone"], rtol=1e-10)
    assert len(set(first["together"])) > 1
    assert first["weights"] < 1e-10
    assert first["parts"]  # weights are packed, whichever way they are given
    assert first["unpacked"]
    assert first["placed"]
    assert "PlanError: process 0: args[0]['u1'] is [3, 32]; of the [24, 32]" in first["half"]


def test_a_busy_host_does_not_make_measuring_take_minutes() -> None:
    """What collectives add is hidden by what else runs: a run with them takes no longer than one without."""
    asked = list[int]()

    def run(times: Sequence[int], communicates: bool) -> float:
        asked.append(max(times))
        return 0.002 * sum(times)

    assert curves._times(run, 1, 4) == max(asked)
    assert curves.LONG / 2 <= 0.002 * max(asked) <= 1.5 * curves.LONG


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


@dataclass(frozen=True)
class FakeGPU(FakeDevice):
    slice_index: int
    platform: str = "gpu"


GRID = unity.Machine.grid


def test_devices_are_taken_host_by_host() -> None:
    shuffled = [FakeDevice(i, i % 2) for i in range(8)]  # as JAX may list them
    assert [d.process_index for d in in_mesh_order(GRID(2, 4, "a100"), shuffled)] == [0] * 4 + [1] * 4
    assert [d.id for d in in_mesh_order(GRID(2, 3, "a100"), shuffled)] == [0, 2, 4, 1, 3, 5]
    assert in_mesh_order(GRID(2, 2, "a100"), [FakeDevice(i, 0) for i in range(8)]) == [FakeDevice(i, 0) for i in range(4)]


def test_processes_of_one_host_are_one_unit() -> None:
    devices = [FakeGPU(i, i, i % 2) for i in range(8)]  # a process for each GPU
    assert [d.slice_index for d in in_mesh_order(GRID(2, 4, "a100"), devices)] == [0] * 4 + [1] * 4
    with pytest.raises(unity.PlanError, match="2 hosts with 4 devices"):
        in_mesh_order(GRID(4, 2, "a100"), devices)
    with pytest.raises(unity.PlanError, match="processes 6, 7 would have none"):
        in_mesh_order(GRID(2, 3, "a100"), devices)


def test_all_levels_may_cross_processes_of_one_device() -> None:
    devices = [FakeDevice(i, i) for i in range(4)]
    assert in_mesh_order(GRID(2, 2, "a100"), devices) == in_mesh_order(GRID(4, 1, "a100"), devices) == devices
    with pytest.raises(unity.PlanError, match="2 node > 1 device"):
        in_mesh_order(GRID(2, 1, "a100"), devices)
