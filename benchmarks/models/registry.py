"""Every model by name: its builder, the sizes it is known by, and sizes at which it runs in a moment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .alexnet import alexnet
from .bert import attention_stack, bert
from .candle import candle_uno
from .dit import dit
from .gpt import gpt
from .inception import biased, inception_v3
from .lenet import lenet5
from .llama import llama
from .mamba import mamba2
from .mixtral import mixtral
from .mlp import mlp, two_towers
from .model import Model
from .recommenders import dlrm, dlrm_kaggle, xdl
from .recurrent import nmt, rnnlm, rnntc
from .resnet import resnet, resnext50_unity
from .rwkv import rwkv7
from .squeezenet import squeezenet
from .t5 import t5
from .unet import unet
from .unrolled import nmt_unrolled, rnnlm_unrolled, rnntc_unrolled
from .vgg import vgg16
from .vit import vit


@dataclass(frozen=True)
class _Entry:
    build: Callable[..., Model]
    tiny: Mapping[str, Any]
    sizes: Mapping[str, Any] = field(default_factory=dict)


_TINY_GPT = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq": 16, "batch": 8}
_TINY_RESNET = {"blocks": (1, 1), "base": 16, "image": 32, "batch": 8, "classes": 10}
_TINY_UNET = {"width": 32, "growth": (1, 2), "blocks": 1, "attended": (4,), "image": 8, "batch": 4}
_TINY_INCEPTION = {"image": 75, "batch": 2, "blocks": 5, "classes": 10}
_TINY_RNN = {"hidden": 16, "vocab": 61, "steps": 8, "batch": 8}
_TINY_DLRM = {"tables": (40, 7, 33), "width": 8, "batch": 16}
_TINY_MAMBA = {"hidden": 32, "state": 8, "head": 8, "chunk": 4}
_TINY_LLAMA = {"kv_heads": 2, "feed_forward": 96}
_GPT3 = {"layers": 32, "hidden": 4096, "heads": 32, "seq": 2048, "batch": 64}

_MODELS: Mapping[str, _Entry] = {
    "mlp": _Entry(mlp, {"layers": 3, "width": 32, "batch": 16}),
    "mlp_unity": _Entry(two_towers, {"layers": 3, "width": 32, "inputs": 16, "batch": 16}),
    "lenet5": _Entry(lenet5, {"batch": 8}),
    "alexnet": _Entry(alexnet, {"image": 63, "width": 64, "batch": 4, "classes": 10}),
    "vgg16": _Entry(vgg16, {"image": 32, "channels": 8, "width": 32, "batch": 4, "classes": 10}),
    "squeezenet": _Entry(squeezenet, {"image": 63, "batch": 2, "classes": 10}),
    "inception_v3": _Entry(inception_v3, _TINY_INCEPTION),
    "inception_v3_unity": _Entry(inception_v3, {**_TINY_INCEPTION, "unit": biased}, {"unit": biased, "classes": 10}),
    "resnet50": _Entry(resnet, _TINY_RESNET),
    "resnet101": _Entry(resnet, _TINY_RESNET, {"blocks": (3, 4, 23, 3)}),
    "resnet200": _Entry(resnet, _TINY_RESNET, {"blocks": (3, 24, 36, 3)}),
    "resnext50": _Entry(resnet, {**_TINY_RESNET, "groups": 4}, {"groups": 32, "group_width": 4}),
    "resnext50_unity": _Entry(resnext50_unity, {"blocks": (1, 1), "base": 16, "groups": 4, "image": 32, "batch": 4}),
    "wide_resnet50": _Entry(resnet, _TINY_RESNET, {"group_width": 128}),
    # TensorOpt widens until the parameters take 7.3 GiB, by factors it does not give; these come to 7.5
    "wide_resnet_tensoropt": _Entry(resnet, _TINY_RESNET, {"blocks": (3, 4, 23, 3), "base": 256, "group_width": 128, "batch": 256}),
    "gpt2": _Entry(gpt, _TINY_GPT),
    "gpt2_padded": _Entry(gpt, {**_TINY_GPT, "vocab": 64}, {"vocab": 50304}),
    "gpt2_xl": _Entry(gpt, _TINY_GPT, {"layers": 48, "hidden": 1600, "heads": 25}),
    "gpt3_6.7b": _Entry(gpt, _TINY_GPT, _GPT3),
    "gpt3_6.7b_scan": _Entry(gpt, _TINY_GPT, {**_GPT3, "scan": True, "remat": True, "compute": "bfloat16"}),
    # TensorOpt gives 9.7 GiB of parameters and no sizes; these come to 9.8
    "transformer_tensoropt": _Entry(gpt, _TINY_GPT, {"hidden": 4096, "heads": 32, "seq": 256, "batch": 256}),
    "llama3_8b": _Entry(llama, {**_TINY_GPT, **_TINY_LLAMA}),
    "mixtral_8x7b": _Entry(mixtral, {**_TINY_GPT, **_TINY_LLAMA, "experts": 4, "group": 8}),
    "vit_large": _Entry(vit, {"layers": 2, "hidden": 32, "heads": 4, "image": 16, "patch": 4, "classes": 10, "batch": 8}),
    "bert_large": _Entry(bert, _TINY_GPT),
    "t5_large": _Entry(t5, {"layers": 2, "hidden": 32, "heads": 4, "feed_forward": 64, "vocab": 61, "seq": 16, "batch": 8}),
    "dit_xl": _Entry(dit, {"layers": 2, "hidden": 32, "heads": 4, "image": 8, "classes": 10, "batch": 8}),
    "unet_cifar": _Entry(unet, _TINY_UNET),
    # the levels of Stable Diffusion 1.5's, without the text that its attention reads, too, and with attention of one head
    "unet_latents": _Entry(
        unet,
        {**_TINY_UNET, "channels": 3},
        {"width": 320, "growth": (1, 2, 4, 4), "attended": (64, 32, 16), "image": 64, "channels": 4},
    ),
    "mamba2_1.3b": _Entry(mamba2, {**_TINY_MAMBA, "layers": 2, "vocab": 61, "seq": 16, "batch": 8}),
    "rwkv7_1.5b": _Entry(rwkv7, {"layers": 2, "hidden": 32, "head": 8, "rank": 4, "vocab": 61, "seq": 16, "batch": 8}),
    "bert_unity": _Entry(attention_stack, {"layers": 2, "hidden": 32, "heads": 4, "seq": 16, "batch": 8}),
    "dlrm": _Entry(dlrm, {**_TINY_DLRM, "bottom": (4, 16, 8), "top": (16, 2)}),
    "dlrm_summit": _Entry(
        dlrm,
        {**_TINY_DLRM, "bag": 3, "bottom": (16, 16, 16, 8), "top": (16, 16)},
        {"tables": (1_000_000,) * 8, "width": 256, "bottom": (1024,) * 9, "top": (1024,) * 5, "batch": 1024},
    ),
    "dlrm_kaggle": _Entry(dlrm_kaggle, {**_TINY_DLRM, "bottom": (13, 16, 8), "top": (16, 1)}),
    "xdl": _Entry(xdl, {**_TINY_DLRM, "top": (16, 2)}),
    "candle_uno": _Entry(
        candle_uno, {"cell": 9, "descriptors": 27, "fingerprints": 16, "width": 16, "tower_layers": 2, "batch": 8}
    ),
    "rnnlm": _Entry(rnnlm, _TINY_RNN),
    # TensorOpt gives 108 GiB of parameters and no sizes; these come to 107
    "rnn_tensoropt": _Entry(rnnlm, _TINY_RNN, {"layers": 4, "hidden": 29696, "batch": 256}),
    "rnntc": _Entry(rnntc, {**_TINY_RNN, "layers": 2}),
    "nmt": _Entry(nmt, _TINY_RNN),
    "rnnlm_unrolled": _Entry(rnnlm_unrolled, _TINY_RNN),
    "rnntc_unrolled": _Entry(rnntc_unrolled, {**_TINY_RNN, "layers": 2}),
    "nmt_unrolled": _Entry(nmt_unrolled, _TINY_RNN),
}


def names() -> tuple[str, ...]:
    return tuple(_MODELS)


def get(name: str, **sizes: Any) -> Model:
    """A model at the sizes it is known by, but for those that are given."""
    entry = _MODELS[name]
    return replace(entry.build(**{**entry.sizes, **sizes}), name=name)


def tiny(name: str, **sizes: Any) -> Model:
    """A model of the same structure, small enough to run on a laptop's processor."""
    entry = _MODELS[name]
    return replace(entry.build(**{**entry.sizes, **entry.tiny, **sizes}), name=name)
