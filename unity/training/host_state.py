"""The optimizer's state in the memory of the host: which arrays of a step are, and the step that fetches them and sends them back.

A step computes all gradients, and then updates one weight after the other: it fetches the weight's state, computes the next values,
and sends the next state back. Barriers make this the only order, so that the states of two weights at most are on a device at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax import lax
from jax.extend import core

from unity.pcg.jaxprs.jaxprs import each, equations
from unity.plan.plan import Plan
from unity.plan.shardings.following_shardings import KeyNames, names_of
from unity.training.marked_loss import GRADIENT, OPERAND, MarkedCall, operand_name

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


@dataclass(frozen=True)
class Weight:
    """A weight that a loss is differentiated by.

    Attributes:
        names: the keys of its path in the loss's arguments.
        shape: its shape.
        arguments: the numbers of the step's arguments of this shape that it is computed from. They tell it from a weight with the
            same names that another loss, or another argument of the loss, has.
        hosted: whether the plan has the optimizer's state of it in the memory of the host.
    """

    names: KeyNames
    shape: tuple[int, ...]
    arguments: frozenset[int]
    hosted: bool


def weights_of_plans(calls: Sequence[MarkedCall], plans: Sequence[Plan], jaxpr: core.Jaxpr) -> list[Weight]:
    """Return the weights of the losses of a step, whose program has them by name."""
    jaxpr, _ = inlined(jaxpr)
    program, argument, read = _Program(jaxpr), {v: k for k, v in enumerate(jaxpr.invars)}, operands_by_name(jaxpr)
    weights: dict[tuple[KeyNames, tuple[int, ...], frozenset[int]], bool] = {}
    for k, (call, plan) in enumerate(zip(calls, plans, strict=True)):
        leaves = jax.tree.leaves_with_path(call.arguments.trees)
        for (path, operand), hosted in zip(leaves, plan.program.hosted_state, strict=True):
            if call.perturbed[operand]:
                shape = call.structs[operand].shape
                sources = program.needed(v for v in read[operand_name(k, operand)] if v.aval.shape == shape)
                arguments = frozenset(argument[v] for v in sources if v in argument and v.aval.shape == shape)
                weight = names_of(path[1:]), shape, arguments
                weights[weight] = weights.get(weight, False) or hosted
    return [Weight(*weight, hosted) for weight, hosted in weights.items()]


def _common(one: KeyNames, other: KeyNames) -> int:
    """Return the number of keys at the end of two paths that are equal."""
    pairs = list(zip(reversed(one), reversed(other), strict=False))
    return next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))


def needed_by_losses(jaxpr: core.Jaxpr) -> frozenset[int]:
    """Return the numbers of a program's arguments that values with the name `OPERAND` or `GRADIENT` depend on."""
    jaxpr, _ = inlined(jaxpr)
    needed = _Program(jaxpr).needed([*named(jaxpr, OPERAND), *named(jaxpr, GRADIENT)])
    return frozenset(k for k, v in enumerate(jaxpr.invars) if v in needed)


@dataclass(frozen=True)
class Update:
    """The update of a weight.

    Attributes:
        state: for each argument of the step, by number, that is the weight's state in the memory of the host, the number of the
            result that is its next value.
        others: the numbers of the results that are next values of the weight, and of its state on the device.
    """

    state: Mapping[int, int]
    others: tuple[int, ...]


def updates_of(
    weights: Sequence[Weight],
    keys: Sequence[Sequence[Any]],
    jaxpr: core.Jaxpr,
    later: Mapping[int, int],
    needed: Collection[int],
) -> list[Update]:
    """Return the updates of the weights that have state in the memory of the host.

    Args:
        weights: the weights of the losses.
        keys: the path of each argument of the step.
        jaxpr: the program of the step, in which the gradients have the name `GRADIENT`.
        later: the number of the argument whose next value a result is, by the number of the result.
        needed: the numbers of the arguments that a loss depends on. They stay on the device.
    """
    states, others = defaultdict[Weight, dict[int, int]](dict), defaultdict[Weight, list[int]](list)
    following = _Following(weights, keys, jaxpr, later)
    for result, k in later.items():
        weight = following.weight(k)
        if weight is not None and weight.hosted and k not in needed:
            states[weight][k] = result
        elif weight is not None:
            others[weight].append(result)
    return [Update(state, tuple(others[weight])) for weight, state in states.items()]


