"""Models as their own packages build them, at published sizes and on abstract arguments: what capture has to cope with.

Each builder gives a loss and its arguments. Packages are imported when a model of theirs is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp

Case = tuple[Callable[..., Any], tuple[Any, ...]]
Abstract = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Packaged:
    """A model of a package: `build` gives a loss, and its abstract arguments (weights first)."""

    package: str
    name: str
    build: Callable[[], Case]


MODELS: list[Packaged] = []


def model(package: str, name: str, *args: Any) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    def register(build: Callable[..., Case]) -> Callable[..., Case]:
        MODELS.append(Packaged(package, name, lambda: build(*args)))
        return build

    return register


def images(size: int, batch: int = 32, channels: int = 3) -> tuple[Abstract, Abstract]:
    return Abstract((batch, size, size, channels), jnp.float32), Abstract((batch,), jnp.int32)


def tokens(length: int, batch: int = 8) -> Abstract:
    return Abstract((batch, length), jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), labels[..., None], axis=-1)
    return -jnp.mean(chosen)


def key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: Abstract(x.shape, x.dtype), tree)


# --- Keras ---


@model("keras", "ResNet50", "ResNet50", 224)
@model("keras", "EfficientNetV2B0", "EfficientNetV2B0", 224)
@model("keras", "MobileNetV2", "MobileNetV2", 224)
@model("keras", "ConvNeXtTiny", "ConvNeXtTiny", 224)
@model("keras", "VGG16", "VGG16", 224)
@model("keras", "InceptionV3", "InceptionV3", 299)
@model("keras", "DenseNet121", "DenseNet121", 224)
def keras_application(name: str, size: int) -> Case:
    """With the new state as auxiliary output."""
    import keras

    made: list[Any] = []

    def build() -> int:
        made.append(getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), **bare))
        return 0

    # preprocessing keeps constants outside of the variables, which could not be built abstractly
    bare = {"include_preprocessing": False} if name.startswith(("EfficientNetV2", "ConvNeXt")) else {}
    jax.eval_shape(build)
    network = made[0]
    variables = network.trainable_variables, network.non_trainable_variables
    trainable, other = (abstract([v.value for v in vs]) for vs in variables)

    def loss(trainable: Any, other: Any, image: jax.Array, label: jax.Array) -> Any:
        logits, state = network.stateless_call(trainable, other, image, training=True)
        losses: Any = keras.losses.sparse_categorical_crossentropy(label, logits)
        return jnp.mean(losses), state

    return loss, (trainable, other, *images(size))


# --- Flax ---


@model("flax", "linen ViT-B/16")
def linen_vit() -> Case:
    """Typed random keys, dropout, attention by Flax's own layer."""
    import flax.linen as nn

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(12, dropout_rate=0.1, deterministic=False)(y, y)
            y = nn.Dense(3072)(nn.LayerNorm()(x))
            y = nn.Dropout(0.1, deterministic=False)(nn.gelu(y))
            return x + nn.Dense(768)(y)

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(768, (16, 16), (16, 16), name="embedding")(x).reshape(x.shape[0], -1, 768)
            cls = self.param("cls", nn.initializers.zeros, (1, 1, 768))
            x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
            x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], 768))
            for k in range(12):
                x = Encoder(name=f"layer_{k}")(x)
            return nn.Dense(1000, name="head")(nn.LayerNorm()(x)[:, 0])

    network = ViT()
    image, label = images(224)
    params = jax.eval_shape(network.init, {"params": key(), "dropout": key()}, image)["params"]

    def loss(params: Any, image: jax.Array, label: jax.Array, seed: jax.Array) -> jax.Array:
        logits: Any = network.apply({"params": params}, image, rngs={"dropout": seed})
        return cross_entropy(logits, label)

    return loss, (params, image, label, key())


