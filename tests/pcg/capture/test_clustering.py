"""Operators are few, have common names, and can be partitioned wherever their equations can."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from jax import lax
from small_models import MODELS
from test_capture import interpret, programs

from benchmarks import models
from benchmarks.equivalent import CLASSES
from unity.pcg.capture.capture import capture
from unity.pcg.capture.clustering import clusters
from unity.pcg.capture.heavy_operators import Uses, constants, light, reduces
from unity.pcg.capture.lossless import LOSSLESS, _dimensions, lossless, pattern
from unity.pcg.capture.merging import LARGEST
from unity.pcg.capture.repetition import repeated, signature
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.ir.program import Body, program_of
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.relaxation import Relaxed
from unity.plan.files import cache

X = np.ones((8, 32, 64), np.float32)
IMAGE = np.ones((8, 16, 16, 32), np.float32)
GAIN = np.ones(64, np.float32)
CHANNEL = np.ones(32, np.float32)


def operators(graph: PCG) -> list[Node]:
    return [n for n in graph.nodes if n.kind not in ("input", "constant")]


def kinds(fn, *args) -> list[str]:
    return [n.kind for n in operators(capture(fn, *args).graph)]


def plain_layer_norm(x, gain, bias):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * gain + bias


def rms_norm(x, gain):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * gain


def batch_norm(x, gain, bias, axes=(0, 1, 2)):
    return (x - jnp.mean(x, axes)) * lax.rsqrt(jnp.var(x, axes) + 1e-5) * gain + bias


def group_norm(x, gain, bias):
    grouped = x.reshape(*x.shape[:-1], 4, -1)
    mean, var = jnp.mean(grouped, (1, 2, 4), keepdims=True), jnp.var(grouped, (1, 2, 4), keepdims=True)
    return ((grouped - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * gain + bias


NAMED = {
    "softmax": (lambda x: jax.nn.softmax(x), X),
    "softmax masked": (lambda x: jax.nn.softmax(jnp.where(x > 0, x * 0.1, -1e9)), X),
    "log_softmax": (lambda x: jax.nn.log_softmax(x), X),
    "layer_norm": (plain_layer_norm, X, GAIN, GAIN),
    "rms_norm": (rms_norm, X, GAIN),
    "batch_norm": (batch_norm, IMAGE, CHANNEL, CHANNEL),
    "group_norm": (group_norm, IMAGE, CHANNEL, CHANNEL),
    "gelu": (lambda x, b: jax.nn.gelu(x + b), X, GAIN),
    "gelu exact": (lambda x: jax.nn.gelu(x, approximate=False), X),
    "silu": (lambda x: x * jax.nn.sigmoid(x), X),
    "relu": (lambda x, b: jax.nn.relu(x + b), X, GAIN),
    "dropout": (lambda x, k: jnp.where(jax.random.bernoulli(k, 0.9, x.shape), x / 0.9, 0), X, jax.random.key(0)),
    "embedding": (lambda t, i: t[i], GAIN[:, None] * GAIN, np.arange(5)),
    "add": (lambda x, b: x + b, X, GAIN),
    "reduce_sum of tanh": (lambda x: jnp.mean(jnp.tanh(x) ** 2), X),
    "elementwise of erf": (lambda x: jax.scipy.special.erf(x) ** 3 - 1, X),
    "reshape": (lambda x: x.reshape(8, 32, 4, 16).transpose(0, 2, 1, 3), X),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_people_name_is_one_operator_of_that_name(name):
    fn, *args = NAMED[name]
    assert kinds(fn, *args) == [name.split()[0]]


@pytest.mark.parametrize("name", NAMED)
def test_a_function_around_everything_names_nothing(name):
    fn, *args = NAMED[name]

    @jax.jit
    def whole_step(*args):
        return fn(*args) * 2, jnp.sin(args[0][0])

    assert "whole_step" not in kinds(whole_step, *args)


def flax_norms():
    import flax.linen as nn

    class Net(nn.Module):
        norm: type

        @nn.compact
        def __call__(self, x):
            return self.norm(**({"use_running_average": False} if self.norm is nn.BatchNorm else {}))(x)

    for norm, name in (
        (nn.LayerNorm, "layer_norm"),
        (nn.RMSNorm, "rms_norm"),
        (nn.GroupNorm, "group_norm"),
        (nn.BatchNorm, "batch_norm"),
    ):
        net = Net(norm)
        variables = net.init(jax.random.key(0), IMAGE)
        yield name, lambda v, x, net=net: net.apply(v, x, mutable=["batch_stats"]), (variables, IMAGE)


def haiku_norms():
    import haiku as hk

    makers = {
        "layer_norm": lambda x: hk.LayerNorm(-1, True, True)(x),
        "rms_norm": lambda x: hk.RMSNorm(-1)(x),
        "group_norm": lambda x: hk.GroupNorm(4)(x),
        "batch_norm": lambda x: hk.BatchNorm(True, True, 0.9)(x, True),
    }
    for name, make in makers.items():
        net = hk.transform_with_state(make)
        params, state = net.init(jax.random.key(0), IMAGE)
        yield name, lambda p, s, x, net=net: net.apply(p, s, None, x), (params, state, IMAGE)


def equinox_norms():
    import equinox as eqx

    for name, norm in (("layer_norm", eqx.nn.LayerNorm(64)), ("rms_norm", eqx.nn.RMSNorm(64))):
        params, static = eqx.partition(norm, eqx.is_array)
        yield name, lambda p, x, static=static: jax.vmap(jax.vmap(eqx.combine(p, static)))(x), (params, X)
    params, static = eqx.partition(eqx.nn.GroupNorm(4, 32), eqx.is_array)
    yield "group_norm", lambda p, x: jax.vmap(eqx.combine(p, static))(x), (params, np.ones((8, 32, 16, 16), np.float32))


def keras_norms():
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    layers = keras.layers

    def mode(layer):
        return {"training": True} if isinstance(layer, layers.BatchNormalization) else {}

    made = {
        "layer_norm": layers.LayerNormalization(),
        "group_norm": layers.GroupNormalization(4),
        "batch_norm": layers.BatchNormalization(),
    }
    for name, layer in made.items():
        layer.build(IMAGE.shape)
        trained, other = ([v.value for v in vs] for vs in (layer.trainable_variables, layer.non_trainable_variables))
        yield name, lambda t, o, x, layer=layer: layer.stateless_call(t, o, x, **mode(layer)), (trained, other, IMAGE)


@pytest.mark.parametrize("name", ["embedding", "gather", "dot_general", "sort", "conv_general_dilated", "reduce_max", "combine"])
def test_a_function_with_the_name_of_another_operator_is_no_such_operator(name) -> None:
    """The cost and memory models read facts about an operator by its name."""

    def block(x):
        return jnp.tanh(jnp.exp(x) * 2) - jnp.sin(x)

    block.__name__ = name
    function, ruled = jax.jit(block), jax.custom_jvp(jax.jit(block))
    ruled.defjvp(lambda x, dx: (block(*x), dx[0]))
    assert kinds(lambda x: function(x) @ jnp.ones((64, 8)), X)[0] == f"{name}()"
    assert kinds(lambda x: ruled(x) @ jnp.ones((64, 8)), X)[0] == f"{name}()"


@pytest.mark.parametrize("norms", [flax_norms, haiku_norms, equinox_norms, keras_norms])
def test_the_packages_norms_are_recognized(norms):
    for name, fn, args in norms():
        found = [k for k in kinds(fn, *args) if k not in ("reshape", "transpose")]
        assert found == [name], (name, found)


def test_batch_norm_lets_the_batch_and_the_channels_be_partitioned():
    def step(x, gain, bias, state):
        mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
        y = jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * gain + bias)
        return y, (0.9 * state[0] + 0.1 * mean, 0.9 * state[1] + 0.1 * var)

    (norm,) = operators(capture(step, IMAGE, CHANNEL, CHANNEL, (CHANNEL, CHANNEL)).graph)
    assert norm.kind == "batch_norm"
    image = next(k for k, v in enumerate(norm.operands) if v.tensor.ndim == 4)
    assert norm.body is not None
    found = {str(c.operands[image]): c for c in choices(norm.body) if c.operands[image].kind == "P"}
    assert set(found) == {"0", "1", "2", "3"}
    assert [r.nbytes for r in found["0"].reduced if r.kind] == [4 * 32] * 2  # a mean and a variance
    assert not found["3"].reduced


def test_two_norms_that_meet_stay_two_operators():
    def block(x, y, gain, bias):
        return jax.nn.relu(batch_norm(x, gain, bias) + batch_norm(2 * y, gain, bias))

    found = Counter(kinds(block, IMAGE, IMAGE, CHANNEL, CHANNEL))
    assert (found["batch_norm"], found["relu"]) == (2, 1)


def test_a_residual_sum_is_not_part_of_the_norm_after_it():
    assert kinds(lambda x, y, gain: rms_norm(x + y, gain), X, X, GAIN) == ["add", "rms_norm"]


GATES = {
    "plain": lambda x, h: x + h,
    "scaled": lambda x, h: x - 2 * h,
    "biased": lambda x, h: (x + GAIN[:32]) + (h + CHANNEL),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("gates", "operators"), [(4, 1), (8, 3)])
def test_many_sums_of_products_that_meet_are_separated(gates, operators, gate):
    """Each sum may be of partial products, whatever the others are: one operator of k sums has 2 to the power of k choices."""

    def cell(weights, x, h):
        parts = [jnp.tanh(GATES[gate](x @ w, h @ u)) for w, u in weights]
        while len(parts) > 1:
            parts = [jnp.tanh(a * b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    weights = [(jnp.ones((64, 32)), jnp.ones((64, 32)))] * gates
    captured = capture(cell, weights, X[0], X[1])
    found = [node.body for node in captured.graph.nodes if node.body is not None and node.kind != "dot_general"]
    assert len(found) == operators
    assert max(len(choices(body)) for body in found) < 64


@pytest.mark.parametrize(("boxes", "is_one"), [(1024, True), (1031, False)])
def test_a_box_is_one_operator_where_the_boxes_can_be_divided(boxes, is_one):
    def areas(x):
        t = jnp.tanh(x)
        return t[:, 0] * t[:, 1] + t[:, 2] * t[:, 3]

    assert (len(operators(capture(areas, np.ones((boxes, 4), np.float32)).graph)) == 1) == is_one


def test_a_square_is_no_sum():
    """Of partial values a square is no partial sum: five sums of squares that meet are one operator."""

    def fn(*pairs):
        sums = [jnp.tanh(a * a + b * b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        return functools.reduce(lambda x, y: x * y, sums)

    assert len(operators(capture(fn, *[X[0]] * 10).graph)) == 1


def test_random_keys_are_split_in_one_operator():
    def loss(x, key):
        for _ in range(6):
            key, now = jax.random.split(key)
            x = jax.random.bernoulli(now, 0.5, x.shape) * (x @ x.mT @ x)
        return x

    assert Counter(kinds(loss, X, jax.random.key(0)))["random_keys"] == 1


def test_a_large_table_is_never_inside_a_composite():
    graph = capture(lambda t, i: jax.nn.gelu(t.astype(jnp.bfloat16)[i]), np.ones((1000, 64), np.float32), np.arange(5)).graph
    (lookup,) = (n for n in operators(graph) if n.body and "gather" in n.body.primitives)
    assert lookup.kind == "embedding"
    assert lookup.body is not None
    assert "convert_element_type" not in {e.name for e in lookup.body.equations if e.results[0] in lookup.body.inputs}


@settings(max_examples=fewer(20))
@given(programs())
def test_clusters_partition_the_program_in_order(program):
    body, _ = program_of(jax.make_jaxpr(lambda x: interpret(program, x))(X[0, :4, :4]))
    constant = constants(body)
    found = clusters(body, constant)
    members = [i for c in found for i in c.members]
    wanted = [i for i, e in enumerate(body.equations) if e.results[0] not in constant]
    assert sorted(members) == wanted
    made = set(body.inputs)
    for c in found:
        assert len(c.members) <= LARGEST
        part, order = extract(body, c.members, c.outputs, constant)
        assert made.issuperset(order)
        made.update(c.outputs)
        assert len(c.members) == 1 or lossless(part)
    assert made.issuperset(a for a in body.outputs if isinstance(a, int) and a not in constant)


def alone(composite: Body, i: int) -> set[tuple[int, int]]:
    """What an equation can have partitioned as an operator of its own."""
    part, order = extract(composite, [i], composite.equations[i].results, {})
    return {(v, s.dim) for c in choices(part) for v, s in zip(order, c.operands, strict=True) if s.kind == "P"}


def paths(composite: Body, i: int) -> Iterator[list[int]]:
    """All ways from an equation to a result of the composite."""
    made = composite.equations[i].results
    if any(v in composite.outputs for v in made):
        yield [i]
    users = [k for k, e in enumerate(composite.equations) if any(v in e.operands for v in made)]
    yield from ([i, *path] for k in users for path in paths(composite, k))


def meets_whole(composite: Body, i: int, v: int, dim: int) -> bool:
    """Whether all that an equation computes meets a value as large as an input, for which a dimension of the input is whole."""

    def size(u: int) -> int:
        return sum(n > 1 for n in composite.tensors[u].shape)

    large, whole = size(v), set[int]()
    for k, e in enumerate(composite.equations):
        here = v in e.operands and not reduces(composite, e) and (v, dim) not in alone(composite, k)
        if (here and max(map(size, e.results)) >= large) or whole.intersection(a for a in e.operands if isinstance(a, int)):
            whole |= {u for u in e.results if size(u) >= large}
    meeting = {k for k, e in enumerate(composite.equations) if whole.intersection(a for a in e.operands if isinstance(a, int))}
    ways = list(paths(composite, i))  # none if nothing reads what it computes
    return bool(ways) and all(meeting.intersection(path) for path in ways)


def lossless_by_all_choices(composite: Body) -> bool:
    """What `lossless` says, from every choice of every equation and of the whole, with nothing spared."""
    together = {(v, s.dim) for c in choices(composite) for v, s in zip(composite.inputs, c.operands, strict=True)}
    wanted = ((i, v, dim) for i in range(len(composite.equations)) for v, dim in alone(composite, i) if v in composite.inputs)
    return all((v, dim) in together or meets_whole(composite, i, v, dim) for i, v, dim in wanted)


def windows(body: Body, length: int) -> Iterator[Body]:
    """Light equations that follow one another, as one operator; more and more of them, in steps."""
    constant = constants(body)
    uses = Uses(body)
    for start in range(0, len(body.equations), length // 2):
        members = [i for i in range(start, min(start + length, len(body.equations))) if light(body, body.equations[i])]
        members = [i for i in members if body.equations[i].results[0] not in constant]
        for count in range(2, len(members) + 1, 3):
            some = members[:count]
            yield extract(body, some, uses.outputs(some, set(some)), constant)[0]


@settings(max_examples=fewer(8))
@given(programs())
def test_lossless_is_what_all_choices_together_say(program):
    body, _ = program_of(jax.make_jaxpr(lambda x: interpret(program, x))(X[0, :4, :4]))
    for part in windows(body, 12):
        assert lossless(part) == lossless_by_all_choices(part)


def step_of_a_flow(x, speed):
    """Neighbours along one dimension, which cannot be split."""
    flux = jnp.maximum(speed * x, 0.0) * jnp.roll(x, -1, 1) / (1.0 + jnp.abs(x))
    return x - 0.1 * (flux - jnp.roll(flux, 1, 1)) + jnp.mean(x, 0)


def pairs_of_particles(x, charge):
    """Particles along two dimensions of one table, of which only one can be split."""
    apart = x[:, :, None, :] - x[:, None, :, :]
    far = jnp.sqrt(jnp.sum(apart * apart, -1) + jnp.eye(x.shape[1]))
    return jnp.sum(charge[:, None] * charge[None, :] * jnp.exp(-far) / far, (1, 2)), jax.nn.softmax(far)


@pytest.mark.parametrize(("fn", "args"), [(step_of_a_flow, (X[0], X[1, 0])), (pairs_of_particles, (X[..., :3], X[0, :, 0]))])
def test_what_is_not_lossless_is_found_to_be_so(fn, args):
    body, _ = program_of(jax.make_jaxpr(fn)(*args))
    answers = [(lossless(part), lossless_by_all_choices(part)) for part in windows(body, len(body.equations))]
    assert all(fast == slow for fast, slow in answers)
    assert {fast for fast, _ in answers} == {True, False}


@jax.custom_jvp
def sorted_two(x, y):
    """A rule with two results, of which one is also read inside, and one operand that is handed on as it is."""
    low = jnp.minimum(x, y)
    return low, jnp.maximum(x, y) * jnp.mean(low, 0), y


@sorted_two.defjvp
def sorted_two_tangents(primals, tangents):
    return sorted_two(*primals), sorted_two(*tangents)


def joined_activations(x, y, bias):
    """What is joined lies whole in that dimension, so nothing before a rule for tangents may be divided there."""
    small = jax.nn.relu(x + bias)
    return jnp.concatenate([small, jax.nn.relu6(y * bias), jnp.square(y)], 1), small


def joined_results(x, y, bias):
    low, high, same = sorted_two(x * bias, jax.nn.silu(y))
    return jnp.concatenate([low, same], 1), jax.nn.softmax(high), jnp.cumsum(same, 1)


CALLING = [joined_activations, joined_results, lambda x, y, bias: sorted_two(jax.nn.relu(x), y)[1] + bias]


@pytest.mark.parametrize("fn", CALLING)
def test_programs_of_rules_for_tangents_are_looked_into(fn):
    body, _ = program_of(jax.make_jaxpr(fn)(X[0], X[1], X[2, :1]))
    parts = [part for length in (4, 8, 16) for part in windows(body, length)]
    assert any(e.name == "custom_jvp_call" for part in parts for e in part.equations)
    assert all(lossless(part) == lossless_by_all_choices(part) for part in parts)


@pytest.mark.parametrize("fn", CALLING)
def test_the_relaxation_rules_out_nothing_that_there_is(fn):
    """The program as a whole, so that its rules are inside: each dimension that some choice divides, the relaxation allows."""
    body, _ = program_of(jax.make_jaxpr(fn)(X[0], X[1], X[2, :1]))
    whole = [extract(body, range(len(body.equations)), [a for a in body.outputs if isinstance(a, int)], {})[0], *windows(body, 8)]
    for part in whole:
        relaxed = Relaxed(part)
        found = {(v, s.dim) for c in choices(part) for v, s in zip(part.inputs, c.operands, strict=True) if s.kind == "P"}
        assert relaxed.may_partition(found)
        assert all(relaxed.may_partition([one]) for one in found)


def test_the_relaxation_sees_through_a_rule_for_tangents():
    body, _ = program_of(jax.make_jaxpr(lambda x, y: jnp.concatenate([jax.nn.relu(x), y], 1))(X[0], X[1, :, 1:]))
    assert "custom_jvp_call" in body.primitives
    relaxed = Relaxed(body)
    assert [relaxed.may_partition([(body.inputs[0], dim)]) for dim in range(2)] == [True, False]


@settings(max_examples=fewer(20))
@given(programs())
def test_what_is_remembered_changes_no_clusters(program):
    body, _ = program_of(jax.make_jaxpr(lambda x: interpret(program, x))(X[0, :4, :4]))
    warm = clusters(body)
    LOSSLESS.clear()
    _dimensions.cache_clear()
    assert clusters(body) == warm == clusters(body)


def captured(model: models.Model) -> PCG:
    return capture(model.loss, model.params, model.batch).graph


@functools.cache
def published(name: str) -> PCG:
    """A model at its published size, which several tests look at."""
    return captured(models.get(name))


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "dlrm"])
def test_sizes_do_not_change_what_is_lossless(name):
    """Bodies of one pattern have one answer: that of each is asked for itself here."""
    answers: dict[str, set[bool]] = {}
    for graph in (published(name), captured(models.tiny(name))):
        for n, _ in graph.walk():
            if n.body is not None and len(n.body.equations) > 1:
                answers.setdefault(pattern(n.body), set()).add(lossless(n.body))
    assert all(found == {True} for found in answers.values())


# --- whole models ---


@pytest.mark.parametrize(
    ("name", "limit"),
    [("gpt2", 12 * 20), ("bert_large", 24 * 20), ("llama3_8b", 32 * 30), ("resnet50", 180), ("inception_v3", 323)],
)
def test_models_have_few_operators(name, limit):
    assert len(published(name)) <= limit


@pytest.mark.parametrize(("name", "layers"), [("gpt2", 12), ("bert_large", 24), ("llama3_8b", 32)])
def test_unrolled_layers_are_found(name, layers):
    graph = published(name)
    (run,) = repeated(graph)
    assert run.times == layers
    assert run.times * run.operators > 0.95 * len(graph)


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_as_many_layers_are_found_as_there_are(layers):
    (run,) = repeated(captured(models.tiny("gpt2", layers=layers)))
    assert run.times == layers


def test_repeated_blocks_of_a_resnet_are_found():
    runs = repeated(published("resnet50"))
    assert [run.times for run in runs if run.operators == 6] == [2, 3, 5]  # of 3, 4, 6; the first differs


@settings(max_examples=fewer(40))
@given(programs())
def test_segments_compute_the_same_and_do_not_overlap(program):
    runs = repeated(capture(lambda x: [jnp.sin(y) for y in interpret(program, x)], X[0, :4, :4]).graph)
    seen: set[int] = set()
    for run in runs:
        assert run.times >= 2
        for segment in run.segments:
            assert [signature(n) for n in segment] == [signature(n) for n in run.segments[0]]
            assert seen.isdisjoint(map(id, segment))
            seen.update(map(id, segment))


def test_different_layers_are_no_repetition():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    sizes = (64, 32, 16, 8, 4)
    ws = [np.ones(s, np.float32) for s in pairwise(sizes)]
    assert repeated(capture(loss, ws, X).graph) == ()


def test_what_was_joined_before_is_read_and_what_is_damaged_found_again(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = MODELS["gpt_scanned"]()

    def key() -> str:
        return capture(model.loss, model.params, model.batch, clustering=cache.clustered).graph.key

    fresh = capture(model.loss, model.params, model.batch).graph.key
    assert key() == fresh
    entries = list(tmp_path.rglob("clusters/*.json"))
    assert len(entries) > 1  # the body of the scan has one of its own
    with monkeypatch.context() as once:
        once.setattr(cache, "clusters", None)
        assert key() == fresh
    for damaged in ("", "[[0]]", "{}", "[[0, 0], 3]", "[" * 100_000):
        for entry in entries:
            entry.write_text(damaged)
        assert key() == fresh
    assert all(json.loads(entry.read_text()) for entry in entries)


BRANCHES = {
    "cross-entropy": lambda x: (jax.nn.logsumexp(x, -1) - x[:, 0]).mean(),
    "normalization": lambda x: jnp.square(plain_layer_norm(x, 1.0, 0.0)).mean(),
    "entropy": lambda x: -(jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_many_branches_of_a_sum_are_the_operators_of_one(name: str) -> None:
    """However large the sum of all branches is, no operator ends within a branch."""

    def total(w, xs):
        return sum(BRANCHES[name](xs[k] @ w) for k in range(len(xs)))

    def reductions(count: int) -> list[list[str]]:
        graph = capture(
            total, jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((count, 32, 64), jnp.float32)
        ).graph
        names = [[e.name for e in n.body.equations] for n in operators(graph) if n.body is not None]
        return sorted([x for x in some if x.startswith("reduce_")] for some in names if any(x.startswith("reduce_") for x in some))

    assert reductions(20) == sorted(20 * reductions(1))


def variation_of_slices(x):
    return jnp.abs(x[:, 1:] - x[:, :-1]).sum() + jnp.abs(x[:, :, 1:] - x[:, :, :-1]).sum()


def variation_of_each(x):
    def one(x):
        return jnp.square(jnp.diff(x, axis=0)).mean() + jnp.square(jnp.diff(x, axis=1)).mean()

    return jax.vmap(one)(x).mean()


def variation_of_volumes(x):
    return sum(jnp.abs(jnp.diff(x, axis=k)).mean() for k in range(3))


@pytest.mark.parametrize(("fn", "directions"), [(variation_of_slices, 2), (variation_of_each, 2), (variation_of_volumes, 3)])
def test_differences_in_several_directions_are_as_many_operators(fn, directions) -> None:
    """Each divides the dimensions along which it takes no differences, and writes no slice to memory."""
    graph = capture(fn, jax.ShapeDtypeStruct((16, 32, 64), jnp.float32)).graph
    names = [[e.name for e in n.body.equations] for n in operators(graph) if n.body is not None]
    assert sum("slice" in some for some in names) == directions
    assert all("reduce_sum" in some for some in names if "slice" in some)


def test_a_value_is_not_computed_apart_from_the_sum_that_it_is_subtracted_from() -> None:
    """A device could subtract the logarithm of a sum from its summand of a logit, as long as the two are two operators."""
    graph = capture(lambda x: (jax.nn.logsumexp(x, -1) - x[:, 0]).sum(), jax.ShapeDtypeStruct((32, 64), jnp.float32)).graph
    (body,) = (n.body for n in operators(graph) if n.body is not None and "log" in n.body.primitives)
    assert "sub" in [e.name for e in body.equations if body.tensors[e.results[0]].shape == (32,)]


ROLLED = {
    "difference": lambda x, m: jnp.abs((x - jnp.roll(x, 1, 1))[:, 1:]).sum(),
    "shifted": lambda x, m: jnp.tanh(x * m + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] * (1 - m)),
    "mixed": lambda x, m: jnp.exp(0.7 * x + 0.3 * x[::-1]),
    "running": lambda x, m: jnp.tanh(x) - jnp.concatenate([x[:, 1:], x[:, :1]], 1),
}


@pytest.mark.parametrize("name", ROLLED)
def test_what_is_whole_for_an_operand_need_not_be_divided_beside_it(name: str) -> None:
    """The rolled values are not written to memory."""
    x, m = jax.ShapeDtypeStruct((16, 32, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    assert len(operators(capture(ROLLED[name], x, m).graph)) == 1


def test_what_a_small_part_needs_whole_is_divided_beside_it() -> None:
    """The first column costs little to gather, beside the work on all columns."""
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    graph = capture(lambda x: jnp.exp(jnp.sin(x) * x[:, :1]), x).graph
    assert len(operators(graph)) == 2


@pytest.mark.parametrize("form", CLASSES["boxes"].forms)
def test_few_coordinates_beside_a_large_batch_are_one_operator(form: str) -> None:
    """No device is left over that could divide them, and a product of two sides is no statistic of them."""
    shapes = CLASSES["boxes"].structs(form)
    assert len(kinds(CLASSES["boxes"].forms[form].run, *shapes)) == 2  # the product, and all else


def test_few_coordinates_beside_a_small_batch_can_be_divided() -> None:
    fn = CLASSES["boxes"].forms["corners"].run
    w, x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 4), (8, 64), (8, 4)))
    assert len(kinds(fn, w, x, y)) > 2
