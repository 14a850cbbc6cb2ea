"""FlexFlow's recurrent networks step by step, as tables: in its own world (`steps`), and where its strategies must be plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.seeds import published as paper
from benchmarks.seeds.cases import OF_ITS_OWN, PROPOSALS
from benchmarks.seeds.results import Result, Results, Table, ratio, said, times, usable

PART = "flexsteps"


def tables(results: Results) -> Iterator[Table]:
    """Figures 6 and 7 of the recurrent networks, as the simulator sees them."""
    yield own_world(results)
    yield nmt(results)
    yield plans(results)


def own_world(results: Results) -> Table:
    """Every strategy of `steps`, and this project's search on the scanned network."""
    rows = []
    for data in results.of(PART, algorithm="simulated data-parallel"):
        part, model, devices = data["part"], data["model"].removesuffix("_unrolled"), data["devices"]
        expert, drawn, own = (
            results.one(part, model=data["model"], devices=devices, algorithm=f"simulated {a}")
            for a in ("expert", "figure 13", "flexflow")
        )
        scanned, ours = (results.one(part, model=model, devices=devices, algorithm=a) for a in ("data-parallel", "captured"))
        best = min((r for r in (data, expert) if usable(r) and r is not None), key=lambda r: r["simulated"], default=None)
        faster = times(own["simulated"] / ours["on rings"]) if own and ours and "on rings" in ours else ""
        alone = times(best["simulated"] / own["found"]["data-parallel"]) if best and own else ""
        rows.append((
            *(part.split()[-1], model, str(devices), said(data, lambda r: f"{r['simulated'] * 1e3:.4g}")),
            *(times(ratio(expert, data, "simulated")), str(paper.FLEXFLOW_GAIN), times(ratio(best, drawn, "simulated"))),
            *(times(ratio(best, own, "simulated")), alone),
            *(said(own, lambda r: str(r["proposals"])), said(own, lambda r: f"{r['process seconds']:.3g}")),
            *(times(ratio(scanned, ours, "on rings")) if ours and "on rings" in ours else "", faster),
        ))  # fmt: skip
    columns = (
        *("cluster", "model", "GPUs", "data parallelism, ms", "experts / data parallelism"),
        *("paper: best other / FlexFlow", "best other / figure 13's strategy", "best other / FlexFlow's search from there"),
        *("and from data parallelism", "proposals", "search, CPU s"),
        *("scanned: data parallelism / unity", "FlexFlow / unity, scanned"),
    )
    return Table("FlexFlow's recurrent networks, step by step, simulated", columns, tuple(rows), (OWN_WORLD,))


OWN_WORLD = (
    "All seconds are the simulator's, with collectives as rings over links. Every operator of every step may be on any devices "
    "(`benchmarks/seeds/steps.py` says what each strategy is). Figure 13's is what the paper's search found for NMT on 4 P100, "
    "put by hand in every node, and for the other networks alike. The search goes on from there and from data parallelism, with "
    f"{', '.join(f'{n} proposals on {d} GPUs' for d, n in OF_ITS_OWN.items())} for each; the paper's took up to half an hour. "
    "unity is the fixed-graph search, by the price list, on the scanned network, in which a layer's inputs are one large product."
)


def nmt(results: Results) -> Table:
    """FlexFlow's figure 7: NMT on 64 K80."""
    found = results.of(f"{PART} k80", model="nmt_unrolled", devices=64)
    at = {r["algorithm"].removeprefix("simulated "): r for r in found if usable(r)}
    columns = tuple(a for a in ("data-parallel", "expert", "figure 13", "flexflow") if a in at)
    which = (("seconds of a step", "simulated"), ("bytes sent", "sent"), ("seconds of computing", "compute"))
    rows = [
        (f"{what}, of data parallelism's", f"{s.what}: {s}", *(times(ratio(at[a], at.get("data-parallel"), of)) for a in columns))
        for (what, of), s in zip(which, paper.FLEXFLOW_NMT, strict=True)
    ]
    notes = (*_figure_7(at), NMT)
    return Table("FlexFlow, figure 7: NMT on 64 K80, step by step, simulated", ("what", "paper", *columns), tuple(rows), notes)


def _figure_7(at: Mapping[str, Result]) -> Iterator[str]:
    """What the paper says of the figure, and whether it holds."""
    if not {"data-parallel", "expert", "flexflow"} <= at.keys():
        return
    data, expert, own = (at[a] for a in ("data-parallel", "expert", "flexflow"))
    for said_, of in zip(paper.FLEXFLOW_NMT[:2], ("simulated", "sent"), strict=True):
        yield f"{said_.what}: {ratio(data, own, of):.3g} and {ratio(expert, own, of):.3g} (the paper: {said_})."
    slower, least = ratio(expert, data, "simulated") > 1, ratio(expert, own, "compute") < 1
    yield f"experts take longer than data parallelism (the paper: so): {'holds' if slower else 'does not hold'}."
    yield f"experts compute a little less than FlexFlow (the paper: so): {'holds' if least else 'does not hold'}."
    if ratio(expert, own, "sent") < 1:
        yield (
            "Experts send less than FlexFlow here, so there the direction differs from the paper's: they add up the gradients of a "
            "layer among one GPU of every node, FlexFlow those of LSTM layers among all GPUs, in so short a search."
        )


NMT = (
    "That products split in parameters compute faster than products split in samples was measured in the paper, kernel by kernel "
    "(38 % for NMT's); a roofline takes as long for both."
)


def plans(results: Results) -> Table:
    """What `search="flexflow"` finds for the unrolled networks."""
    rows = []
    for own in results.of(PART, algorithm="flexflow"):
        data = results.one(own["part"], model=own["model"], devices=own["devices"], algorithm="data-parallel")
        rows.append((
            *(own["part"].split()[-1], own["model"].removesuffix("_unrolled"), str(own["devices"])),
            *(times(ratio(data, own, "simulated")), times(ratio(data, own, "predicted"))),
            said(own, lambda r: f"{r['process seconds']:.3g}"),
        ))  # fmt: skip
    columns = ("cluster", "model", "GPUs", "data parallelism / FlexFlow, simulated", "the same, priced", "search, CPU s")
    return Table("FlexFlow's recurrent networks, step by step, as plans", columns, tuple(rows), (PLANS,))


PLANS = (
    f'What `search="flexflow"` finds, whose strategies must be plans of one mesh, with {PROPOSALS} proposals for each of its two '
    "chains. The simulator, by which it goes, overlaps communication with computing; the price list does not."
)
