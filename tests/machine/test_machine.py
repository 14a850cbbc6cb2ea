"""The machine model: axes, presets, JSON, what collectives cost, and the description of this machine."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from math import isqrt, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unity.machine.collectives import KINDS, collective, collective_seconds, table
from unity.machine.hardware import Device, HostLink, Level, MachineError
from unity.machine.machine import SCHEMA, Machine
from unity.machine.presets import CLUSTERS, DEVICES, LINKS, USUAL_LINKS
from unity.machine.presets import KINDS as DEVICE_KINDS
from unity.pcg.types.axis import Axis

positive = st.floats(1e-12, 1e18)


@st.composite
def machines(draw):
    names = draw(st.lists(st.sampled_from(("pod", "node", "socket", "device")), min_size=1, max_size=3, unique=True))
    bandwidths = sorted(draw(st.floats(1e6, 1e12)) for _ in names)  # the outermost level is the slowest
    levels = tuple(
        Level(name, draw(st.integers(1, 12)), bandwidth, draw(st.floats(0, 1e-3)))
        for name, bandwidth in zip(names, bandwidths, strict=True)
    )
    rates = draw(st.dictionaries(st.sampled_from(("bfloat16", "float64", "int8")), positive))
    device = Device(
        "d",
        {"float32": draw(positive), **rates},
        draw(st.integers(1, 2**50)),
        draw(positive),
        draw(st.floats(0.01, 1)),
        0,
    )
    return Machine("drawn", device, levels, host=draw(st.none() | st.builds(HostLink, positive, st.floats(0, 1e-3))))


@st.composite
def groups(draw):
    machine = draw(machines())
    return machine, draw(st.sets(st.sampled_from(machine.axes)) if machine.axes else st.just(set()))


# Axes


def is_prime(size):
    return size > 1 and all(size % factor for factor in range(2, isqrt(size) + 1))


@given(machines())
def test_axes_are_prime_and_multiply_to_the_devices(machine):
    assert all(is_prime(axis.size) for axis in machine.axes)
    assert prod(axis.size for axis in machine.axes) == machine.devices
    assert len({axis.name for axis in machine.axes}) == len(machine.axes)
    assert [(a.level, -a.size) for a in machine.axes] == sorted((a.level, -a.size) for a in machine.axes)
    for index, level in enumerate(machine.levels):
        assert prod(axis.size for axis in machine.axes if axis.level == index) == level.size


def test_axes_of_32_nodes_of_6():
    machine = Machine.grid(nodes=32, devices_per_node=6)
    between = tuple(Axis(f"n{i}", 2, 0) for i in range(5))
    assert machine.axes == (*between, Axis("d0", 3, 1), Axis("d1", 2, 1))
    assert machine.devices == 192


def test_levels_of_one_initial_share_the_count():
    machine = replace(
        Machine.grid(), levels=(Level("node", 2, 1.0, 0.0), Level("nvlink", 4, 1.0, 0.0), Level("device", 1, 1.0, 0.0))
    )
    assert [axis.name for axis in machine.axes] == ["n0", "n1", "n2"]


# Devices


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("v100", "float16", 125e12),
        ("v100", "bfloat16", 15.7e12),
        ("v100", "float8_e5m2", 15.7e12),
        ("a100", "float8_e4m3fn", 312e12),
        ("a100", "complex128", 19.5e12),
        ("a100", np.float32, 156e12),
        ("a100", np.dtype("int32"), 156e12),
        ("h100", "bfloat16", 989.4e12),
    ],
)
def test_flops_of(device, dtype, expected):
    assert DEVICES[device].flops_of(dtype) == expected


def test_flops_of_takes_jax_dtypes_and_random_keys():
    import jax
    import jax.numpy as jnp

    device = DEVICES["a100"]
    assert device.flops_of(jnp.bfloat16) == device.flops_of(jnp.dtype("bfloat16")) == 312e12
    assert device.flops_of(jax.random.key(0).dtype) == 156e12


def test_float64_is_half_of_float32_where_no_figure_is_given():
    device = replace(DEVICES["v100"], flops={"float32": 10.0})
    assert device.flops_of("float64") == 5.0


def test_a_device_does_not_follow_the_callers_dict():
    rates = {"float32": 10.0}
    device = replace(DEVICES["v100"], flops=rates)
    rates["float32"] = 20.0
    assert device.flops_of("float32") == 10.0


# Presets and grids


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_every_cluster(name):
    machine = Machine.preset(name)
    inside = machine.devices // machine.levels[0].size
    assert Machine.preset(f"{name}-{machine.levels[0].size}x{inside}") == machine
    assert Machine.preset(f"{name}-64x{inside}").devices == 64 * inside
    assert "\n" not in str(machine)
    assert str(machine.devices) in str(machine)


@pytest.mark.parametrize(
    ("name", "nodes", "devices", "gib"),
    [
        ("summit-32x6", 32, 192, 16),
        ("flexflow-p100", 4, 16, 16),
        ("flexflow-k80", 16, 64, 12),
        ("tensoropt-v100", 2, 16, 16),
        ("dgx-a100", 1, 8, 80),
        ("dgx-h100-4x8", 4, 32, 80),
        ("dgx-h200", 1, 8, 141),
    ],
)
def test_the_papers_clusters(name, nodes, devices, gib):
    machine = Machine.preset(name)
    assert (machine.levels[0].size, machine.devices, machine.device.memory) == (nodes, devices, gib * 2**30)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_has_usual_links(name):
    machine = Machine.grid(nodes=2, devices_per_node=4, device=name)
    assert machine.levels[0].bandwidth < machine.levels[1].bandwidth
    assert set(DEVICES) == set(USUAL_LINKS) == set(DEVICE_KINDS.values())


def test_cards_are_shared_by_a_nodes_devices():
    def share(**arguments):
        return Machine.grid(nodes=2, **arguments).levels[0].bandwidth

    assert share(devices_per_node=8, device="v100") == 12.5e9 / 8
    assert share(devices_per_node=8, device="v100", cards_per_node=4) == 12.5e9 / 2
    assert share(devices_per_node=8, device="h100") == 50e9
    assert share(devices_per_node=8, device="h100", inter="ib-edr", cards_per_node=1) == 12.5e9 / 8
    assert share(devices_per_node=8, device="v100", inter=(3e9, 1e-5)) == 3e9


def test_grid_takes_links_and_devices_of_ones_own():
    device = replace(DEVICES["v100"], name="mine")
    machine = Machine.grid(3, 5, device, intra="pcie4", inter=Level("rack", 99, 2e9, 1e-5), memory=123)
    assert machine.levels == (
        Level("node", 3, 2e9, 1e-5),
        Level("device", 5, 31.5e9, LINKS["pcie4"].latency, protocols=LINKS["pcie4"].protocols),
    )
    assert machine.device == replace(device, memory=123)
    assert machine == Machine.grid(3, 5, device, intra="pcie4", inter=(2e9, 1e-5)).with_memory(123)


def test_a_link_to_the_host_is_a_presets_usual_one_or_ones_own():
    pcie5 = HostLink(63e9, LINKS["pcie5"].latency)
    assert Machine.grid(2, 8, "h100").host == Machine.preset("dgx-h200").host == pcie5
    assert Machine.grid(1, 8, "a100").host == HostLink(31.5e9, LINKS["pcie4"].latency)
    assert Machine.preset("summit").host == HostLink(50e9, LINKS["nvlink2"].latency)
    assert Machine.grid(1, 4, "h200", host="nvlink-c2c").host == HostLink(450e9, LINKS["nvlink-c2c"].latency)
    assert Machine.grid(1, 4, "h200", host=(20e9, 1e-6)).host == HostLink(20e9, 1e-6)
    mine = replace(DEVICES["v100"], name="mine")
    assert Machine.grid(1, 4, mine, intra="pcie4", inter="ib-hdr").host is None
    assert Machine.grid(1, 4, mine, intra="pcie4", inter="ib-hdr", host=pcie5).host == pcie5
    assert pcie5.seconds(63e9) == 1 + LINKS["pcie5"].latency


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Machine.grid(device="v10"), "no device is named 'v10'.*v100"),
        (lambda: Machine.grid(intra="nvlink9"), "no link is named 'nvlink9'.*nvlink2"),
        (lambda: Machine.grid(nodes=0), "nodes"),
        (lambda: Machine.grid(devices_per_node=-8), "devices_per_node"),
        (lambda: Machine.grid(cards_per_node=0), "cards_per_node"),
        (lambda: Machine.grid(memory=0), r"device\.memory"),
        (lambda: Machine.grid(inter=(-1.0, 0.0)), "level 'node': bandwidth"),
        (lambda: Machine.grid(device=replace(DEVICES["v100"], name="mine")), "intra=.*inter="),
        (lambda: Machine.preset("dgx-h10"), "no machine is named 'dgx-h10'.*dgx-h100"),
        (lambda: Machine.preset("summit-32x8"), "has 6 devices|have 6 devices"),
        (lambda: Machine("empty", DEVICES["v100"], ()), "levels is empty"),
        (lambda: Machine("twice", DEVICES["v100"], (Level("node", 2, 1.0, 0.0),) * 2), "'node'"),
        (lambda: Level("Node", 2, 1.0, 0.0), r"level\.name"),
        (lambda: Level("node", 2, float("nan"), 0.0), "level 'node': bandwidth"),
        (lambda: Level("node", 2, 1.0, -1.0), "level 'node': latency"),
        (lambda: replace(DEVICES["v100"], flops={"float16": 1.0}), r"device\.flops.*float32"),
        (lambda: replace(DEVICES["v100"], flops={"float32": -1.0}), r"device\.flops\['float32'\]"),
        (lambda: replace(DEVICES["v100"], efficiency=1.5), r"device\.efficiency"),
        (lambda: Machine.grid(host="pcie9"), "no link is named 'pcie9'.*pcie5"),
        (lambda: Machine.grid(host=(0.0, 1e-6)), r"host\.bandwidth"),
        (lambda: Machine.grid(host=(1e9, -1e-6)), r"host\.latency"),
        (
            lambda: Machine.grid(1, 2, replace(DEVICES["v100"], name="cpu"), "pcie3", "ib-fdr", host="pcie3"),
            "a cpu is its own host.*omit host",
        ),
    ],
)
def test_errors_name_what_is_wrong(make, named):
    with pytest.raises(MachineError, match=named):
        make()


# JSON


@given(machine=machines())
def test_json_round_trip(machine, tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    machine.save(path)
    loaded = Machine.load(path)
    assert loaded == machine
    assert hash(loaded) == hash(machine)
    assert loaded.axes == machine.axes
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]


def test_a_file_without_a_link_to_the_host_is_a_machine_without_one():
    machine = Machine.grid(2, 4, "a100", host=(31.5e9, 2e-6))
    data = machine.to_json()
    assert data["host"] == {"bandwidth": 31.5e9, "latency": 2e-6}
    del data["host"]
    assert Machine.from_json(data) == replace(machine, host=None)


def test_pickle_round_trip():
    machine = Machine.preset("summit-32x6")
    assert pickle.loads(pickle.dumps(machine)) == machine


def without(data, *keys):
    *outer, last = keys
    for key in outer:
        data = data[key]
    del data[last]


def put(data, value, *keys):
    *outer, last = keys
    for key in outer:
        data = data[key]
    data[last] = value


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda d: put(d, SCHEMA + 1, "schema"), f"schema is version {SCHEMA + 1}"),
        (lambda d: without(d, "schema"), "schema is version None"),
        (lambda d: without(d, "device"), r"\$\.device: it is missing"),
        (lambda d: without(d, "device", "memory"), r"\$\.device\.memory: it is missing"),
        (lambda d: without(d, "levels", 1, "latency"), r"\$\.levels\[1\]\.latency: it is missing"),
        (lambda d: put(d, -3, "device", "flops", "float16"), r"device\.flops\['float16'\].*-3"),
        (lambda d: put(d, "16 GB", "device", "memory"), r"\$\.device\.memory: expected int, got str"),
        (lambda d: put(d, True, "device", "bandwidth"), r"device\.bandwidth"),
        (lambda d: put(d, [], "device", "flops"), r"device\.flops"),
        (lambda d: put(d, -1e9, "levels", 0, "bandwidth"), "level 'node': bandwidth"),
        (lambda d: put(d, 2.5, "levels", 0, "size"), r"\$\.levels\[0\]\.size: expected int, got float"),
        (lambda d: put(d, 3, "levels", 0, "name"), r"\$\.levels\[0\]\.name: expected str, got int"),
        (lambda d: put(d, "none", "levels"), r"\$\.levels: expected array, got str"),
        (lambda d: put(d, 3, "name"), r"\$\.name: expected str, got int"),
        (lambda d: put(d, "bfloat16", "reducein"), r"\$\.reducein: no such field is known"),
        (lambda d: put(d, [], "levels", 1, "curve"), r"\$\.levels\[1\]\.curve: no such field is known"),
        (lambda d: without(d, "host", "bandwidth"), r"\$\.host\.bandwidth: it is missing"),
        (lambda d: put(d, "fast", "host", "bandwidth"), r"\$\.host\.bandwidth: expected float, got str"),
        (lambda d: put(d, 1, "host", "lanes"), r"\$\.host\.lanes: no such field is known"),
    ],
)
def test_a_spoiled_file_is_refused_by_name(spoil, named, tmp_path):
    path = tmp_path / "machine.json"
    Machine.grid(nodes=2).save(path)
    data = json.loads(path.read_text())
    spoil(data)
    path.write_text(json.dumps(data))
    with pytest.raises(MachineError, match=named) as caught:
        Machine.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe"])
def test_a_file_that_is_no_machine_is_refused(text, tmp_path):
    path = tmp_path / "machine.json"
    path.write_bytes(text)
    with pytest.raises(MachineError, match=r"machine\.json"):
        Machine.load(path)


# Collectives


@given(st.integers(2, 64), st.floats(1e6, 1e12), st.floats(0, 1e-3), st.floats(0, 1e12))
def test_ring_formulas_on_one_level(k, bandwidth, latency, nbytes):
    machine = replace(Machine.grid(), levels=(Level("device", k, bandwidth, latency),))
    ring = (k - 1) * latency + (k - 1) / k * nbytes / bandwidth
    expected = {
        "all-reduce": 2 * ring,
        "all-gather": ring,
        "reduce-scatter": ring,
        "all-to-all": ring,
        "collective-permute": latency + nbytes / bandwidth,
    }
    for kind, seconds in expected.items():
        launched = machine.device.launch + seconds
        assert collective_seconds(machine, kind, machine.axes, nbytes) == pytest.approx(launched, rel=1e-12)


@given(groups(), st.sampled_from(KINDS), st.floats(0, 1e15), st.floats(0, 1e15))
def test_more_bytes_never_cost_less(drawn, kind, one, other):
    machine, axes = drawn
    fewer, more = sorted((one, other))
    assert 0 <= collective_seconds(machine, kind, axes, fewer) <= collective_seconds(machine, kind, axes, more)


@given(groups(), st.sampled_from(KINDS), st.data())
def test_a_further_axis_that_is_not_inside_the_group_never_costs_less(drawn, kind, data):
    # One inside may: its members bring their shares of the node's cards.
    machine, axes = drawn
    outermost = min((axis.level for axis in axes), default=len(machine.levels))
    if further := [axis for axis in machine.axes if axis not in axes and axis.level <= outermost]:
        bigger = collective(machine, kind, {*axes, data.draw(st.sampled_from(further))})
        small = collective(machine, kind, axes)
        assert bigger.alpha >= small.alpha
        assert bigger.beta >= small.beta * (1 - 1e-12)


@given(groups())
def test_several_levels_are_never_worse_than_flat_or_hierarchical(drawn):
    machine, axes = drawn
    sizes = [prod(axis.size for axis in axes if axis.level == index) for index in range(len(machine.levels))]
    inside = [prod(sizes[index + 1 :]) for index in range(len(sizes))]
    spanned = [(k, m, level.bandwidth) for k, m, level in zip(sizes, inside, machine.levels, strict=True) if k > 1]
    if not spanned:
        return
    k = prod(sizes)
    flat = (k - 1) / k / min(m * bandwidth for _, m, bandwidth in spanned)
    step_by_step = sum((k - 1) / k / m / bandwidth for k, m, bandwidth in spanned)
    gather = collective(machine, "all-gather", axes)
    assert gather.beta == pytest.approx(min(flat, step_by_step), rel=1e-12)
    # Nothing moves bytes faster than the members' links allow: no level passes on less than what its units lack.
    assert gather.beta >= max((k - 1) / k / m / bandwidth for k, m, bandwidth in spanned) * (1 - 1e-12)


@given(groups())
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(drawn):
    machine, axes = drawn
    parts = [collective(machine, kind, axes) for kind in ("reduce-scatter", "all-gather")]
    whole = collective(machine, "all-reduce", axes)
    assert whole.alpha == pytest.approx(sum(part.alpha for part in parts))
    assert whole.beta == pytest.approx(sum(part.beta for part in parts))


def test_hierarchical_where_the_inside_is_fast():
    # 2 nodes of 4; a device has 1 GB/s of its node's card, and 1000 GB/s inside. Half of its quarter of the bytes comes
    # through the card, then three quarters from inside.
    machine = replace(Machine.grid(), levels=(Level("node", 2, 1e9, 1.0), Level("device", 4, 1e12, 0.5)))
    gather = collective(machine, "all-gather", machine.axes)
    assert gather.beta == pytest.approx(0.75 / 1e12 + 0.5 * 0.25 / 1e9)
    assert gather.alpha == pytest.approx(machine.device.launch + 1.0 + 3 * 0.5)


def test_flat_where_a_nodes_cards_together_match_the_inside():
    # A ring leaves the node through four shares of 1 GB/s: no slower than the 4 GB/s inside.
    machine = replace(Machine.grid(), levels=(Level("node", 2, 1e9, 0.0), Level("device", 4, 4e9, 0.0)))
    assert collective(machine, "all-gather", machine.axes).beta == pytest.approx(7 / 8 / 4e9)


def test_more_members_in_a_node_own_more_of_its_card():
    machine = Machine.grid(nodes=4, devices_per_node=8, device="v100")
    between = [axis for axis in machine.axes if axis.level == 0]
    alone, together = (collective(machine, "all-reduce", axes).beta for axes in (between, machine.axes))
    assert together < alone / 4


def test_all_to_all_sends_a_byte_over_one_level():
    # Half of the buffer is for the other node, three quarters of the other half for the others here.
    machine = replace(Machine.grid(), levels=(Level("node", 2, 1e9, 0.0), Level("device", 4, 1e10, 0.0)))
    assert collective(machine, "all-to-all", machine.axes).beta == pytest.approx(0.5 / 1e9 + 0.5 * 0.75 / 1e10)


def test_collectives_refuse_what_they_do_not_know():
    machine = Machine.grid()
    with pytest.raises(MachineError, match=r"x0.*d0"):
        collective(machine, "all-reduce", [Axis("x0", 2, 0)])
    with pytest.raises(MachineError, match=r"'broadcast'.*all-reduce"):
        collective(machine, "broadcast", machine.axes)


@pytest.mark.parametrize("kind", KINDS)
def test_table_holds_every_set_of_axes(kind):
    machine = Machine.grid(4, 6, "v100")
    prices = table(machine, kind)
    assert prices.alpha.shape == prices.beta.shape
    assert prices.alpha.shape[1] == 2 ** len(machine.axes)
    for mask in range(2 ** len(machine.axes)):
        cost = collective(machine, kind, {axis for i, axis in enumerate(machine.axes) if mask & 1 << i})
        for nbytes in (0, 1e4, 1e6, 1e9):
            assert prices.seconds(mask, nbytes) == cost(nbytes)
        sizes = np.array([0, 1e4, 1e6, 1e9])
        assert prices.seconds(mask, sizes).tolist() == [cost(nbytes) for nbytes in sizes]
    assert not prices.seconds(0, 1e9)
    assert table(Machine.grid(4, 6, "v100"), kind) is prices
    with pytest.raises(ValueError, match="read-only"):
        prices.alpha[0, 0] = 1


def test_table_of_a_machine_without_axes():
    prices = table(Machine.grid(1, 1), "all-reduce")
    assert (prices.alpha.tolist(), prices.beta.tolist()) == ([[0.0]], [[0.0]])


# This machine


LOCAL = """
import json, sys, warnings
from functools import partial
from pathlib import Path
from unity.exec.measure import collective_curves as curves, machine as measure
from unity.machine.machine import Machine

