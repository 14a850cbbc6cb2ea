"""Inception-v3 (Szegedy et al. 2016) without its auxiliary head: 23,834,568 parameters."""

from collections.abc import Callable

from .layers import (
    Layer,
    Pair,
    batch_norm,
    concat,
    conv,
    dense,
    image_classifier,
    image_mean,
    max_pool,
    mean_pool,
    relu,
    serial,
)
from .model import Model

Unit = Callable[..., Layer]
"""A convolution as the network uses it, by width, window, stride and padding: see `normed` and `biased`."""


def normed(width: int, window: int | Pair, stride: int = 1, padding: int | Pair = 0) -> Layer:
    return serial(conv(width, window, stride, padding, bias=False), batch_norm(1e-3), relu)


def biased(width: int, window: int | Pair, stride: int = 1, padding: int | Pair = 0) -> Layer:
    """Without batch norm, as in Unity's released example."""
    return serial(conv(width, window, stride, padding), relu)


def inception_v3(*, unit: Unit = normed, batch: int = 64, image: int = 299, classes: int = 1000, blocks: int = 11) -> Model:
    """`blocks` keeps only the first so many of the eleven mixed blocks."""
    stem = [unit(32, 3, 2), unit(32, 3), unit(64, 3, 1, 1), max_pool(3, 2), unit(80, 1), unit(192, 3), max_pool(3, 2)]
    mixed = [
        *(_mixed_35(unit, pooled) for pooled in (32, 64, 64)),
        _to_17(unit),
        *(_mixed_17(unit, narrow) for narrow in (128, 160, 160, 192)),
        _to_8(unit),
        *(_mixed_8(unit) for _ in range(2)),
    ]
    features = serial(*stem, *mixed[:blocks])
    network = serial(features, image_mean, dense(classes))
    return image_classifier(network, batch, (3, image, image), classes)


def _mixed_35(unit: Unit, pooled: int) -> Layer:
    """On 35×35 maps: windows of 1, 5, twice 3, and a pool."""
    return concat(
        unit(64, 1),
        serial(unit(48, 1), unit(64, 5, 1, 2)),
        serial(unit(64, 1), unit(96, 3, 1, 1), unit(96, 3, 1, 1)),
        serial(mean_pool(3, 1, 1), unit(pooled, 1)),
    )


def _to_17(unit: Unit) -> Layer:
    deep = serial(unit(64, 1), unit(96, 3, 1, 1), unit(96, 3, 2))
    return concat(unit(384, 3, 2), deep, max_pool(3, 2))


def _mixed_17(unit: Unit, narrow: int) -> Layer:
    """On 17×17 maps: windows of 7 taken as 1×7 and 7×1."""

    def row(width: int) -> Layer:
        return unit(width, (1, 7), 1, (0, 3))

    def column(width: int) -> Layer:
        return unit(width, (7, 1), 1, (3, 0))

    return concat(
        unit(192, 1),
        serial(unit(narrow, 1), row(narrow), column(192)),
        serial(unit(narrow, 1), column(narrow), row(narrow), column(narrow), row(192)),
        serial(mean_pool(3, 1, 1), unit(192, 1)),
    )


def _to_8(unit: Unit) -> Layer:
    seven = serial(unit(192, 1), unit(192, (1, 7), 1, (0, 3)), unit(192, (7, 1), 1, (3, 0)), unit(192, 3, 2))
    return concat(serial(unit(192, 1), unit(320, 3, 2)), seven, max_pool(3, 2))


def _mixed_8(unit: Unit) -> Layer:
    """On 8×8 maps: windows of 3 taken as 1×3 beside 3×1."""

    def split() -> Layer:
        return concat(unit(384, (1, 3), 1, (0, 1)), unit(384, (3, 1), 1, (1, 0)))

    return concat(
        unit(320, 1),
        serial(unit(384, 1), split()),
        serial(unit(448, 1), unit(384, 3, 1, 1), split()),
        serial(mean_pool(3, 1, 1), unit(192, 1)),
    )