class _Following:
    """The weights that the arguments of a step follow. Arguments as for `updates_of`."""

    def __init__(
        self, weights: Sequence[Weight], keys: Sequence[Sequence[Any]], jaxpr: core.Jaxpr, later: Mapping[int, int]
    ) -> None:
        self.jaxpr, _ = inlined(jaxpr)
        self.weights, self.keys, self.results = weights, keys, {k: result for result, k in later.items()}
        self.program, self.gradients = _Program(self.jaxpr), frozenset(named(self.jaxpr, GRADIENT))
        self.sources: dict[int, set[Any]] = {}

    def weight(self, k: int) -> Weight | None:
        """Return the weight that an argument follows: of those of its shape, the one with the most alike path, if any.

        Of weights with equally alike paths, those that are updated with the argument come first, and then those whose state is on
        the device.
        """
        names, argument = names_of(self.keys[k]), cast("Any", self.jaxpr.invars[k].aval)
        alike = [weight for weight in self.weights if weight.shape == argument.shape]
        most = max((_common(names, weight.names) for weight in alike), default=0)
        best = [weight for weight in alike if _common(names, weight.names) == most]
        if len(best) > 1:
            return max(best, key=lambda weight: (self.is_updated_with(weight, k), not weight.hosted))
        return best[0] if best else None

    def is_updated_with(self, weight: Weight, k: int) -> bool:
        """Return whether the next value of a weight depends on an argument, or that of the argument on the weight.

        What they depend on through a gradient does not count.
        """
        by_weight = any(self.jaxpr.invars[k] in self.sources_of(w) for w in weight.arguments)
        return by_weight or any(self.jaxpr.invars[w] in self.sources_of(k) for w in weight.arguments)

    def sources_of(self, k: int) -> set[Any]:
        """Return the variables that the next value of an argument depends on, but not through a gradient, with the argument."""
        if k not in self.sources:
            after = [self.jaxpr.outvars[self.results[k]]] if k in self.results else []
            self.sources[k] = {self.jaxpr.invars[k], *self.program.needed(after, self.gradients)}
        return self.sources[k]


def with_state_on_host(closed: core.ClosedJaxpr, updates: Sequence[Update]) -> Callable[..., list[Any]]:
    """Return the function of a step whose arguments and results have the state of some weights in the memory of the host.

    Args:
        closed: the step on the device, in which the gradients have the name `GRADIENT`. None depends on such state.
        updates: the updates of the weights with such state.
    """

    def run(*arrays: Any) -> list[Any]:
        return _Execution(closed, arrays, updates).results()

    return run


class _Execution:
    """An execution of a step in parts, each of which computes what some variables depend on."""

    def __init__(self, closed: core.ClosedJaxpr, arrays: Sequence[Any], updates: Sequence[Update]) -> None:
        (self.jaxpr, consts), self.updates = inlined(closed.jaxpr), updates
        self.program = _Program(self.jaxpr)
        self.values: dict[Any, Any] = {**consts, **dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))}
        self.values |= zip(self.jaxpr.invars, arrays, strict=True)
        self.waiting = {self.jaxpr.invars[k]: update for update in updates for k in update.state}  # still on the host
        self.left = set(range(len(self.jaxpr.eqns)))  # the equations that are not computed yet

    def results(self) -> list[Any]:
        """Return the results of the step."""
        arguments, hosted = frozenset(self.jaxpr.invars), {r for update in self.updates for r in update.state.values()}
        before = [v for v in named(self.jaxpr, GRADIENT) if v in self.program.read]
        self.compute(self.program.equations(before, self.values))
        for update in reversed(self.updates):
            outvars = [self.jaxpr.outvars[k] for k in (*update.state.values(), *update.others)]
            after = [v for v in outvars if not isinstance(v, core.Literal) and v not in arguments]
            equations = self.program.equations(after, self.values)
            self.fetch(equations, before)
            self.compute(equations)
            before = after
        rest = sorted(self.left)
        self.fetch(rest, before)
        self.compute(rest)
        return [self.sent(v, k in hosted) for k, v in enumerate(self.jaxpr.outvars)]

    def sent(self, atom: Any, is_hosted: bool) -> Any:
        """Return a result, in the memory of the host if it is hosted, and else in that of the device."""
        value = atom.val if isinstance(atom, core.Literal) else self.values[atom]
        is_there = not isinstance(atom, core.Literal) and atom in self.waiting
        return value if is_there == is_hosted else jax.device_put(value, HOST if is_hosted else DEVICE)

    def fetch(self, equations: Iterable[int], before: Sequence[Any]) -> None:
        """Fetch the state that equations read, with that of the same weights, after variables are computed."""
        read = dict.fromkeys(a for k in equations for a in self.jaxpr.eqns[k].invars if not isinstance(a, core.Literal))
        for update in {id(u): u for v in read if (u := self.waiting.get(v)) is not None}.values():
            state = [self.jaxpr.invars[k] for k in update.state]
            values = lax.optimization_barrier([self.values[v] for v in (*state, *before)])
            self.values |= zip((*state, *before), values, strict=True)
            for v in state:
                self.values[v] = jax.device_put(self.values[v], DEVICE)
                del self.waiting[v]

    def compute(self, equations: Sequence[int]) -> None:
        """Compute some of the equations that are left, in ascending order."""
        self.left.difference_update(equations)
        eqns = [self.jaxpr.eqns[k] for k in equations]
        computed = {v: None for eqn in eqns for v in eqn.outvars if v in self.program.read}
        read = {a: None for eqn in eqns for a in eqn.invars if not isinstance(a, core.Literal) and a not in computed}
        effects, unnamed = frozenset[Any]().union(*(eqn.effects for eqn in eqns)), core.DebugInfo("update", "", None, None)
        part = core.Jaxpr((), list(read), list(computed), eqns, effects, debug_info=unnamed)
        self.values |= zip(computed, core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))(*(self.values[v] for v in read)), strict=True)


