"""Dense layers alone."""

import jax

from .layers import dense, relu, serial
from .losses import cross_entropy, squared_error
from .model import Model, Tree, f32, i32


def mlp(*, layers: int = 16, width: int = 8192, batch: int = 256) -> Model:
    """Square dense layers with relu between them (Unity, section 7: 16 of 8192), squared error to a target."""
    network = serial(*(layer for _ in range(layers - 1) for layer in (dense(width), relu)), dense(width))

    def loss(params: Tree, data: Tree) -> jax.Array:
        return squared_error(network.apply(params, data["x"]), data["y"])

    data = {"x": f32(batch, width), "y": f32(batch, width)}
    return Model("mlp", loss, network.params(data["x"]), data, below={"x": 0, "y": 0})


def two_towers(*, layers: int = 8, width: int = 8192, inputs: int = 1024, batch: int = 256) -> Model:
    """Unity's released example: two towers without biases over two inputs, added, and a softmax. 956 M parameters."""
    hidden = [layer for _ in range(layers - 1) for layer in (dense(width, bias=False), relu)]
    tower = serial(*hidden, dense(width, bias=False))

    def loss(params: Tree, data: Tree) -> jax.Array:
        logits = tower.apply(params["left"], data["left"]) + tower.apply(params["right"], data["right"])
        return cross_entropy(logits, data["label"])

    x = f32(batch, inputs)
    params = {"left": tower.params(x), "right": tower.params(x)}
    data = {"left": x, "right": x, "label": i32(batch)}
    return Model("mlp_unity", loss, params, data, below={"left": 0, "right": 0, "label": width})
