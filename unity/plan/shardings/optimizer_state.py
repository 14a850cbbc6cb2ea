"""Descriptions of an optimizer's state, and its sizes: of optax's optimizers, of functions of the weights, or in a few words.

A leaf of the state is divided like the weight that it follows (`following_shardings`); every device stores the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.base.errors import OptionError
from unity.base.user_warnings import warn_user
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.types.parallel_type import Shape
from unity.plan.shardings.following_shardings import following, weights_of
from unity.search.cost.state_sizes import StateMemory, StateSizes

NOT_FOLLOWING = -1


@dataclass(frozen=True)
class OptimizerState:
    """A description of an optimizer's state: `unity.optimize(..., optimizer=unity.OptimizerState(2, master="float32"))`.

    Called with weights, or with `jax.ShapeDtypeStruct`s in their place, it returns a state's structure, whose leaves are
    `jax.ShapeDtypeStruct`s.

    Attributes:
        slots: the number of values for each weight: 2 for Adam, 1 for momentum, 0 for plain SGD.
        dtype: the type of these values. By default it is that of the master, or of a weight that has none.
        master: the type of the masters, such as "float32" for weights in bfloat16: copies that the optimizer updates and rounds to
            the weights. A weight whose type is as wide has no master. None by default: no weight has one.
        host: whether these values and the masters lie in the memory of the host until the update. False by default.
    """

    slots: int = 2
    dtype: str | None = None
    master: str | None = None
    host: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.slots, bool) or not isinstance(self.slots, int) or self.slots < 0:
            raise OptionError(f"slots={self.slots!r}: expected the number of values for each weight, such as 2 for Adam")
        if not isinstance(self.host, bool):
            raise OptionError(
                f"host={self.host!r}: expected True, for a state in the memory of the host, or False"
                " (docs: memory#state-on-the-host)"
            )
        for name, dtype in (("dtype", self.dtype), ("master", self.master)):
            try:
                is_number = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.number)
            except TypeError:
                is_number = False
            if not is_number:
                raise OptionError(f"{name}={dtype!r}: expected None or a type of numbers, such as 'float32' (docs: optax)")

    def __call__(self, weights: Any) -> Any:
        """Return the structure of the state of some weights."""

        def slot(weight: Any) -> jax.ShapeDtypeStruct:
            master = self._master_of(weight)
            own = weight.dtype if master is None else master.dtype
            return jax.ShapeDtypeStruct(weight.shape, own if self.dtype is None else jnp.dtype(self.dtype))

        slots = tuple(jax.tree.map(slot, weights) for _ in range(self.slots))
        return {"master": jax.tree.map(self._master_of, weights), "slots": slots}

    def _master_of(self, weight: Any) -> jax.ShapeDtypeStruct | None:
        """Return the master of a weight, or None if it has none."""
        if self.master is None or jnp.dtype(self.master).itemsize <= weight.dtype.itemsize:
            return None
        return jax.ShapeDtypeStruct(weight.shape, jnp.dtype(self.master))


@dataclass(frozen=True)
class SlotsByShape:
    """Values of an optimizer for each weight, by the weight's shape, where only shapes tell which weight a value follows.

    Attributes:
        by_shape: bytes for each byte of a weight of that shape.
        otherwise: the same for the other weights.
    """

    by_shape: Mapping[Shape, float]
    otherwise: float = 0


def state_sizes(optimizer: Any, slots: float, captured: Captured, args: Sequence[Any], argnums: int | Sequence[int]) -> StateSizes:
    """Return the sizes of an optimizer's state.

    Args:
        optimizer: an object with a method `init`, such as optax's; a function from weights to the state, or to its structure; or
            None for `slots` values for each weight, in the weights' type.
        slots: the number of values for each weight, without `optimizer`.
        captured: the function as captured.
        args: its arguments.
        argnums: the arguments that are weights. The optimizer gets several in the function's order, as `weights_of` numbers them.

    Raises:
        OptionError: the state of the weights cannot be computed.
    """
    if optimizer is None:
        return StateSizes(slots)
    names, structs = captured.paths, [node.tensors[0] for node in captured.graph.inputs]
    nbytes = {k: structs[k].nbytes for k in sorted(captured.differentiated) if structs[k].floating}
    if isinstance(optimizer, SlotsByShape):
        ratios = {k: optimizer.by_shape.get(structs[k].shape, optimizer.otherwise) for k in nbytes}
        return _sizes({names[k]: (nbytes[k], ratio) for k, ratio in ratios.items()}, 0)
    memory = StateMemory.HOST if isinstance(optimizer, OptimizerState) and optimizer.host else StateMemory.DEVICE
    weights = args[argnums] if isinstance(argnums, int) else tuple(args[k] for k in sorted(k % len(args) for k in argnums))
    state = _structure(optimizer, weights)
    shapes = [struct.shape for struct in structs]
    numbers = weights_of(jax.tree.unflatten(captured.in_tree, range(len(names))), shapes, captured.differentiated)
    itemsizes, whole = defaultdict[int, int](int), 0
    for leaf, k in zip(jax.tree.leaves(state), jax.tree.leaves(following(state, numbers, NOT_FOLLOWING)), strict=True):
        itemsizes[k] += leaf.dtype.itemsize if k in nbytes else 0
        whole += 0 if k in nbytes else leaf.dtype.itemsize * leaf.size
    sizes = _sizes({names[k]: (nbytes[k], itemsizes[k] / structs[k].itemsize) for k in nbytes}, whole)
    return replace(sizes, memory=memory)


def placed_state(state: StateSizes, machine: Machine, offload: bool) -> StateSizes:
    """Return the sizes of a state with the memory that it lies in on a machine. Warns if that has no link to such a memory.

    Args:
        state: the sizes.
        machine: the machine.
        offload: whether the search may put the state on the host.
    """
    if state.memory is StateMemory.HOST and machine.host is None:
        warn_user(
            f"optimizer=OptimizerState(host=True): the state stays on the device, since {machine.name} has no link to the memory of"
            " a host (docs: memory#state-on-the-host)"
        )
        return replace(state, memory=StateMemory.DEVICE)
    if offload and machine.host is None:
        warn_user(
            f"offload=True: nothing is offloaded, since {machine.name} has no link to the memory of a host"
            " (docs: memory#offloaded-values)"
        )
    may_move = offload and machine.host is not None and state.memory is StateMemory.DEVICE and bool(state.slots or state.others)
    return replace(state, memory=StateMemory.EITHER) if may_move else state


def _sizes(weights: Mapping[str, tuple[int, float]], whole: int) -> StateSizes:
    """Return the sizes of a state, from the bytes of every weight and the slots that it has."""
    bytes_with = defaultdict[float, int](int)
    for nbytes, slots in weights.values():
        bytes_with[slots] += nbytes
    most = max(bytes_with, key=lambda slots: bytes_with[slots], default=0)
    others = tuple((name, _plain(slots)) for name, (_, slots) in weights.items() if slots != most)
    return StateSizes(_plain(most), others, whole)


def _plain(slots: float) -> float:
    """Return an integer where a number is one, as it prints without a fraction."""
    return int(slots) if slots == int(slots) else slots


def _structure(optimizer: Any, weights: Any) -> Any:
    """Return the structure of an optimizer's state, with `jax.ShapeDtypeStruct`s as leaves. Nothing is computed."""
    init: Callable[[Any], Any] | None = getattr(optimizer, "init", None if not callable(optimizer) else optimizer)
    if not callable(init):
        raise OptionError(
            f"optimizer={optimizer!r}: expected an object with a method init, such as optax.adam(1e-3), a function from weights to"
            " the optimizer's state, or a unity.OptimizerState (docs: memory#optimizer-state)"
        )
    states = []

    def trace(weights: Any) -> None:
        states.append(jax.tree.map(_struct, init(weights)))

    try:
        jax.eval_shape(trace, jax.tree.map(_struct, weights))
    except Exception as error:
        raise OptionError(
            f"optimizer={optimizer!r}: its state cannot be computed for the arguments that are differentiated:\n    {error}\n"
            "    (docs: memory#optimizer-state)"
        ) from error
    return states[0]


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and the type of an array, a tracer, a number or another `jax.ShapeDtypeStruct`."""
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))
