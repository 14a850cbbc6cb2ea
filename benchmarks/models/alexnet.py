"""AlexNet as one tower (Krizhevsky 2014): 61,100,840 parameters. Dropout is left out: losses must repeat."""

from .layers import conv, dense, flatten, image_classifier, max_pool, relu, serial
from .model import Model


def alexnet(*, batch: int = 256, image: int = 224, width: int = 4096, classes: int = 1000) -> Model:
    maps = serial(
        *(conv(64, 11, stride=4, padding=2), relu, max_pool(3, 2)),
        *(conv(192, 5, padding=2), relu, max_pool(3, 2)),
        *(conv(384, 3, padding=1), relu),
        *(conv(256, 3, padding=1), relu),
        *(conv(256, 3, padding=1), relu, max_pool(3, 2)),
    )
    network = serial(maps, flatten, dense(width), relu, dense(width), relu, dense(classes))
    return image_classifier(network, batch, (3, image, image), classes)
