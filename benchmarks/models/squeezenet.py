"""SqueezeNet 1.1 (Iandola et al. 2016): 1,235,496 parameters."""

from .layers import Layer, concat, conv, image_classifier, image_mean, max_pool, relu, serial
from .model import Model


def squeezenet(*, batch: int = 64, image: int = 224, classes: int = 1000) -> Model:
    """A stem, eight fire modules and a convolution to the classes; no dropout."""
    network = serial(
        *(conv(64, 3, 2), relu, max_pool(3, 2)),
        *(fire_module(16, 64), fire_module(16, 64), max_pool(3, 2)),
        *(fire_module(32, 128), fire_module(32, 128), max_pool(3, 2)),
        *(fire_module(48, 192), fire_module(48, 192), fire_module(64, 256), fire_module(64, 256)),
        *(conv(classes, 1), relu, image_mean),
    )
    return image_classifier(network, batch, (3, image, image), classes)


def fire_module(squeezed: int, expanded: int) -> Layer:
    """Squeeze to few channels, then expand by windows of 1 and of 3, beside each other."""
    return serial(
        conv(squeezed, 1),
        relu,
        concat(serial(conv(expanded, 1), relu), serial(conv(expanded, 3, padding=1), relu)),
    )
