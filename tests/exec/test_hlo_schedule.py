"""`benchmarks.hlo_schedule`: the times of a schedule, on texts whose times are known."""

from textwrap import dedent

import pytest

from benchmarks.hlo_schedule import scheduled
from unity.machine.collectives import collective_seconds
from unity.machine.machine import Machine

MACHINE = Machine.grid(1, 8, "h200")
REDUCE = collective_seconds(MACHINE, "all-reduce", MACHINE.axes, 4 * 2**20)
GATHER = collective_seconds(MACHINE, "all-gather", MACHINE.axes, 4 * 2**20)
PRODUCT = 2 * 4096**3 / (MACHINE.device.flops_of("bfloat16") * MACHINE.device.efficiency) + MACHINE.device.launch
COPY = 2 * 4 * 2**20 / MACHINE.device.bandwidth + MACHINE.device.launch

HEADER = """
    HloModule step, is_scheduled=true, num_partitions=8

    add {
      a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT s = f32[] add(a, b)
    }
"""
START = "all-reduce-start(x), channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=add"


def times(entry, others=""):
    return scheduled(dedent(HEADER) + others + "\nENTRY main {\n" + dedent(entry).strip() + "\n}\n", MACHINE)


def test_a_collective_is_hidden_behind_the_kernels_before_its_done():
    found = times(f"""
        x = f32[1048576]{{0}} parameter(0)
        a = bf16[4096,4096]{{1,0}} parameter(1)
        start = f32[1048576]{{0}} {START}
        d = bf16[4096,4096]{{1,0}} dot(a, a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        done = f32[1048576]{{0}} all-reduce-done(start)
        c = f32[1048576]{{0}} copy(done)
        ROOT r = (f32[1048576]{{0}}, bf16[4096,4096]{{1,0}}) tuple(c, d)
    """)
    assert REDUCE < PRODUCT
    assert [found.computing, found.communicating] == pytest.approx([PRODUCT + COPY, REDUCE])
    assert [found.now, found.hidden] == pytest.approx([PRODUCT + COPY, 1])


def test_the_device_waits_for_what_is_not_hidden():
    found = times(f"""
        x = f32[1048576]{{0}} parameter(0)
        start = f32[1048576]{{0}} {START}
        c = f32[1048576]{{0}} copy(x)
        done = f32[1048576]{{0}} all-reduce-done(start)
        ROOT g = f32[1048576]{{0}} all-gather(p), dimensions={{0}}, replica_groups=[1,8]<=[8]
        p = f32[131072]{{0}} parameter(1)
    """)
    assert found.now == pytest.approx(REDUCE + GATHER)
    assert found.hidden == pytest.approx(COPY / (REDUCE + GATHER))


def test_a_loop_takes_as_many_steps_as_it_runs():
    others = """
step {
  p = (s32[], f32[1048576]{0}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  v = f32[1048576]{0} get-tuple-element(p), index=1
  c = f32[1048576]{0} copy(v)
  ROOT t = (s32[], f32[1048576]{0}) tuple(i, c)
}

cond {
  p = (s32[], f32[1048576]{0}) parameter(0)
  ROOT c = pred[] constant(true)
}
"""
    found = times(
        """
        q = (s32[], f32[1048576]{0}) parameter(0)
        ROOT w = (s32[], f32[1048576]{0}) while(q), condition=cond, body=step, backend_config={"known_trip_count":{"n":"5"}}
        """,
        others,
    )
    assert [found.now, found.hidden] == pytest.approx([5 * COPY, 1])


def test_a_fusion_reads_of_a_stack_the_slice_and_writes_in_place_the_part():
    others = """
fused {
  a = f32[64,1048576]{1,0} parameter(0)
  i = s32[] parameter(1)
  z = s32[] constant(0)
  s = f32[1,1048576]{1,0} dynamic-slice(a, i, z), dynamic_slice_sizes={1,1048576}
  n = f32[1,1048576]{1,0} negate(s)
  ROOT u = f32[64,1048576]{1,0} dynamic-update-slice(a, n, i, z)
}
"""
    found = times(
        """
        x = f32[64,1048576]{1,0} parameter(0)
        i = s32[] parameter(1)
        ROOT f = f32[64,1048576]{1,0} fusion(x, i), kind=kLoop, calls=fused
        """,
        others,
    )
    assert found.now == pytest.approx(COPY, rel=1e-4)
