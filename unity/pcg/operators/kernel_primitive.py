"""The primitive of `unity.kernel`: an opaque function whose author names the dimensions of its operands and results.

As a primitive, it stays visible in every traced program. Outside a plan it behaves as the function does when it is run, compiled or
differentiated, and `vmap` adds a name to every operand and result that it maps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.dtypes import float0
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from unity.base.errors import UnityError, reason_of
from unity.pcg.jaxprs.foreign_primitives import outside
from unity.pcg.jaxprs.jaxprs import floating
from unity.pcg.types.parallel_type import Shape

KERNEL = "kernel"

Function = Callable[..., Any]
Terms = tuple[tuple[str, ...], ...]  # the names of the dimensions of every operand, or of every result


class KernelError(UnityError, ValueError):
    """The declared dimensions of a kernel contradict each other, its arguments, or its values."""

    docs = "kernels"


@dataclass(frozen=True)
class KernelDimensions:
    """The named dimensions of a kernel, and those along which devices may divide it.

    Attributes:
        operands, results: the names of the dimensions of each.
        split: names such that slices of the operands that have the name yield the same slice of every result.
        summed: names that some results lack; these results are sums over the results of slices.
    """

    operands: Terms
    results: Terms
    split: tuple[str, ...]
    summed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " -> ".join(", ".join(map(" ".join, terms)) for terms in (self.operands, self.results))

    @cached_property
    def sides(self) -> Terms:
        """The names of all operands, then of all results."""
        return self.operands + self.results

    @classmethod
    def read(cls, text: str, split: str, summed: str) -> KernelDimensions:
        """Parse dimensions such as `"b s d, d e -> b s e"`. Raises KernelError if they contradict each other.

        Args:
            text: the names of all operands and results.
            split, summed: names separated by blanks.
        """
        sides = [tuple(tuple(term.split()) for term in side.split(",")) for side in text.split("->")]
        if len(sides) != 2:
            raise KernelError(f"'{text}' does not name arguments and results: 'b s d, d e -> b s e' does")
        operands, results = sides
        dimensions = cls(operands, results, tuple(split.split()), tuple(summed.split()))
        repeating = next((term for term in dimensions.sides if len(set(term)) < len(term)), None)
        if repeating is not None:
            raise KernelError(f"'{' '.join(repeating)}' names two dimensions of one array alike; give each its own name")
        dimensions._check_divided()
        return dimensions

    def _check_divided(self) -> None:
        """Raise KernelError if a name cannot be split, or summed, as declared."""
        common = set(self.split) & set(self.summed)
        if common:
            raise KernelError(f"'{min(common)}' is in split= and in summed=; what some results lack is summed, all else is split")
        for name in (*self.split, *self.summed):
            if not any(name in term for term in self.operands):
                raise KernelError(f"no argument has a dimension '{name}' ('{self}')")
            lacking = [k for k, term in enumerate(self.results) if name not in term]
            if lacking and name in self.split:
                raise KernelError(
                    f"result {lacking[0]} has no dimension '{name}': if it is the sum of what slices along '{name}' give, name it"
                    f" in summed=, else it cannot be split ('{self}')"
                )
            if not lacking and name in self.summed:
                raise KernelError(f"every result has the dimension '{name}', so nothing is summed along it: name it in split=")

    def sizes(self, shapes: Sequence[Shape], terms: Terms, what: str = "argument") -> dict[str, int]:
        """Return the size of every name. Raises KernelError if shapes do not match the names, or each other.

        Args:
            shapes: one for each entry of `terms`.
            terms: the names of the dimensions of each shape.
            what: the noun for a shape in error messages.
        """
        if len(shapes) != len(terms):
            raise KernelError(f"'{self}' names {len(terms)} {what}s; there are {len(shapes)}")
        first_of: dict[str, tuple[int, int]] = {}
        for k, (names, shape) in enumerate(zip(terms, shapes, strict=True)):
            if len(names) != len(shape):
                raise KernelError(
                    f"{what} {k} has shape {tuple(shape)}; '{self}' names {len(names)} dimensions: '{' '.join(names)}'"
                )
            for name, n in zip(names, shape, strict=True):
                first, size = first_of.setdefault(name, (k, n))
                if size != n:
                    raise KernelError(f"'{name}' is {size} in {what} {first} and {n} in {what} {k} ('{self}')")
        return {name: n for name, (_, n) in first_of.items()}

    def check(self, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Raise KernelError unless operands and results have these dimensions."""
        if len(results) != len(self.results):
            raise KernelError(f"'{self}' names {len(self.results)} results; there are {len(results)}")
        self.sizes([x.shape for x in (*operands, *results)], self.sides, "argument or result")

    def batched(self, at: Sequence[int | None]) -> KernelDimensions:
        """Return the dimensions with a batch dimension added: to operands at the given positions, to results in front."""
        used = {name for term in self.sides for name in term}
        new = next(name for k in count() if (name := f"batch{k}") not in used)
        operands = tuple(t if k is None else (*t[:k], new, *t[k:]) for t, k in zip(self.operands, at, strict=True))
        return KernelDimensions(operands, tuple((new, *t) for t in self.results), (new, *self.split), self.summed)

    def transposed(self, linear: Sequence[int], results: Sequence[int]) -> KernelDimensions:
        """Return the dimensions of the transpose of a kernel that is linear in some operands.

        The transpose takes the other operands and the cotangents of these results, and returns the cotangents of the linear
        operands. It is divided along the names that the kernel is, and summed along those that some of its results lack.
        """
        others = tuple(t for k, t in enumerate(self.operands) if k not in linear)
        operands = others + tuple(self.results[k] for k in results)
        cotangents = tuple(self.operands[k] for k in linear)
        divided = [name for name in (*self.split, *self.summed) if any(name in t for t in operands)]
        split = tuple(name for name in divided if all(name in t for t in cotangents))
        return KernelDimensions(operands, cotangents, split, tuple(name for name in divided if name not in split))


