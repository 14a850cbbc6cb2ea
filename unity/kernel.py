"""`unity.kernel`: declared splits of functions whose programs are opaque (Pallas and Triton kernels, foreign calls)."""

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

CLOSE = 1e-3  # relative to the largest value: kernels add in another order where they have fewer terms


@dataclass(frozen=True)
class Kernel:
    """A function with names for the dimensions of its arguments and results. A call computes the function."""

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
        """Compute the function. Raises KernelError if arguments or results do not have the declared dimensions."""
        arrays = [jnp.asarray(x) for x in operands]
        self._sizes(arrays)
        if any(map(varying, arrays)):  # inside of a `shard_map`, which has divided them already
            return self.function(*arrays)
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        program, results = jax.make_jaxpr(self.function, return_shape=True)(*structs)
        if any(isinstance(c, Tracer) for c in program.consts):
            raise KernelError(f"{self.__name__} uses a value that was computed around it: make it an argument")
        with self._named():
            self.dimensions.check(structs, jax.tree.leaves(results))
        flops = self.flops(*structs) if callable(self.flops) else self.flops
        leaves = bind(self.function, self.__name__, self.dimensions, float(flops), arrays)
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    def check(self, *operands: Any, gradients: bool = True, tolerance: float = CLOSE) -> None:
        """Compare the function of these arguments with the function of their halves, along every declared name.

        Compared are the results, and the gradients by a random cotangent.

        Args:
            operands: arguments whose sizes along the declared names are even.
            gradients: whether to compare gradients, too.
            tolerance: the largest allowed difference, relative to the largest value.

        Raises:
            KernelError: a difference is larger, or a size is odd.
        """
        arrays = [jnp.asarray(x) for x in operands]
        sizes = self._sizes(arrays)
        for name in (*self.dimensions.split, *self.dimensions.summed):
            if sizes[name] % 2:
                raise KernelError(f"'{name}' is {sizes[name]} here, which has no halves: check with arguments of even sizes")
        for name, value, difference in differences(self.function, self.dimensions, arrays, gradients):
            if not difference <= tolerance:
                raise KernelError(
                    f"{self.__name__} may not be divided along '{name}': {value}, put together from halves, differs by"
                    f" {difference:.2g} of its largest value"
                )

    def _sizes(self, arrays: Sequence[jax.Array]) -> dict[str, int]:
        with self._named():
            return self.dimensions.sizes([x.shape for x in arrays], self.dimensions.operands)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Put the kernel's name in front of the message of a KernelError."""
        try:
            yield
        except KernelError as problem:
            raise KernelError(f"{self.__name__}: {problem.reason}") from None


def kernel(dimensions: str, *, split: str = "", summed: str = "", flops: Flops = 0.0) -> Callable[[Function], Kernel]:
    """Declare how devices may divide a function whose program is opaque: a Pallas or Triton kernel, a foreign call, a callback.

        @unity.kernel("b h q d, b h k d, b h k d -> b h q d", split="b h")
        def attention(q, k, v):
            return flash_attention(q, k, v)

    A plan calls the function on each device with slices of its arguments. Everywhere else the kernel is the function itself: under
    `jit`, `grad` and `vmap`, by its own derivative rule. A plan relies on the declaration; `attention.check(q, k, v)` tests it.

    Args:
        dimensions: names for the dimensions of every argument and result. Equal names have equal sizes.
        split: names along which a slice of the arguments yields the same slice of every result. Arguments without the name are
            not sliced.
        summed: names that some results lack: these results are the sums of the slices' results.
        flops: the FLOPs of a call, or a function that computes them from the arguments' types. Without them, the search assumes the
            time of reading and writing memory, unless the kernel was measured (`unity profile`).

    Returns:
        A decorator for functions of arrays alone that return one array or several.

    Raises:
        KernelError: the names contradict each other.
    """
    declared = KernelDimensions.read(dimensions, split, summed)
    return lambda function: Kernel(function, declared, flops)
