"""Pallas kernels without a declaration, as kernels whose dimensions are read off their grids and index maps.

A grid dimension *walks* a dimension of an operand or a result if the index of its block along that dimension is the number of the
step along the grid dimension. If every result is walked, and the kernel's program does not ask for the number of the step, then a
part of the steps computes a part of the blocks of every result from a part of the blocks of the operands, provided that no other
steps leave anything to them in scratch memory. So devices may divide the blocks: each runs the same program over a smaller grid.
Results that are not walked are sums over devices if the program provably adds up what its steps compute. A trial on small random
arrays confirms all that, unless the kernel is too large for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity.base.lru_cache import LRUCache
from unity.pcg.jaxprs.foreign_primitives import outside
from unity.pcg.jaxprs.jaxprs import Program, each, equations, with_equations, with_nested
from unity.pcg.jaxprs.parameter_text import identities, program_text, text_of
from unity.pcg.jaxprs.trace_contexts import in_new_thread
from unity.pcg.operators.kernel_primitive import KernelDimensions, bind
from unity.pcg.operators.kernel_trials import half, relative_difference, sample
from unity.pcg.operators.pallas_scratch import set_before_read, writes_operands
from unity.pcg.operators.pallas_sums import asks_for_any_step, asks_for_step, is_sum
from unity.pcg.types.parallel_type import Shape

PALLAS = "pallas_call"
TRIED = 1 << 25  # bytes of a trial's operands; larger kernels are not tried
STEPS = 1 << 9  # of the grid, in a trial
CLOSE = 1e-3  # relative to the largest value, though each element is computed alike


@dataclass(frozen=True)
class GridWalk:
    """A grid dimension along which devices may divide a kernel.

    Attributes:
        grid: its position in the grid.
        places: for each operand, then each result, the dimension that it walks and the size of a block, or None. Results without
            one are summed over the steps.
    """

    grid: int
    places: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, eq=False)
class PallasKernel:
    """A `pallas_call` as a function of arrays whose walked dimensions are split into blocks: of [blocks, block] for each.

    Attributes:
        primitive, params: the primitive and the parameters of its equation.
        operands, results: the shapes of its operands and results as traced.
        walks: the grid dimensions along which devices may divide it.
        whole: for each other grid dimension the reason why devices may not.
    """

    primitive: core.Primitive
    params: Mapping[str, Any] = field(repr=False)
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    walks: tuple[GridWalk, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name that users see."""
        return str(self.params.get("name") or self.params["jaxpr"].debug_info.func_name)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of operands, then of results."""
        return self.operands + self.results

    @property
    def dimensions(self) -> KernelDimensions:
        """The names of its dimensions: one for each walk, which blocks share, and a separate one for every other dimension."""
        terms = tuple(self._term(k) for k in range(len(self.shapes)))
        n = len(self.operands)
        summed = tuple(f"g{w.grid}" for w in self.walks if None in w.places[n:])
        split = tuple(f"g{w.grid}" for w in self.walks if None not in w.places[n:])
        return KernelDimensions(terms[:n], terms[n:], split, summed)

    def _term(self, position: int) -> tuple[str, ...]:
        names = []
        for dim in range(len(self.shapes[position])):
            walk = self._walk(position, dim)
            names += [f"x{position}d{dim}"] if walk is None else [f"g{walk.grid}", f"b{position}d{dim}"]
        return tuple(names)

    def _walk(self, position: int, dim: int) -> GridWalk | None:
        return next((w for w in self.walks if (p := w.places[position]) is not None and p[0] == dim), None)

    def blocked(self, position: int, x: Any) -> Any:
        """Return an operand or a result with its walked dimensions split into blocks."""
        shape: list[int] = []
        for dim, n in enumerate(x.shape):
            walk = self._walk(position, dim)
            place = None if walk is None else walk.places[position]
            shape += [n] if place is None else [n // place[1], place[1]]
        return x.reshape(shape)

    def _joined(self, position: int, x: Any) -> Any:
        """Return an operand whose walked dimensions are split into blocks in its own shape."""
        sizes, shape = iter(x.shape), []
        for dim in range(len(self.shapes[position])):
            shape.append(next(sizes) if self._walk(position, dim) is None else next(sizes) * next(sizes))
        return x.reshape(shape)

    def run(self, *operands: Any, **changes: Any) -> list[Any]:
        """Call the kernel on any number of blocks, with `changes` of its parameters."""
        arrays = [self._joined(k, x) for k, x in enumerate(operands)]
        sizes = {w.grid: n for w in self.walks if (n := self._blocks(w, [x.shape for x in arrays])) is not None}
        results = self.primitive.bind(*arrays, **{**self._params(sizes), **changes})
        return [self.blocked(len(self.operands) + k, y) for k, y in enumerate(results)]

    def _blocks(self, walk: GridWalk, shapes: Sequence[Shape]) -> int | None:
        """Return the number of blocks along a walk in operands of these shapes."""
        walked = ((s, p) for s, p in zip(shapes, walk.places, strict=False) if p is not None)
        return next((shape[dim] // block for shape, (dim, block) in walked), None)

    def shape(self, position: int, sizes: Mapping[int, int]) -> Shape:
        """Return the shape of an operand or a result for other numbers of blocks along walks, by grid dimension."""
        shape = list(self.shapes[position])
        for walk in self.walks:
            if (place := walk.places[position]) is not None:
                shape[place[0]] = sizes.get(walk.grid, shape[place[0]] // place[1]) * place[1]
        return tuple(shape)

    def _params(self, sizes: Mapping[int, int]) -> dict[str, Any]:
        """Return the parameters for other numbers of blocks: those of a smaller grid over smaller arrays."""
        mapping, leading = self.params["grid_mapping"], _leading(self.params, len(self.operands))
        if all(mapping.grid[d] == n for d, n in sizes.items()):
            return dict(self.params)
        grid = tuple(sizes.get(d, n) for d, n in enumerate(mapping.grid))
        blocks = tuple(
            dataclasses.replace(b, array_aval=b.array_aval.update(shape=self.shape(leading + k, sizes)))
            for k, b in enumerate(mapping.block_mappings)
        )
        avals = tuple(a.update(shape=self.shape(len(self.operands) + k, sizes)) for k, a in enumerate(self.params["out_avals"]))
        return {
            **self.params,
            "grid_mapping": dataclasses.replace(mapping, grid=grid, block_mappings=blocks),
            "out_avals": avals,
        }

    @property
    def flops(self) -> float:
        """The FLOPs of a call, as its author estimates them, or of its matrix products."""
        estimate = self.params.get("cost_estimate")
        if estimate is not None:
            return float(estimate.flops)
        steps = prod(n for n in self.params["grid_mapping"].grid if isinstance(n, int))
        return steps * _product_flops(self.params["jaxpr"])


def _product_flops(program: Any) -> float:
    """Return the FLOPs of a program's matrix products; those of a loop of unknown length are counted once."""
    total = 0.0
    for e in program.eqns:
        if e.primitive.name == "dot_general":
            left: Any = e.invars[0].aval
            result: Any = e.outvars[0].aval
            total += 2.0 * result.size * prod(left.shape[d] for d in e.params["dimension_numbers"][0][0])
        inner = sum(_product_flops(getattr(p, "jaxpr", p)) for p in each(e.params) if isinstance(p, Program))
        total += inner * (e.params["length"] if e.primitive.name == "scan" else 1)
    return total


