"""Cost of an operator on one device, for every way to parallelize it: its time, and the memory of its residuals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from unity.machine.collectives import table
from unity.machine.machine import Machine
from unity.machine.resharding_tables import distinct_changes
from unity.pcg.ir.gradient_flow import carrying
from unity.pcg.ir.program import Body, Tensor
from unity.pcg.propagation.halos import HaloEdge, sent
from unity.pcg.propagation.nested.agreements import RulePass
from unity.pcg.types.accumulation import accumulator, growth
from unity.search.cost.alignment import depends_on_alignment
from unity.search.cost.operator_seconds import Pieces, seconds
from unity.search.cost.roofline import dense_work, local_traffic
from unity.search.cost.state_sizes import ADAM, StateMemory, StateSizes
from unity.search.space.configurations import Domain, distinct_types, shapes_of, work_shares
from unity.search.space.sites import Site

Array = np.ndarray


@dataclass(frozen=True)
class Training:
    """The parts of a training step that are counted.

    Args:
        backward: Whether there is a backward pass; if so, each weight has a gradient.
        state: The sizes of the optimizer's state.
    """

    backward: bool = True
    state: StateSizes = ADAM


@dataclass(frozen=True, eq=False)
class SiteCost:
    """Terms of a site's cost, arrays with an entry for each value of its domain: seconds, and bytes on one device.

    Args:
        forward: Seconds of computing in the forward pass.
        backward: Seconds of computing in the backward pass.
        reduces: Seconds of collectives inside the operator, Reduces and halo exchanges, forward and backward.
        memory: Bytes of arguments or residuals.
        once: Seconds of one more forward run for every backward pass; of an argument, of moving its state to the host and back.
        saved: Bytes of `memory` that recomputing the inner values saves, or the argument's state in the memory of the host; 0 where
            recomputing would repeat Reduces; None if not offered.
        whole: Bytes that rerunning the operator saves, less those of the operands kept instead; -inf where it may not rerun;
            None if not offered.
        transfers: Seconds of moving offloaded values, or an argument's state, to the memory of the host and back; None if there are
            none.
    """

    forward: Array
    backward: Array
    reduces: Array
    memory: Array
    once: Array
    saved: Array | None = None
    whole: Array | None = None
    transfers: Array | None = None

    @property
    def time(self) -> Array:
        """The sum of all seconds."""
        seconds = self.forward + self.backward + self.reduces
        return seconds if self.transfers is None else seconds + self.transfers

    @property
    def alternatives(self) -> tuple[Array, Array]:
        """Seconds and bytes, [alternatives, values]: inner values are kept, or recomputed; state is on the device, or the host."""
        if self.saved is None:
            return self.time[None], self.memory[None]
        again = np.where(self.saved > 0, self.time + self.once, np.inf)
        return np.stack([self.time, again]), np.stack([self.memory, self.memory - self.saved])


def site_cost(site: Site, domain: Domain, machine: Machine, training: Training) -> SiteCost:
    """Return the cost of every value of a site."""
    memory = _residuals(site, domain, machine, training)
    zero = np.zeros(len(domain))
    body = site.body
    if body is None:
        alone = SiteCost(zero, zero, _stage_messages(site, domain, machine, training), memory, zero)
        return _with_state_on_host(alone, site, domain, machine, training)
    forward, backward = computing_seconds(site, body, domain, machine, training)
    rows = site.stacking.seconds(machine.device.launch)
    inside = (_reduces, _call_arrays, _scatters, _halo_exchanges)
    reduces = sum((seconds_of(site, domain, machine, training) for seconds_of in inside), zero) * site.times
    again = site.recomputable and training.backward and not dense_work(body)[0]
    saved = np.where(reduces > 0, 0.0, _inside(site.inner, site.alive, domain, machine)) if again else None
    whole = None
    if site.reader is not None and training.backward:
        instead = (site.ports[p].tensor.nbytes * fraction(domain, p, machine) for p in site.instead)
        whole = np.where(reduces > 0, -np.inf, memory - site.alive * sum(instead, zero))
    transfers = _transfers(site, domain, machine)
    return SiteCost(
        forward * forward_runs(site) + rows[0] * site.times,
        (backward + rows[1]) * site.times,
        reduces,
        memory,
        forward * site.times,
        saved,
        whole,
        transfers,
    )


def computing_seconds(site: Site, body: Body, domain: Domain, machine: Machine, training: Training) -> tuple[Array, Array]:
    """Return the seconds of computing of one forward and one backward run of an operator, for every value."""
    flows = training.backward and any(site.flows)
    differentiated = [flows and p.gradient for p in site.ports]
    share = work_shares(domain.choices, domain.picks, machine.axes)
    tensors = enumerate((*(p.tensor for p in site.ports), *site.results))
    touched, zeroed = local_traffic(body, (t.nbytes * fraction(domain, k, machine) for k, t in tensors), share, differentiated)
    by_size = machine.profile is not None or depends_on_alignment(machine.device, body)
    sizes = local_sizes(site, domain, machine) if by_size else None
    zero = np.zeros(len(domain))
    pieces = Pieces(share, zero + touched + _moved_bytes(site, domain, machine), zero + zeroed, sizes)
    forward, backward, _ = seconds(body, shapes_of(site), pieces, differentiated, machine)
    return forward, backward


def forward_runs(site: Site) -> float:
    """Return the forward runs of an operator in a step, recomputation included."""
    return site.times * (1 / site.hoisted + site.repeats)


def local_sizes(site: Site, domain: Domain, machine: Machine) -> Array:
    """Return the local sizes of all dimensions of a site's operands and results, [values, dimensions]."""
    sizes = np.array([a.size for a in machine.axes], int)
    columns = []
    for position, shape in enumerate(shapes_of(site)):
        dims = np.array([c.states[position].dim if c.states[position].kind == "P" else -1 for c in domain.choices])[domain.picks]
        columns += [n // np.prod(np.where(dims == dim, sizes, 1), axis=1) for dim, n in enumerate(shape)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(domain), 0), int)


def fraction(domain: Domain, position: int, machine: Machine) -> Array:
    """Return the fraction of an operand or result that one device holds, for every value."""
    sizes = np.array([a.size for a in machine.axes], float)
    split = np.array([c.states[position].kind == "P" for c in domain.choices])
    return np.prod(np.where(split[domain.picks], 1 / sizes, 1.0), axis=1)


def _reduces(site: Site, domain: Domain, machine: Machine, training: Training) -> Array:
    """Price the Reduces inside composites: an all-reduce forward, and one backward for each value that is replicated for use."""
    total = np.zeros(len(domain))
    prices = table(machine, "all-reduce")
    bits = 1 << np.arange(len(machine.axes))
    sizes = np.array([a.size for a in machine.axes], float)
    every = [{r.variable: r for r in c.reduced} for c in domain.choices]
    for variable, r in {v: r for rs in every for v, r in rs.items()}.items():
        of_choice = [rs.get(variable) for rs in every]
        kind = next((x.kind for x in of_choice if x is not None and x.kind), "")
        split = np.array([variable in c.partitions for c in domain.choices])[domain.picks]
        nbytes = r.nbytes * np.prod(np.where(split, 1 / sizes, 1.0), axis=1)
        summed = nbytes * growth(r.dtype, machine.reduce_in)
        over = np.array([x is not None and bool(x.kind) for x in of_choice])[domain.picks]
        mask = (over * bits).sum(axis=1)
        again = next((n for v, n in site.computed if v == variable), 0)
        produced = nbytes
        if variable in domain.scattered:
            split = np.array([c.around_scatter(variable)[0].kind == "P" for c in domain.choices])[domain.picks]
            produced = r.nbytes * np.prod(np.where(split, 1 / sizes, 1.0), axis=1)
        if variable not in domain.scattered or kind != "sum":  # else the change that scatters it adds it up
            total += (1 / site.hoisted + again) * prices.seconds(mask, summed if kind == "sum" else produced)
        masks: list[Array] = []  # users for which it is replicated along the same axes share one all-reduce
        users = sorted({u for x in of_choice if x is not None for u in x.users})
        for user in users if _has_cotangents(site, variable, kind, training) else ():
            along = np.array([x is not None and user in x.users for x in of_choice])[domain.picks]
            mask = (along * bits).sum(axis=1)
            new = np.all([mask != other for other in masks], axis=0) if masks else np.True_
            total += np.where(new, prices.seconds(mask, summed), 0.0)
            masks.append(mask)
    return total


def _call_arrays(site: Site, domain: Domain, machine: Machine, training: Training) -> Array:
    """Price the all-reduces of arrays inside of calls with derivative rules."""
    total = np.zeros(len(domain))
    every = [{x.key: x for x in c.arrays} for c in domain.choices]
    if not any(every):
        return total
    body, prices = site.body, table(machine, "all-reduce")
    assert body is not None
    bits, sizes = 1 << np.arange(len(machine.axes)), np.array([a.size for a in machine.axes], float)
    carried = _carrying_variables(site, training)
    for key, x in {key: x for xs in every for key, x in xs.items() if x.agreement.kind}.items():
        equation, a = body.equations[x.agreement.equation], x.agreement
        differentiated = not carried.isdisjoint(equation.results)
        active = [p for p, v in enumerate(equation.operands) if isinstance(v, int) and v in carried]
        if differentiated == (x.run is RulePass.UNDIFFERENTIATED) or not a.needed(active):
            continue
        of_choice = [xs.get(key) for xs in every]
        split = np.array([o is not None and not o.agreement.kind for o in of_choice])[domain.picks]
        over = np.array([o is not None and bool(o.agreement.kind) for o in of_choice])[domain.picks]
        wide = growth(a.dtype, machine.reduce_in) if a.kind == "sum" else 1.0
        nbytes = a.elements * a.dtype.itemsize * wide * np.prod(np.where(split, 1 / sizes, 1.0), axis=1)
        mask = (over * bits).sum(axis=1)
        again = max((n for v, n in site.computed if v in equation.results), default=0)
        runs = a.times * (1 if x.run is RulePass.BACKWARD else 1 / site.hoisted + again)
        total += runs * prices.seconds(mask, nbytes)
    return total


def _scatters(site: Site, domain: Domain, machine: Machine, training: Training) -> Array:
    """Price the values inside composites that are reduce-scattered, along some axes, where they are produced."""
    total = np.zeros(len(domain))
    body = site.body
    if body is None or not domain.scattered:
        return total
    carried = _carrying_variables(site, training)
    for variable in sorted(domain.scattered):
        tensor, around = body.tensors[variable], [c.around_scatter(variable) for c in domain.choices]
        before, old = distinct_types([before for before, _ in around], domain.picks)
        after, new = distinct_types([after for _, after in around], domain.picks)
        changes, index = distinct_changes(machine, before, after, tensor.nbytes, growth(tensor.dtype, machine.reduce_in))
        change = changes[index[old, new]]
        again = next((n for v, n in site.computed if v == variable), 0)
        total += (1 / site.hoisted + again) * change.forward
        total += change.backward if variable in carried else 0.0
    return total


def _moved_bytes(site: Site, domain: Domain, machine: Machine) -> Array:
    """Return the bytes on one device of values that are moved inside an operator: written before the move, and read after it."""
    return sum((before + after for _, before, after in _moved_values(site, domain, machine)), np.zeros(len(domain)))


def _moved_values(site: Site, domain: Domain, machine: Machine) -> Iterator[tuple[int, Array, Array]]:
    """Yield the variables that are moved inside an operator, and their bytes on one device before and after; 0 if they are not."""
    sizes = np.array([a.size for a in machine.axes], float)
    body = site.body
    for variable in domain.scattered if body is not None else ():
        assert body is not None
        moves = np.array([any(x.moves and x.variable == variable for x in c.scattered) for c in domain.choices])[domain.picks]
        nbytes = np.where(moves.any(axis=1), float(body.tensors[variable].nbytes), 0.0)
        around = [c.around_scatter(variable) for c in domain.choices]
        split = (np.array([s.kind == "P" for s in states])[domain.picks] for states in zip(*around, strict=True))
        before, after = (nbytes * np.prod(np.where(s, 1 / sizes, 1.0), axis=1) for s in split)
        yield variable, before, after


def _carrying_variables(site: Site, training: Training) -> frozenset[int]:
    """Return the variables of an operator's program whose cotangents the backward pass computes."""
    if site.body is None or not training.backward:
        return frozenset()
    return carrying(site.body, tuple(p.gradient for p in site.ports), site.flows)


def _has_cotangents(site: Site, variable: int | tuple[int, ...], kind: str, training: Training) -> bool:
    """Return whether the backward pass sums cotangents of a value that an operator reduces or replicates inside."""
    if not training.backward or kind not in ("", "sum") or not isinstance(variable, int):
        return False
    return variable in _carrying_variables(site, training)


def _stage_messages(site: Site, domain: Domain, machine: Machine, training: Training) -> Array:
    """Price the messages between the stages of a pipeline: carries forward, and their gradients backward."""
    if not site.sends:
        return np.zeros(len(domain))
    mask = sum(1 << k for k, axis in enumerate(machine.axes) if axis.name in site.along)
    messages = site.sends + (site.returns if training.backward else 0)
    nbytes = site.results[0].nbytes * fraction(domain, len(site.ports), machine)
    return messages * table(machine, "collective-permute").seconds(mask, nbytes)


def _halo_exchanges(site: Site, domain: Domain, machine: Machine, training: Training) -> Array:
    """Price the halo messages between neighbours, and those of their gradients."""
    total = np.zeros(len(domain))
    body = site.body
    every = sorted({e for c in domain.choices for e in c.halos}, key=lambda e: (e.equation, e.reach.operand, e.reach.dim))
    if body is None or not every:
        return total
    computed = dict(site.computed)
    carried = _carrying_variables(site, training)
    for _, same in groupby(every, key=lambda e: (e.equation, e.reach.operand)):
        edges = tuple(same)
        variable, tensor = edges[0].variable, body.tensors[edges[0].variable]
        again = max(computed.get(v, 0) for v in body.equations[edges[0].equation].results)
        forward = _message_seconds(tensor, edges, domain, machine, tensor.itemsize)
        total += (1 / site.hoisted + again) * forward
        if variable in carried:
            total += _backward_message_seconds(site, variable, forward, edges, domain, machine)
    return total


def _backward_message_seconds(
    site: Site, variable: int, forward: Array, edges: tuple[HaloEdge, ...], domain: Domain, machine: Machine
) -> Array:
    """Return the seconds of the messages backward; cotangents that are partial sums may be wider."""
    body = site.body
    assert body is not None
    tensor = body.tensors[variable]
    if growth(tensor.dtype, machine.reduce_in) == 1 or variable not in body.inputs:
        return forward
    p = body.inputs.index(variable)
    summed = np.array([c.operands[p].kind == "R" for c in domain.choices])[domain.picks].any(axis=1)
    return np.where(summed, _message_seconds(tensor, edges, domain, machine, accumulator(tensor.dtype).itemsize), forward)


def _message_seconds(tensor: Tensor, edges: tuple[HaloEdge, ...], domain: Domain, machine: Machine, itemsize: int) -> Array:
    """Return the seconds of the messages that extend one operand, for every value; equal ones are priced once."""
    sizes, bits = np.array([a.size for a in machine.axes], int), 1 << np.arange(len(machine.axes))
    split = np.array([edges[0].variable in c.partitions for c in domain.choices])[domain.picks]
    along = np.stack([np.array([e in c.halos for c in domain.choices])[domain.picks] for e in edges])
    keys = np.column_stack([np.where(split, sizes, 1).prod(1), *(along @ bits)])
    distinct, index = np.unique(keys, axis=0, return_inverse=True)
    prices = table(machine, "collective-permute")
    devices = np.where(along, sizes, 1).prod(2)
    seconds = np.zeros(len(distinct))
    for row, (parts, *masks) in enumerate(distinct):
        value = int(np.argmax(index.reshape(-1) == row))
        pieces = [
            (tensor.shape[e.reach.dim] // int(n), int(n), e.reach.halo) for e, n in zip(edges, devices[:, value], strict=True)
        ]
        for k, _, elements in sent(tensor.nbytes // tensor.itemsize // int(parts), pieces):
            seconds[row] += prices.seconds(masks[k], elements * itemsize)
    return seconds[index.reshape(-1)]


def _residuals(site: Site, domain: Domain, machine: Machine, training: Training) -> Array:
    """Return the bytes of arguments with their gradients and optimizer slots, or of the residuals: results and inner values."""
    n = len(site.ports)
    if site.kind == "input":
        slots = 0 if site.node is None else training.state.on_device(site.node)
        count = 1 + (1 + slots if site.weight and training.backward else 0)
        return count * site.results[0].nbytes * fraction(domain, n, machine)
    total = np.zeros(len(domain))
    if not training.backward:
        return total
    for k, tensor in enumerate(site.results):
        if site.stored[k]:
            total += site.stored[k] * tensor.nbytes * fraction(domain, n + k, machine)
    offloaded = () if machine.host is not None else ((v, runs * nbytes) for v, nbytes, runs in site.offloaded)
    saved = (*site.saved, *offloaded)
    total += _inside(site.inner, site.alive, domain, machine) + _inside(saved, 1.0, domain, machine)
    if any(site.flows):  # the backward pass does not move a value again
        residual_variables = {v for v, _ in site.inner}
        moved = (after for v, _, after in _moved_values(site, domain, machine) if v not in residual_variables)
        total += site.alive * sum(moved)
    return total + _extended(site, domain, machine)


def slots_of(site: Site, training: Training) -> float:
    """Return the bytes of the optimizer's state for each byte of a weight; 0 for other sites."""
    return training.state.of(site.node) if site.weight and site.node is not None else 0


def _with_state_on_host(cost: SiteCost, site: Site, domain: Domain, machine: Machine, training: Training) -> SiteCost:
    """Return the cost of a weight with its optimizer's state in the memory of the host, or with that as an alternative."""
    memory, slots = training.state.memory, slots_of(site, training)
    if memory is StateMemory.DEVICE or machine.host is None or not (slots and site.kind == "input" and training.backward):
        return cost
    nbytes = slots * site.results[0].nbytes * fraction(domain, len(site.ports), machine)
    seconds = machine.host.there_and_back(nbytes)
    return replace(cost, transfers=seconds) if memory is StateMemory.HOST else replace(cost, saved=nbytes, once=seconds)


def _transfers(site: Site, domain: Domain, machine: Machine) -> Array | None:
    """Return the seconds of all transfers of offloaded values: to the host in the forward pass, and back in the backward pass."""
    if not site.offloaded or machine.host is None or site.node is None or site.node.body is None:
        return None
    host = machine.host
    total = np.zeros(len(domain))
    for variable, nbytes, _ in site.offloaded:
        total += site.times * host.there_and_back(_inside([(variable, nbytes)], 1.0, domain, machine))
    return total


def _extended(site: Site, domain: Domain, machine: Machine) -> Array:
    """Return the additional bytes of operands that are residuals with their halos.

    Such an operand is kept in place of the original, or beside it if other operators need the original.
    """
    total = np.zeros(len(domain))
    body = site.body
    if body is None:
        return total
    sizes = np.array([a.size for a in machine.axes], int)
    for p, (variable, port) in enumerate(zip(body.inputs, site.ports, strict=True)):
        every = {e for c in domain.choices for e in c.halos if e.variable == variable}
        if not (every and port.kept):
            continue
        larger = np.ones(len(domain))
        for e in every:
            over = np.array([e in c.halos for c in domain.choices])[domain.picks]
            devices = np.where(over, sizes, 1).prod(1)
            reach = np.where(devices > 1, e.reach.halo.before + e.reach.halo.after, 0)
            larger *= 1 + reach * devices / port.tensor.shape[e.reach.dim]
        additional = np.where(larger > 1, larger - port.sole, 0.0)
        total += port.kept * port.tensor.nbytes * fraction(domain, p, machine) * additional
    return total


def _inside(values: Sequence[tuple[int, float]], alive: float, domain: Domain, machine: Machine) -> Array:
    """Return the bytes of values of an operator's program, as (variable, bytes), of which `alive` copies are live at once."""
    total = np.zeros(len(domain))
    sizes = np.array([a.size for a in machine.axes], float)
    for variable, nbytes in values:
        split = np.array([variable in c.partitions for c in domain.choices])[domain.picks]
        total += alive * nbytes * np.prod(np.where(split, 1 / sizes, 1.0), axis=1)
    return total
