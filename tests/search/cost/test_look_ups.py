"""The memory traffic of operators that look up rows: forward the rows, backward a table of zeros and the rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unity
from benchmarks.gpu import CASES
from unity.machine.machine import Machine
from unity.machine.profiles.profile import Measurement, Profile, Where
from unity.pcg.ir.program import close
from unity.search.cost.prediction import predict
from unity.search.cost.profile_lookup import Piece, kind_of, lookup
from unity.search.cost.roofline import local_traffic, roofline

ROWS, WIDTH, IDS = 4096, 64, 256
TABLE, READ, NUMBERS = ROWS * WIDTH * 4, IDS * WIDTH * 4, IDS * 4  # bytes
H200 = Machine.grid(1, 1, "h200")


def f(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def body_of(fn, *args):
    return close(jax.make_jaxpr(fn)(*args))


def look_up(table, ids):
    return jax.lax.gather(
        table,
        ids[:, None],
        jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)),
        slice_sizes=(1, table.shape[1]),
        mode="clip",
    )


BODY = body_of(look_up, f(ROWS, WIDTH), f(IDS, dtype="int32"))


@pytest.mark.parametrize(
    ("pieces", "share", "read", "zeroed"),
    [
        ((TABLE, NUMBERS, READ), 1, READ, TABLE),
        ((TABLE / 4, NUMBERS, READ), 1 / 4, READ / 4, TABLE / 4),  # rows of the table: each device reads those that it has
        ((TABLE / 4, NUMBERS, READ / 4), 1 / 4, READ / 4, TABLE / 4),  # columns
        ((TABLE, NUMBERS / 4, READ / 4), 1 / 4, READ / 4, TABLE),  # indices: every device has the gradient of all rows
        ((TABLE / 8, NUMBERS / 4, READ / 4), 1 / 8, READ / 8, TABLE / 8),  # indices, and rows in two
    ],
)
def test_a_look_up_reads_rows_and_its_gradient_begins_as_zeros(pieces, share, read, zeroed):
    assert local_traffic(BODY, pieces, share, (True, False)) == pytest.approx((read + sum(pieces[1:]), zeroed))
    assert local_traffic(BODY, pieces, share, (False, False)) == pytest.approx((read + sum(pieces[1:]), 0))


def test_a_table_is_read_at_most_once():
    few = body_of(look_up, f(2, WIDTH), f(IDS, dtype="int32"))
    table = 2 * WIDTH * 4
    assert local_traffic(few, (table, NUMBERS, READ), 1, (True, False)) == (table + NUMBERS + READ, table)
    by_indices = table, NUMBERS / 4, READ / 4  # a quarter of the indices selects both rows, too
    assert local_traffic(few, by_indices, 1 / 4, (True, False)) == (sum(by_indices), table)
    by_rows = table / 2, NUMBERS, READ
    assert local_traffic(few, by_rows, 1 / 2, (True, False)) == (sum(by_rows), table / 2)
    whole = body_of(lambda t, i: (t * 2.0, look_up(t, i)), f(ROWS, WIDTH), f(IDS, dtype="int32"))
    assert local_traffic(whole, (TABLE, NUMBERS, TABLE, READ), 1, (False, False))[0] == TABLE + NUMBERS + TABLE + READ


def test_a_slice_at_an_index_reads_its_part_and_its_gradient_begins_as_zeros():
    """As in the compiled program: XLA counts the zeros, and the cotangent of the slice read and written."""

    def cut(x, i):
        return jax.lax.dynamic_slice(x, (0, i), (ROWS, 2))

    x, i, g = f(ROWS, WIDTH), f(dtype="int32"), f(ROWS, 2)
    touched, zeroed = local_traffic(body_of(cut, x, i), (TABLE, 4, ROWS * 8), 1, (True, False))
    assert (touched, zeroed) == (2 * ROWS * 8 + 4, TABLE)
    compiled = jax.jit(lambda x, i, g: jax.vjp(lambda x: cut(x, i), x)[1](g)[0]).lower(x, i, g).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    assert zeroed + touched == pytest.approx(analysis["bytes accessed"], rel=1e-3)


def test_rows_are_added_to_the_gradient_of_a_table_that_is_traversed_too():
    """As in the compiled program: XLA writes zeros for a look-up alone, and none for the logits of a cross-entropy."""
    logits, labels = f(ROWS, WIDTH), f(ROWS, dtype="int32")

    def chosen(x, y):
        return jnp.sum(jnp.take_along_axis(x, y[:, None], -1))

    def cross_entropy(x, y):
        return jnp.sum(jax.nn.logsumexp(x, -1)) - chosen(x, y)

    for loss, zeros in ((chosen, TABLE), (cross_entropy, 0)):
        assert local_traffic(body_of(loss, logits, labels), (TABLE, ROWS * 4, 4), 1, (True, False))[1] == zeros
        compiled = jax.jit(jax.grad(loss)).lower(logits, labels).compile().as_text()
        assert compiled is not None
        constants = re.findall(rf"f32\[{ROWS},{WIDTH}\]\S* broadcast\(\S+\), dimensions={{}}", compiled)
        assert len(constants) == (zeros > 0)


def test_seconds_of_a_look_up_are_those_of_its_traffic():
    card = H200.device
    forward, backward = roofline(card, 0.0, "float32", 1e9, 1, zeroed=5e9)
    assert (forward, backward) == (1e9 / card.bandwidth + card.launch, 7e9 / card.bandwidth + card.launch)


def test_a_measured_table_tells_of_others():
    """Its ratio to the roofline, with the zeros: without them a table of twice the rows would be as fast."""

    def of(rows):
        return body_of(look_up, f(rows, WIDTH), f(IDS, dtype="int32"))

    def piece(rows):
        traffic = local_traffic(of(rows), (rows * WIDTH * 4, NUMBERS, READ), 1, (True, False))
        return Piece(((rows, WIDTH), (IDS,), (IDS, WIDTH)), 0.0, *map(float, traffic))

    def plain(rows):
        return [float(s) for s in roofline(H200.device, 0.0, "float32", piece(rows).nbytes, 1, zeroed=piece(rows).zeroed)]

    known, (forward, backward) = piece(1_000_000), plain(1_000_000)
    size = known.work, "float32", known.nbytes, known.zeroed
    row = Measurement("key", kind_of(BODY), known.shapes, (True, False), *size, 3 * forward, 2 * backward, 0.0)
    profile = Profile(Where("a", 1, 1, "x", "y"), (row,))
    other = lookup(profile, H200.device, of(2_000_000), piece(2_000_000), (True, False))
    assert other.how == "calibrated"
    np.testing.assert_allclose([other.forward, other.backward], np.multiply(plain(2_000_000), (3, 2)))


def test_the_step_of_a_recommender_is_that_which_an_h200_takes():
    """Of two gigabytes of tables, a step reads some rows and writes gradients: 0.724 ms measured (`benchmarks.gpu`)."""
    model = CASES["dlrm"].full()
    plan = unity.optimize(model.loss, model.params, model.batch, machine=H200, search="captured", progress=False)
    assert plan.time == pytest.approx(0.724e-3, rel=0.05)
    tables = [
        t for t in predict(plan.program.pcg, H200, plan.program.family.search.differentiated).operators if "embed" in t.node.kind
    ]
    rows, table = 2048 * (2 * 64 + 1) * 4, 1_000_000 * 64 * 4
    per_byte, launch = 1 / H200.device.bandwidth, H200.device.launch
    np.testing.assert_allclose([t.forward for t in tables], rows * per_byte + launch, rtol=1e-6)
    np.testing.assert_allclose([t.backward for t in tables], (2 * rows + table) * per_byte + launch, rtol=1e-6)
    assert len(tables) == 8


def test_a_larger_table_costs_no_forward_pass_more():
    def loss(table, ids):
        return jnp.take(table, ids, axis=0).sum()

    times = []
    for rows in (100_000, 10_000_000):
        plan = unity.optimize(loss, f(rows, 64), f(1024, dtype="int32"), machine=H200, training=False, progress=False)
        times.append(plan.time)
    assert times[0] == times[1]
