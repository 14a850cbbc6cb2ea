"""The command `unity machine list | show | local`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from unity.cli.arguments import add_devices, add_json, named_machine, use_devices
from unity.cli.errors import CommandError
from unity.cli.help_format import HelpFormatter
from unity.cli.output import print_json, result_console, stage
from unity.exec.measure.local_machine import is_unmeasured
from unity.machine.machine import Level, Machine
from unity.machine.presets import CLUSTERS, DEVICES, LINKS
from unity.pcg.parallel.axis_names import AxisNames

HELP = "list machines, show one, describe this one"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity machine` and its subcommands."""
    command.description = "Machines that plans are made for: a kind of device, and the levels of the network between devices."
    command.epilog = (
        "examples:\n"
        "  unity machine list\n"
        "  unity machine show dgx-h100-4x8 -o machine.json\n"
        "  unity machine local --devices 8 -o here.json"
    )
    commands = command.add_subparsers(required=True, metavar="COMMAND")

    def subcommand(name: str, run: Callable[[argparse.Namespace], int], text: str, examples: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(
            name, help=text, description=text, epilog=f"examples:\n{examples}", formatter_class=HelpFormatter
        )
        parser.set_defaults(run=run)
        add_json(parser)
        return parser

    text = "Name the clusters, devices and links that are known."
    subcommand("list", run_list, text, "  unity machine list\n  unity machine list --json")
    text = "Show a machine: a cluster, nodes x devices of a kind of device, or a file."
    show_parser = subcommand("show", run_show, text, "  unity machine show a100-4x8\n  unity machine show dgx-h100 -o machine.json")
    show_parser.add_argument("machine", type=named_machine, metavar="NAME", help="dgx-h100, dgx-h100-4x8, v100-4x8, machine.json")
    text = "Describe the devices of this computer; unknown ones are measured, which takes a minute or two, once."
    local_parser = subcommand("local", run_local, text, "  unity machine local\n  unity machine local --devices 8 -o here.json")
    add_devices(local_parser)
    for parser in (show_parser, local_parser):
        parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it as JSON, to change it or to plan elsewhere")


def run_list(options: argparse.Namespace) -> int:
    """Print the machines, devices and links that have a name."""
    clusters = {name: Machine.preset(name) for name in CLUSTERS}
    if options.json:
        links = {name: {"bandwidth": link.bandwidth, "latency": link.latency} for name, link in LINKS.items()}
        devices = {name: Machine.grid(1, 1, name).to_json()["device"] for name in DEVICES}
        print_json({"clusters": {k: m.to_json() for k, m in clusters.items()}, "devices": devices, "links": links})
        return 0
    table = _table("clusters: NAME, or NAME-<nodes>x<devices per node>", "cluster", "devices", "as")
    for name, machine in clusters.items():
        table.add_row(name, f"{machine.devices} x {machine.device.name}", _network(machine))
    result_console().print(table)
    table = _table("devices: NAME-<nodes>x<devices per node>", "device", "memory", "TFLOP/s float32", "bfloat16", "GB/s")
    for name, device in DEVICES.items():
        rates = (f"{device.flops_of(dtype) / 1e12:.4g}" for dtype in ("float32", "bfloat16"))
        table.add_row(name, f"{device.memory / 2**30:.4g} GiB", *rates, f"{device.bandwidth / 1e9:.4g}")
    result_console().print(table)
    table = _table("links, for Machine.grid: in each direction, for each message", "link", "GB/s", "µs")
    for name, link in LINKS.items():
        table.add_row(name, f"{link.bandwidth / 1e9:.4g}", f"{link.latency * 1e6:.3g}")
    result_console().print(table)
    return 0


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left")


def run_show(options: argparse.Namespace) -> int:
    """Print a machine, or write it to a file."""
    return _print_or_write(options.machine, options)


def run_local(options: argparse.Namespace) -> int:
    """Print the local machine, or write it to a file."""
    use_devices(options.devices)
    try:
        devices = jax.devices()
    except RuntimeError as problem:
        raise CommandError(f"JAX finds no devices: {problem}") from None
    if not is_unmeasured(devices):
        return _print_or_write(Machine.local(devices), options)
    with stage("measuring this machine's devices (once, for a minute or two)", is_announced=True):
        machine = Machine.local(devices)
    return _print_or_write(machine, options)


def _print_or_write(machine: Machine, options: argparse.Namespace) -> int:
    if options.output is not None:
        machine.save(options.output)
    if options.json:
        print_json(machine.to_json())
        return 0
    console = result_console()
    for line in _lines(machine):
        console.print(line)
    if options.output is not None:
        console.print(f"written to {options.output}: unity.Machine.load and --machine read it")
    return 0


def _lines(machine: Machine) -> list[Any]:
    device = machine.device
    rates = ", ".join(f"{dtype} {rate / 1e12:.4g}" for dtype, rate in device.flops.items())
    table = _table("network, slowest first", "level", "of", "GB/s per device", "µs a message", "measured")
    for level in machine.levels:
        row = f"{level.bandwidth / 1e9:.4g}", f"{level.latency * 1e6:.3g}", _measured(level)
        table.add_row(level.name, str(level.size), *row)
    shown = AxisNames.of(machine.axes, machine.named_levels, ()).shown
    axes = " × ".join(f"{axis.name} of {axis.size}" for axis in shown) or "none, one device"
    return [
        f"{machine.name}: {machine.devices} x {device.name}",
        f"device: {device.memory / 2**30:.4g} GiB at {device.bandwidth / 1e9:.4g} GB/s; {device.launch * 1e6:.3g} µs an operator",
        f"TFLOP/s: {rates}, of which {device.efficiency:.0%} are reached",
        f"mesh: {axes}",
        f"to the host: {_to_host(machine)}",
        table,
        f"operators: {f'{len(machine.profile)} measured' if machine.profile is not None else 'not measured, a roofline'}",
    ]


def _measured(level: Level) -> str:
    """Return the collectives that were measured on a level, or what their prices are from."""
    known = ", ".join(protocol.name for protocol in level.protocols) or "alpha-beta"
    return ", ".join(sorted({c.kind for c in level.curves})) or f"no: {known}"


def _to_host(machine: Machine) -> str:
    """Return the link to the memory of the host in words."""
    host = machine.host
    if host is None:
        return "no link, so that offloaded values are priced as if they stayed on the device"
    return f"{host.bandwidth / 1e9:.4g} GB/s per device, {host.latency * 1e6:.3g} µs a transfer"


def _network(machine: Machine) -> str:
    return " > ".join(f"{level.size} {level.name} at {level.bandwidth / 1e9:.4g} GB/s" for level in machine.levels)