def with_kernels(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Replace every `pallas_call` of a program, in nested programs too, by a kernel with declared dimensions."""
    return with_equations(program, _as_kernel)


def _as_kernel(eqn: core.JaxprEqn) -> core.JaxprEqn:
    return _call(eqn) if eqn.primitive.name == PALLAS else with_nested(eqn, _as_kernel)


def _call(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Return a call of the program that splits operands into blocks, calls the kernel, and joins its results."""
    function = inferred(eqn)
    kernel: PallasKernel = function.args[0]

    def run(*operands: Any) -> list[Any]:
        blocked = [kernel.blocked(k, x) for k, x in enumerate(operands)]
        results = bind(function, kernel.title, kernel.dimensions, kernel.flops, blocked)
        return [y.reshape(shape) for y, shape in zip(results, kernel.results, strict=True)]

    run.__name__ = kernel.title  # the name of the operators in it
    program = with_equations(outside(jax.jit(run), [v.aval for v in eqn.invars]), lambda e: _placed(e, eqn.source_info))
    return program.eqns[0].replace(invars=eqn.invars, outvars=eqn.outvars)


def _placed(eqn: core.JaxprEqn, source_info: Any) -> core.JaxprEqn:
    """Return an equation with another place in the user's files, in nested programs too."""
    return with_nested(eqn, lambda e: _placed(e, source_info)).replace(source_info=source_info)


Call = partial[list[Any]]
_KERNELS = LRUCache[tuple[str, tuple[int, ...]], Call](1 << 24, lambda call: len(call.args[1]))


def inferred(eqn: core.JaxprEqn) -> Call:
    """Return a `pallas_call` as a function of blocks, the same object for equal calls, by which programs compare functions.

    Its arguments are the kernel, and the text by which files compare it.
    """
    text = _text(eqn)
    functions = tuple(i for e in equations(eqn) for i in identities(e.params))
    if (text, functions) not in _KERNELS:
        kernel = _divided(eqn)
        _KERNELS[text, functions] = call = partial(_called, kernel, text)
        call.__dict__["__name__"] = kernel.title  # for error messages
    return _KERNELS[text, functions]


def _called(kernel: PallasKernel, text: str, *operands: Any) -> list[Any]:
    return kernel.run(*operands)


def _text(eqn: core.JaxprEqn) -> str:
    """Return a text that is equal for calls of equal kernels on equal types, in every process."""
    mapping = eqn.params["grid_mapping"]
    hidden = ("origin", "debug", "local_grid_env", "get_grid_indices")
    parts = [(name, value) for name, value in sorted(eqn.params.items()) if name not in ("grid_mapping", "debug")]
    for record in (mapping, *mapping.block_mappings):
        fields = [f.name for f in dataclasses.fields(record) if f.name not in (*hidden, "block_mappings")]
        parts += [(name, getattr(record, name)) for name in fields]
    types = [str(v.aval) for v in (*eqn.invars, *eqn.outvars)]
    return "\n".join([*(f"{name}={text_of(value, program_text)}" for name, value in parts), *types])


def _leading(params: Mapping[str, Any], operands: int) -> int:
    """Return the number of operands before those that index maps divide into blocks: bounds of the grid, and indices."""
    return operands - params["grid_mapping"].num_inputs


def _divided(eqn: core.JaxprEqn) -> PallasKernel:
    """Return a kernel with those of its grid dimensions along which devices may divide it, after a trial."""
    kernel = PallasKernel(eqn.primitive, eqn.params, _shapes(eqn.invars), _shapes(eqn.outvars))
    read = list(_walks(kernel))
    walks, whole = tuple(w for w in read if isinstance(w, GridWalk)), [w for w in read if isinstance(w, str)]
    if walks and _trial(dataclasses.replace(kernel, walks=walks), eqn):
        together = list[GridWalk]()
        for walk in walks:
            reason = _trial(dataclasses.replace(kernel, walks=(*together, walk)), eqn)
            whole.append(reason) if reason else together.append(walk)
        walks = tuple(together)
    return dataclasses.replace(kernel, walks=walks, whole=tuple(whole))


def _shapes(atoms: Sequence[Any]) -> tuple[Shape, ...]:
    return tuple(tuple(map(int, v.aval.shape)) for v in atoms)


def _walks(kernel: PallasKernel) -> Iterator[GridWalk | str]:
    """Iterate over the grid dimensions of more than one step: a walk, or the reason why devices may not divide the dimension."""
    mapping = kernel.params["grid_mapping"]
    if kernel.params.get("mesh") is not None or not all(isinstance(n, int) for n in mapping.grid):
        yield "its grid has no fixed numbers of steps"
        return
    yield from (_walk(kernel, d) for d, steps in enumerate(mapping.grid) if steps > 1)


def _walk(kernel: PallasKernel, d: int) -> GridWalk | str:
    """Return the walk of a grid dimension, or the reason why devices may not divide it."""
    mapping, count = kernel.params["grid_mapping"], len(kernel.operands)
    places: list[tuple[int, int] | None] = [None] * _leading(kernel.params, count)
    for position, block in enumerate(mapping.block_mappings, len(places)):
        what = f"operand {position}" if position < count else f"result {position - count}"
        dims, others = _walked(block.index_map_jaxpr, d, mapping.grid[d])
        if others or len(dims) > 1:
            return f"grid dimension {d}: the index map of {what} does more than count its blocks"
        if not dims:
            places.append(None)
            continue
        size, n = _block_size(block.block_shape[dims[0]]), kernel.shapes[position][dims[0]]
        if size is None or n != size * mapping.grid[d]:
            return f"grid dimension {d}: its blocks do not divide dimension {dims[0]} of {what}"
        places.append((dims[0], size))
    if not any(places[:count]):
        return f"grid dimension {d}: it walks no operand"
    totals = [k for k, place in enumerate(places[count:]) if place is None]
    for operand, result in kernel.params["input_output_aliases"]:
        if places[operand] != places[count + result]:
            return f"grid dimension {d}: operand {operand} and result {result} share memory, and are divided differently"
        if result in totals:  # a block that no step writes keeps the operand's values, and steps may read the total as the operand
            return f"grid dimension {d}: result {result}, a sum over its steps, shares the memory of operand {operand}"
    return _obstacle(kernel, d, totals) or _memory_obstacle(kernel, d) or GridWalk(d, tuple(places))


def _obstacle(kernel: PallasKernel, d: int, totals: Sequence[int]) -> str:
    """Return the reason in a kernel's program why devices may not divide a grid dimension, which does not walk some results."""
    mapping, program = kernel.params["grid_mapping"], kernel.params["jaxpr"]
    numbered = [k for k in range(len(mapping.grid)) if k not in mapping.vmapped_dims]  # as its program sees them
    axis = numbered.index(d) if d in numbered else None
    if not totals:
        counts = axis is not None and any(asks_for_step(e, axis) for e in program.eqns)
        return f"grid dimension {d}: its program asks for the number of the step" if counts else ""
    first = mapping.num_index_operands + mapping.num_inputs
    narrow = any(kernel.params["out_avals"][k].dtype.itemsize < 4 for k in totals)  # whose sums each device would round
    if narrow or axis is None or not is_sum(program, axis, [program.invars[first + k] for k in totals]):
        return f"grid dimension {d}: result {totals[0]} is not provably a sum over its steps"
    blocks = [mapping.block_mappings[mapping.num_inputs + k] for k in totals]
    for inner in (k for k in range(d + 1, len(mapping.grid)) if mapping.grid[k] > 1):
        again = next((k for k, block in zip(totals, blocks, strict=True) if not _has_own_blocks(block, inner, mapping.grid)), None)
        if again is not None:  # each step of the inner dimension would set the same block to zero
            return f"grid dimension {d}: result {again} is not provably a sum over its steps, as dimension {inner} sets it again"
    return ""


def _memory_obstacle(kernel: PallasKernel, d: int) -> str:
    """Return the reason why memory may carry values between steps along a grid dimension; "" if it provably does not.

    The program asks for the number of the step along that dimension at most to set totals to zero (`_obstacle`).
    """
    mapping, program = kernel.params["grid_mapping"], kernel.params["jaxpr"]
    numbered = [k for k in range(len(mapping.grid)) if k not in mapping.vmapped_dims]
    zero_axes = [axis for axis, k in enumerate(numbered) if k > d or mapping.grid[k] == 1]
    scratch = program.invars[len(program.invars) - mapping.num_scratch_operands :]
    first = mapping.num_index_operands
    if any(x.primitive.name.startswith("prng_") for e in program.eqns for x in (e, *equations(e))):
        return f"grid dimension {d}: its program draws random numbers, whose generator may pass on from step to step"
    if writes_operands(program, program.invars[: first + mapping.num_inputs]):
        return f"grid dimension {d}: its program writes to an operand, where the next step may read it"
    if set_before_read(program, zero_axes, scratch):
        return ""
    return f"grid dimension {d}: its scratch memory is not provably set before it is read"


def _walked(index_map: core.ClosedJaxpr, d: int, steps: int) -> tuple[list[int], bool]:
    """Return the dimensions whose block is the step along a grid dimension, and whether the step affects the map in another way."""
    program = index_map.jaxpr
    if any(asks_for_any_step(x) for e in program.eqns for x in (e, *equations(e))):
        return [], True
    step = program.invars[d]
    same, dependent = {step}, {step}
    for e in program.eqns:
        if any(isinstance(v, core.Var) and v in dependent for v in e.invars):
            dependent.update(e.outvars)
            if e.primitive.name in ("convert_element_type", "copy") and _counts_to(e.outvars[0], steps - 1):
                same.update(v for v in e.outvars if e.invars[0] in same)
    outputs = [v if isinstance(v, core.Var) else None for v in program.outvars]
    return [k for k, v in enumerate(outputs) if v in same], any(v in dependent and v not in same for v in outputs)


def _counts_to(variable: Any, last: int) -> bool:
    """Return whether a variable is of a type of integers that holds 0 to `last`."""
    dtype = variable.aval.dtype
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max >= last


def _has_own_blocks(block: Any, d: int, grid: Sequence[int]) -> bool:
    """Return whether the steps along a grid dimension have blocks of their own, which do not overlap."""
    return any(_block_size(block.block_shape[k]) is not None for k in _walked(block.index_map_jaxpr, d, grid[d])[0])


def _block_size(block: Any) -> int | None:
    """Return the size of a block along a dimension; None if blocks are not counted there, but elements."""
    from jax.experimental import pallas  # takes a while, and only a program with kernels needs it

    if isinstance(block, pallas.Squeezed):
        return 1
    return int(block.block_size) if isinstance(block, pallas.Blocked) else None


def _trial(kernel: PallasKernel, eqn: core.JaxprEqn) -> str:
    """Return the reason why a kernel may not be divided along its walks, after a trial in Pallas' interpreter; "" if it may."""
    where = f"grid dimension {kernel.walks[-1].grid}"
    sizes = {w.grid: 2 for w in kernel.walks}
    shapes = [kernel.shape(k, sizes) for k in range(len(kernel.operands))]
    types: list[Any] = [v.aval for v in eqn.invars]
    grid: tuple[int, ...] = kernel.params["grid_mapping"].grid
    steps = prod(sizes.get(d, n) for d, n in enumerate(grid))
    if steps > STEPS or sum(prod(s) * t.dtype.itemsize for s, t in zip(shapes, types, strict=True)) > TRIED:
        return ""

    def difference() -> float:
        indices = _leading(kernel.params, len(kernel.operands))  # operands that index maps read, zeros in a trial
        arrays = [_sample(k, shape, t.dtype, k < indices) for k, (shape, t) in enumerate(zip(shapes, types, strict=True))]
        return _difference(kernel, [kernel.blocked(k, x) for k, x in enumerate(arrays)])

    try:
        worst = in_new_thread(difference)
    except Exception as problem:  # Pallas' interpreter does not know everything that compilers do
        return f"{where}: a trial of it fails ({str(problem).strip().partition(chr(10))[0]})"
    return "" if worst <= CLOSE else f"{where}: in a trial, the results of halves differ from the whole by {worst:.2g}"


def _sample(number: int, shape: Shape, dtype: Any, index: bool) -> jax.Array:
    """Return random numbers; of integers that index maps do not read, zeros and ones."""
    if index or not jnp.issubdtype(dtype, jnp.integer):
        return sample(number, shape, dtype)
    return jax.random.randint(jax.random.key(number), shape, 0, 2, jnp.int32).astype(dtype)


def _difference(kernel: PallasKernel, operands: Sequence[jax.Array]) -> float:
    """Return the largest relative difference between a kernel's results and those put together from halves along all walks."""
    dimensions, run = kernel.dimensions, jax.jit(partial(kernel.run, interpret=True))

    def joined(names: Sequence[str], part: Sequence[jax.Array]) -> list[jax.Array]:
        if not names:
            return run(*part)
        name, *rest = names
        halves = [joined(rest, half(part, dimensions.operands, name, k)) for k in range(2)]
        return [
            jnp.concatenate([x, y], term.index(name)) if name in term else x + y
            for x, y, term in zip(*halves, dimensions.results, strict=True)
        ]

    whole, together = run(*operands), joined((*dimensions.split, *dimensions.summed), operands)
    differences = [relative_difference(x, y) for x, y in zip(whole, together, strict=True)]
    return float(np.max(differences))  # NaN if any is


def kernel_of(function: Callable[..., Any]) -> PallasKernel | None:
    """Return the Pallas kernel that a function of `bind` calls; None if a user has declared the function's dimensions."""
    return function.args[0] if isinstance(function, partial) and function.func is _called else None
