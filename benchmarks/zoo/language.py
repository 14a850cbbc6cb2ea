"""Language models."""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.zoo.entry import Case, Pick, cross_entropy, entry, integers, key, normal


def _tunix(model: Any, config: Any, pick: Pick) -> Case:
    """The next-token loss of a decoder of tunix, on packed tokens."""
    from flax import nnx

    def build() -> Any:
        return model(config, rngs=nnx.Rngs(0))

    graph = nnx.split(nnx.eval_shape(build))[0]
    batch, length = pick(64, 8), pick(1024, 16)

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (*tokens.shape, length))
        logits, _ = nnx.merge(graph, state)(tokens, positions, None, mask)
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return loss, lambda: (nnx.split(build())[1], integers(config.vocab_size, batch, length))


@entry("google-tunix", "Qwen3-0.6B")
def qwen3(pick: Pick) -> Case:
    from tunix.models.qwen3 import model

    tiny = model.ModelConfig(2, 64, 32, 64, 4, 8, 2, 10000, 1e-6)
    return _tunix(model.Qwen3, pick(model.ModelConfig.qwen3_0p6b(), tiny), pick)


@entry("google-tunix", "Qwen3 mixture of experts, 4 layers of 30B-A3B")
def qwen3_experts(pick: Pick) -> Case:
    from tunix.models.qwen3 import model

    tiny = model.ModelConfig(2, 64, 32, 64, 4, 8, 2, 10000, 1e-6, num_experts=4, num_experts_per_tok=2)
    return _tunix(model.Qwen3, pick(replace(model.ModelConfig.qwen3_30b_a3b(), num_layers=4), tiny), pick)


