"""Language models."""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from benchmarks.zoo.entry import Case, Pick, cross_entropy, entry, integers, keras_case, key, normal


def _tunix(model: Any, config: Any, pick: Pick) -> Case:
    """The next-token loss of a decoder of tunix, on packed tokens."""
    from flax import nnx

    def build() -> Any:
        return model(config, rngs=nnx.Rngs(0))

    graph = nnx.split(nnx.eval_shape(build))[0]
    batch, length = pick(64, 8), pick(1024, 16)
    words = config.num_embed if hasattr(config, "num_embed") else config.vocab_size  # Gemma's name, and the others'

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (*tokens.shape, length))
        logits, _ = nnx.merge(graph, state)(tokens, positions, None, mask)
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return loss, lambda: (nnx.split(build())[1], integers(words, batch, length))


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


@entry("google-tunix", "Gemma-3-1B")
def gemma3(pick: Pick) -> Case:
    from tunix.models.gemma3 import model

    sizes = {"num_layers": 2, "num_embed": 64, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8, "num_kv_heads": 1}
    config: Any = pick(model.ModelConfig.gemma3_1b_pt(), model.ModelConfig(**sizes, sliding_window_size=8, param_dtype=jnp.float32))
    return _tunix(model.Gemma3, config, pick)


@entry("google-tunix", "Qwen2.5-0.5B, GRPO")
def qwen2_grpo(pick: Pick) -> Case:
    """Group relative policy optimization: completions with advantages, log-probabilities of a reference and an older policy."""
    from flax import nnx
    from tunix.models.qwen2 import model
    from tunix.rl import algo_core
    from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample

    config = pick(model.ModelConfig.qwen2p5_0p5b(), model.ModelConfig(2, 64, 32, 64, 4, 8, 2, 10000, 1e-6))
    graph = nnx.split(nnx.eval_shape(lambda: model.Qwen2(config, rngs=nnx.Rngs(0))))[0]
    batch, length, settings = pick(128, 8), pick(512, 8), cast(Any, GRPOConfig())
    settings.temperature = 1.0  # as its learner does

    def loss(state: Any, prompt: jax.Array, completion: jax.Array, advantages: jax.Array, logps: jax.Array) -> Any:
        ones = jnp.ones(prompt.shape, jnp.int32)
        example = TrainExample(prompt, ones, completion, ones, advantages, logps[0], logps[1])
        return algo_core.grpo_loss_fn(nnx.merge(graph, state), example, settings, 0, 1)

    def arguments() -> tuple[Any, ...]:
        state = nnx.split(model.Qwen2(config, rngs=nnx.Rngs(0)))[1]
        prompt, completion = (integers(config.vocab_size, batch, length, seed=seed) for seed in (2, 3))
        return state, prompt, completion, normal(batch), normal(2, batch, length, seed=4) - 4

    return loss, arguments


@entry("keras-hub", "GPT-2 base")
def keras_gpt2(pick: Pick) -> Case:
    import keras_hub

    sizes, batch, length = pick((50257, 12, 12, 768, 3072), (64, 2, 4, 32, 64)), pick(64, 8), pick(1024, 16)
    network = keras_hub.models.GPT2CausalLM(
        keras_hub.models.GPT2Backbone(*sizes, dropout=0.0, max_sequence_length=length), preprocessor=None
    )

    def inputs() -> Any:
        return {"token_ids": integers(sizes[0], batch, length), "padding_mask": jnp.ones((batch, length), jnp.int32)}

    return keras_case(network, inputs, lambda: integers(sizes[0], batch, length, seed=3))


@entry("keras-hub", "T5 base, encoder and decoder")
def keras_t5(pick: Pick) -> Case:
    import keras_hub

    sizes, batch, length = pick((32128, 12, 12, 768, 2048), (64, 2, 4, 32, 64)), pick(128, 8), pick(512, 16)
    backbone = keras_hub.models.T5Backbone(*sizes, dropout=0.0)
    weights, rest = ([v.value for v in vs] for vs in (backbone.trainable_variables, backbone.non_trainable_variables))

    def loss(weights: Any, rest: Any, source: jax.Array, target: jax.Array) -> Any:
        mask = jnp.ones(source.shape, jnp.int32)
        inputs = {f"{part}_padding_mask": mask for part in ("encoder", "decoder")}
        inputs |= {"encoder_token_ids": source, "decoder_token_ids": target}
        outputs, state = backbone.stateless_call(weights, rest, inputs, training=True)
        logits = outputs["decoder_sequence_output"] @ weights[0].T / sizes[3] ** 0.5  # tied to the embedding, as T5 does
        return cross_entropy(logits[:, :-1], target[:, 1:]), state

    return loss, lambda: (weights, rest, *(integers(sizes[0], batch, length, seed=seed) for seed in (2, 3)))


