"""The benchmark models are the published ones: by their parameter counts, and by laws that their parts obey."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import CI, by_hand

from benchmarks import models
from benchmarks.models import Model
from benchmarks.models.llama import _rotate
from benchmarks.models.mamba import state_space
from benchmarks.models.mixtral import mixture
from benchmarks.models.recurrent import lstm
from benchmarks.models.rwkv import delta_rule
from benchmarks.models.transformer import causal, self_attention

PUBLISHED = {
    "alexnet": 61_100_840,  # torchvision
    "bert_large": 335_174_458,  # BERT-Large uncased with its masked-language-model head
    "dit_xl": 675_129_632,
    "dlrm_kaggle": 33_762_577 * 16 + (13 + 1) * 512 + 513 * 256 + 257 * 64 + 65 * 16 + 368 * 512 + 513 * 256 + 257,
    "gpt2": 124_439_808,
    "gpt2_padded": 124_439_808 + (50304 - 50257) * 768,
    "gpt2_xl": 1_557_611_200,
    "inception_v3": 23_834_568,  # torchvision, less the auxiliary head
    "lenet5": 61_706,
    "llama3_8b": 8_030_261_248,
    "mixtral_8x7b": 46_702_792_704,
    "resnet101": 44_549_160,  # torchvision, as the next five
    "resnet50": 25_557_032,
    "resnext50": 25_028_904,
    "squeezenet": 1_235_496,  # version 1.1
    "t5_large": 737_668_096,
    "unet_cifar": 35_746_307,
    "vgg16": 138_357_544,
    "vit_large": 304_326_632,  # torchvision, patches of 16
    "wide_resnet50": 68_883_240,
}
ROUNDED = {  # published in millions, or in GiB of float32
    "candle_uno": (821e6, 0.5e6),
    "gpt3_6.7b": (6.7e9, 0.05e9),
    "mamba2_1.3b": (1.3e9, 0.05e9),
    "mlp_unity": (956e6, 0.5e6),
    "resnet200": (64.7e6, 0.05e6),
    "rwkv7_1.5b": (1.5e9, 0.05e9),
    "rnn_tensoropt": (108 * 2**28, 0.01 * 108 * 2**28),
    "transformer_tensoropt": (9.7 * 2**28, 0.01 * 9.7 * 2**28),
    "wide_resnet_tensoropt": (7.3 * 2**28, 0.025 * 7.3 * 2**28),
}
EPSILON = 2.0**-23  # of float32
DEPTH = 100  # roundings that follow each other in a tiny transformer's step, to within a factor of two
EVERY_KIND_OF_LAYER = (
    *("mlp_unity", "resnext50", "llama3_8b", "bert_unity", "mixtral_8x7b", "dlrm_kaggle", "candle_uno", "rnntc", "nmt", "dit_xl"),
    "mamba2_1.3b",
    "rwkv7_1.5b",
    *by_hand("lenet5", "gpt2", "bert_large", "vit_large", "inception_v3_unity", "dlrm", "rnnlm", "t5_large", "unet_cifar"),
)


published, tiny = cache(models.get), cache(models.tiny)  # several tests look at each, and nearly all of their time is to trace it


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert published(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_round_to_what_was_published(name: str) -> None:
    count, rounding = ROUNDED[name]
    assert abs(published(name).parameters - count) <= rounding


@pytest.mark.parametrize("name", ["gpt2"] if CI else models.names())
def test_gradient_traces_at_published_size(name: str) -> None:
    model = published(name)
    loss, gradient = jax.eval_shape(jax.value_and_grad(model.loss), model.params, model.batch)
    assert loss.shape == ()
    assert loss.dtype == jnp.float32
    assert same_types(gradient, model.params)


@pytest.mark.parametrize("name", models.names())
def test_tiny_has_the_structure_of_the_batch_and_its_limits(name: str) -> None:
    small, full = tiny(name), published(name)
    assert small.name == full.name == name
    assert set(small.batch) == set(full.batch)
    assert jax.tree.structure(small.batch) == jax.tree.structure(small.below)
    assert small.parameters < 4_000_000


@pytest.mark.parametrize("name", EVERY_KIND_OF_LAYER)
def test_gradient_reaches_every_parameter(name: str) -> None:
    model = tiny(name)
    params, batch = models.concrete(model)
    gradient = jax.jit(jax.grad(model.loss))(params, batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all(), path
        assert np.any(leaf), path


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        *(("lenet5", 10), ("gpt2", 61), ("mixtral_8x7b", 61), ("dlrm_kaggle", 2), ("nmt", 61)),
        *by_hand(("resnet50", 10), ("llama3_8b", 61), ("bert_large", 61), ("vit_large", 10), ("mlp_unity", 32), ("rnntc", 2)),
    ],
)
def test_a_model_of_zeros_guesses_evenly(name: str, classes: int) -> None:
    model = tiny(name)
    params, batch = models.concrete(model, scale=0.0)
    assert float(jax.jit(model.loss)(params, batch)) == pytest.approx(math.log(classes), rel=8 * EPSILON)


def test_concrete_is_what_was_abstract() -> None:
    model = tiny("dlrm")
    params, batch = models.concrete(model)
    assert same_types(params, model.params)
    assert same_types(batch, model.batch)
    for rows, count in zip(batch["sparse"], model.below["sparse"], strict=True):
        assert rows.min() >= 0
        assert rows.max() < count


def test_scanned_and_rematerialized_are_unrolled() -> None:
    plain, scanned = tiny("gpt2"), tiny("gpt2", scan=True, remat=True)
    params, batch = models.concrete(plain)
    stacked = params | {"blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *params["blocks"])}
    loss, gradient = value_and_grad(plain, params, batch)
    loss_scanned, gradient_scanned = value_and_grad(scanned, stacked, batch)
    assert float(loss_scanned) == pytest.approx(float(loss), rel=DEPTH * EPSILON)
    for layer, expected in enumerate(gradient["blocks"]):
        found = jax.tree.map(lambda leaf, layer=layer: leaf[layer], gradient_scanned["blocks"])
        assert distance(found, expected) <= DEPTH * EPSILON


def test_fused_projections_are_the_separate_ones() -> None:
    fused, separate = tiny("gpt2"), tiny("gpt2", fused_qkv=False)
    params, batch = models.concrete(separate)

    def fuse(block: dict) -> dict:
        attention = block["attention"]
        parts = [attention[name] for name in ("query", "key", "value")]
        qkv = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *parts)
        return block | {"attention": {"qkv": qkv, "out": attention["out"]}}

    joined = params | {"blocks": [fuse(block) for block in params["blocks"]]}
    assert float(fused.loss(joined, batch)) == pytest.approx(float(separate.loss(params, batch)), rel=DEPTH * EPSILON)


def test_low_precision_computes_but_does_not_store() -> None:
    exact, rounded = tiny("gpt2"), tiny("gpt2", compute="bfloat16")
    params, batch = models.concrete(exact)
    loss, gradient = value_and_grad(rounded, params, batch)
    assert same_types(gradient, exact.params)
    # bfloat16 keeps 8 bits; a dozen roundings lie between a token and its loss
    assert float(loss) == pytest.approx(float(exact.loss(params, batch)), rel=12 * 2**-8)


def test_causal_attention_does_not_see_the_future() -> None:
    model = tiny("gpt2")
    attention = models.concrete(model)[0]["blocks"][0]["attention"]
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    before = self_attention(attention, x, 4, causal(16))
    after = self_attention(attention, x.at[:, 9].add(1.0), 4, causal(16))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.all(np.any(before[:, 9:] != after[:, 9:], axis=(0, 2)))


def test_rotated_products_depend_on_distance_alone() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    rotated = [_rotate(jnp.broadcast_to(x, (1, 12, 1, 8)))[0, :, 0] for x in (query, key)]
    products = np.asarray(rotated[0] @ rotated[1].T)
    # an angle of up to 12 radians is rounded before its sine is taken
    bound = 12 * EPSILON * float(jnp.linalg.norm(query) * jnp.linalg.norm(key))
    np.testing.assert_allclose(products[3:, 3:], products[:-3, :-3], rtol=0, atol=bound)


def test_experts_with_room_for_all_tokens_are_two_experts_for_each() -> None:
    tokens, width, inner = 16, 8, 12
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = {"router": (width, 4), "gate": (4, width, inner), "up": (4, width, inner), "down": (4, inner, width)}
    params = {name: {"weight": jax.random.normal(next(keys), shape)} for name, shape in shapes.items()}
    x = jax.random.normal(next(keys), (2, tokens, width))
    found = mixture(params, x, group=8, places=8)
    router, gate, up, down = (np.asarray(params[name]["weight"]) for name in shapes)
    for got, token in zip(np.asarray(found).reshape(-1, width), np.asarray(x).reshape(-1, width), strict=True):
        scores = token @ router
        first, second = np.argsort(scores)[:-3:-1]
        share = 1 / (1 + np.exp(scores[second] - scores[first]))
        each = [(g / (1 + np.exp(-g)) * (token @ up[e])) @ down[e] for e in (first, second) for g in [token @ gate[e]]]
        np.testing.assert_allclose(got, share * each[0] + (1 - share) * each[1], rtol=1e-3, atol=1e-3)


def test_lstm_is_its_equations() -> None:
    layer = models.concrete(tiny("rnnlm"))[0]["layers"][0]
    inputs = jax.random.normal(jax.random.key(1), (5, 3, 16))
    zero = jnp.zeros((3, 16))
    (output, cell), outputs = lstm(layer, (zero, zero), inputs)
    h, c = np.zeros((3, 16)), np.zeros((3, 16))
    for x in inputs:
        gates = x @ layer["input"]["weight"] + layer["input"]["bias"] + h @ layer["recurrent"]["weight"]
        i, f, g, o = np.split(np.asarray(gates, np.float64), 4, axis=-1)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
    # 16 products are added up at each of 5 steps; outputs and cells are of order 1
    np.testing.assert_allclose(output, h, rtol=0, atol=16 * 5 * EPSILON)
    np.testing.assert_allclose(cell, c, rtol=0, atol=16 * 5 * EPSILON)
    np.testing.assert_array_equal(outputs[-1], output)


def test_state_space_layers_in_chunks_are_their_recurrence() -> None:
    samples, time, heads, width, state = 2, 12, 3, 4, 5
    keys = iter(jax.random.split(jax.random.key(0), 4))
    x = jax.random.normal(next(keys), (samples, time, heads, width))
    decay = -jax.random.uniform(next(keys), (samples, time, heads))
    b, c = (jax.random.normal(next(keys), (samples, time, state)) for _ in range(2))
    found = np.asarray(state_space(x, decay, b, c, chunk=4))
    states = np.zeros((samples, heads, width, state))
    for t in range(time):
        states = np.exp(decay[:, t, :, None, None]) * states + x[:, t, :, :, None] * b[:, t, None, None, :]
        expected = np.einsum("zhps,zs->zhp", states, c[:, t])
        # products of five states, of order 10, after up to 12 steps
        np.testing.assert_allclose(found[:, t], expected, rtol=0, atol=10 * 5 * time * EPSILON)


def test_the_delta_rule_is_a_product_with_the_transition_of_every_step() -> None:
    samples, time, heads, width = 2, 6, 3, 4
    keys = jax.random.split(jax.random.key(0), 6)
    receptance, decay, key, value, removal, rate = (jax.random.uniform(k, (samples, time, heads, width)) for k in keys)
    found = np.asarray(delta_rule(receptance, decay, key, value, removal, rate))
    states = np.zeros((samples, heads, width, width))
    for t in range(time):
        outer = np.einsum("zhi,zhj->zhij", removal[:, t], rate[:, t] * removal[:, t])
        transition = np.eye(width) * decay[:, t, :, :, None] - outer
        states = states @ transition + np.einsum("zhi,zhj->zhij", value[:, t], key[:, t])
        expected = np.einsum("zhij,zhj->zhi", states, receptance[:, t])
        # sums of 4 products of order 10, three at each of 6 steps
        np.testing.assert_allclose(found[:, t], expected, rtol=0, atol=10 * 4 * 3 * time * EPSILON)


def value_and_grad(model: Model, params: dict, batch: dict) -> tuple[jax.Array, dict]:
    return jax.jit(jax.value_and_grad(model.loss))(params, batch)


def distance(found: object, expected: object) -> float:
    """2-norm of the difference, relative to what was expected."""
    difference = jax.tree.map(jnp.subtract, found, expected)
    return norm(difference) / norm(expected)


def norm(tree: object) -> float:
    return math.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(tree)))


def same_types(found: object, expected: object) -> bool:
    """Same structure, shapes and dtypes."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
