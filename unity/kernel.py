"""`unity.kernel`: functions that only their authors can read (Pallas, Triton, foreign calls), split as their authors say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from unity.pcg.operators.kernel_primitive import Function, KernelDimensions, KernelError, bind
from unity.pcg.operators.kernel_trials import differences
from unity.pcg.types.varying_axes import varying

Flops = Callable[..., float] | float

CLOSE = 1e-3  # of the largest value: kernels add up in another order where there is less to add up


@dataclass(frozen=True)
class Kernel:
    """A function with names for the dimensions of its arguments and results. Called, it does what the function does."""

    function: Function
    dimensions: KernelDimensions
    flops: Flops = 0.0

    @property
    def __name__(self) -> str:
        named = self.function
        while isinstance(named, partial):
            named = named.func
        return getattr(named, "__name__", type(named).__name__)

    def __call__(self, *operands: Any) -> Any:
        """The function's results. Raises KernelError if arguments or results do not have the dimensions that they are said to
        have."""
        given = [jnp.asarray(x) for x in operands]
        self._sizes(given)
        if any(map(varying, given)):  # a `shard_map` has divided them already
            return self.function(*given)
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
        program, made = jax.make_jaxpr(self.function, return_shape=True)(*structs)
        if any(isinstance(c, Tracer) for c in program.consts):
            raise KernelError(f"{self.__name__} uses a value that was computed around it: make it an argument")
        with self._named():
            self.dimensions.check(structs, jax.tree.leaves(made))
        flops = self.flops(*structs) if callable(self.flops) else self.flops
        found = bind(self.function, self.__name__, self.dimensions, float(flops), given)
        return jax.tree.unflatten(jax.tree.structure(made), found)

    def check(self, *operands: Any, gradients: bool = True, tolerance: float = CLOSE) -> None:
        """Compares what the function gives for these arguments with what it gives for their halves, along every name that it may
        be divided along: its results, and gradients by a cotangent drawn at random.

        `tolerance`: the largest difference, in parts of the largest value. Raises KernelError where there is a larger one, or a
        size has no halves.
        """
        given = [jnp.asarray(x) for x in operands]
        sizes = self._sizes(given)
        for name in (*self.dimensions.split, *self.dimensions.summed):
            if sizes[name] % 2:
                raise KernelError(f"'{name}' is {sizes[name]} here, which has no halves: check with arguments of even sizes")
        for name, what, difference in differences(self.function, self.dimensions, given, gradients):
            if not difference <= tolerance:
                raise KernelError(
                    f"{self.__name__} may not be divided along '{name}': {what}, put together from halves, differs by"
                    f" {difference:.2g} of its largest value"
                )

    def _sizes(self, given: Sequence[jax.Array]) -> dict[str, int]:
        with self._named():
            return self.dimensions.sizes([x.shape for x in given], self.dimensions.operands)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors say which kernel it is."""
        try:
            yield
        except KernelError as problem:
            raise KernelError(f"{self.__name__}: {problem.reason}") from None


def kernel(dimensions: str, *, split: str = "", summed: str = "", flops: Flops = 0.0) -> Callable[[Function], Kernel]:
    """Says of a function how devices may divide it, where nothing else can: its program is a Pallas or Triton kernel, a foreign
    call, a callback.

        @unity.kernel("b h q d, b h k d, b h k d -> b h q d", split="b h")
        def attention(q, k, v):
            return flash_attention(q, k, v)

    A plan calls the function on each device with slices of its arguments. Everywhere else it is the function: under `jit`, `grad`
    and `vmap`, by its own derivative rule. A plan believes what is said here; `attention.check(q, k, v)` tries it.

    Args:
        dimensions: names for the dimensions of every argument and result. Equal names have equal sizes.
        split: names along which slices of the arguments that have it give the same slice of every result, and arguments that
            lack it are whole.
        summed: names that some results lack: these are the sum of what slices give.
        flops: the FLOPs of a call, or a function of the arguments' types that says so. Without it, the search takes the time to
            be that of reading and writing, unless it was measured (`unity profile`).

    Returns:
        What makes a kernel of a function of arrays alone that gives an array or several.

    Raises:
        KernelError: names contradict each other.
    """
    said = KernelDimensions.read(dimensions, split, summed)
    return lambda function: Kernel(function, said, flops)
