"""Collectives by size: protocols and trees, as NCCL's own model counts them."""

import json
from dataclasses import replace
from math import inf, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unity.machine.collectives import KINDS, MERGED, collective, collective_seconds, most_merged, table
from unity.machine.hardware import Level, MachineError, Protocol
from unity.machine.machine import Machine
from unity.machine.presets import LINKS
from unity.machine.resharding_tables import changes
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, partitioned

NODE = Machine.grid(1, 8, "h100")
NODES = Machine.grid(16, 8, "h100")


def test_few_bytes_go_in_short_steps_and_many_by_the_bandwidth():
    # In microseconds: what NCCL's model says of 8 H100s in a node. LL reaches 141 GB/s, LL128 0.92 of 450.
    gathers = {
        0: 6.6 + 7 * 0.6,
        64e3: 6.6 + 7 * 0.6 + 7 / 8 * 64e3 / 141e3,
        8e6: 14 + 7 * 1.9 + 7 / 8 * 8e6 / (0.92 * 450e3),
        1e9: 8.4 + 7 * 3.4 + 7 / 8 * 1e9 / 450e3,
    }
    for nbytes, microseconds in gathers.items():
        assert collective_seconds(NODE, "all-gather", NODE.axes, nbytes) == pytest.approx(microseconds * 1e-6)
        assert collective_seconds(NODE, "reduce-scatter", NODE.axes, nbytes) == pytest.approx(microseconds * 1e-6)


def test_an_all_reduce_starts_once():
    assert collective_seconds(NODE, "all-reduce", NODE.axes, 0) == pytest.approx((6.6 + 2 * 7 * 0.6) * 1e-6)
    assert collective_seconds(NODE, "all-reduce", NODE.axes, 1e9) == pytest.approx(
        (8.4 + 2 * (7 * 3.4 + 7 / 8 * 1e9 / 450e3)) * 1e-6
    )


def test_between_nodes_a_small_all_reduce_goes_through_a_tree():
    small = collective_seconds(NODES, "all-reduce", NODES.axes, 0)
    assert small == pytest.approx((6.6 + 2 * (7 * 0.6 + log2(16) * 5.0)) * 1e-6)
    # A ring takes 15 steps between nodes and 112 inside, each of at least a microsecond, as it is posted to the network.
    assert small < collective_seconds(NODES, "all-gather", NODES.axes, 0) == pytest.approx((6.6 + 112 * 1.0 + 15 * 2.7) * 1e-6)


def test_a_device_alone_in_its_node_waits_for_each_message():
    nodes = [axis for axis in NODES.axes if axis.level == 0]
    assert collective_seconds(NODES, "all-gather", nodes, 0) == pytest.approx((6.6 + 15 * 5.0) * 1e-6)


@pytest.mark.parametrize("link", ["nvlink4", "pcie4"])
def test_one_all_reduce_of_few_bytes_is_no_slower_than_one_over_each_of_its_axes(link):
    machine = Machine.grid(1, 8, "h100", intra=link)
    together = collective_seconds(machine, "all-reduce", machine.axes, 64)
    assert together < sum(collective_seconds(machine, "all-reduce", [axis], 64) for axis in machine.axes)


@given(st.sampled_from(KINDS), st.sampled_from((NODE, NODES, Machine.grid(4, 4, "p100"))), st.data())
def test_a_price_is_concave_and_grows_with_the_bytes(kind, machine, data):
    price = collective(machine, kind, data.draw(st.sets(st.sampled_from(machine.axes), min_size=1)), data.draw(st.booleans()))
    few, many = sorted(data.draw(st.tuples(st.floats(0, 1e10), st.floats(0, 1e10))))
    assert price(few) <= price(many)
    assert price((few + many) / 2) >= (price(few) + price(many)) / 2 * (1 - 1e-12)
    assert price.alpha == price(0)
    assert price(many) >= price.beta * many


def test_levels_share_the_protocols_that_all_of_them_have():
    # PCIe has no LL128, so neither has a group that crosses it and the network.
    machine = Machine.grid(2, 2, "p100", intra="pcie3")
    names = [{p.name for p in level.protocols} for level in machine.levels]
    assert names == [{"LL", "LL128", "Simple"}, {"LL", "Simple"}]
    without = replace(machine.levels[0], protocols=tuple(p for p in machine.levels[0].protocols if p.name != "LL128"))
    other = replace(machine, levels=(without, machine.levels[1]))
    for kind in KINDS:
        assert np.array_equal(table(machine, kind).alpha[:, 3], table(other, kind).alpha[:, 3])


def test_a_level_without_protocols_takes_its_latency_in_any():
    machine = replace(NODE, levels=(Level("node", 4, 50e9, 3e-6), NODE.levels[1]))
    assert collective_seconds(machine, "all-gather", machine.axes, 0) == pytest.approx((6.6 + 3 * 3 + 4 * 7 * 0.6) * 1e-6)