class _Program:
    """A program, with the equation that computes each variable, and the variables that are read."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.producers = {v: k for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        atoms = [*jaxpr.outvars, *(a for eqn in jaxpr.eqns for a in eqn.invars)]
        self.read = {a for a in atoms if not isinstance(a, core.Literal)}

    def needed(self, atoms: Iterable[Any], known: Collection[Any] = ()) -> set[Any]:
        """Return the variables that some values depend on, themselves included, without those that are known."""
        needed, pending = set[Any](), list(atoms)
        while pending:
            v = pending.pop()
            if isinstance(v, core.Literal) or v in needed or v in known:
                continue
            needed.add(v)
            if v in self.producers:
                pending += self.jaxpr.eqns[self.producers[v]].invars
        return needed

    def equations(self, atoms: Iterable[Any], known: Collection[Any]) -> list[int]:
        """Return the numbers of the equations, ascending, that compute some values from variables that are known."""
        return sorted({self.producers[v] for v in self.needed(atoms, known) if v in self.producers})


def inlined(jaxpr: core.Jaxpr) -> tuple[core.Jaxpr, dict[Any, Any]]:
    """Inline the jitted calls of a program. Returns the program, and the constants of the calls.

    Functions of optimizers are jitted calls of trees of all weights. Calls with shardings stay.
    """
    eqns, consts, renamed = list[core.JaxprEqn](), dict[Any, Any](), dict[Any, Any]()

    def add(program: core.Jaxpr, own: dict[Any, Any]) -> None:
        for eqn in program.eqns:
            operands = [a if isinstance(a, core.Literal) else own.get(a, a) for a in eqn.invars]
            inner = eqn.params.get("jaxpr")
            if eqn.primitive.name not in ("jit", "pjit") or inner is None or any(map(_is_sharding, each(eqn.params))):
                if program is not jaxpr:
                    own.update((v, core.Var(v.aval)) for v in eqn.outvars if not isinstance(v, core.DropVar))
                eqns.append(eqn.replace(invars=operands, outvars=[own.get(v, v) for v in eqn.outvars]))
                continue
            fixed = {v: core.Var(v.aval) for v in inner.jaxpr.constvars}
            consts.update(zip(fixed.values(), inner.consts, strict=True))
            inside = {**fixed, **dict(zip(inner.jaxpr.invars, operands, strict=True))}
            add(inner.jaxpr, inside)
            results = [a if isinstance(a, core.Literal) else inside.get(a, a) for a in inner.jaxpr.outvars]
            own.update(zip(eqn.outvars, results, strict=True))

    add(jaxpr, renamed)
    outvars = [a if isinstance(a, core.Literal) else renamed.get(a, a) for a in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars), consts


def _is_sharding(parameter: Any) -> bool:
    return isinstance(parameter, jax.sharding.Sharding)


def named(jaxpr: core.Jaxpr, name: str) -> list[Any]:
    """Return the variables whose names begin with a name, and the results of equations with such a variable inside."""
    with_name = (eqn for eqn in jaxpr.eqns if any(own.startswith(name) for own in _names(eqn)))
    return [v for eqn in with_name for v in eqn.outvars if not isinstance(v, core.DropVar)]


def operands_by_name(jaxpr: core.Jaxpr) -> Mapping[str, list[Any]]:
    """Return by name the operands of equations with the name, and of those with such an equation inside."""
    operands = defaultdict[str, list[Any]](list)
    for eqn in jaxpr.eqns:
        for name in _names(eqn):
            operands[name] += (a for a in eqn.invars if not isinstance(a, core.Literal))
    return operands


def _names(eqn: core.JaxprEqn) -> set[str]:
    """Return the names of an equation, and of those in its nested programs."""
    return {str(e.params["name"]) for e in (eqn, *equations(eqn)) if "name" in e.params}
