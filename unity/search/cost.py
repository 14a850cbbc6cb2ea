"""What an operator costs on one device, for every way to parallelize it: time by roofline, memory by what must be kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unity.pcg.body import Body
from unity.pcg.solve import nested_body, spec_of
from unity.search.collectives import table
from unity.search.configurations import Domain
from unity.search.machine import Machine
from unity.search.offers import HEAVY
from unity.search.sites import Site

Array = np.ndarray


@dataclass(frozen=True)
class Training:
    """What is counted: the backward pass, and for each weight its gradient and the optimizer's slots."""

    backward: bool = True
    optimizer_slots: int = 2


@dataclass(frozen=True, eq=False)
class SiteCost:
    """Terms of a site's cost, an array entry for each value of its domain. Seconds, and bytes on one device."""

    forward: Array
    backward: Array
    reduces: Array  # collectives inside the operator, forward and backward
    memory: Array
    saved: Array | None = None  # of this memory, if inner values are computed again; nothing where Reduces would be repeated

    @property
    def time(self) -> Array:
        """All seconds together."""
        return self.forward + self.backward + self.reduces

    @property
    def alternatives(self) -> tuple[Array, Array]:
        """Seconds and bytes, [alternatives, values]: inner values are kept, or computed again."""
        if self.saved is None:
            return self.time[None], self.memory[None]
        again = np.where(self.saved > 0, self.time + self.forward, np.inf)
        return np.stack([self.time, again]), np.stack([self.memory, self.memory - self.saved])


@lru_cache(maxsize=65536)
def dense_work(body: Body) -> tuple[float, str]:
    """FLOPs of matrix products and convolutions in a body, and the dtype that they are computed in."""
    total, dtype = 0.0, "float32"
    for e in body.equations:
        if e.name in HEAVY:
            spec = spec_of(body, e)
            total += spec.flops if spec else 0.0
            dtype = str(body.tensor(e.operands[0]).dtype)
        elif "call_jaxpr" in e.params or "jaxpr" in e.params:
            inner, inner_dtype = dense_work(nested_body(e))
            total += inner * int(e.params.get("length", 1))
            dtype = inner_dtype if inner else dtype
    return total, dtype


def site_cost(site: Site, domain: Domain, machine: Machine, training: Training) -> SiteCost:
    """The cost of every value of a site."""
    memory = _kept(site, domain, machine, training)
    zero = np.zeros(len(domain))
    body = site.node.body if site.node is not None else None
    if body is None:
        return SiteCost(zero, zero, zero, memory)
    touched = sum(
        (t.nbytes * fraction(domain, k, machine) for k, t in enumerate([*(p.tensor for p in site.ports), *site.results])), zero
    )
    differentiated = sum(p.gradient for p in site.ports) if training.backward and any(site.flows) else 0
    forward, backward = roofline(body, _share(domain, machine), touched, differentiated, machine)
    runs = site.times * (2 if site.again and training.backward else 1)
    reduces = _reduces(site, domain, machine, training) * site.times
    again = site.recomputable and training.backward and not dense_work(body)[0]
    saved = np.where(reduces > 0, 0.0, _inner(site, domain, machine)) if again else None
    return SiteCost(forward * runs, backward * site.times, reduces, memory, saved)


def roofline(body: Body, share: Array, touched: Array, differentiated: int, machine: Machine) -> tuple[Array, Array]:
    """Seconds forward and backward on one device that does `share` of the work and touches so many bytes.

    Either arithmetic or memory traffic is what takes the time (Williams et al. 2009). Backward, a product is one more product
    for each of its two operands that has a gradient, and traffic is twofold: cotangents in and out beside the operands.
    """
    flops, dtype = dense_work(body)
    compute = flops * share / (machine.device.flops_of(dtype) * machine.device.efficiency)
    traffic = touched / machine.device.bandwidth
    launch = machine.device.launch if body.equations else 0.0
    forward = np.maximum(compute, traffic) + launch
    if not differentiated:
        return forward, np.zeros_like(forward)
    return forward, np.maximum(compute * min(differentiated, 2), 2 * traffic) + launch


def fraction(domain: Domain, position: int, machine: Machine) -> Array:
    """What part of an operand or result one device holds, for every value."""
    sizes = np.array([a.size for a in machine.axes], float)
    split = np.array([c.states[position].kind == "P" for c in domain.choices])
    return np.prod(np.where(split[domain.picks], 1 / sizes, 1.0), axis=1)


def _share(domain: Domain, machine: Machine) -> Array:
    """What part of the work one device does."""
    sizes = np.array([a.size for a in machine.axes], float)
    divided = np.array([c.divided for c in domain.choices])[domain.picks]
    return np.prod(1 - divided + divided / sizes, axis=1)


def _reduces(site: Site, domain: Domain, machine: Machine, training: Training) -> Array:
    """Reduces inside composites: an all-reduce forward, and its dual, another, backward."""
    total = np.zeros(len(domain))
    alpha, beta = table(machine, "all-reduce")
    bits = 1 << np.arange(len(machine.axes))
    sizes = np.array([a.size for a in machine.axes], float)
    found = {r.variable: r for c in domain.choices for r in c.reduced}
    for variable, r in found.items():
        over = np.array([any(x.variable == variable for x in c.reduced) for c in domain.choices])[domain.picks]
        split = np.array([variable in c.partitions for c in domain.choices])[domain.picks]
        mask = (over * bits).sum(axis=1)
        nbytes = r.nbytes * np.prod(np.where(split, 1 / sizes, 1.0), axis=1)
        both = 2 if training.backward and r.kind == "sum" and any(p.gradient for p in site.ports) else 1
        again = 1 if site.again and training.backward else 0
        total += (both + again) * (alpha[mask] + beta[mask] * nbytes)
    return total


def _kept(site: Site, domain: Domain, machine: Machine, training: Training) -> Array:
    """Bytes that stay: arguments with their gradients and optimizer slots, results and inner values for the backward pass."""
    n = len(site.ports)
    if site.kind == "input":
        count = 1 + (1 + training.optimizer_slots if site.weight and training.backward else 0)
        return count * site.results[0].nbytes * fraction(domain, n, machine)
    total = np.zeros(len(domain))
    if not training.backward:
        return total
    for k, tensor in enumerate(site.results):
        if site.stored[k]:
            total += site.stored[k] * tensor.nbytes * fraction(domain, n + k, machine)
    return total + _inner(site, domain, machine)


def _inner(site: Site, domain: Domain, machine: Machine) -> Array:
    """Bytes of the inner values that are kept."""
    total = np.zeros(len(domain))
    sizes = np.array([a.size for a in machine.axes], float)
    for variable, nbytes in site.inner:
        split = np.array([variable in c.partitions for c in domain.choices])[domain.picks]
        total += site.around.alive * nbytes * np.prod(np.where(split, 1 / sizes, 1.0), axis=1)
    return total