@model("flax", "linen ResNet-50")
def linen_resnet() -> Case:
    """Batch statistics as a mutable collection, which come out as auxiliary outputs; bfloat16 compute."""
    import flax.linen as nn

    class Block(nn.Module):
        width: int
        stride: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            def norm(y: jax.Array) -> jax.Array:
                return nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(y)

            def conv(y: jax.Array, width: int, window: int, stride: int = 1) -> jax.Array:
                return nn.Conv(width, (window, window), (stride, stride), use_bias=False, dtype=jnp.bfloat16)(y)

            y = nn.relu(norm(conv(x, self.width, 1)))
            y = nn.relu(norm(conv(y, self.width, 3, self.stride)))
            y = norm(conv(y, 4 * self.width, 1))
            if x.shape != y.shape:
                x = norm(conv(x, 4 * self.width, 1, self.stride))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=jnp.bfloat16)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for stage, blocks in enumerate((3, 4, 6, 3)):
                for k in range(blocks):
                    x = Block(64 * 2**stage, 2 if stage and not k else 1)(x)
            return nn.Dense(1000)(jnp.mean(x, (1, 2)))

    network = ResNet()
    image, label = images(224)
    made = jax.eval_shape(network.init, key(), image)

    def loss(params: Any, stats: Any, image: jax.Array, label: jax.Array) -> Any:
        logits, new = network.apply({"params": params, "batch_stats": stats}, image, mutable=["batch_stats"])
        return cross_entropy(logits, label), new

    return loss, (made["params"], made["batch_stats"], image, label)