def listed(function: Function) -> Function:
    """Return the function with its results as a list."""

    def call(*operands: Any) -> list:
        out = function(*operands)
        return list(out) if isinstance(out, tuple | list) else [out]

    return call


_primitive = core.Primitive(KERNEL)
_primitive.multiple_results = True


def bind(function: Function, title: str, dimensions: KernelDimensions, flops: float, operands: Sequence[Any]) -> list[jax.Array]:
    """Call a kernel as a primitive.

    Args:
        function: the kernel.
        title: its name for people.
        dimensions: its dimensions.
        flops: the FLOPs of this call.
        operands: its arguments.
    """
    return _primitive.bind(*operands, function=function, title=title, dimensions=dimensions, flops=flops)


def _run(*operands: Any, function: Function, **_: Any) -> list:
    return listed(function)(*operands)


def _types(*operands: Any, function: Function, **_: Any) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype) for x in results_of(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands])]


def results_of(function: Function, operands: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """Return the types of a function's results."""
    return jax.eval_shape(listed(function), *operands)


def _function_of(function: Function, operands: Sequence[Any], positions: Sequence[int]) -> Callable[..., list]:
    """Return the function of the operands at some positions, with the other operands fixed."""

    def run(*changed: Any) -> list:
        arguments = dict(enumerate(operands)) | dict(zip(positions, changed, strict=True))
        return listed(function)(*arguments.values())

    return run


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], *, function: Function, **_: Any) -> tuple[list, list]:
    """Differentiate the function itself, by its own rules: the kernel is its function from here on."""
    active = [k for k, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    run = _function_of(function, primals, active)
    out, out_tangents = jax.jvp(run, [primals[k] for k in active], [tangents[k] for k in active])
    return out, [ad.Zero(ShapedArray(t.shape, float0)) if t.dtype == float0 else t for t in out_tangents]


def _batched(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list, list[int]]:
    at = tuple(None if d is None else int(d) for d in dims)
    size = next(x.shape[k] for x, k in zip(operands, at, strict=True) if k is not None)
    changed = {"function": _mapped(params["function"], at), "dimensions": params["dimensions"].batched(at)}
    out = _primitive.bind(*operands, **{**params, **changed, "flops": size * params["flops"]})
    return out, [0] * len(out)


@lru_cache(maxsize=1024)
def _mapped(function: Function, at: tuple[int | None, ...]) -> Function:
    """Return `vmap` of the function, one object for equal calls, since equality of programs compares function objects."""
    return jax.vmap(function, in_axes=at)


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """Transpose a kernel that a derivative rule calls with tangents, in which it is linear. The transpose is a kernel too."""
    linear = tuple(k for k, x in enumerate(operands) if ad.is_undefined_primal(x))
    nonzero = tuple(k for k, c in enumerate(cotangents) if not isinstance(c, ad.Zero))
    types = tuple(jax.ShapeDtypeStruct(operands[k].aval.shape, operands[k].aval.dtype) for k in linear)
    dimensions = params["dimensions"].transposed(linear, nonzero)
    changed = {"function": _transposed(params["function"], dimensions, linear, types, nonzero), "dimensions": dimensions}
    others = [x for k, x in enumerate(operands) if k not in linear]
    results = iter(_primitive.bind(*others, *(cotangents[k] for k in nonzero), **{**params, **changed}))
    return [next(results) if k in linear else None for k in range(len(operands))]


@lru_cache(maxsize=1024)
def _transposed(function: Function, *arguments: Any) -> Function:
    """Return the transpose of a function (see `_pull_linear`), one object for equal arguments."""
    return partial(_pull_linear, function, *arguments)


def _pull_linear(
    function: Function,
    dimensions: KernelDimensions,
    linear: tuple[int, ...],
    types: tuple[jax.ShapeDtypeStruct, ...],
    nonzero: tuple[int, ...],
    *values: Any,
) -> list:
    """Return the cotangents of the operands in which a function is linear.

    The transpose is taken by reverse-mode differentiation, since a function with a `custom_vjp` supports nothing else.

    Args:
        function: the function.
        dimensions: those of its transpose.
        linear: the positions of the operands in which it is linear.
        types: their types as a whole; on a slice, the sizes of divided dimensions follow from the values.
        nonzero: the positions of the results that have cotangents.
        values: the other operands, then these cotangents.
    """
    sizes = dimensions.sizes([x.shape for x in values], dimensions.operands)
    shapes = [
        tuple(sizes.get(name, n) for name, n in zip(names, whole.shape, strict=True))
        for names, whole in zip(dimensions.results, types, strict=True)
    ]
    rest = iter(values)
    operands = [None if k in linear else next(rest) for k in range(len(values) - len(nonzero) + len(linear))]

    def run(*changed: Any) -> list:
        out = _function_of(function, operands, linear)(*changed)
        return [out[k] for k in nonzero]

    _, pull = jax.vjp(run, *(jnp.zeros(shape, t.dtype) for shape, t in zip(shapes, types, strict=True)))
    return list(pull(list(rest)))


_primitive.def_impl(_run)
_primitive.def_abstract_eval(_types)
ad.primitive_jvps[_primitive] = _derivative
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batched
mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))


