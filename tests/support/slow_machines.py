"""Machines on which the plans of small programs divide them."""

from __future__ import annotations

from dataclasses import replace

from unity.machine.machine import Machine


def slow(machine: Machine) -> Machine:
    """Return a machine whose devices compute and communicate so slowly that launches and latency hardly count."""
    device = replace(machine.device, flops={k: n / 1e6 for k, n in machine.device.flops.items()}, bandwidth=2e7, launch=1e-9)
    levels = tuple(replace(level, bandwidth=level.bandwidth / 1e3, latency=1e-9, protocols=()) for level in machine.levels)
    return replace(machine, device=device, levels=levels)
