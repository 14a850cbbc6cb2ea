"""`unity.step`: a whole training step on all devices, in the place of `jax.jit`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from math import prod
from types import MethodType
from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.base.errors import OptionError, PlanError
from unity.base.user_warnings import warn_user
from unity.exec.context import automatic, explicit_mesh
from unity.exec.hosts.arrays import place
from unity.optimize import OPTION_NAMES, optimize
from unity.pcg.jaxprs.shardings import sharding_of
from unity.pcg.jaxprs.trace_contexts import WIDE, unset, without_mesh
from unity.plan.call_arguments import bound, refuse_narrow, refuse_others
from unity.plan.face.former_names import accepting_former_options, former_member
from unity.plan.further_options import refuse_unknown
from unity.plan.plan import Plan
from unity.plan.shardings.following_shardings import HOST
from unity.plan.shardings.optimizer_state import SlotsByShape
from unity.plan.shardings.placement import Placement
from unity.planning.options import refuse_uncallable
from unity.training.array_call import ArrayCall, ResultStructure, Structured, next_values
from unity.training.host_state import Update, Weight, needed_by_losses, updates_of, weights_of_plans, with_state_on_host
from unity.training.marked_loss import MarkedCall, PlannedTrace, Survey, traced_with
from unity.training.scalar_sums import with_single_reductions
from unity.training.sharding_propagation import propagated_specs

_SETTINGS = (  # of JAX, under which a function computes other values or types, or is refused
    "jax_accurate_erf_inv",
    "jax_allow_f16_reductions",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
)
STEP_OPTION_NAMES = OPTION_NAMES - {"argnums", "training", "pack"}


@accepting_former_options
def step(fn: Callable[..., Any], *, donate_argnums: int | Sequence[int] | None = (), **options: Any) -> TrainingStep:
    """Run a training step on all devices: `unity.step(train_step, donate_argnums=0)` in the place of `jax.jit`.

    The step takes gradients of functions that are marked by `unity.loss`. These are planned as by `unity.optimize`, and everything
    else, such as the optimizer's update, runs where the weights are.

    Args:
        fn: a function of a state and a batch, or of more, that returns the next state. Modules of Flax NNX may change in place.
        donate_argnums: the arguments whose memory the results may use, as in `jax.jit`.
        options: those of `unity.optimize`, but `argnums`, `training` and `pack`. The optimizer's state is by default what
            the arguments have beside those of a loss. A mesh with explicit axes is used as one with automatic axes.

    Returns:
        A TrainingStep, which is called like `fn`.

    Raises:
        OptionError: an option is unknown, `fn` cannot be called, or it has no argument of a number in `donate_argnums`.
    """
    refuse_uncallable(fn, "that is a training step")
    refuse_unknown(options, STEP_OPTION_NAMES | {"donate_argnums"}, "unity.step", "training#options")
    if isinstance(mesh := options.get("mesh"), Mesh):  # the types of a step's values state no shardings
        options["mesh"] = automatic(mesh)
    return TrainingStep(fn, _donated(fn, donate_argnums), options)


def _donated(fn: Callable[..., Any], donate_argnums: Any) -> tuple[int, ...]:
    """Return the numbers of the donated arguments. Raises OptionError if the function lacks one of them."""
    if donate_argnums is None:
        return ()
    numbers = tuple(donate_argnums) if isinstance(donate_argnums, Sequence) else (donate_argnums,)
    try:
        kinds = [p.kind for p in inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):  # some built-in functions have no signature
        kinds = [inspect.Parameter.VAR_POSITIONAL]
    count = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    is_open = inspect.Parameter.VAR_POSITIONAL in kinds
    for k in numbers:
        if not isinstance(k, int) or k < (0 if is_open else -count) or (k >= count and not is_open):
            own = "any number of arguments" if is_open else f"{count} argument{'s' * (count != 1)}"
            raise OptionError(
                f"donate_argnums={donate_argnums!r}: expected numbers of arguments by position, such as 0, of"
                f" {getattr(fn, '__name__', 'the step')}, which takes {own}. (docs: training#options)"
            )
    return tuple(k if is_open else k % count for k in numbers)


@dataclass(frozen=True)
class CompiledStep:
    """A training step for arguments of certain types.

    Attributes:
        run: the program, a function of the arrays among the arguments, jitted.
        form: the form of its results.
        placement: the shardings of the arrays.
    """

    run: Any
    form: ResultStructure
    placement: Placement


class TrainingStep:
    """A training step on all devices. The first call plans it, as do `shard`, `shardings` and `lower`."""

    def __init__(self, fn: Callable[..., Any], donated: tuple[int, ...], options: dict[str, Any]) -> None:
        self.fn, self._donated, self._options = fn, frozenset(donated), options
        self._compiled: dict[Hashable, CompiledStep] = {}  # by the arguments' structure and types, and JAX's settings
        self._plans: dict[Hashable, Plan] = {}  # by the content of the loss
        self._inputs: Structured | None = None  # the arguments that the step was compiled for, without arrays
        self._structs: tuple[jax.ShapeDtypeStruct, ...] = ()  # and their types
        self._in_64 = False  # whether 64-bit types were enabled then
        update_wrapper(self, fn, updated=())  # a callable object has attributes of its own
        self.__name__: str = getattr(fn, "__name__", "the step")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the step as a method, whose first argument is the instance."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the step. Arrays that are not committed to devices, as most are before the first step, are placed as by `shard`.

        Raises:
            PlanError: the step differentiates no function that is marked by `unity.loss`; or the arguments have other structures or
                shapes than in the first call, or are committed to other devices (docs: training#errors).
        """
        call = self._call(args, named)
        compiled = self._compiled_for(call)
        self._refuse_repeated(call)
        with unset():
            results = compiled.run(*self._placed(call.inputs, compiled.placement.shardings))
        return call.finish(results, compiled.form)

    def shard(self, *args: Any, **named: Any) -> Any:
        """Place the arguments of a call where the step needs them. Arrays that are there already are not copied.

        Returns the positional arguments as a tuple, followed by a dict of the keyword arguments if there are any. Modules of Flax
        NNX change in place.
        """
        call = self._call(args, named)
        return call.inputs.write(call.arguments, self._compiled_for(call).placement.whole(call.inputs.arrays))

    def shardings(self, *args: Any, **named: Any) -> tuple[Any, ...]:
        """Return the shardings of the arguments, to create or to restore a state where it is needed.

        Returns trees like the arguments, in the order of `shard`. In the place of a module of Flax NNX is a tree like its state.

        Args:
            args: the arguments of a call, or `jax.ShapeDtypeStruct`s in the place of their arrays.
            named: arguments by name.
        """
        call = self._call(args, named)
        return call.inputs.like(call.arguments, self._compiled_for(call).placement.shardings)

    def lower(self, *args: Any, **named: Any) -> jax.stages.Lowered:
        """Lower the step for arguments, or for `jax.ShapeDtypeStruct`s in their place, as `jax.jit(fn).lower` does."""
        call = self._call(args, named)
        compiled = self._compiled_for(call)
        with unset():
            return compiled.run.lower(*call.inputs.structs)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the losses, in the order in which the step calls them; empty before the first call."""
        return tuple(self._plans.values())

    if not TYPE_CHECKING:  # former names are no attributes to a type checker

        def __getattr__(self, name: str) -> Any:
            return former_member(self, "step", name)

    def _call(self, args: tuple[Any, ...], named: dict[str, Any]) -> ArrayCall:
        args, keywords = bound(self.fn, args, named)
        return ArrayCall(self.fn, args, keywords, numbers=True, donated=self._donated)

    def _compiled_for(self, call: ArrayCall) -> CompiledStep:
        """Return the compiled step for a call. It compiles again for other weak types or settings; other shapes are an error."""
        key = call.key, call.inputs.types, tuple(getattr(jax.config, name, None) for name in _SETTINGS)
        try:
            is_compiled = key in self._compiled
        except TypeError as error:
            raise PlanError(
                f"{self.__name__} is called with a value that is no array and cannot be compared with that of another call"
                f" ({error}):\n    give it a __hash__ and an __eq__, or fix it by functools.partial. (docs: training#errors)"
            ) from None
        if not is_compiled:
            structs = call.inputs.structs
            if self._inputs is not None:
                if not jax.config.read("jax_enable_x64") and self._in_64 and any(str(s.dtype) in WIDE for s in structs):
                    refuse_narrow(self.__name__, "training#errors")
                self._refuse_others(call.inputs, structs)
            elif any(isinstance(x, jax.core.Tracer) for x in call.inputs.arrays):
                raise PlanError(
                    f"{self.__name__} is called while another function is traced, and is not planned yet: call"
                    f" {self.__name__}.shardings(...) with these arguments, or their shapes, before. (docs: training#errors)"
                )
            self._compiled[key] = self._compile(call, structs)
            self._inputs, self._structs = call.inputs.static, structs
            self._in_64 = bool(jax.config.read("jax_enable_x64"))
        return self._compiled[key]

    def _compile(self, call: ArrayCall, structs: Sequence[jax.ShapeDtypeStruct]) -> CompiledStep:
        closed, mesh, weights = self._trace(call, structs)
        jaxpr = closed.jaxpr
        specs = propagated_specs(jaxpr, mesh)
        shardings = tuple(NamedSharding(mesh, specs.get(v, PartitionSpec())) for v in jaxpr.invars)
        results: list[NamedSharding | None] = [
            NamedSharding(mesh, specs[v]) if not isinstance(v, core.Literal) and v in specs else None for v in jaxpr.outvars
        ]
        later = next_values(call.inputs, call.form, structs, closed.out_avals)
        updates = self._updates(weights, call.inputs, jaxpr, later)
        hosted = {k for update in updates for k in update.state}
        shardings = tuple(s.with_memory_kind(HOST) if k in hosted else s for k, s in enumerate(shardings))
        for k, argument in later.items():
            results[k] = shardings[argument]
        with without_mesh():  # the user's may be another one than the mesh of the plans
            reduced = core.ClosedJaxpr(with_single_reductions(jaxpr, specs, mesh), closed.consts)
            program = with_state_on_host(reduced, updates) if updates else core.jaxpr_as_fun(reduced)

        def run(*arrays: Any) -> list[Any]:
            return program(*arrays)

        run.__name__ = self.__name__  # which names the compiled program in profiles
        donated = tuple(k for k, top in enumerate(call.inputs.tops) if top in call.donated)
        jitted = jax.jit(run, in_shardings=shardings, out_shardings=results, donate_argnums=donated)
        shapes, tree = tuple(struct.shape for struct in structs), jax.tree.structure(shardings)
        return CompiledStep(jitted, call.form, Placement(self.__name__, tree, call.inputs.paths, shapes, shardings))

    def _updates(
        self, weights: Sequence[Weight], inputs: Structured, jaxpr: core.Jaxpr, later: Mapping[int, int]
    ) -> Sequence[Update]:
        """Return the updates of the weights whose state is in the memory of the host. Warns of plans that have more there.

        Args:
            weights: the weights of the losses.
            inputs: the arguments.
            jaxpr: the program of the step on the device.
            later: the arguments whose next values the results are, by number.
        """
        if not any(weight.hosted for weight in weights):
            return ()
        updates = updates_of(weights, inputs.keys, jaxpr, later, needed_by_losses(jaxpr))
        planned = sum(weight.hosted for weight in weights)
        if len(updates) < planned:
            warn_user(
                f"{self.__name__}: the plan has the optimizer's state of {planned} weights in the memory of the host, but the step"
                f" returns such a state of {len(updates)} that the gradients do not depend on, so that the rest is on the device."
                " (docs: memory#state-on-the-host)"
            )
        return updates

    def _trace(self, call: ArrayCall, structs: Sequence[jax.ShapeDtypeStruct]) -> tuple[core.ClosedJaxpr, Mesh, Sequence[Weight]]:
        """Return the program of a step in which plans compute the losses, the mesh of the plans, and the losses' weights.

        Without state in the memory of the host, no weights are returned.
        """
        if explicit_mesh(()) is not None:
            raise PlanError(
                f"{self.__name__} is called while jax.set_mesh has set a mesh with explicit axes, where unity.step cannot run.\n"
                "    Leave it out, or plan the loss by unity.optimize. (docs: moving#under-a-mesh-of-your-own)"
            )
        survey = Survey()
        with traced_with(survey):
            jax.make_jaxpr(call)(*structs)
        self._refuse_unmarked(survey.calls)
        plans = [self._plan(marked, structs) for marked in survey.calls]
        mesh = plans[0].inspect.mesh
        if any(plan.inspect.mesh != mesh for plan in plans):
            raise PlanError(
                f"{self.__name__} has losses that are planned for different numbers of devices: leave objective='devices' out."
                " (docs: training#options)"
            )
        hosts = any(any(plan.program.hosted_state) for plan in plans)
        substitution = PlannedTrace(self.__name__, survey.calls, plans, hosts)
        with traced_with(substitution):
            closed = jax.make_jaxpr(call)(*structs)
        if len(substitution.done) != len(survey.calls):
            substitution.refuse()
        return closed, mesh, weights_of_plans(survey.calls, plans, closed.jaxpr) if hosts else ()

    def _plan(self, marked: MarkedCall, structs: Sequence[jax.ShapeDtypeStruct]) -> Plan:
        """Return the plan of a marked call, which equal calls share."""
        if marked.key not in self._plans:
            arguments, options = marked.arguments, dict(self._options)
            if not options.keys() & {"optimizer", "optimizer_slots"}:
                options["optimizer"] = _slots(marked, structs)
            self._plans[marked.key] = optimize(
                marked.planned_function,
                *arguments.fill(marked.structs),
                argnums=arguments.differentiated,
                training=bool(arguments.differentiated),
                **options,
            )
        return self._plans[marked.key]

    def _refuse_unmarked(self, calls: Sequence[MarkedCall]) -> None:
        """Raise PlanError unless the step differentiates a marked function."""
        if not calls:
            raise PlanError(
                f"{self.__name__} calls no function that is marked by unity.loss, so that nothing in it can be planned:\n"
                "    mark what it differentiates, as in jax.value_and_grad(unity.loss(loss_fn)). (docs: training#errors)"
            )
        if not any(any(one.perturbed) for one in calls):
            names = ", ".join(dict.fromkeys(one.name for one in calls))
            raise PlanError(
                f"{self.__name__} differentiates no function that is marked by unity.loss; it only calls {names}:\n"
                "    mark what is given to jax.value_and_grad, or plan an evaluation by unity.optimize(..., training=False)."
                " (docs: training#errors)"
            )

    def _refuse_others(self, inputs: Structured, structs: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Raise PlanError if the arguments differ from those of the first call in more than weak types."""
        planned = self._inputs
        assert planned is not None
        if inputs.key != planned.key:
            new, old = set(inputs.paths), set(planned.paths)
            wrong = [f"{path} is missing" for path in planned.paths if path not in new]
            wrong += [f"{path} is not known to the step" for path in inputs.paths if path not in old]
            wrong = wrong or ["what is not an array among them differs, such as a function or a module's settings"]
        else:
            triples = zip(inputs.paths, self._structs, structs, strict=True)
            wrong = [f"{p}: planned for {_text(a)}, called with {_text(b)}" for p, a, b in triples if _text(a) != _text(b)]
        refuse_others(
            f"{self.__name__} is called with other arguments than it was planned for",
            wrong,
            "Keep shapes and types fixed (drop or pad the last batch), or make another unity.step for these."
            " (docs: training#errors)",
        )

    def _refuse_repeated(self, call: ArrayCall) -> None:
        """Raise PlanError if an array occurs twice and is donated, as `jax.jit` does.

        Otherwise only the device that has the array would fail, because the others have copies, and wait for it.
        """
        inputs, arrays = call.inputs, call.inputs.arrays
        if not call.donated or len(set(map(id, arrays))) == len(arrays):
            return
        first: dict[int, int] = {}
        places = ((first.setdefault(id(x), k), k) for k, x in enumerate(arrays) if _is_concrete(x))
        pairs = [(j, k) for j, k in places if j != k]
        if not pairs:  # Python numbers, or scalars of NumPy
            return
        tops, paths = inputs.tops, inputs.paths
        refuse_others(
            f"{self.__name__} donates arrays that it is called with twice",
            [f"{paths[k]} is also {paths[j]}" for j, k in pairs if call.donated & {tops[j], tops[k]}],
            f"Copy them by jnp.copy, or place all: arguments = {self.__name__}.shard(*arguments). (docs: training#errors)",
        )

    def _placed(self, inputs: Structured, shardings: Sequence[NamedSharding]) -> list[Any]:
        """Place the arrays where the step needs them. As for `jax.jit`, arrays that are committed elsewhere are an error."""
        arrays, wrong = list(inputs.arrays), []
        for k, (x, sharding) in enumerate(zip(arrays, shardings, strict=True)):
            if isinstance(x, jax.core.Tracer):
                continue
            own = x.sharding if isinstance(x, jax.Array) else None
            if own is sharding:
                continue
            if own is None or not x.committed:
                arrays[k] = place(x, sharding)
            elif not own.is_equivalent_to(sharding, x.ndim):
                wrong.append(k)
            elif sharding_of(jax.typeof(x)) is not None:  # its mesh has explicit axes, which the step's mesh has not
                arrays[k] = place(x, sharding)
        refuse_others(
            f"{self.__name__} is called with arrays that are placed otherwise than it needs them",
            [f"{inputs.paths[k]}: {arrays[k].sharding}, not {shardings[k]}" for k in wrong],
            f"Place them once: arguments = {self.__name__}.shard(*arguments). (docs: training#errors)",
        )
        return arrays