@model("flax", "nnx GPT-2")
def nnx_gpt() -> Case:
    """State as an NNX pytree, split and merged at the boundary."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(768, rngs=rngs), nnx.LayerNorm(768, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(12, 768, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(768, 3072, rngs=rngs), nnx.Linear(3072, 768, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class GPT(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.token, self.position = nnx.Embed(50257, 768, rngs=rngs), nnx.Embed(1024, 768, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(12)])
            self.norm = nnx.LayerNorm(768, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(x)
            y = self.token(x) + self.position(jnp.arange(x.shape[1]))
            for block in self.blocks:
                y = block(y, mask)
            return self.token.attend(self.norm(y))

    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))))

    def loss(state: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, state)(x), labels)

    return loss, (abstract(state), tokens(1024), tokens(1024))


# --- Haiku ---


@model("haiku", "hk.nets.ResNet50", "ResNet50")
@model("haiku", "hk.nets.MobileNetV1", "MobileNetV1")
def haiku_net(name: str) -> Case:
    """State in and out; a raw random key."""
    import haiku as hk

    network = hk.transform_with_state(lambda x: getattr(hk.nets, name)(num_classes=1000)(x, is_training=True))
    image, label = images(224)
    raw = Abstract((2,), jnp.uint32)
    params, state = jax.eval_shape(network.init, raw, image)

    def loss(params: Any, state: Any, seed: jax.Array, image: jax.Array, label: jax.Array) -> Any:
        logits, new = network.apply(params, state, seed, image)
        return cross_entropy(logits, label), new

    return loss, (params, state, raw, image, label)


@model("haiku", "transformer")
def haiku_transformer() -> Case:
    """Dropout by a raw random key that is split at every use."""
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        y = hk.Embed(32000, 512)(x) + hk.get_parameter("position", (x.shape[1], 512), init=jnp.zeros)
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        for _ in range(6):
            z = hk.LayerNorm(-1, True, True)(y)
            z = hk.MultiHeadAttention(8, 64, w_init_scale=1.0)(z, z, z, mask)
            y += hk.dropout(hk.next_rng_key(), 0.1, z)
            z = hk.nets.MLP([2048, 512], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(y))
            y += hk.dropout(hk.next_rng_key(), 0.1, z)
        return hk.Linear(32000)(hk.LayerNorm(-1, True, True)(y))

    network = hk.transform(forward)
    raw = Abstract((2,), jnp.uint32)
    params = jax.eval_shape(network.init, raw, tokens(512))

    def loss(params: Any, seed: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(network.apply(params, seed, x), labels)

    return loss, (params, raw, tokens(512), tokens(512))


# --- Equinox ---


@model("equinox", "encoder")
def equinox_encoder() -> Case:
    """A module with holes where its functions are, mapped over the batch; RMS norms and rotary positions."""
    import equinox as eqx

    class Block(eqx.Module):
        norm1: eqx.nn.RMSNorm
        norm2: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        rotary: eqx.nn.RotaryPositionalEmbedding
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __init__(self, key: Any) -> None:
            a, b = jax.random.split(key)
            self.norm1, self.norm2 = eqx.nn.RMSNorm(512), eqx.nn.LayerNorm(512)
            self.attention = eqx.nn.MultiheadAttention(8, 512, key=a)
            self.rotary = eqx.nn.RotaryPositionalEmbedding(64)
            self.mlp = eqx.nn.MLP(512, 512, 2048, 1, jax.nn.gelu, key=b)
            self.dropout = eqx.nn.Dropout(0.1)

        def __call__(self, x: jax.Array, key: Any) -> jax.Array:
            y = jax.vmap(self.norm1)(x)

            def turn(q: Any, k: Any, v: Any) -> Any:
                heads = jax.vmap(self.rotary, in_axes=1, out_axes=1)
                return heads(q), heads(k), v

            x = x + self.attention(y, y, y, process_heads=turn)
            return x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norm2)(x)), key=key)

    class Encoder(eqx.Module):
        embedding: eqx.nn.Embedding
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 8)
            self.embedding = eqx.nn.Embedding(32000, 512, key=keys[0])
            self.blocks = [Block(k) for k in keys[1:7]]
            self.head = eqx.nn.Linear(512, 32000, key=keys[7])

        def __call__(self, x: jax.Array, key: Any) -> jax.Array:
            y = jax.vmap(self.embedding)(x)
            for block, k in zip(self.blocks, jax.random.split(key, 6), strict=True):
                y = block(y, k)
            return jax.vmap(self.head)(y)

    params, static = eqx.partition(eqx.filter_eval_shape(Encoder, key()), lambda x: isinstance(x, Abstract))

    def loss(params: Any, x: jax.Array, labels: jax.Array, seed: jax.Array) -> jax.Array:
        network = eqx.combine(params, static)
        logits = jax.vmap(network)(x, jax.random.split(seed, x.shape[0]))
        return cross_entropy(logits, labels)

    return loss, (params, tokens(512), tokens(512), key())


@model("equinox", "ResNet-18 with group and batch norm")
def equinox_resnet() -> Case:
    """Channels first, mapped over the batch by a named axis: batch norm is a `pmean` inside `vmap`."""
    import equinox as eqx

    class Block(eqx.Module):
        conv1: eqx.nn.Conv2d
        conv2: eqx.nn.Conv2d
        norm1: eqx.nn.GroupNorm
        norm2: eqx.nn.BatchNorm
        short: Any

        def __init__(self, before: int, after: int, key: Any) -> None:
            a, b, c = jax.random.split(key, 3)
            self.conv1 = eqx.nn.Conv2d(before, after, 3, 1 + (before != after), 1, key=a)
            self.conv2 = eqx.nn.Conv2d(after, after, 3, 1, 1, key=b)
            self.norm1, self.norm2 = eqx.nn.GroupNorm(8, after), eqx.nn.BatchNorm(after, "batch", mode="batch")
            self.short = eqx.nn.Conv2d(before, after, 1, 2, key=c) if before != after else None

        def __call__(self, x: jax.Array, state: Any) -> Any:
            y = jax.nn.relu(self.norm1(self.conv1(x)))
            y, state = self.norm2(self.conv2(y), state)
            return jax.nn.relu(y + (x if self.short is None else self.short(x))), state

    class ResNet(eqx.Module):
        stem: eqx.nn.Conv2d
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 10)
            widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
            self.stem = eqx.nn.Conv2d(3, 64, 7, 2, 3, key=keys[0])
            self.blocks = [Block(a, b, k) for a, b, k in zip(widths[:-1], widths[1:], keys[1:9], strict=True)]
            self.head = eqx.nn.Linear(512, 1000, key=keys[9])

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x = eqx.nn.MaxPool2d(3, 2, 1)(self.stem(x))
            for block in self.blocks:
                x, state = block(x, state)
            return self.head(jnp.mean(x, (1, 2))), state

    shapes, state = eqx.filter_eval_shape(eqx.nn.make_with_state(ResNet), key())
    params, static = eqx.partition(shapes, lambda x: isinstance(x, Abstract))

    def loss(params: Any, state: Any, image: jax.Array, label: jax.Array) -> Any:
        network = eqx.combine(params, static)
        logits, new = jax.vmap(network, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(image, state)
        return cross_entropy(logits, label), new

    return loss, (params, state, Abstract((32, 3, 224, 224), jnp.float32), Abstract((32,), jnp.int32))


# --- transformers (Flax models of Hugging Face, up to version 4) ---


@model("transformers", "GPT-2", "GPT2Config", "FlaxGPT2LMHeadModel", 50257, 1024)
@model("transformers", "BERT-Large", "BertConfig", "FlaxBertForMaskedLM", 30522, 512)
@model("transformers", "RoBERTa", "RobertaConfig", "FlaxRobertaForMaskedLM", 50265, 512)
@model("transformers", "Llama-7B", "LlamaConfig", "FlaxLlamaForCausalLM", 32000, 2048)
def hugging_face(config: str, name: str, vocabulary: int, length: int) -> Case:
    """Weights as a nested dictionary of an uninitialized model."""
    import transformers  # pyright: ignore[reportMissingImports]

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    settings = getattr(transformers, config)(vocab_size=vocabulary, **(large if name.startswith("FlaxBert") else {}))
    network = getattr(transformers, name)(settings, _do_init=False, input_shape=(1, 8))
    params = jax.eval_shape(lambda k: network.init_weights(k, (1, 8)), key())

    def loss(params: Any, x: jax.Array, labels: jax.Array, seed: jax.Array) -> jax.Array:
        return cross_entropy(network(x, params=params, dropout_rng=seed, train=True).logits, labels)

    return loss, (params, tokens(length), tokens(length), key())


# --- jraph ---


@model("jraph", "graph network")
def graph_network() -> Case:
    """No batch: nodes and edges, gathered and summed by segments."""
    import jraph  # pyright: ignore[reportMissingImports]

    nodes, edges, width, layers = 10000, 50000, 128, 5

    def dense(p: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ p["w"] + p["b"])

    def apply(params: Any, graph: Any) -> Any:
        for p in params:
            step = jraph.GraphNetwork(
                update_edge_fn=lambda e, s, r, g, p=p: dense(p["edge"], jnp.concatenate([e, s, r], -1)),
                update_node_fn=lambda n, s, r, g, p=p: dense(p["node"], jnp.concatenate([n, s, r], -1)),
            )
            graph = step(graph)
        return graph

    def weights(inputs: int) -> Any:
        return {"w": Abstract((inputs, width), jnp.float32), "b": Abstract((width,), jnp.float32)}

    params = [{"edge": weights(3 * width), "node": weights(3 * width)} for _ in range(layers)]
    f, i = jnp.float32, jnp.int32
    graph = jraph.GraphsTuple(
        nodes=Abstract((nodes, width), f), edges=Abstract((edges, width), f), senders=Abstract((edges,), i),
        receivers=Abstract((edges,), i), globals=None, n_node=Abstract((1,), i), n_edge=Abstract((1,), i),
    )  # fmt: skip

    def loss(params: Any, graph: Any, target: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(apply(params, graph).nodes - target))

    return loss, (params, graph, Abstract((nodes, width), f))


# --- Equimo (vision models on Equinox) ---


@model("equimo", "ViT-S/16")
def equimo_vit() -> Case:
    import equimo.models as models  # pyright: ignore[reportMissingImports]
    import equinox as eqx

    def make(k: Any) -> Any:
        return models.VisionTransformer(
            img_size=224, in_channels=3, dim=384, patch_size=16, num_heads=[6], depths=[12], num_classes=1000, key=k
        )

    params, static = eqx.partition(eqx.filter_eval_shape(make, key()), lambda x: isinstance(x, Abstract))

    def loss(params: Any, image: jax.Array, label: jax.Array, seed: jax.Array) -> jax.Array:
        network = eqx.combine(params, static)
        keys = jax.random.split(seed, image.shape[0])
        return cross_entropy(jax.vmap(lambda x, k: network(x, k))(image, keys), label)

    return loss, (params, Abstract((32, 3, 224, 224), jnp.float32), Abstract((32,), jnp.int32), key())


# --- e3nn-jax ---


@model("e3nn-jax", "equivariant tensor products")
def equivariant() -> Case:
    """Spherical harmonics and Clebsch-Gordan products: many small contractions over closed-over tables."""
    import e3nn_jax as e3nn  # pyright: ignore[reportMissingImports]

    inside = e3nn.Irreps("32x0e + 32x1o + 16x2e")
    edges, nodes = 4096, 512

    def loss(params: Any, x: jax.Array, positions: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        features = e3nn.IrrepsArray(inside, x)
        for p in params:
            offsets = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", offsets, True)
            messages = e3nn.tensor_product(features[senders], harmonics, filter_ir_out=["0e", "1o", "2e"])
            gathered = e3nn.scatter_sum(messages, dst=receivers, output_size=nodes)
            linear = e3nn.FunctionalLinear(gathered.irreps, inside)
            features = jax.vmap(lambda row, linear=linear, p=p: linear(p, row))(gathered)
        return jnp.mean(jnp.square(features.array))

    harmonics = e3nn.Irreps("0e + 1o + 2e")
    wide = e3nn.tensor_product(inside, harmonics, filter_ir_out=["0e", "1o", "2e"])
    linear = e3nn.FunctionalLinear(wide, inside)
    weights = [Abstract(i.path_shape, jnp.float32) for i in linear.instructions]
    f, i32 = jnp.float32, jnp.int32
    arguments = (
        [weights] * 2, Abstract((nodes, inside.dim), f), Abstract((nodes, 3), f), Abstract((edges,), i32), Abstract((edges,), i32)
    )  # fmt: skip
    return loss, arguments


# --- distrax ---


@model("distrax", "masked coupling flow")
def normalizing_flow() -> Case:
    import distrax  # pyright: ignore[reportMissingImports]

    width, layers, hidden = 64, 8, 256

    def conditioner(p: Any) -> Callable[[jax.Array], Any]:
        def net(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ p["a"]) @ p["b"]

        return net

    def loss(params: Any, x: jax.Array) -> jax.Array:
        flow = distrax.Chain([
            distrax.MaskedCoupling(
                jnp.arange(width) % 2 == k % 2, conditioner(p),
                lambda q: distrax.ScalarAffine(q[..., :width], log_scale=q[..., width:]),
            )
            for k, p in enumerate(params)
        ])  # fmt: skip
        base = distrax.MultivariateNormalDiag(jnp.zeros(width), jnp.ones(width))
        return -jnp.mean(distrax.Transformed(base, flow).log_prob(x))

    one = {"a": Abstract((width, hidden), jnp.float32), "b": Abstract((hidden, 2 * width), jnp.float32)}
    return loss, ([one] * layers, Abstract((512, width), jnp.float32))
