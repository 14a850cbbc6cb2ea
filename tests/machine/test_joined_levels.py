"""Machines whose outer levels are joined: no collective takes longer on them."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from unity.machine.collectives import KINDS, collective
from unity.machine.hardware import Curve, Level, Protocol
from unity.machine.joined_levels import joined, joined_axes
from unity.machine.machine import Machine

DEVICE = Machine.grid(1, 1, "h100").device
FIGURES = (
    st.floats(0, 1e-4),
    st.floats(0, 1e-4),
    st.floats(0.1, 1),
    st.none() | st.floats(1e8, 1e12),
    st.floats(0, 1e-4),
    st.none() | st.floats(0, 1e-4),
    st.floats(0.1, 1),
)
# Levels with protocols have one in common.
PROTOCOLS = st.dictionaries(st.sampled_from(("LL", "LL128")), st.tuples(*FIGURES)).flatmap(
    lambda more: st.tuples(*FIGURES).map(lambda figures: {"Simple": figures, **more})
)
LEVELS = st.tuples(st.sampled_from((1, 2, 3, 4, 6)), st.floats(1e8, 1e12), st.floats(0, 1e-4), st.just({}) | PROTOCOLS)


def level_of(name, size, bandwidth, latency, protocols=None):
    return Level(name, size, bandwidth, latency, protocols=tuple(Protocol(p, *figures) for p, figures in (protocols or {}).items()))


def machine_of(levels):
    named = zip(("pod", "node", "device"), levels, strict=False)
    return Machine("machine", DEVICE, tuple(level_of(name, *level) for name, level in named))


@given(st.lists(LEVELS, min_size=2, max_size=3), st.data(), st.sampled_from(KINDS), st.booleans())
def test_no_collective_takes_longer_on_joined_levels(levels, data, kind, turned):
    machine = machine_of(levels)
    count = data.draw(st.integers(1, len(levels) - 1))
    bound = joined(machine, count)
    assert bound is not None
    assert (bound.devices, len(bound.levels)) == (machine.devices, count)
    axes = [axis for axis in machine.axes if data.draw(st.booleans())]
    others = joined_axes(axes, machine, bound)
    assert prod(axis.size for axis in others) == prod(axis.size for axis in axes)
    price, least = collective(machine, kind, axes, turned), collective(bound, kind, others, turned)
    for nbytes in (0, 1e3, 1e5, 1e7, 1e9, 1e12):
        assert least(nbytes) <= price(nbytes) * (1 + 1e-9)


def test_axes_of_inner_levels_stay_on_them():
    machine = machine_of([(2, 1e9, 0.0), (4, 1e10, 0.0), (6, 1e11, 0.0)])
    bound = joined(machine, 2)
    assert bound is not None
    axes = {axis.name: axis for axis in machine.axes}
    inner = joined_axes([axes["p0"], axes["d0"]], machine, bound)
    assert [(axis.level, axis.size) for axis in inner] == [(0, 2), (1, axes["d0"].size)]


def test_measured_machines_are_not_joined():
    levels = Level("node", 2, 1e9, 0.0, curves=(Curve("all-reduce", 2, 0.0, 1e-9),)), Level("device", 2, 1e10, 0.0)
    assert joined(Machine("measured", DEVICE, levels), 1) is None
    levels = Level("node", 2, 1e9, 0.0), Level("device", 2, 1e10, 0.0, relative=(("all-reduce", 0.5, 0.5),))
    assert joined(Machine("measured", DEVICE, levels), 1) is None
