"""`unity.kernel` as a primitive: a function of which only its author knows what it computes, with names for its dimensions.

It is a primitive of its own, so that a program keeps it wherever it is traced. Outside of a plan it does what the function does: it
runs, is compiled and differentiated as that is, and `vmap` gives every operand and result that it maps one more name.
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

from unity.base.errors import UnityError
from unity.pcg.jaxprs.foreign_primitives import outside
from unity.pcg.jaxprs.jaxprs import floating
from unity.pcg.types.parallel_type import Shape

KERNEL = "kernel"

Function = Callable[..., Any]
Terms = tuple[tuple[str, ...], ...]  # of every operand, or result, the names of its dimensions


class KernelError(UnityError, ValueError):
    """What is said of a kernel's dimensions contradicts itself, or its arguments, or what it computes."""

    docs = "kernels"


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a kernel by name, and those along which devices may divide it.

    Args:
        operands, results: the names of each one's dimensions.
        split: names along which a slice of the operands that have it gives the same slice of the results.
        summed: names that some results lack, which are then the sum of what slices give.
    """

    operands: Terms
    results: Terms
    split: tuple[str, ...]
    summed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " -> ".join(", ".join(map(" ".join, terms)) for terms in (self.operands, self.results))

    @cached_property
    def sides(self) -> Terms:
        return self.operands + self.results

    @classmethod
    def read(cls, text: str, split: str, summed: str) -> Dimensions:
        """`"b s d, d e -> b s e"`, and names between blanks. Raises KernelError where they contradict each other."""
        sides = [tuple(tuple(term.split()) for term in side.split(",")) for side in text.split("->")]
        if len(sides) != 2:
            raise KernelError(f"'{text}' does not name arguments and results: 'b s d, d e -> b s e' does")
        operands, results = sides
        found = cls(operands, results, tuple(split.split()), tuple(summed.split()))
        twice = next((term for term in found.sides if len(set(term)) < len(term)), None)
        if twice is not None:
            raise KernelError(f"'{' '.join(twice)}' names two dimensions of one array alike; give each its own name")
        found._check_divided()
        return found

    def _check_divided(self) -> None:
        both = set(self.split) & set(self.summed)
        if both:
            raise KernelError(f"'{min(both)}' is in split= and in summed=; what some results lack is summed, all else is split")
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
        """The size of every name. Raises KernelError where shapes do not go with names, or with each other."""
        if len(shapes) != len(terms):
            raise KernelError(f"'{self}' names {len(terms)} {what}s; there are {len(shapes)}")
        found: dict[str, tuple[int, int]] = {}
        for k, (names, shape) in enumerate(zip(terms, shapes, strict=True)):
            if len(names) != len(shape):
                raise KernelError(
                    f"{what} {k} has shape {tuple(shape)}; '{self}' names {len(names)} dimensions: '{' '.join(names)}'"
                )
            for name, n in zip(names, shape, strict=True):
                first, size = found.setdefault(name, (k, n))
                if size != n:
                    raise KernelError(f"'{name}' is {size} in {what} {first} and {n} in {what} {k} ('{self}')")
        return {name: n for name, (_, n) in found.items()}

    def check(self, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Raises KernelError unless operands and results have these dimensions."""
        if len(results) != len(self.results):
            raise KernelError(f"'{self}' names {len(self.results)} results; there are {len(results)}")
        self.sizes([x.shape for x in (*operands, *results)], self.sides, "argument or result")

    def batched(self, at: Sequence[int | None]) -> Dimensions:
        """The same with one more dimension, that some operands have at these places, and results first."""
        taken = {name for term in self.sides for name in term}
        new = next(name for k in count() if (name := f"batch{k}") not in taken)
        operands = tuple(t if k is None else (*t[:k], new, *t[k:]) for t, k in zip(self.operands, at, strict=True))
        return Dimensions(operands, tuple((new, *t) for t in self.results), (new, *self.split), self.summed)

    def transposed(self, moving: Sequence[int], results: Sequence[int]) -> Dimensions:
        """Those of the transpose of what is linear in some operands: of the other operands and of cotangents of these results, the
        cotangents of the moving operands. It is divided as it is itself; what some of these lack is summed over."""
        others = tuple(t for k, t in enumerate(self.operands) if k not in moving)
        operands = others + tuple(self.results[k] for k in results)
        found = tuple(self.operands[k] for k in moving)
        there = [name for name in (*self.split, *self.summed) if any(name in t for t in operands)]
        split = tuple(name for name in there if all(name in t for t in found))
        return Dimensions(operands, found, split, tuple(name for name in there if name not in split))


