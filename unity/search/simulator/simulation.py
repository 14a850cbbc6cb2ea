"""The simulation of one training step of a parallel graph."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from unity.machine.machine import Machine
from unity.pcg.ir.graph import PCG
from unity.search.cost.cost import Training
from unity.search.cost.prediction import Prediction
from unity.search.memory.backend import backend_of
from unity.search.simulator.expansion import Target, expand
from unity.search.simulator.memory import MemoryOverTime, SimulatedStep, memory_over_time
from unity.search.simulator.program import HostTransfer, program_of
from unity.search.simulator.timeline import Timeline, full
from unity.search.simulator.topology import Topology
from unity.search.simulator.trace import picture, write_trace

MOST = 8  # devices named in the text of a simulation


@dataclass(frozen=True, repr=False)
class Simulation:
    """When every task of one step runs, the label of each, and the step itself."""

    timeline: Timeline
    labels: Mapping[int, str]
    step: SimulatedStep

    def __repr__(self) -> str:
        tasks, busy = len(self.timeline.graph.tasks), ", ".join(f"{name} {s * 1e3:.4g}" for name, s in [*self.busy.items()][:MOST])
        more = ", …" if len(self.busy) > MOST else ""
        return f"<Simulation: a step of {self.makespan * 1e3:.4g} ms, {tasks} tasks; busy, in ms: {busy}{more}>"

    @property
    def makespan(self) -> float:
        """Seconds of the step."""
        return self.timeline.makespan

    @cached_property
    def busy(self) -> Mapping[str, float]:
        """Seconds for which each device and each link is busy, by name."""
        pairs = zip(self.timeline.graph.devices, self.timeline.busy, strict=True)
        return {r.name: seconds for r, seconds in pairs if r.kind != "barrier"}

    @cached_property
    def sent(self) -> Mapping[str, float]:
        """Bytes that each link carries, by name; without overlap, bytes that each device sends."""
        pairs = zip(self.timeline.graph.devices, self.timeline.nbytes, strict=True)
        return {r.name: nbytes for r, nbytes in pairs if r.kind == "link" or nbytes}

    @cached_property
    def memory(self) -> Mapping[str, MemoryOverTime]:
        """The memory of each device over time, by name."""
        devices = self.timeline.graph.devices
        return {r.name: memory_over_time(self.step, self.timeline, k) for k, r in enumerate(devices) if r.kind == "compute"}

    @property
    def peak(self) -> float:
        """The largest peak of any device, in bytes."""
        return max(device.peak for device in self.memory.values())

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a trace that Perfetto and Chrome open, with the memory of each device as counters."""
        write_trace(path, self.timeline, self.labels.__getitem__, self.memory)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the timeline as a matplotlib figure (the extra `plot`), and below it the memory of the device with the largest peak.

        The figure is written to `path` if one is given.
        """
        return picture(self.timeline, max(self.memory.values(), key=lambda device: device.peak), path)


def simulate(
    graph: PCG,
    machine: Machine,
    differentiated: Collection[int],
    *,
    overlap: bool | None = None,
    topology: Topology | None = None,
    folded: bool | None = None,
    training: Training | None = None,
    prediction: Prediction | None = None,
) -> Simulation:
    """Simulate one step of a parallel graph.

    Args:
        graph: the result of `unity.pcg.parallel.parallelize`.
        machine: its formulas price operators and collectives.
        differentiated: the inputs with respect to which gradients are taken; none means the forward pass alone.
        overlap: whether devices communicate while they compute, links being devices of their own. Default: they do on GPUs; the
            collectives of a CPU use the cores that compute.
        topology: devices and links that differ from each other. Operators take the machine's seconds scaled by a device's speed,
            collectives are rings over its links.
        folded: whether one device stands for all. Default: wherever all are alike.
        training: what else takes memory: the optimizer's slots. Default: two for each weight.
        prediction: the predicted terms of the step, if they are known.

    Raises:
        SimulationError: the topology has another number of devices than the machine, or is to be folded.
    """
    overlap = backend_of(machine).overlaps if overlap is None else overlap
    training = replace(training or Training(), backward=bool(differentiated))
    program = program_of(graph, machine, differentiated, prediction, training.state)
    target = Target(machine, topology, topology is None if folded is None else folded, overlap, program.has(HostTransfer))
    tasks, labels = expand(program, target)
    step = SimulatedStep(graph, differentiated, training, backend_of(machine))
    return Simulation(full(tasks), labels, step)
