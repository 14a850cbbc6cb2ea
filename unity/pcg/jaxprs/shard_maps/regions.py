"""Regions of `shard_map` as global programs: a program per device is a `vmap` over stacked pieces, with mesh axes as axis names.

Each operand is reshaped to its pieces, stacked along one leading dimension for each mesh axis in its specification. JAX's batching
rules then turn the program of one device into one of all pieces, in which a collective is an ordinary operation on leading
dimensions (`stacked_collectives`). A plan may divide these like any other dimension: over the devices as written, or otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from unity.base.errors import CaptureError
from unity.pcg.jaxprs.effects import is_effect, pruned, warn
from unity.pcg.jaxprs.jaxprs import (
    BRANCHED,
    RULED,
    Program,
    callable_of,
    called,
    chosen_of,
    equations,
    floating,
    is_reference,
    merged,
    with_equations,
    with_nested,
    with_programs,
)
from unity.pcg.jaxprs.parameter_text import identities, program_text, text_of
from unity.pcg.jaxprs.pullbacks import EquationPullback
from unity.pcg.jaxprs.references import has_references, without_references
from unity.pcg.jaxprs.shard_maps.piecewise_calls import draws_by_batch, piecewise, with_ordinary_calls
from unity.pcg.jaxprs.shard_maps.stacked_collectives import COLLECTIVES, agreed, gathered, piece, stacked
from unity.pcg.jaxprs.shard_maps.summed_products import contracted
from unity.pcg.jaxprs.shardings import PLACING, literal_value, plain, without_shardings
from unity.pcg.jaxprs.source_lines import Place, place_of
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.pcg.jaxprs.weak_types import struct_of
from unity.pcg.types.varying_axes import CASTS

REGION = "shard_map"
IDENTITIES = CASTS.union(PLACING)  # placements are along the axes that stay automatic
KERNELS = frozenset({"pallas_call"})
REPLACEABLE = frozenset({"custom_vmap_call", "custom_partitioning"})  # calls with the user's rule for batches or partitions
STACKED = frozenset({"ragged_dot", "ragged_dot_general"})  # JAX batches these once, and if all operands are batched
FOREIGN = frozenset({"pure_callback", "ffi_call"})  # calls that tell JAX how to batch them, or that it cannot
COMMUNICATION = frozenset({"axis_index", "get_barrier_semaphore"})  # primitives inside kernels that address other devices
_DIVERGENT = "it is in a branch that only some devices of a shard_map take, and that has collectives or lax.axis_index"


def raised(program: Any) -> Any:
    """Replace every `shard_map` of a program, or of the programs in a parameter, by a call of the global program that it computes.

    Returns the same object if it has none.
    """
    return with_equations(program, _without_regions)


def _without_regions(eqn: core.JaxprEqn) -> core.JaxprEqn:
    if eqn.primitive.name != REGION:
        return with_nested(eqn, _without_regions)
    with without_mesh():
        program = jax.make_jaxpr(_Region.of(eqn))(*(struct_of(v.aval) for v in eqn.invars))
    program = contracted(with_ordinary_calls(program))
    return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": program}, effects=program.effects)


@dataclass(frozen=True)
class _Region:
    """A `shard_map`, as a function of global arrays.

    Attributes:
        eqn: its equation.
        sizes: the size of each mesh axis that it maps over, in the order of the mesh.
        outer: the region around it.
        place: the user's line.
        alone: its programs run on the pieces of one device, rather than under `vmap`s.
    """

    eqn: core.JaxprEqn
    sizes: dict[str, int]
    outer: _Region | None
    place: Place
    alone: bool = False

    @staticmethod
    def of(eqn: core.JaxprEqn, outer: _Region | None = None) -> _Region:
        mapped = eqn.params["newly_manual_axes"]
        sizes = {name: size for name, size in eqn.params["mesh"].shape.items() if name in mapped}
        return _Region(eqn, sizes, outer, place_of(eqn.source_info, outer.place if outer else Place()))

    def __call__(self, *operands: Any) -> list[Any]:
        """Return the region's results for global operands."""
        if any(is_reference(v.aval) for v in self.eqn.invars):
            raise CaptureError(
                f"{self.place.line or 'the function'}: a jax.Ref made outside of a shard_map is passed to it, and a plan is a graph"
                " of values only.\n    Pass its value (ref[...]), and change the reference by the result."
                " (docs: capture#references)"
            )
        into, out = ([self.named(spec) for spec in self.eqn.params[name]] for name in ("in_specs", "out_specs"))

        def one(*pieces: Any) -> list[Any]:
            return [self.result(x, dims) for x, dims in zip(self.values(pieces), out, strict=True)]

        mapped: Callable[..., list[Any]] = one
        for name, size in reversed(self.sizes.items()):
            axes = tuple(
                [0 if size > 1 and any(name in names for names in dims) else None for dims in each] for each in (into, out)
            )
            mapped = jax.vmap(mapped, *axes, axis_name=name, axis_size=size)
        results = mapped(*(self.stack(x, dims) for x, dims in zip(operands, into, strict=True)))
        return [self.unstack(x, dims) for x, dims in zip(results, out, strict=True)]

    def named(self, spec: PartitionSpec) -> list[tuple[str, ...]]:
        """Return for each leading dimension of a specification the axes of more than one device that divide it."""
        if sums := spec.unreduced | spec.reduced:
            raise CaptureError(
                f"{self.place.line or 'the function'}: a specification of a shard_map has unreduced or reduced axes"
                f" ({', '.join(map(str, sorted(sums, key=str)))}), which unity cannot plan.\n    Sum inside of the shard_map by"
                " lax.psum. (docs: capture#shard-maps)"
            )
        dims = [() if names is None else names if isinstance(names, tuple) else (names,) for names in spec]
        return [tuple(name for name in names if self.sizes.get(name, 1) > 1) for names in dims]

    def stack(self, x: Any, dims: Sequence[tuple[str, ...]]) -> Any:
        """Stack the pieces of a global array along one leading dimension for each axis that divides it, in the mesh's order."""
        shape, places = [], {}
        for n, names in zip(x.shape, (*dims, *[()] * (x.ndim - len(dims))), strict=True):
            places.update((name, len(shape) + k) for k, name in enumerate(names))
            shape += [*(self.sizes[name] for name in names), n // prod(self.sizes[name] for name in names)]
        if not places:
            return x
        first = [places[name] for name in self.sizes if name in places]
        return lax.transpose(lax.reshape(x, shape), (*first, *(k for k in range(len(shape)) if k not in first)))

    def unstack(self, x: Any, dims: Sequence[tuple[str, ...]]) -> Any:
        """Join stacked pieces to a global array: the inverse of `stack`."""
        first = [name for name in self.sizes if any(name in names for names in dims)]
        if not first:
            return x
        order, shape = [], []
        for k, n in enumerate(x.shape[len(first) :]):
            names = dims[k] if k < len(dims) else ()
            order += [*(first.index(name) for name in names), len(first) + k]
            shape.append(n * prod(self.sizes[name] for name in names))
        return lax.reshape(lax.transpose(x, order), shape)

    def result(self, x: Any, dims: Sequence[tuple[str, ...]]) -> Any:
        """Stack a result along exactly those axes that divide it. Along the others it is equal on all devices, as its type says."""
        divided = {name for names in dims for name in names}
        for name, size in self.sizes.items():
            x = stacked(x, {name: size}) if name in divided else agreed(x, name, size, not self.eqn.params["check_vma"])
        return x

    def values(self, pieces: Sequence[Any]) -> list[Any]:
        """Return the results of each device's program for its pieces.

        References are removed once collectives are operations on pieces, and before `vmap`, which refuses some uses of them.
        """
        program = self.eqn.params["jaxpr"]
        if not has_references(program):
            return self.run(program, pieces)
        types = (struct_of(jax.typeof(x)) for x in pieces)
        plain_program = without_references(jax.make_jaxpr(lambda *pieces: self.run(program, pieces))(*types))
        return self.run(plain_program, pieces, lambda eqn, operands: callable_of(without_scope(eqn))(*operands))

    def run(
        self, program: Program, operands: Sequence[Any], apply: Callable[[core.JaxprEqn, list[Any]], Sequence[Any]] | None = None
    ) -> list[Any]:
        """Run a program of one device under the `vmap`s of the region's axes.

        apply: returns the results of an equation; by default, those of an equation of one device.
        """
        inner: Any = getattr(program, "jaxpr", program)
        env: dict[Any, Any] = dict(
            zip((*inner.constvars, *inner.invars), (*getattr(program, "consts", ()), *operands), strict=True)
        )

        def read(atom: Any) -> Any:
            return literal_value(atom) if isinstance(atom, core.Literal) else env[atom]

        for eqn in inner.eqns:
            with self.origin(eqn):
                env.update(zip(eqn.outvars, (apply or self.apply)(eqn, [read(a) for a in eqn.invars]), strict=True))
        return [read(a) for a in inner.outvars]

    @contextmanager
    def origin(self, eqn: core.JaxprEqn) -> Iterator[None]:
        """Record the place of an equation as that of what is traced, and name it in errors."""
        try:
            with source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
                yield
        except CaptureError:
            raise
        except Exception as error:
            raise self.refusal(eqn, str(error).strip().split("\n")[0] or type(error).__name__) from error

    def line(self, eqn: core.JaxprEqn) -> str:
        return place_of(eqn.source_info, self.place).line or "the function"

    def refusal(self, eqn: core.JaxprEqn, reason: str) -> CaptureError:
        return CaptureError(
            f"{self.line(eqn)}: {eqn.primitive.name} inside of a shard_map cannot be planned, since JAX cannot apply it to the"
            f" pieces of all devices at once: {reason}\n    Compute it outside of the shard_map, or write it with JAX's collectives"
            " (lax.psum, lax.all_gather, lax.ppermute, lax.all_to_all). (docs: capture#shard-maps)"
        )

    def apply(self, eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """Return the results of an equation."""
        name = eqn.primitive.name
        if name in IDENTITIES:
            return operands
        if name in COLLECTIVES:
            return COLLECTIVES[name](eqn.params, self.axes, *operands)
        if name == REGION:
            return _Region.of(eqn, self)(*operands)
        if name in REPLACEABLE:  # a device has a piece and no batch, so these rules do not run
            return self.run(eqn.params["call"], operands)
        if name in KERNELS and not COMMUNICATION.isdisjoint(e.primitive.name for e in equations(eqn)):
            raise self.refusal(eqn, "it communicates with other devices itself")
        if name in RULED:
            rule = _Rule((self.key, *_content(eqn)), self, eqn)
            return with_jvp(rule)(*operands) if name == "custom_jvp_call" else with_vjp(rule)(*self.varied(eqn.invars, operands))
        if draws_by_batch(eqn):
            return piecewise(jax.make_jaxpr(self.mapped_function(eqn))(*(struct_of(v.aval) for v in eqn.invars)), operands)
        if name in STACKED:
            return self.stacked_call(eqn, operands)
        diverges = name in BRANCHED and any(map(is_effect, equations(eqn))) and bool(self.varying(eqn.invars[0].aval))
        return (self.branched if diverges else self.mapped_function)(eqn)(*operands)

    def mapped_function(self, eqn: core.JaxprEqn) -> Callable[..., list[Any]]:
        """Return an equation, which is neither a collective nor a region, as a function of pieces."""
        kernel = eqn.primitive.name in KERNELS  # its program changes references, and is that of one device in any case
        params = {key: value if kernel else self.traced(value) for key, value in eqn.params.items()}
        if eqn.primitive.name in FOREIGN and params.get("vmap_method", "") is None:
            params["vmap_method"] = "sequential"  # each device calls it for its own piece
        variables: list[list[Any]] = [[core.Var(plain(v.aval)) for v in part] for part in (eqn.invars, eqn.outvars)]
        plain_eqn = eqn.replace(invars=variables[0], outvars=variables[1], params=params)
        return callable_of(without_scope(plain_eqn), without_shardings)

    def stacked_call(self, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation that is batched once, over one leading dimension that all operands have.

        The `vmap`s of the region do not see it, since the batching rules of these primitives refuse operands that are not batched.
        """
        axes = {axis: size for v in eqn.invars for axis, size in self.varying(v.aval).items()}
        if not axes:
            return self.mapped_function(eqn)(*operands)
        flat = [lax.reshape(gathered(x, axes), (prod(axes.values()), *jnp.shape(x))) for x in operands]
        batched = jax.make_jaxpr(jax.vmap(self.mapped_function(eqn)))(*(struct_of(jax.typeof(x)) for x in flat))
        results = piecewise(batched, flat)
        return [piece(lax.reshape(x, (*axes.values(), *x.shape[1:])), axes) for x in results]

    def branched(self, eqn: core.JaxprEqn) -> Callable[..., list[Any]]:
        """Return a conditional, each of whose effects runs for the devices that take its branch, as a function of pieces.

        `vmap` runs all branches for all devices and selects results, so effects run in a separate loop over the devices. Branches
        that communicate cannot run in such a loop: their effects are dropped with a warning. Branches that change references are
        refused, since the loop would change them, too.
        """
        if any(is_reference(v.aval) for v in eqn.invars):
            raise CaptureError(
                f"{self.line(eqn)}: a branch that only some devices of a shard_map take has a side effect, such as jax.debug.print,"
                " and reads or changes a jax.Ref.\n    Return the value from the branch, and change the reference by the result."
                " (docs: capture#references)"
            )
        axes = {name: size for name, size in self.axes.items() if size > 1}
        run, one = self.mapped_function(eqn), replace(self, alone=True).mapped_function(eqn)
        communicates = any(e.primitive.name in COLLECTIVES or e.primitive.name == REGION for e in equations(eqn))

        def call(*operands: Any) -> list[Any]:
            types = (struct_of(jax.typeof(x)) for x in operands)
            silent, notices = pruned(jax.make_jaxpr(run)(*types), reason=_DIVERGENT)
            if communicates:
                warn(notices)
            else:
                rows = [lax.reshape(gathered(x, axes), (prod(axes.values()), *jnp.shape(x))) for x in operands]
                lax.scan(lambda _, pieces: (None, one(*pieces)[:0]), None, lax.stop_gradient(rows))
            return core.jaxpr_as_fun(silent)(*operands)

        return call

    def traced(self, value: Any) -> Any:
        """Trace the program, or programs, in a parameter again, without the types that say along which axes values vary."""

        def retraced(program: Any) -> Any:
            inner: Any = getattr(program, "jaxpr", program)
            closed = jax.make_jaxpr(lambda *operands: self.run(program, operands))(*map(_struct, (v.aval for v in inner.invars)))
            return closed if isinstance(program, core.ClosedJaxpr) else closed.jaxpr

        return with_programs(value, retraced)

    def inside(self, run: Callable[..., Any], avals: Sequence[Any]) -> core.ClosedJaxpr:
        """Trace a function of one device's pieces, of the types inside of the region."""
        programs = []

        def local() -> tuple:
            programs.append(jax.make_jaxpr(run)(*map(_piece_struct, avals)))
            return ()

        jax.make_jaxpr(self.mapped(local))()
        return programs[0]

    def mapped(self, local: Callable[[], tuple]) -> Callable[[], tuple]:
        """Return a function without operands that runs inside of the region, and of those around it."""
        params = self.eqn.params
        mesh, names, checked = params["mesh"], set(self.sizes), params["check_vma"]
        call = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=(), axis_names=names, check_vma=checked)
        return self.outer.mapped(call) if self.outer else call

    def varied(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Stack floating-point values along the axes along which their types say that they may vary."""
        return [
            stacked(x, self.varying(v.aval)) if floating(v.aval) and not isinstance(v, core.Literal) else x
            for v, x in zip(variables, values, strict=True)
        ]

    def varying(self, aval: Any) -> dict[str, int]:
        """Return the sizes of the axes along which a value of a type inside of the region may vary."""
        if self.alone:
            return {}
        unchecked, names = not self.eqn.params["check_vma"], aval.manual_axis_type.varying
        return {name: size for name, size in self.axes.items() if size > 1 and (unchecked or name in names)}

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes of this region and of those around it, outermost first."""
        return {**(self.outer.axes if self.outer else {}), **self.sizes}

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for regions in which derivative rules mean the same, and are traced in the same precision."""
        mesh, wide = self.eqn.params["mesh"], jax.config.read("jax_enable_x64")
        settings = tuple(self.sizes), getattr(mesh, "abstract_mesh", mesh), wide, self.eqn.params["check_vma"], self.alone
        return (*settings, *(self.outer.key if self.outer else ()))


@dataclass(frozen=True)
class _Rule:
    """A call with a derivative rule in a region. It is traced inside of the region, since rules compare types with the call's.

    Attributes:
        key: its content. Equal calls share their functions, since later passes tell functions apart by identity.
        region: the region.
        eqn: the call.
        programs: the traced programs of its rule.
    """

    key: tuple[Any, ...]
    region: _Region = field(compare=False)
    eqn: core.JaxprEqn = field(compare=False)
    programs: list[core.ClosedJaxpr] = field(compare=False, default_factory=list)

    @property
    def avals(self) -> list[Any]:
        return [v.aval for v in self.eqn.invars]

    def value(self, *operands: Any) -> list[Any]:
        return self.region.run(called(self.eqn.params), operands)

    def derivative(self, call: Callable[..., Any]) -> core.ClosedJaxpr:
        """Return the program (operands, tangents of the floating-point ones) -> (results, their tangents)."""
        active = list(map(floating, self.avals))

        def run(*given: Any) -> list[Any]:
            primals, tangents = given[: len(active)], given[len(active) :]
            others = chosen_of(active, primals, False)
            results = jax.jvp(lambda *c: call(*merged(active, c, others)), tuple(chosen_of(active, primals)), tuple(tangents))
            return [x for part in results for x in part]

        if not self.programs:
            self.programs.append(self.region.inside(run, [*self.avals, *chosen_of(active, self.avals)]))
        return self.programs[0]

    def pull(self, call: Callable[..., Any]) -> list[core.ClosedJaxpr]:
        """Return the programs of the rule: operands -> (results, residuals); (residuals, cotangents) -> cotangents.

        Cotangents are those of floating-point results and operands.
        """
        if not self.programs:
            pullback, real = EquationPullback(call, list(map(floating, self.avals))), [floating(v.aval) for v in self.eqn.outvars]
            self.programs.append(self.region.inside(pullback.forward, self.avals))
            residuals, n = pullback.residuals, len(pullback.residuals)
            cotangents = [v.aval.to_tangent_aval() for v in chosen_of(real, self.eqn.outvars)]
            backward = self.region.inside(lambda *xs: pullback.backward(real, xs[:n], xs[n:]), [*residuals, *cotangents])
            self.programs.append(backward)
        return self.programs


def _content(eqn: core.JaxprEqn) -> tuple[Any, ...]:
    """Return what tells a call with a derivative rule from others: its types, its text, and the identities of its functions."""

    def known(value: Any) -> str | None:
        text = program_text(value)
        return None if text is None else f"{text} {[*map(id, getattr(value, 'consts', ()))]}"

    return str([str(v.aval) for v in eqn.invars]), text_of(dict(eqn.params), known), tuple(identities(eqn.params))


@lru_cache(maxsize=1024)
def with_jvp(rule: _Rule) -> Callable[..., list[Any]]:
    """Return a `custom_jvp` on stacked pieces."""
    original = callable_of(without_scope(rule.eqn))  # in the closure of the rule, which is told from others by what it closes over
    n, active = len(rule.eqn.outvars), list(map(floating, rule.avals))

    def derivative(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        results = rule.region.run(rule.derivative(original), [*primals, *chosen_of(active, tangents)])
        return results[:n], results[n:]

    call = jax.custom_jvp(rule.value)
    call.defjvp(derivative)
    return call


@lru_cache(maxsize=1024)
def with_vjp(rule: _Rule) -> Callable[..., list[Any]]:
    """Return a `custom_vjp` on stacked pieces, whose rule sees the cotangents of each device, as it would inside of the region.

    Otherwise an operand or a result that is equal on all devices would have a single cotangent, summed before the rule.
    """
    original = callable_of(without_scope(rule.eqn))
    results, n = rule.eqn.outvars, len(rule.eqn.outvars)
    active, real = list(map(floating, rule.avals)), [floating(v.aval) for v in results]

    def forward(*operands: Any) -> tuple[list[Any], list[Any]]:
        values = rule.region.run(rule.pull(original)[0], operands)
        return rule.region.varied(results, values[:n]), values[n:]

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        values = rule.region.run(rule.pull(original)[1], [*residuals, *chosen_of(real, cotangents)])
        return tuple(merged(active, values, [None] * active.count(False)))

    call = jax.custom_vjp(lambda *operands: rule.region.varied(results, rule.value(*operands)))
    call.defvjp(forward, backward)
    return call


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Convert an abstract value, perhaps of a reference, to a `ShapeDtypeStruct`."""
    return struct_of(aval).update(is_ref=is_reference(aval))


def _piece_struct(aval: Any) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(get_abstract_mesh(), PartitionSpec())
    varying, weak = aval.manual_axis_type, aval.weak_type
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, manual_axis_type=varying, weak_type=weak)


def without_scope(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Return an equation without its scopes, for a trace that is already in them."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=source_info_util.new_name_stack()))