def listed(function: Function) -> Function:
    """The function with a list of its results."""

    def call(*operands: Any) -> list:
        out = function(*operands)
        return list(out) if isinstance(out, tuple | list) else [out]

    return call


_primitive = core.Primitive(KERNEL)
_primitive.multiple_results = True


def bind(function: Function, title: str, dimensions: Dimensions, flops: float, operands: Sequence[Any]) -> list[jax.Array]:
    """A call of a kernel, which takes so many FLOPs. `title`: what people call it."""
    return _primitive.bind(*operands, function=function, title=title, dimensions=dimensions, flops=flops)


def _run(*operands: Any, function: Function, **_: Any) -> list:
    return listed(function)(*operands)


def _types(*operands: Any, function: Function, **_: Any) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype) for x in results_of(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands])]


def results_of(function: Function, operands: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """The types of a function's results."""
    return jax.eval_shape(listed(function), *operands)


def _of_some(function: Function, operands: Sequence[Any], at: Sequence[int]) -> Callable[..., list]:
    """The function of some of its operands, the others as they are."""

    def run(*some: Any) -> list:
        given = dict(enumerate(operands)) | dict(zip(at, some, strict=True))
        return listed(function)(*given.values())

    return run


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], *, function: Function, **_: Any) -> tuple[list, list]:
    """The kernel is its function from here on: what that is differentiated by, it knows itself."""
    moving = [k for k, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    run = _of_some(function, primals, moving)
    out, changes = jax.jvp(run, [primals[k] for k in moving], [tangents[k] for k in moving])
    return out, [ad.Zero(ShapedArray(t.shape, float0)) if t.dtype == float0 else t for t in changes]


def _batched(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list, list[int]]:
    at = tuple(None if d is None else int(d) for d in dims)
    size = next(x.shape[k] for x, k in zip(operands, at, strict=True) if k is not None)
    more = {"function": _mapped(params["function"], at), "dimensions": params["dimensions"].batched(at)}
    out = _primitive.bind(*operands, **{**params, **more, "flops": size * params["flops"]})
    return out, [0] * len(out)


@lru_cache(maxsize=1024)
def _mapped(function: Function, at: tuple[int | None, ...]) -> Function:
    """`vmap` of the function, one object for equal calls: programs are told apart by their functions."""
    return jax.vmap(function, in_axes=at)


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """That of a kernel which a derivative rule calls with tangents, in which it is linear then. It is a kernel too."""
    moving = tuple(k for k, x in enumerate(operands) if ad.is_undefined_primal(x))
    given = tuple(k for k, c in enumerate(cotangents) if not isinstance(c, ad.Zero))
    types = tuple(jax.ShapeDtypeStruct(operands[k].aval.shape, operands[k].aval.dtype) for k in moving)
    dimensions = params["dimensions"].transposed(moving, given)
    more = {"function": _transposed(params["function"], dimensions, moving, types, given), "dimensions": dimensions}
    others = [x for k, x in enumerate(operands) if k not in moving]
    found = iter(_primitive.bind(*others, *(cotangents[k] for k in given), **{**params, **more}))
    return [next(found) if k in moving else None for k in range(len(operands))]


@lru_cache(maxsize=1024)
def _transposed(function: Function, *how: Any) -> Function:
    """The transpose of a function, one object for equal ones."""
    return partial(_pull_linear, function, *how)


def _pull_linear(
    function: Function,
    dimensions: Dimensions,
    moving: tuple[int, ...],
    types: tuple[jax.ShapeDtypeStruct, ...],
    given: tuple[int, ...],
    *values: Any,
) -> list:
    """Cotangents of the moving operands, in which a function is linear, of the other operands and cotangents of the given results.

    It is the derivative in reverse, wherever that is taken: functions may know no more than that (`custom_vjp`). `types`: those of
    the moving operands where nothing is divided. What is divided has its size from the values.
    """
    sizes = dimensions.sizes([x.shape for x in values], dimensions.operands)
    shapes = [
        tuple(sizes.get(name, n) for name, n in zip(names, whole.shape, strict=True))
        for names, whole in zip(dimensions.results, types, strict=True)
    ]
    rest = iter(values)
    operands = [None if k in moving else next(rest) for k in range(len(values) - len(given) + len(moving))]

    def linear(*some: Any) -> list:
        out = _of_some(function, operands, moving)(*some)
        return [out[k] for k in given]

    _, pull = jax.vjp(linear, *(jnp.zeros(shape, t.dtype) for shape, t in zip(shapes, types, strict=True)))
    return list(pull(list(rest)))


_primitive.def_impl(_run)
_primitive.def_abstract_eval(_types)
ad.primitive_jvps[_primitive] = _derivative
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batched
mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))


