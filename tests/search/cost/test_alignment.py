"""The slowdown of matrix products with misaligned rows: which products, by how much, and what a plan says and does about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision import in_64_bits

import unity
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.plan.warnings import warnings_of
from unity.search.cost.alignment import slowdown, slowdown_of_shapes
from unity.search.cost.prediction import predict
from unity.transforms.padding.choose import odd_sizes, padded_size

H100 = Machine.grid(1, 1, "h100")
SLOWER = H100.device.misaligned
OPTIONS = {"search": "captured", "pipelines": False, "branches": False, "recompute": False, "progress": False}


def product(m, k, n, dtype="bfloat16", machine=H100):
    """Return the seconds of a product and its gradients, of a size at which arithmetic takes all the time."""
    x, w = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
    plan = unity.optimize(lambda w, x: (x @ w).astype("float32").sum(), w, x, machine=machine, **OPTIONS)
    terms = predict(plan.program.pcg, machine, plan.program.family.differentiated).operators
    (term,) = [t for t in terms if t.node.kind == "dot_general"]
    return np.array([term.forward, term.backward])


@pytest.mark.parametrize(
    ("sizes", "dtype", "slower"),
    [
        ((4096, 4096, 4104), "bfloat16", (1, 1)),  # 16 bytes are 8 elements
        ((4096, 4096, 4100), "bfloat16", (SLOWER, SLOWER)),
        ((4096, 4100, 4096), "bfloat16", (SLOWER, 1)),  # the contracted dimension is the last of an operand
        ((4100, 4096, 4096), "bfloat16", (1, 1)),  # rows may have any number
        ((4096, 4096, 4100), "float32", (1, 1)),
        ((4096, 4096, 4098), "float32", (SLOWER, SLOWER)),
        ((4096, 4096, 4097), "float64", (1, 1)),
    ],
)
def test_products_are_slower_whose_last_dimension_is_no_multiple_of_16_bytes(sizes, dtype, slower):
    m, k, n = sizes
    with in_64_bits():
        aligned, seconds = product(4096, 4096, 4096, dtype), product(m, k, n, dtype)
    np.testing.assert_allclose(seconds / aligned, slower, rtol=3e-2)


@pytest.mark.parametrize(
    ("spec", "shapes", "slower"),
    [
        ("bd,dfk->bfk", ((4096, 2048), (2048, 2048, 2)), (1, 1)),
        ("bk,ktd->btd", ((4096, 4096), (4096, 3, 1366)), (SLOWER, SLOWER)),  # 4,098 elements
        ("bhc,hcd->bd", ((4096, 683, 6), (683, 6, 4096)), (SLOWER, 1)),  # of the left operand alone
        ("kb,kbd->kd", ((6, 4096), (6, 4096, 4096)), (1, 1)),
    ],
)
def test_rows_have_all_dimensions_that_a_product_merges(spec, shapes, slower):
    operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    graph = capture(lambda *xs: jnp.einsum(spec, *xs), *operands).graph
    (product,) = [node for node, _ in graph.walk() if node.kind == "dot_general"]
    body = product.body
    assert body is not None
    whole = [*shapes, product.tensors[0].shape]
    assert [float(x) for x in slowdown_of_shapes(H100.device, "bfloat16", whole, body)] == list(slower)


def test_devices_without_the_figure_have_no_such_products():
    machine = Machine.grid(1, 1, "a100")
    assert machine.device.misaligned == 1
    np.testing.assert_allclose(product(4096, 4096, 4097, machine=machine), product(4096, 4096, 4096, machine=machine), rtol=1e-3)


def test_integers_were_not_measured():
    assert [float(x) for x in slowdown(H100.device, "int8", [4097, 4097], 4097)] == [1, 1]


def test_the_part_of_one_device_is_misaligned_or_not():
    """4,112 columns are aligned, and an eighth of them, 514, is not."""
    forward, backward = slowdown(H100.device, "bfloat16", [np.array([4096, 4096]), np.array([4112, 514])], np.array([4112, 514]))
    np.testing.assert_array_equal(forward, [1, SLOWER])
    np.testing.assert_array_equal(backward, [1, SLOWER])


def head(params, tokens):
    x = params["table"][tokens]
    logits = x @ params["table"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def test_a_plan_names_such_products_and_pads_them_if_it_may(capsys):
    params, tokens = {"table": jax.ShapeDtypeStruct((5001, 2048), "float32")}, jax.ShapeDtypeStruct((8, 2048), "int32")
    plan = unity.optimize(head, params, tokens, machine=H100, **OPTIONS)
    (warning,) = [w for w in warnings_of(plan.program) if w.topic == "misaligned"]
    assert "rows of 5001 elements" in warning.text
    assert "test_alignment.py" in warning.line
    plan.explain()
    assert "rows of 5001 elements" in " ".join(capsys.readouterr().out.split())
    padded = unity.optimize(head, params, tokens, machine=H100, padding=True, pack=True, **OPTIONS)
    assert padded.program.padding is not None
    assert padded.program.padding.sizes == {5001: 5004}
    assert padded.time < plan.time
    padded.explain()
    assert "rows of" not in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "warned"), [(1, False), (4100, True)])
def test_a_product_that_waits_for_memory_is_not_called_slow(columns, warned):
    x, w = jax.ShapeDtypeStruct((4096, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, columns), "bfloat16")
    plan = unity.optimize(lambda w, x: (x @ w).astype("float32").sum(), w, x, machine=H100, **OPTIONS)
    texts = [w.text for w in warnings_of(plan.program) if w.topic == "misaligned"]
    assert [f"about {SLOWER:.2g} times as long with rows of {columns} elements" in text for text in texts] == [True] * warned


@pytest.mark.parametrize(
    ("size", "devices", "unit", "padded"),
    [
        (50257, 1, 8, 50264),
        (50257, 8, 8, 50304),
        (50257, 8, 1, 50264),
        (1000, 8, 4, 1024),  # the devices divide it, but not into aligned parts
        (1024, 8, 8, None),
        (17, 8, 8, 24),  # 64 would be much more
    ],
)
def test_padded_sizes_are_aligned_on_each_device_where_that_is_not_much_more(size, devices, unit, padded):
    assert padded_size(size, devices, unit) == padded


@pytest.mark.parametrize(
    ("dtype", "padded"), [("bfloat16", {5001: 5008}), ("float32", {5001: 5004}), ("float64", {}), ("int8", {})]
)
def test_sizes_are_padded_on_one_device_only_in_types_whose_rows_have_a_price(dtype, padded):
    x, w, scale = (jax.ShapeDtypeStruct(shape, t) for shape, t in (((64, 128), dtype), ((128, 5001), dtype), ((), "float32")))
    with in_64_bits():
        assert odd_sizes(capture(lambda scale, w, x: scale * (x @ w).sum(), scale, w, x), H100) == padded


def test_a_product_with_a_constant_is_priced() -> None:
    table = np.ones((3, 8), np.float32)  # small enough to be a literal, which is no operand of its node
    x, w = jax.ShapeDtypeStruct((4096, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
    plan = unity.optimize(lambda w, x: jnp.sum(jnp.einsum("ij,kj->ik", x @ w, table)), w, x, machine=H100, **OPTIONS)
    assert plan.time > 0
    assert str(plan)
