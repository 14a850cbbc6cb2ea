"""Residual networks: ResNet (He et al. 2016), ResNeXt (Xie et al. 2017), Wide ResNet (Zagoruyko and Komodakis 2016)."""

from .layers import (
    Layer,
    add,
    batch_norm,
    conv,
    dense,
    identity,
    image_classifier,
    image_mean,
    max_pool,
    recomputed,
    relu,
    serial,
)
from .model import Model


def resnet(
    *,
    blocks: tuple[int, ...] = (3, 4, 6, 3),
    base: int = 64,
    groups: int = 1,
    group_width: int = 64,
    batch: int = 64,
    image: int = 224,
    classes: int = 1000,
    remat: bool = False,
) -> Model:
    """Bottleneck blocks, the stride on their 3×3 convolution; `remat` keeps only their inputs for the backward pass.

    Stage i puts out 4·base·2^i channels, and its 3×3 convolution has groups·(group_width·2^i·base/64) of them.
    """
    layers = [_normed(base, 7, stride=2, padding=3), relu, max_pool(3, 2, 1)]
    channels = base
    for stage, count in enumerate(blocks):
        inner = groups * (group_width * base // 64 << stage)
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layer = _bottleneck(channels, inner, 4 * base << stage, stride, groups)
            layers.append(recomputed(layer) if remat else layer)
            channels = 4 * base << stage
    network = serial(*layers, image_mean, dense(classes))
    return image_classifier(network, batch, (3, image, image), classes)


def resnext50_unity(
    *, blocks: tuple[int, ...] = (3, 4, 6, 3), base: int = 128, groups: int = 32, batch: int = 16, image: int = 224
) -> Model:
    """Unity's released example: ResNeXt-50's convolutions alone, without batch norm and without residuals."""
    layers = [conv(base // 2, 7, stride=2, padding=3), relu, max_pool(3, 2, 1)]
    for stage, count in enumerate(blocks):
        for block in range(count):
            width, stride = base << stage, 2 if stage > 0 and block == 0 else 1
            grouped = conv(width, 3, stride, 1, groups)
            layers += [conv(width, 1), relu, grouped, relu, conv(2 * width, 1)]
    network = serial(*layers, relu, image_mean, dense(1000))
    return image_classifier(network, batch, (3, image, image), classes=1000)


def _bottleneck(channels: int, inner: int, outer: int, stride: int, groups: int) -> Layer:
    middle = _normed(inner, 3, stride, 1, groups)
    main = serial(_normed(inner, 1), relu, middle, relu, _normed(outer, 1))
    shortcut = identity if channels == outer and stride == 1 else _normed(outer, 1, stride)
    return serial(add(main, shortcut), relu)


def _normed(width: int, window: int, stride: int = 1, padding: int = 0, groups: int = 1) -> Layer:
    return serial(conv(width, window, stride, padding, groups, bias=False), batch_norm())