@entry("google-tunix", "Llama-3.2-1B, DPO")
def llama3_dpo(pick: Pick) -> Case:
    """Direct preference optimization: pairs of answers, log-probabilities of a reference model."""
    from flax import nnx
    from tunix.models.llama3 import model
    from tunix.sft.dpo.dpo_trainer import TrainExample, dpo_loss_fn

    tiny = model.ModelConfig(2, 64, 32, 64, 4, 8, 2, 10000, 1e-6)
    config = pick(model.ModelConfig.llama3p2_1b(), tiny)
    graph = nnx.split(nnx.eval_shape(lambda: model.Llama3(config, rngs=nnx.Rngs(0))))[0]
    batch, length = pick(64, 8), pick(512, 16)

    def loss(state: Any, tokens: jax.Array, reference: jax.Array) -> Any:
        mask = jnp.ones(tokens.shape, bool)
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (*tokens.shape, length))
        example = TrainExample(
            input_ids=tokens,
            positions=jnp.broadcast_to(jnp.arange(length), tokens.shape),
            attention_mask=causal,
            ref_chosen_logps=reference[0],
            ref_rejected_logps=reference[1],
            completion_mask=mask[:, length // 2 :],
            logits_to_keep=length // 2,
        )
        return dpo_loss_fn(nnx.merge(graph, state), example)

    def arguments() -> tuple[Any, ...]:
        state = nnx.split(model.Llama3(config, rngs=nnx.Rngs(0)))[1]
        return state, integers(config.vocab_size, batch, length), normal(2, batch // 2)

    return loss, arguments


@entry("keras-hub", "BERT base, masked language model")
def keras_bert(pick: Pick) -> Case:
    import keras
    import keras_hub

    sizes = pick((30522, 12, 12, 768, 3072, 512), (64, 2, 2, 32, 64, 16))
    backbone = keras_hub.models.BertBackbone(*sizes[:5], max_sequence_length=sizes[5], dropout=0.0)
    network = keras_hub.models.BertMaskedLM(backbone, preprocessor=None)
    batch, length, masked = pick(256, 8), sizes[5], pick(80, 4)
    weights, rest = ([v.value for v in vs] for vs in (network.trainable_variables, network.non_trainable_variables))

    def loss(weights: Any, rest: Any, tokens: jax.Array, places: jax.Array, labels: jax.Array) -> Any:
        inputs = {
            "token_ids": tokens,
            "segment_ids": jnp.zeros_like(tokens),
            "padding_mask": jnp.ones_like(tokens),
            "mask_positions": places,
        }
        logits, state = network.stateless_call(weights, rest, inputs, training=True)
        losses: Any = keras.losses.sparse_categorical_crossentropy(labels, logits)
        return jnp.mean(losses), state

    def arguments() -> tuple[Any, ...]:
        tokens, places = integers(sizes[0], batch, length), integers(length, batch, masked)
        return weights, rest, tokens, places, integers(sizes[0], batch, masked)

    return loss, arguments


@entry("qwix", "quantization-aware training of a Linen decoder layer")
def qwix_training(pick: Pick) -> Case:
    import flax.linen as nn
    import qwix

    jax.config.update("jax_enable_x64", pick(False, True))  # sums in another order then round no element to another integer
    width, heads, batch, length = pick(2048, 32), pick(16, 4), pick(64, 8), pick(1024, 16)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(heads)(y, y)
            return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))

    # qwix' default scale makes the largest element of every channel 127.5, which the last bit of a sum rounds up or down.
    scale = dict.fromkeys(("weight_calibration_method", "act_calibration_method", "bwd_calibration_method"), "absmax,1.01")
    rules = [qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", **scale)]
    network = qwix.quantize_model(Layer(), qwix.QtProvider(rules))

    def loss(variables: Any, x: jax.Array, target: jax.Array) -> Any:
        return jnp.mean(jnp.square(network.apply(variables, x) - target))

    def arguments() -> tuple[Any, ...]:
        x = normal(batch, length, width)
        return network.init(key(), x), x, normal(batch, length, width, seed=3)

    return loss, arguments


@entry("marin-haliax", "decoder layers with named axes, stacked")
def haliax_layers(pick: Pick) -> Case:
    import equinox as eqx
    import haliax as hax
    import haliax.nn as hnn

    batch, length = hax.Axis("batch", pick(64, 8)), hax.Axis("position", pick(1024, 16))
    embed, mlp = hax.Axis("embed", pick(1024, 32)), hax.Axis("mlp", pick(4096, 64))
    heads, size = hax.Axis("heads", pick(16, 4)), hax.Axis("size", pick(64, 8))
    layers, keys = hax.Axis("layers", pick(12, 2)), length.alias("key_position")

    class Layer(eqx.Module):
        norm: hnn.LayerNorm
        qkv: hnn.Linear
        out: hnn.Linear
        mlp: hnn.MLP

        @staticmethod
        def init(*, key: Any) -> Layer:
            a, b, c = jax.random.split(key, 3)
            return Layer(
                hnn.LayerNorm.init(embed),
                hnn.Linear.init(embed, (hax.Axis("qkv", 3), heads, size), key=a),
                hnn.Linear.init((heads, size), embed, key=b),
                hnn.MLP.init(embed, embed, mlp.size, 1, key=c),
            )

        def __call__(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm(x)).unbind("qkv")
            k, v = (t.rename({"position": "key_position"}) for t in (k, v))
            mask = hnn.attention.causal_mask(length, keys)
            x = x + self.out(hnn.attention.dot_product_attention(keys, size, q, k, v, mask))
            return x + self.mlp(x)

    def build() -> Any:
        return hnn.Stacked.init(layers, Layer)(key=jax.random.split(key(), layers.size))

    def loss(network: Any, x: Any, target: Any) -> Any:
        return hax.mean(hax.square(network.fold(x) - target)).scalar()

    def arguments() -> tuple[Any, ...]:
        return build(), hax.random.normal(key(1), (batch, length, embed)), hax.random.normal(key(2), (batch, length, embed))

    return loss, arguments