@dataclass(frozen=True)
class Pulled:
    """A kernel's derivative in reverse as programs, outside of any mesh.

    Args:
        forward: the results, and then what is kept.
        backward: of what was kept, and of cotangents of the floating results, the cotangents of the floating operands.
        results: how many results there are.
    """

    forward: core.ClosedJaxpr
    backward: core.ClosedJaxpr
    results: int


@lru_cache(maxsize=4096)
def value_of(function: Function, operands: tuple[jax.ShapeDtypeStruct, ...]) -> core.ClosedJaxpr:
    """What a kernel computes of operands of these types, as a program outside of any mesh."""
    return outside(listed(function), operands)


@lru_cache(maxsize=4096)
def pulled_of(function: Function, operands: tuple[jax.ShapeDtypeStruct, ...]) -> Pulled:
    """How a kernel is differentiated, for operands of these types. Raises KernelError if it cannot be."""
    trees = []

    def run(*given: Any) -> list:
        out, pull = pulled(function, *given)
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return [*out, *leaves]

    try:
        forward = outside(run, operands)
    except Exception as problem:
        name = getattr(function, "__name__", function)
        raise KernelError(f"{name} cannot be differentiated: {problem}\n    Give it a rule: jax.custom_vjp.") from problem
    results = len(value_of(function, operands).out_avals)
    made = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in forward.out_avals]
    cotangents = [a for a in made[:results] if floating(a)]
    kept = made[results:]

    def back(*given: Any) -> list:
        return list(trees[0].unflatten(given[: len(kept)])(list(given[len(kept) :])))

    return Pulled(forward, outside(back, [*kept, *cotangents]), results)


def pulled(function: Function, *operands: Any) -> tuple[list, Callable[[list], Sequence[Any]]]:
    """The results, and what takes cotangents of the floating ones to those of the floating operands."""
    real = [k for k, x in enumerate(operands) if floating(x)]

    def run(*moving: Any) -> tuple[list, list]:
        out = _of_some(function, operands, real)(*moving)
        return [y for y in out if floating(y)], out

    _, pull, out = jax.vjp(run, *(operands[k] for k in real), has_aux=True)
    return out, pull


@dataclass(frozen=True)
class Kept:
    """What a kernel's derivative needs again: which operands and results, and the bytes of what else there is."""

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    more: tuple[int, ...]


def kept_by(function: Function, operands: tuple[jax.ShapeDtypeStruct, ...]) -> Kept:
    """What is kept by the function's own derivative. Raises KernelError if it has none."""
    found = pulled_of(function, operands)
    program = found.forward.jaxpr
    results, left = program.outvars[: found.results], [v for v in program.outvars[found.results :] if isinstance(v, core.Var)]
    more: dict[core.Var, Any] = {v: v.aval for v in left if v not in results and v not in program.invars}
    nbytes = tuple(int(a.size) * a.dtype.itemsize for a in more.values())
    return Kept(tuple(v in left for v in program.invars), tuple(v in left for v in results), nbytes)
