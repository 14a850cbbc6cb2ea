"""Models whose parts are of different operators and shapes, small ones; and plans of them with stages that are unlike."""

import itertools
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.stages import GPIPE
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.transforms.pipelining.unlike.balance import Loads, estimated
from unity.transforms.pipelining.unlike.chain import chain_of
from unity.transforms.pipelining.unlike.pipelining import unlike

TREE, SQUARE = Machine.grid(2, 4), Machine.grid(2, 2)
WIDTHS = (12, 32, 8, 48, 24, 4)
BATCH, WORDS = 16, 11


def drawn(seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]) if len(shape) > 1 else 1))

    def whole(most, *shape):
        return jnp.asarray(rng.integers(most, size=shape))

    return normal, whole


def mlp(params, x, y):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return ((x - y) ** 2).mean()


def mlp_arguments():
    normal, _ = drawn()
    params = [(normal(a, b), normal(b)) for a, b in itertools.pairwise(WIDTHS)]
    return params, normal(BATCH, WIDTHS[0]), normal(BATCH, WIDTHS[-1])


def convolved(x, w, b):
    return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b)


def vgg(params, x, y):
    """VGG's kinds of layers: convolutions between poolings, then dense layers."""
    for block in params["convolutions"]:
        for w, b in block:
            x = convolved(x, w, b)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(x.shape[0], -1)
    *hidden, (w, b) = params["dense"]
    for v, c in hidden:
        x = jax.nn.relu(x @ v + c)
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w + b), y[:, None], 1).mean()


def vgg_arguments():
    normal, whole = drawn()
    blocks = [[(normal(3, 3, a, b), normal(b)) for a, b in block] for block in (((3, 4), (4, 4)), ((4, 8), (8, 8)), ((8, 16),))]
    dense = [(normal(a, b), normal(b)) for a, b in ((16, 32), (32, 32), (32, 10))]
    return {"convolutions": blocks, "dense": dense}, normal(BATCH, 8, 8, 3), whole(10, BATCH)


def attended(p, q, kv, mask):
    scores = jnp.einsum("bqd,bkd->bqk", q @ p["q"], kv @ p["k"]) / np.sqrt(q.shape[-1])
    return jax.nn.softmax(jnp.where(mask, scores, -1e9), -1) @ (kv @ p["v"]) @ p["o"]


def normalized(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def translated(params, words, before, after):
    """An encoder and a decoder: all of the decoder reads what the encoder makes, and a mask that is made of the words."""
    mask, causal = (words != 0)[:, None], jnp.tril(jnp.ones((before.shape[1],) * 2, bool))
    x, y = params["words"][words], params["others"][before]
    e, d = params["encoder"], params["decoder"]
    x = x + attended(e["self"], normalized(x), normalized(x), mask)
    x = x + jax.nn.gelu(normalized(x) @ e["up"]) @ e["down"]
    y = y + attended(d["self"], normalized(y), normalized(y), causal)
    y = y + attended(d["cross"], normalized(y), x, mask)
    y = y + jax.nn.gelu(normalized(y) @ d["up"]) @ d["down"]
    found = jax.nn.log_softmax(normalized(y) @ params["out"])
    return -jnp.take_along_axis(found, after[..., None], -1).mean()


def translated_arguments(width=8):
    normal, whole = drawn()

    def attention():
        return {k: normal(width, width) for k in "qkvo"}

    def dense(times):
        return {"up": normal(width, times * width), "down": normal(times * width, width)}

    encoder, decoder = {"self": attention(), **dense(4)}, {"self": attention(), "cross": attention(), **dense(2)}
    params = {"words": normal(WORDS, width), "others": normal(WORDS, width), "out": normal(width, WORDS)}
    words, before, after = (whole(WORDS, BATCH, n) for n in (5, 6, 6))
    return {**params, "encoder": encoder, "decoder": decoder}, words, before, after


MODELS = {"mlp": (mlp, mlp_arguments), "vgg": (vgg, vgg_arguments), "translated": (translated, translated_arguments)}


def planned(
    fn, args, axes=TREE.axes[:1], rounds=2, pack=False, machine=TREE, kind=GPIPE, argnums: int | tuple[int, ...] = 0
) -> Plan:
    """The fastest plan with stages along these axes."""
    captured = capture(fn, *args, argnums=argnums)
    chain = chain_of(captured)
    _, cuts = estimated(Loads(chain, machine, True), axes, rounds * prod(axis.size for axis in axes))
    made = unlike(chain, captured, cuts, axes, rounds, pack, kind)
    search = Search(made.after.graph, captured.differentiated, machine, Training())
    return Plan(PlanFamily(fn, made.before, search, 0.0, transformations=(made,)), search.fastest)


def largest_difference(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(b).max(), 1e-3)) for a, b in pairs)
