"""Meshes of the user's on machines: which fit, the levels of their axes, and their collectives' prices."""

import json
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unity.machine.collectives import KINDS, collective
from unity.machine.hardware import Level, MachineError
from unity.machine.machine import Machine
from unity.machine.mesh import extents_of
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, partitioned
from unity.search.space.masks import way_of

SIZES = (1, 2, 3, 4, 6, 8, 12)


def cluster(*levels: int) -> Machine:
    """Return a machine of levels with different links."""
    device = Machine.grid(1, 1, "a100").device
    named = zip(("pod", "node", "device"), levels, strict=False)
    return Machine("drawn", device, tuple(Level(name, n, 1e9 * 7**k, 3e-6 / 2**k) for k, (name, n) in enumerate(named)))


def parts(group: list[int], levels: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Return for each level the units that a group of devices has in each unit of the level outside; None if that differs."""
    extent, outer = [], {0: group}
    for k, _ in enumerate(levels):
        unit = prod(levels[k + 1 :])
        inner = {}
        for device in group:
            inner.setdefault(device // unit, []).append(device)
        counts = {sum(1 for u in inner if u // levels[k] == o) for o in outer}
        sizes = set(map(len, inner.values()))
        if len(counts) > 1 or len(sizes) > 1:
            return None
        extent.append((k, counts.pop()))
        outer = inner
    return tuple((k, n) for k, n in extent if n > 1)


@st.composite
def meshes(draw):
    """Draw the levels of a machine and the sizes of a mesh of as many devices."""
    levels = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    left, sizes = prod(levels), []
    while left > 1 and len(sizes) < 3:
        sizes.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= sizes[-1]
    return levels, (*sizes, left)


@given(meshes())
def test_a_mesh_fits_if_the_groups_of_every_axis_are_alike_on_every_level(drawn):
    levels, sizes = drawn
    grid = np.arange(prod(sizes)).reshape(sizes)
    wanted = []
    for k in range(len(sizes)):
        kinds = {parts(group, levels) for group in np.moveaxis(grid, k, -1).reshape(-1, sizes[k]).tolist()}
        wanted.append(kinds.pop() if len(kinds) == 1 else None)
    assert extents_of(sizes, levels) == (None if None in wanted else wanted)


@st.composite
def merged(draw):
    """Draw a machine, and a mesh each of whose axes is some neighbouring prime axes in one, of one level or of several."""
    machine = cluster(*draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    cuts = [draw(st.booleans()) for _ in machine.axes[1:]]
    groups = [list(part) for part in np.split(np.arange(len(machine.axes)), [k + 1 for k, cut in enumerate(cuts) if cut])]
    return machine, [[machine.axes[k] for k in group] for group in groups]


@given(merged(), st.sampled_from(KINDS), st.booleans(), st.data())
def test_a_collective_costs_what_it_costs_over_the_prime_axes_of_the_same_devices(drawn, kind, turned, data):
    machine, groups = drawn
    own = machine.with_mesh({f"m{k}": prod(axis.size for axis in group) for k, group in enumerate(groups)})
    chosen = [k for k in range(len(own.axes)) if data.draw(st.booleans())]
    wide = [axis for k in chosen for axis in groups[k]]
    assert collective(own, kind, [own.axes[k] for k in chosen], turned) == collective(machine, kind, wide, turned)


def test_axes_may_be_levels_several_levels_or_parts_of_one():
    machine = Machine.grid(4, 8, "h100")
    assert machine.with_mesh({"data": 4, "tensor": 8}).axes == (Axis("data", 4, 0), Axis("tensor", 8, 1))
    assert machine.with_mesh({"data": 32}).axes == (Axis("data", 32, 0, "", ((1, 8),)),)
    own = machine.with_mesh({"data": 8, "one": 1, "tensor": 4})
    assert own.axes == (Axis("data", 8, 0, "", ((1, 2),)), Axis("tensor", 4, 1))
    assert own.axes[0].extent == ((0, 4), (1, 2))
    assert own.mesh_shape == {"data": 8, "one": 1, "tensor": 4}
    assert own.alone.axes == ()
    assert Machine.grid(1, 1, "h100").with_mesh({"data": 1}).axes == ()
    assert "data of 8 × one of 1 × tensor of 4" in str(own)


def test_axes_are_interchangeable_only_if_they_are_on_the_same_levels_alike():
    states = ((partitioned(0),), (UNUSED,))
    for sizes, levels, alike in (((4, 4), (8, 2), False), ((4, 4), (2, 8), False), ((2, 2), (4, 1), True), ((2, 2), (2, 2), False)):
        axes = cluster(*levels).with_mesh(dict(zip("ab", sizes, strict=True))).axes
        assert (way_of(states, axes) == way_of(states[::-1], axes)) == alike


def test_a_machine_with_a_mesh_is_written_as_json_and_read(tmp_path):
    own = Machine.grid(2, 4, "h100").with_mesh({"data": 4, "tensor": 2})
    own.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == own
    assert json.loads((tmp_path / "machine.json").read_text())["mesh"] == [["data", 4], ["tensor", 2]]
    assert "mesh" not in Machine.grid(2, 4, "h100").to_json()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"data": 3, "tensor": 4}, r"\(data: 3 × tensor: 4\) does not fit the levels of machine 'h100-2x6' \(2 node > 6 device\)"),
        ({"data": 2, "tensor": 4}, r"has 8 devices, and machine 'h100-2x6' has 12"),
        ({"my data": 12}, "mesh axis 'my data': expected a name of letters"),
        ({"data": 0, "tensor": 12}, "mesh axis 'data': size must be a whole number"),
    ],
)
def test_other_meshes_are_refused(shape, message):
    with pytest.raises(MachineError, match=message):
        Machine.grid(2, 6, "h100").with_mesh(shape)


def test_two_axes_of_one_name_are_refused():
    with pytest.raises(MachineError, match="two axes of one name"):
        Machine("m", Machine.grid(1, 4, "h100").device, Machine.grid(1, 4, "h100").levels, mesh=(("a", 2), ("a", 2)))


def test_every_mesh_of_twelve_devices_fits_or_not_on_machines_of_two_levels():
    fits = {(a, b): extents_of((a, b), (2, 6)) is not None for a, b in product(SIZES, SIZES) if a * b == 12}
    assert fits == {(1, 12): True, (12, 1): True, (2, 6): True, (6, 2): True, (3, 4): False, (4, 3): True}
