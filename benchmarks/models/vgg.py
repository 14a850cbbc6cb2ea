"""VGG-16 (Simonyan and Zisserman 2015, configuration D): 138,357,544 parameters. Dropout is left out."""

from .layers import Layer, conv, dense, flatten, image_classifier, max_pool, relu, serial
from .model import Model

STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
"""Convolutions of a stage, and their channels in multiples of the first stage's."""


def vgg16(*, batch: int = 64, image: int = 224, channels: int = 64, width: int = 4096, classes: int = 1000) -> Model:
    maps = serial(*(_stage(count, channels * wider) for count, wider in STAGES))
    network = serial(maps, flatten, dense(width), relu, dense(width), relu, dense(classes))
    return image_classifier(network, batch, (3, image, image), classes)


def _stage(convolutions: int, channels: int) -> Layer:
    convs = (layer for _ in range(convolutions) for layer in (conv(channels, 3, padding=1), relu))
    return serial(*convs, max_pool(2, 2))
