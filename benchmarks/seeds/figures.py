"""The papers' figures, drawn from what was found here (matplotlib, the extra `plot`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.seeds.results import Result, Results, usable

FAR = 2.0  # times the memory of all frontiers, from which on a point is only named
DOTS = 70  # to the inch: all figures together stay well below a megabyte


def drawn(results: Results, folder: Path) -> list[tuple[str, str]]:
    """Writes every figure that there are results of; gives file names and titles."""
    found = []
    for name, title, draw in FIGURES:
        if results.of(name.split()[0]):
            figure = draw(results)
            file = f"{name.replace(' ', '-')}.png"
            figure.savefig(folder / file, dpi=DOTS, bbox_inches="tight")
            found.append((file, title))
    return found


def _panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * count, 3.6), layout="tight")
    return figure, [figure.add_subplot(1, count, k + 1) for k in range(count)]


def _curve(axes: Any, points: list[list[float]], label: str, which: int = 1, style: str = "-o") -> None:
    ordered = sorted(points)
    axes.plot([p[0] / 1e9 for p in ordered], [p[which] for p in ordered], style, label=label, markersize=3, linewidth=1)


def frontiers(results: Results) -> Any:
    """TensorOpt, figure 6: seconds of a step against gigabytes on a device; dotted: computing and communicating."""
    models = results.values("tensoropt6", "model")
    figure, panels = _panels(len(models))
    for axes, model in zip(panels, models, strict=True):
        found = results.of("tensoropt6", model=model)
        most = max((p[0] for r in found for p in r.get("points", [])), default=math.inf)
        for r in found:
            if not usable(r) or r["algorithm"] == "tensoropt-elimination":
                continue
            if r.get("points"):
                _curve(axes, r["points"], r["algorithm"])
                if r["algorithm"] == "tensoropt-frontier":
                    _curve(axes, r["points"], "computing", 2, ":")
                    _curve(axes, [[p[0], p[1] - p[2]] for p in r["points"]], "communicating", 1, ":")
            elif "time" in r and r["memory"] <= FAR * most:
                axes.plot([r["memory"] / 1e9], [r["time"]], "*", label=r["algorithm"])
            elif "time" in r:  # the paper leaves it out, too
                axes.plot([], [], "*", label=f"{r['algorithm']}: {r['memory'] / 1e9:.3g} GB, {r['time']:.3g} s")
        _named(axes, model, "GB on a device", "s of a step", log=True)
    return figure


def factors(results: Results) -> Any:
    """TensorOpt, figure 7: the frontier of Transformer for sizes and networks."""
    parts = [p for p in ("tensoropt7a", "tensoropt7b", "tensoropt7c") if results.of(p)]
    figure, panels = _panels(len(parts))
    for axes, part in zip(panels, parts, strict=True):
        for r in results.of(part):
            if usable(r) and r.get("points"):
                _curve(axes, r["points"], str(r["scale"]))
        titles = {"tensoropt7a": "hidden size", "tensoropt7b": "between machines", "tensoropt7c": "inside of one, 8 GPUs"}
        _named(axes, titles[part], "GB on a device", "s of a step", log=True)
    return figure


def parallelism(results: Results) -> Any:
    """TensorOpt, figure 8: the shortest time that fits against the number of devices."""
    return _against_devices(results, "tensoropt8", lambda r: r["time"], "s of a step")


def optcnn7(results: Results) -> Any:
    """OptCNN, figure 7: images a second against the number of devices."""
    return _against_devices(results, "optcnn7", lambda r: r["batch"] / r["time"], "images a second")


def optcnn8(results: Results) -> Any:
    """OptCNN, figure 8: gigabytes that are sent in a step."""
    return _against_devices(results, "optcnn7", lambda r: r["sent"] / 1e9, "GB sent in a step")


def flexflow6(results: Results) -> Any:
    """FlexFlow, figure 6: samples a second for each device."""
    return _against_devices(results, "flexflow6", lambda r: r["batch"] / r["time"] / r["devices"], "samples a second and device")


def unity14(results: Results) -> Any:
    """Unity, figure 14: samples a second."""
    return _against_devices(results, "unity14", lambda r: r["batch"] / r["time"], "samples a second")


def flexflow7(results: Results) -> Any:
    """FlexFlow, figure 7: NMT on 64 K80, step by step: seconds, gigabytes sent, seconds of computing on all devices together."""
    found = [r for r in results.of("flexsteps k80", model="nmt_unrolled", devices=64) if usable(r)]
    figure, panels = _panels(3)
    shown: tuple[tuple[str, Callable[[Result], float]], ...] = (
        ("s of a step", lambda r: r["simulated"]),
        ("GB sent in a step", lambda r: r["sent"] / 1e9),
        ("s computing", lambda r: r["compute"]),
    )
    for axes, (title, value) in zip(panels, shown, strict=True):
        axes.bar([r["algorithm"].removeprefix("simulated ") for r in found], [value(r) for r in found])
        axes.set_title(title)
        axes.tick_params(axis="x", rotation=45)
    return figure


def joint(results: Results) -> Any:
    """Unity, figure 15 (b): sequential over joint optimization."""
    figure, (axes,) = _panels(1)
    found = []
    for model in results.values("unity14", "model"):
        at = {r["algorithm"]: r for r in results.of("unity14", model=model, devices=96) if usable(r)}
        if {"sequential", "unity"} <= at.keys():
            found.append((model, at["sequential"]["time"] / at["unity"]["time"]))
    axes.bar([m for m, _ in found], [x for _, x in found])
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.tick_params(axis="x", rotation=45)
    axes.set_title("sequential / joint, 96 V100")
    return figure


def _against_devices(results: Results, part: str, value: Callable[[Result], float], label: str) -> Any:
    pairs = list(dict.fromkeys((r["part"], r["model"]) for r in results.of(part)))
    from matplotlib.figure import Figure

    columns = min(4, len(pairs))
    rows = -(-len(pairs) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="tight")
    for k, (own, model) in enumerate(pairs):
        axes = figure.add_subplot(rows, columns, k + 1)
        for algorithm in results.values(part, "algorithm"):
            found = [r for r in results.of(own, model=model, algorithm=algorithm) if usable(r) and r.get("fits", True)]
            if found:
                points = sorted((r["devices"], value(r)) for r in found)
                axes.plot(*zip(*points, strict=True), "-o", label=algorithm, markersize=3, linewidth=1)
        _named(axes, f"{model} {own.removeprefix(part)}", "devices", label)
    return figure


def _named(axes: Any, title: str, x: str, y: str, log: bool = False) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if log:
        axes.set_yscale("log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6)


FIGURES: tuple[tuple[str, str, Callable[[Results], Any]], ...] = (
    ("tensoropt6", "TensorOpt, figure 6: frontiers of every system, 16 V100", frontiers),
    ("tensoropt7", "TensorOpt, figure 7: model sizes and networks", factors),
    ("tensoropt8", "TensorOpt, figure 8: time against parallelism", parallelism),
    ("optcnn7", "OptCNN, figure 7: throughput", optcnn7),
    ("optcnn7 sent", "OptCNN, figure 8: communication", optcnn8),
    ("flexflow6", "FlexFlow, figures 6 and 9: throughput for each device", flexflow6),
    ("flexsteps nmt", "FlexFlow, figure 7: NMT on 64 K80, step by step, simulated", flexflow7),
    ("unity14", "Unity, figure 14: throughput on Summit", unity14),
    ("unity14 joint", "Unity, figure 15 (b): joint against sequential", joint),
)
