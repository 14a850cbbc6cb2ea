"""LeNet-5 (LeCun et al. 1998): 61,706 parameters with every map of the first pool joined to every one of the second."""

from .layers import conv, dense, flatten, image_classifier, max_pool, relu, serial
from .model import Model


def lenet5(*, batch: int = 32, image: int = 32, channels: int = 1, classes: int = 10) -> Model:
    maps = [conv(6, 5), relu, max_pool(2, 2), conv(16, 5), relu, max_pool(2, 2), flatten]
    network = serial(*maps, dense(120), relu, dense(84), relu, dense(classes))
    return image_classifier(network, batch, (channels, image, image), classes)
