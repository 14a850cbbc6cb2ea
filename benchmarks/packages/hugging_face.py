"""transformers: Flax models of Hugging Face, up to version 4."""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.packages.package import Case, cross_entropy, key, model, tokens


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