@dataclass(frozen=True)
class KernelPullback:
    """The reverse-mode derivative of a kernel as programs, outside any mesh.

    Attributes:
        forward: operands → (results, residuals).
        backward: (residuals, cotangents of the floating results) → cotangents of the floating operands.
        results: the number of results.
    """

    forward: core.ClosedJaxpr
    backward: core.ClosedJaxpr
    results: int


@lru_cache(maxsize=4096)
def value_of(function: Function, operands: tuple[jax.ShapeDtypeStruct, ...]) -> core.ClosedJaxpr:
    """Return a kernel's program for operands of these types, outside any mesh."""
    return outside(listed(function), operands)


@lru_cache(maxsize=4096)
def pulled_of(function: Function, operands: tuple[jax.ShapeDtypeStruct, ...]) -> KernelPullback:
    """Return a kernel's derivative programs for operands of these types. Raises KernelError if it cannot be differentiated."""
    trees = []

    def run(*arguments: Any) -> list:
        out, pull = pulled(function, *arguments)
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return [*out, *leaves]

    try:
        forward = outside(run, operands)
    except Exception as problem:
        name = getattr(function, "__name__", function)
        raise KernelError(
            f"{name} cannot be differentiated: {reason_of(problem)}\n    Give it a rule: jax.custom_vjp."
        ) from problem
    results = len(value_of(function, operands).out_avals)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in forward.out_avals]
    cotangents = [a for a in types[:results] if floating(a)]
    residuals = types[results:]

    def back(*arguments: Any) -> list:
        return list(trees[0].unflatten(arguments[: len(residuals)])(list(arguments[len(residuals) :])))

    return KernelPullback(forward, outside(back, [*residuals, *cotangents]), results)


def pulled(function: Function, *operands: Any) -> tuple[list, Callable[[list], Sequence[Any]]]:
    """Return the results, and the pullback from cotangents of the floating results to those of the floating operands."""
    floats = [k for k, x in enumerate(operands) if floating(x)]

    def run(*changed: Any) -> tuple[list, list]:
        out = _function_of(function, operands, floats)(*changed)
        return [y for y in out if floating(y)], out

    _, pull, out = jax.vjp(run, *(operands[k] for k in floats), has_aux=True)
    return out, pull


@dataclass(frozen=True)
class KernelResiduals:
    """The residuals of a kernel's derivative.

    Attributes:
        operands, results: for each whether it is a residual.
        other_nbytes: the bytes of each residual that is neither.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    other_nbytes: tuple[int, ...]


def kernel_residuals(function: Function, operands: tuple[jax.ShapeDtypeStruct, ...]) -> KernelResiduals:
    """Return the residuals of a kernel's derivative. Raises KernelError if it has none."""
    pullback = pulled_of(function, operands)
    program, n = pullback.forward.jaxpr, pullback.results
    results, residuals = program.outvars[:n], [v for v in program.outvars[n:] if isinstance(v, core.Var)]
    others: dict[core.Var, Any] = {v: v.aval for v in residuals if v not in results and v not in program.invars}
    nbytes = tuple(int(a.size) * a.dtype.itemsize for a in others.values())
    return KernelResiduals(tuple(v in residuals for v in program.invars), tuple(v in residuals for v in results), nbytes)