@entry("dm-haiku", "Transformer (its example), 12 layers of width 768")
def haiku_transformer(pick: Pick) -> Case:
    import haiku as hk
    from examples.transformer import model

    words, batch, length = pick(32768, 64), pick(128, 8), pick(1024, 16)

    def forward(tokens: jax.Array) -> jax.Array:
        stack = model.Transformer(pick(12, 4), pick(12, 2), pick(64, 8), pick(0.1, 0.1))
        return model.LanguageModel(stack, model_size=pick(768, 32), vocab_size=words, pad_token=0)(tokens)

    network = hk.transform(forward)

    def loss(weights: Any, seed: jax.Array, tokens: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(network.apply(weights, seed, tokens)[:, :-1])
        likelihood = jnp.sum(jax.nn.one_hot(tokens[:, 1:], words) * log_probs, axis=-1)
        mask = jnp.not_equal(tokens[:, :-1], 0)
        return -jnp.sum(likelihood * mask) / jnp.sum(mask)

    def arguments() -> tuple[Any, ...]:
        tokens = integers(words, batch, length)
        return network.init(key(), tokens), key(1), tokens

    return loss, arguments


@entry("optax", "CTC loss of a bidirectional LSTM (speech recognition)")
def ctc(pick: Pick) -> Case:
    import optax
    from flax import nnx

    batch, frames, bands, width, labels, length = pick((256, 400, 80, 1024, 32, 80), (8, 8, 8, 16, 8, 4))

    class Recognizer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            forward, backward = (nnx.RNN(nnx.OptimizedLSTMCell(bands, width, rngs=rngs)) for _ in range(2))
            self.lstm, self.out = nnx.Bidirectional(forward, backward), nnx.Linear(2 * width, labels, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            hidden: Any = self.lstm(x)
            return self.out(hidden)

    graph = nnx.split(nnx.eval_shape(lambda: Recognizer(nnx.Rngs(0))))[0]

    def loss(state: Any, sound: jax.Array, text: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, state)(sound)
        return jnp.mean(optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), text, jnp.zeros(text.shape)))

    def arguments() -> tuple[Any, ...]:
        state = nnx.split(Recognizer(nnx.Rngs(0)))[1]
        return state, normal(batch, frames, bands), 1 + integers(labels - 1, batch, length)

    return loss, arguments


@entry("penzai", "Llama-like decoder of 1B")
def penzai_llama(pick: Pick) -> Case:
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llama

    sizes = {
        "num_kv_heads": pick(8, 1),
        "query_head_multiplier": pick(4, 2),
        "embedding_dim": pick(2048, 32),
        "projection_dim": pick(64, 8),
        "mlp_hidden_dim": pick(8192, 64),
        "num_decoder_blocks": pick(16, 2),
        "vocab_size": pick(128256, 64),
    }
    config = llama.LlamalikeTransformerConfig(**sizes, mlp_variant="swiglu", tie_embedder_and_logits=True)

    def build() -> Any:
        return pz.unbind_params(llama.build_llamalike_transformer(config, key()), freeze=True)[::-1]

    def loss(params: Any, unbound: Any, tokens: jax.Array) -> jax.Array:
        named = pz.nx.wrap(tokens, "batch", "seq")
        logits = pz.bind_variables(unbound, params)(named).unwrap("batch", "seq", "vocabulary")
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return loss, lambda: (*build(), integers(config.vocab_size, pick(64, 8), pick(1024, 16)))


def _maxtext(pick: Pick, name: str, **options: Any) -> Case:
    """The next-token loss of a model of MaxText, by the name of its configuration, with layers in a loop."""
    from pathlib import Path

    import flax.linen as nn
    import maxtext
    import numpy as np
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    small = {
        "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "base_mlp_dim": 64, "base_num_decoder_layers": 2,
        "base_moe_mlp_dim": 64, "head_dim": 8, "vocab_size": 64, "dtype": "float32", "override_model_config": True,
    }  # fmt: skip
    batch, length = pick(64, 8), pick(2048, 16)
    sizes = {"max_target_length": length, "per_device_batch_size": batch, **pick({}, small)}
    apart = {
        "run_name": "zoo",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "log_config": False,
    }
    base = str(Path(str(maxtext.__file__)).parent / "configs" / "base.yml")
    config: Any = pyconfig.initialize(["", base], model_name=name, attention="dot_product", **options, **sizes, **apart)
    device = np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes))
    mesh = jax.sharding.Mesh(device, config.mesh_axes)

    def build() -> Any:
        with nn.logical_axis_rules(config.logical_axis_rules), mesh:
            return nnx.split(model_creation_utils.create_model(config, mesh, rngs=nnx.Rngs(0)))

    graph = jax.eval_shape(build)[0]

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        logits = nnx.merge(graph, state)(tokens, positions, jnp.ones_like(tokens), enable_dropout=False)
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return loss, lambda: (build()[1], integers(config.vocab_size, batch, length))


@entry("maxtext", "Llama-3.1-8B")
def maxtext_llama(pick: Pick) -> Case:
    return _maxtext(pick, "llama3.1-8b")


@entry("maxtext", "Mixtral-8x7B, dense experts")
def maxtext_mixtral(pick: Pick) -> Case:
    return _maxtext(pick, "mixtral-8x7b", sparse_matmul=False, megablox=False)


@entry("maxtext", "Gemma-3-4B")
def maxtext_gemma(pick: Pick) -> Case:
    return _maxtext(pick, "gemma3-4b")


@entry("gemma", "Gemma-3-270M")
def gemma_linen(pick: Pick) -> Case:
    """The next-token loss of the Linen model of Google DeepMind's own library."""
    from gemma import gm

    config = gm.nn.Gemma3_270M.config
    sizes = {"num_embed": 64, "embed_dim": 16, "hidden_dim": 32, "head_dim": 8, "sliding_window_size": 4}
    small = replace(config, attention_types=config.attention_types[4:6], **sizes)
    network = gm.nn.Gemma3_270M(config=pick(config, small), dtype=pick(jnp.bfloat16, jnp.float32))
    batch, length = pick(64, 8), pick(1024, 16)

    def loss(weights: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = network.apply(weights, tokens).logits
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return loss, lambda: (network.init(key(), integers(64, 1, length)), integers(pick(config.num_embed, 64), batch, length))