@pytest.mark.parametrize("nbytes", [1e2, 1e5, 1e7, 1e9])
def test_changes_of_type_are_priced_by_the_bytes_that_move(nbytes):
    axes = NODES.axes
    over = {UNUSED: ("all-reduce", 1), partitioned(0): ("reduce-scatter", 1)}
    for after, (kind, parts) in over.items():
        found = changes(NODES, [(PARTIAL,) * len(axes)], [(after,) * len(axes)], nbytes)
        assert found.forward.item() == pytest.approx(collective_seconds(NODES, kind, axes, nbytes / parts))
    # A gather along one axis, of an eighth of the tensor: what is priced is what one device receives.
    one, rest = [a for a in axes if a.level == 0][:1], len(axes) - 1
    before, after = (UNUSED, *[partitioned(0)] * rest), (REPLICATED, *[partitioned(0)] * rest)
    found = changes(NODES, [before], [after], nbytes)
    price = collective(NODES, "all-reduce", one)
    size = nbytes / (NODES.devices / one[0].size)
    assert found.backward.item() == pytest.approx(price(size))
    assert found.merged.item() == pytest.approx(price(size) - price.merged(size, MERGED))


def test_a_merged_all_reduce_takes_its_part_of_a_collective_of_thirty_mebibytes():
    price = collective(NODE, "all-reduce", NODE.axes)
    whole = (14 + 2 * (7 * 1.9 + 7 / 8 * MERGED / (0.92 * 450e3))) * 1e-6  # by LL128
    assert price(MERGED) == pytest.approx(whole)
    assert price.merged(MERGED / 4, MERGED) == pytest.approx(whole / 4)
    assert price.merged(2 * MERGED, MERGED) == price(2 * MERGED)  # too large to be merged
    assert price.merged(0, MERGED) == 0
    cpus = replace(NODE, device=replace(NODE.device, name="cpu"), host=None)  # they merge all
    assert (most_merged(NODE), most_merged(cpus)) == (MERGED, inf)
    price = collective(cpus, "all-reduce", cpus.axes)
    assert price.merged(1e6, inf) == pytest.approx(price.beta * 1e6)
    sizes = np.array([0.0, 1e3, 1e6, 1e9])
    for machine, most in ((NODE, MERGED), (cpus, inf)):
        every = (1 << len(machine.axes)) - 1
        found = table(machine, "all-reduce").merged_seconds(every, sizes, most)
        assert found == pytest.approx([collective(machine, "all-reduce", machine.axes).merged(n, most) for n in sizes])


def test_files_keep_protocols():
    machine = Machine.grid(2, 8, "h200")
    assert machine.levels[0].protocols == LINKS["ib-ndr"].protocols
    data = json.loads(json.dumps(machine.to_json()))
    assert Machine.from_json(data) == machine
    del data["levels"][1]["protocols"][0]["step"]
    with pytest.raises(MachineError, match=r"levels\[1\].protocols\[0\]"):
        Machine.from_json(data)


def test_levels_without_a_protocol_in_common_are_refused():
    levels = (Level("node", 2, 1e9, 0.0, protocols=(Protocol("LL", 0.0, 0.0),)), NODE.levels[1])
    Machine("ours", NODE.device, levels)
    with pytest.raises(MachineError, match="no protocol is on all levels"):
        Machine("ours", NODE.device, (levels[0], replace(NODE.levels[1], protocols=(Protocol("Simple", 0.0, 0.0),))))


def test_a_level_of_one_unit_needs_no_protocol_in_common():
    mine = Level("device", 8, 200e9, 2e-6, protocols=(Protocol("mine", 5e-6, 1e-6),))
    machine = Machine.grid(1, 8, "h100", intra=mine)
    assert collective_seconds(machine, "all-gather", machine.axes, 0) == pytest.approx(12e-6)
    with pytest.raises(MachineError, match="no protocol is on all levels"):
        Machine.grid(2, 8, "h100", intra=mine)
    with pytest.raises(MachineError, match=r"protocols must be unity\.Protocol"):
        Level("node", 2, 1e9, 0.0, protocols=("LL",))  # pyright: ignore[reportArgumentType]


def test_clusters_of_papers_count_steps_of_rings_alone():
    assert not any(level.protocols for level in Machine.preset("summit").levels)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"start": -1.0}, "start"),
        ({"step": float("nan")}, "step"),
        ({"share": 1.5}, "share.*at most 1"),
        ({"tree_share": 0.0}, "tree_share"),
        ({"most": 0.0}, "most"),
        ({"tree_step": -1.0}, "tree_step"),
    ],
)
def test_impossible_figures_are_refused(fields, named):
    with pytest.raises(MachineError, match=f"protocol 'LL': {named}"):
        Protocol("LL", **{"start": 1e-6, "step": 1e-6, **fields})
    with pytest.raises(MachineError, match="two protocols"):
        Level("node", 2, 1e9, 0.0, protocols=(Protocol("LL", 0.0, 0.0),) * 2)