# A cache does not care how well was measured; tests/exec/test_profile_measure.py has every curve.
curves.COLLECTIVES = {(kind, turned): ways[:1] for (kind, turned), ways in curves.COLLECTIVES.items() if not turned}
measure.curves = partial(measure.curves, sizes=(1 << 13,), rounds=1)

def described():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        machine = Machine.local()
    return machine.to_json(), [str(warning.message) for warning in caught]

found = [described()]
for path in sys.argv[1:]:
    Path(path).write_text("{")
    found.append(described())
print(json.dumps(found))
"""


def local(directory, *spoiled, devices=4):
    """Describes a host of virtual CPU devices in a process of its own, again after it has spoiled each of some files.

    Returns each machine with its warnings, and what the cache has then.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "XDG_CACHE_HOME": str(directory / "cache"),
    }
    command = [sys.executable, "-c", LOCAL, *map(str, spoiled)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [(Machine.from_json(machine), warned) for machine, warned in json.loads(done.stdout.splitlines()[-1])]
    return found, sorted((directory / "cache").rglob("*.json*"))


@pytest.mark.skipif(sys.platform != "linux", reason="the cache is moved by XDG_CACHE_HOME")
def test_local_measures_once_and_sets_a_corrupt_cache_aside(tmp_path):
    [(machine, warned)], files = local(tmp_path)
    assert machine.devices == 4
    assert [axis.name for axis in machine.axes] == ["d0", "d1"]
    assert machine.device.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    assert warned == []
    [cached] = files
    assert Machine.load(cached) == machine

    # What is cached is read, not measured again: two measurements never agree to the last bit, and this one is marked.
    marked = replace(machine, device=replace(machine.device, bandwidth=12345.0))
    marked.save(cached)
    [recalled, (again, warned)], files = local(tmp_path, cached)
    assert recalled == (marked, [])
    assert again.device.bandwidth != 12345.0
    assert len(warned) == 1
    assert "set aside" in warned[0]
    assert files == [cached, cached.with_name(cached.name + ".corrupt")]
    assert Machine.load(cached) == again


def test_a_cache_that_may_not_be_written_or_looked_into_is_gone_without(tmp_path):
    from unity.exec.measure import local_machine as local

    cached = tmp_path / "here.json"
    cached.write_text("{")
    (tmp_path / "here.json.corrupt" / "in the way").mkdir(parents=True)  # the file cannot be moved there, whoever runs this
    with pytest.warns(UserWarning, match="cannot be set aside"):
        assert local._load(cached) is None
    with pytest.warns(UserWarning, match="Is a directory"):
        assert local._load(tmp_path) is None
    assert local._load(tmp_path / ("long" * 100) / "here.json") is None  # no such name can be looked up


class FakeDevice:
    def __init__(self, kind, process=0, limit=None):
        self.device_kind, self.process_index = kind, process
        self.limit = limit

    def memory_stats(self):
        return self.limit and {"bytes_limit": self.limit}


def test_local_knows_gpus():
    machine = Machine.local([FakeDevice("NVIDIA H100 80GB HBM3", limit=10**9 + i) for i in range(4)])
    expected = Machine.grid(1, 4, "h100", memory=10**9)
    assert (machine.levels, machine.device) == (expected.levels, expected.device)


def test_local_joins_nodes_and_plans_alike_on_all():
    machine = Machine.local([FakeDevice("NVIDIA H200", process=i // 8, limit=10**9 + i) for i in range(16)])
    expected = Machine.grid(2, 8, "h200")
    assert (machine.levels, machine.device) == (expected.levels, expected.device)


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        ([], "got none"),
        ([FakeDevice("NVIDIA H200"), FakeDevice("Tesla K80")], "NVIDIA H200, Tesla K80"),
        ([FakeDevice("NVIDIA H200", process=i // 2) for i in range(3)], r"different numbers of devices \(1, 2\)"),
        ([FakeDevice("abacus", process=i) for i in range(2)], r"abacus.*Machine\.load"),
    ],
)
def test_local_refuses_by_name(devices, named):
    with pytest.raises(MachineError, match=named):
        Machine.local(devices)


def test_a_level_that_was_measured_says_what_each_collective_takes() -> None:
    plain = Machine.grid(1, 8, "a100")
    level = replace(plain.levels[-1], relative=(("all-gather", 2.0, 3.0),))
    measured = replace(plain, levels=(plain.levels[0], level))
    assert Machine.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    for kind in ("all-gather", "all-reduce"):
        before, after = (collective(m, kind, m.axes) for m in (plain, measured))
        times = (2.0, 3.0) if kind == "all-gather" else (1.0, 1.0)
        launch = plain.device.launch
        assert after.alpha - launch == pytest.approx(times[0] * (before.alpha - launch))
        assert after.beta == pytest.approx(times[1] * before.beta)
    with pytest.raises(MachineError, match="relative"):
        replace(level, relative=(("all-gather", -1.0, 1.0),))