def _slots(marked: MarkedCall, structs: Sequence[jax.ShapeDtypeStruct]) -> SlotsByShape:
    """Return the bytes of a step's arguments beside the operands of a loss, such as moments, for each byte of its weights.

    An argument belongs to the weights of its shape. Those that have the shape of none, such as counts and factored moments, are
    divided among all weights, as the step divides them, too, where the update allows it.
    """
    weights = _bytes_by_shape(s for s, perturbed in zip(marked.structs, marked.perturbed, strict=True) if perturbed)
    operands = _bytes_by_shape(s for s, constant in zip(marked.structs, marked.constant, strict=True) if not constant)
    beside = _bytes_by_shape(structs)
    beside.subtract(operands)
    own = {shape: max(0, beside[shape]) for shape in weights}
    rest = max(0, sum(beside.values()) - sum(own.values())) / (sum(weights.values()) or 1)
    slots = {shape: round(own[shape] / nbytes + rest, 2) for shape, nbytes in weights.items() if nbytes}
    return SlotsByShape(slots, round(rest, 2))


def _bytes_by_shape(structs: Iterable[jax.ShapeDtypeStruct]) -> Counter[tuple[int, ...]]:
    """Return the bytes of all arrays of each shape."""
    nbytes = Counter[tuple[int, ...]]()
    for s in structs:
        nbytes[s.shape] += prod(s.shape) * s.dtype.itemsize
    return nbytes


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _text(struct: jax.ShapeDtypeStruct) -> str:
    return f"{struct.dtype}{list(struct.shape)}"
