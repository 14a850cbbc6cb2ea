"""Devices and links that differ from each other, and the errors for impossible ones."""

from __future__ import annotations

import math

import pytest

from unity.machine.collectives import collective_seconds
from unity.machine.hardware import MachineError
from unity.machine.machine import Machine
from unity.search.simulator import DirectedLink, Topology

K80 = Machine.grid(1, 4, "k80")
PCIE, SHARED = 15.75e9, DirectedLink("shared switch", 15.75e9 / 2, 5e-6)


def flexflow_k80() -> Topology:
    """FlexFlow, figure 5b: four K80; adjacent ones are on a switch of their own, the others share one."""
    near = {(0, 1): (PCIE, 2.5e-6), (2, 3): (PCIE, 2.5e-6)}
    far = {(i, j): SHARED for i in range(4) for j in range(4) if i // 2 != j // 2}
    return Topology.joined("flexflow k80", K80, [1.0] * 4, near | far)


def test_links_may_be_of_one_pair_or_shared() -> None:
    t = flexflow_k80()
    assert t.link(0, 1).bandwidth == t.link(1, 0).bandwidth == PCIE
    assert t.between[0][1] != t.between[1][0]  # each direction has its own
    assert {t.link(i, j) for i in (0, 1) for j in (2, 3)} == {SHARED}
    assert len(t.links) == 5


def test_a_collective_is_as_slow_as_the_slowest_link_of_its_ring() -> None:
    t = flexflow_k80()
    near, all_ = (t.collective_seconds("all-reduce", members, 4e6) for members in ([0, 1], [0, 1, 2, 3]))
    assert near == pytest.approx(2 * (2.5e-6 + 2e6 / PCIE) + K80.device.launch)
    assert all_ == pytest.approx(2 * (3 * 5e-6 + 3e6 / SHARED.bandwidth) + K80.device.launch)
    assert t.collective_seconds("all-reduce", [2], 4e6) == 0.0


def test_on_one_level_a_uniform_topology_is_the_machine() -> None:
    machine = Machine.grid(1, 8, "a100", intra=(300e9, 1.9e-6))
    t = Topology.uniform(machine)
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        assert t.collective_seconds(kind, range(8), 1e6) == pytest.approx(collective_seconds(machine, kind, machine.axes, 1e6))


def test_a_device_sends_through_its_port_of_the_outermost_separating_level() -> None:
    machine = Machine.preset("flexflow-p100")
    t = Topology.uniform(machine)
    assert t.link(0, 3).bandwidth == machine.levels[1].bandwidth
    assert t.link(0, 4).bandwidth == machine.levels[0].bandwidth
    assert t.between[0][4] == t.between[0][15]
    assert t.between[0][4] != t.between[1][4]


@pytest.mark.parametrize(
    ("speeds", "links", "message"),
    [
        ([1.0, 1.0, 1.0], {(0, 1): (1e9, 0.0), (1, 2): (1e9, 0.0)}, "no link from device 0 to device 2"),
        ([1.0, 1.0], {(0, 1): (0.0, 0.0)}, "bandwidth must be a finite number of bytes/s above zero"),
        ([1.0, 1.0], {(0, 1): (-1e9, 0.0)}, "bandwidth must be"),
        ([1.0, 1.0], {(0, 1): (math.nan, 0.0)}, "bandwidth must be"),
        ([1.0, 1.0], {(0, 1): (1e9, -1.0)}, "latency must be"),
        ([1.0, 0.0], {(0, 1): (1e9, 0.0)}, "speed of device 1"),
        ([1.0, 1.0], {(0, 2): (1e9, 0.0)}, "a link from device 0 to device 2; there are 2"),
        ([], {}, "there is no device"),
    ],
)
def test_missing_and_impossible_figures_are_named(speeds: list[float], links: dict, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        Topology.joined("mine", K80, speeds, links)


def test_links_must_be_given_for_all_devices() -> None:
    with pytest.raises(MachineError, match="2 rows of 2 links"):
        Topology("mine", K80, (1.0, 1.0), (SHARED,), ((0, 0),))


def test_nonexistent_devices_are_named() -> None:
    t = flexflow_k80()
    t.check_devices([0, 3], "here")
    with pytest.raises(MachineError, match=r"here: none of the devices \[4, 9\] is one of 'flexflow k80', which are 0 to 3"):
        t.check_devices([4, 9], "here")
    with pytest.raises(MachineError, match=r"has no devices \[4\]"):
        t.check_devices([1, 4], "here")
    with pytest.raises(MachineError, match="none of the devices"):
        t.check_devices([], "here")
