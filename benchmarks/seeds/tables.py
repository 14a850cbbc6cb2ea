"""What was found, as tables and sentences beside what the papers say; nothing is decided here but how to compare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.seeds import age, stepped, studies
from benchmarks.seeds import published as paper
from benchmarks.seeds.cases import IN_TENSOROPT, RNN, SEARCHED
from benchmarks.seeds.dimensions import PIPELINE
from benchmarks.seeds.results import Result, Results, Table, ms, ratio, said, times, usable
from benchmarks.seeds.table5 import PUBLISHED

LITTLE = 1.05  # a gain that is hardly one
NO_LOSS = 0.995  # a ratio from which on nothing is lost
CPU = "process seconds"  # others on the cores do not count
ROUNDING = 1e-6  # by which times may differ that are the same sums in another order

# Why a direction may differ from the paper's.
WHY_OPTCNN = (
    "The other strategies are the best of their kind here: what they leave open is found by exact search, with splits of "
    "contracted dimensions and gathers of weights among it, which OptCNN's space has not."
)
WHY_FLEXFLOW = (
    f"FlexFlow looked for {SEARCHED:g} s a chain, in the paper for up to 30 minutes; it goes by its simulator, which overlaps "
    "communication with computing, and the page by the price list, which does not; what is inside of scans it does not split (the "
    "tables of networks step by step do); and its strategies must be expressible on one mesh."
)
WHY_NOT_OVER = (
    "The paper's gain is that of operators side by side on different GPUs, which no plan of one mesh has; step by step and on any "
    "GPUs, FlexFlow gains (the tables of networks step by step)."
)
WHY_VGG = (
    "The last three convolutions: the paper splits the image to accelerate them (section 6.3), by kernels that it measured. To a "
    "roofline a quarter of the work is a quarter, however it is cut; the same gradients are added up either way, and samples are "
    "exchanged for parts of images before, with halos besides. The last dense layer: the paper leaves two GPUs out, to send less "
    "between fewer; by our prices four pieces of the weights, computed at once, are worth it."
)
WHY_TRACKING = (
    "Its frontiers keep at most 8 strategies each here, but 200 along the row of LDP; equal tables are made once, so that "
    "eliminating equal layers, which is what LDP saves, costs next to nothing."
)
TRACKED = "Seconds of frontier tracking alone: configurations and their costs are listed before, as the paper measures them before."
WHY_BYTES = "OptCNN looks for the least time, not for the fewest bytes: one weird trick takes {} times as long there."
WHY_UNITY = "The others are priced here, not run: what their frameworks cost besides is not in the price list."
WHY_JOINT = (
    "Sequential / joint gains {:.1%} at most: what the paper's joint search undoes is mostly fusion, and here nothing is "
    "fused before it is split (docs/search.md, one problem or two; `python -m benchmarks.figure16` has sequential search with "
    "fused operators, too)."
)


def differs(what: str, here: Mapping[str, float], why: str) -> list[str]:
    """A sentence, where gains that the paper reports are losses here. `here`: gains by what they are of."""
    lost = [f"{label} {gain:.3g}" for label, gain in here.items() if not math.isnan(gain) and gain < NO_LOSS]
    return [f"{what}, where the direction differs from the paper's: {', '.join(lost)}. {why}"] if lost else []


def throughput(results: Results, part: str, title: str, notes: Iterable[str] = ()) -> Table:
    """Milliseconds of a step by model, devices and algorithm."""
    algorithms = [a for a in results.values(part, "algorithm") if a != PUBLISHED]
    rows = []
    for model in results.values(part, "model"):
        for machine in dict.fromkeys(r["machine"] for r in results.of(part, model=model)):
            own = {r["algorithm"]: r for r in results.of(part, model=model, machine=machine)}
            rows.append((model, machine, *(said(own.get(a), ms) for a in algorithms)))
    return Table(title, ("model", "machine", *algorithms), tuple(rows), tuple(notes))


def frontiers(results: Results) -> Table:
    """TensorOpt's figure 6 in figures: the ends of every frontier, and the single strategies."""
    rows = []
    for r in results.of("tensoropt6"):
        if r["algorithm"] == "tensoropt-elimination":
            continue
        if usable(r) and "points" in r and r["points"]:
            lean, fast = min(r["points"]), min(r["points"], key=lambda p: p[1])
            cells = (str(len(r["points"])), *(f"{x:.4g}" for x in (lean[0] / 1e9, lean[1], fast[0] / 1e9, fast[1])))
        elif usable(r) and "time" in r:
            cells = ("1", "", "", f"{r['memory'] / 1e9:.4g}", f"{r['time']:.4g}")
        else:
            cells = ("", "", "", "", said(r, lambda r: "no strategy"))
        rows.append((r["model"], r["algorithm"], *cells))
    columns = ("model", "system", "points", "leanest GB", "its s", "fastest GB", "its s")
    return Table("TensorOpt, figure 6: frontiers on 16 V100", columns, tuple(rows), tuple(findings(results)))


def findings(results: Results) -> Iterable[str]:
    """Whether what TensorOpt's section 5.1 observes holds here."""
    for model in results.values("tensoropt6", "model"):
        own = {r["algorithm"]: r for r in results.of("tensoropt6", model=model) if usable(r)}
        tracked = own.get("tensoropt-frontier")
        if tracked is None or not tracked["points"]:
            yield f"{model}: TensorOpt's frontier is not there, so nothing is compared."
            continue
        mesh, near = own.get("mesh-frontier", {}).get("sums", []), 1 + ROUNDING
        below = [p for p in mesh if not any(q[0] <= p[0] * near and q[1] <= p[1] * near for q in tracked["sums"])]
        yield (
            f"{model}: Mesh-TensorFlow's frontier is never below TensorOpt's (the paper: never): "
            f"{'holds' if not below else f'does not hold at {len(below)} of {len(mesh)} points'}; {len(mesh)} points in all."
        )
        if model == RNN and "data-parallel" in own:
            said_, data = paper.RNN_DATA_PARALLEL, own["data-parallel"]
            yield (
                f"{model}: data parallelism takes {data['memory'] / 1e9:.3g} GB and {data['time']:.3g} s (the paper: "
                f"{said_['memory'] / 1e9:g} GB and {said_['time']:g} s, too far away to be drawn, of 108 GB of parameters: "
                "gradients are not counted there)."
            )
        single = {k: own[k] for k in ("data-parallel", "optcnn", "tofu") if k in own}
        if "tofu" in single and len(single) > 1:
            least = min(single, key=lambda k: single[k]["memory"])
            holds = "holds" if least == "tofu" else f"does not hold, {least} has"
            yield f"{model}: of the single strategies ToFu has the least memory (the paper: so): {holds}."
        if "optcnn" in single:
            fast = min(p[1] for p in tracked["points"])
            alike = f"{own[IN_TENSOROPT]['time'] / fast:.4f}" if IN_TENSOROPT in own else "(not run)"
            yield (
                f"{model}: OptCNN's algorithm finds what takes {alike} times as long as the fastest of "
                f"TensorOpt's frontier (the paper: it is that point), among TensorOpt's strategies; among its own, which split "
                f"results alone, {single['optcnn']['time'] / fast:.4g} times."
            )
        yield f"{model}: {turning(tracked['points'])}"


def turning_point(points: Sequence[list[float]]) -> tuple[float, list[float]] | None:
    """The turning point of a frontier: farthest from the line between its ends, both axes scaled to 1; and how far."""
    ordered = sorted(points)
    if len(ordered) < 3:
        return None
    (m0, t0, *_), (m1, t1, *_) = ordered[0], ordered[-1]
    if m1 == m0 or t0 == t1:
        return None
    away = [((1 - (p[0] - m0) / (m1 - m0)) - (p[1] - t1) / (t0 - t1), p) for p in ordered]
    return max(away, key=lambda a: a[0])


def turning(points: Sequence[list[float]]) -> str:
    """What a frontier's turning point is."""
    found = turning_point(points)
    if found is None:
        return "the frontier has too few points for a turning point."
    gain, point = found
    (m0, t0, *_), (m1, t1, *_) = min(points), max(points)
    return (
        f"the turning point is at {point[0] / 1e9:.3g} GB and {point[1]:.3g} s: {(t0 - point[1]) / (t0 - t1):.0%} of the gain in "
        f"time for {(point[0] - m0) / (m1 - m0):.0%} of the memory (distance from the line {gain:.2f})."
    )


def factors(results: Results) -> Table:
    """TensorOpt's figure 7: where each frontier turns, and its fastest."""
    rows, at = [], dict[str, float]()
    for r in results.of("tensoropt7"):
        if usable(r) and r["points"]:
            turn, fast = turning_point(r["points"]), min(r["points"], key=lambda p: p[1])
            at[str(r["scale"])] = turn[1][1] if turn else math.nan
            cells = [f"{turn[1][0] / 1e9:.3g}", f"{turn[1][1]:.3g}"] if turn else ["none", ""]
            rows.append((r["part"].removeprefix("tensoropt"), str(r["scale"]), *cells, f"{fast[0] / 1e9:.3g}", f"{fast[1]:.3g}"))
    here = at.get("no RDMA", math.nan) / at.get("4x RDMA", math.nan)
    note = f"{paper.RDMA.what}: {paper.RDMA} in the paper, {times(here) or 'not run'} here."
    columns = ("figure", "of", "turning point GB", "s", "fastest GB", "s")
    return Table("TensorOpt, figure 7: turning points of Transformer's frontier", columns, tuple(rows), (note,))


def flexibility(results: Results) -> Iterable[str]:
    """Whether what TensorOpt's section 5.1 observes of few devices holds here."""
    for model in results.values("tensoropt8", "model"):
        of = {a: results.of("tensoropt8", model=model, algorithm=a) for a in results.values("tensoropt8", "algorithm")}
        fits = {a: min((r["devices"] for r in found if usable(r) and r["fits"]), default=None) for a, found in of.items()}
        least = ", ".join(f"{a} on {'none of these' if n is None else n}" for a, n in fits.items())
        yield (
            f"{model}: the fewest GPUs that fit it: {least}. In the paper TensorOpt and ToFu on fewer than 16, data parallelism "
            "and OptCNN on 16; it gives no sizes, and here gradients of all weights are counted, which data parallelism has whole."
        )
        tofu = {r["devices"]: r for r in of.get("tofu", []) if usable(r)}
        if {8, 16} <= tofu.keys():
            yield (
                f"{model}: ToFu on 16 GPUs takes {ratio(tofu[16], tofu[8]):.3g} times as long as on 8 (the paper: longer, as it "
                "sends more between machines; here it is the fastest of its kind, and chooses what it sends)."
            )


def tracking(results: Results) -> Table:
    """TensorOpt's table 3: seconds of frontier tracking."""
    rows, longer = [], dict[str, float]()
    for model, said_ in paper.TRACKING.items():
        for way, algorithm in (("ldp", "tensoropt-frontier"), ("elimination", "tensoropt-elimination")):
            found = next(iter(results.of("tensoropt6", model=model, algorithm=algorithm)), None)
            fixed = said(found, lambda r: str(r["fixed"]))
            target = f"{paper.TRACKING_TARGETS[model]:g}" if way == "ldp" else ""
            seconds = said(found, lambda r: f"{r[CPU]:.3g}")
            rows.append((model, f"FT-{'LDP' if way == 'ldp' else 'Elimination'}", f"{said_[way]:g}", target, seconds, fixed))
        at = {a: results.one("tensoropt6", model=model, algorithm=f"tensoropt-{a}") for a in ("frontier", "elimination")}
        longer[model] = ratio(at["elimination"], at["frontier"], CPU)
    columns = ("model", "algorithm", "paper, 48 cores, s", "target s", "here, CPU s", "fixed by heuristic elimination")
    notes = (TRACKED, *differs("Seconds of FT-Elimination / FT-LDP", longer, WHY_TRACKING))
    return Table("TensorOpt, table 3: seconds of the search, 16 GPUs", columns, tuple(rows), notes)


def optcnn(results: Results) -> Table:
    """OptCNN's findings: gain over the best other, scaling, bytes."""
    rows, gain, less, longer = [], dict[str, float](), dict[str, float](), list[str]()
    for model, (own, other) in paper.OPTCNN_SCALING.items():
        at = {r["algorithm"]: r for r in results.of("optcnn7", model=model, devices=16) if usable(r)}
        first = results.one("optcnn7", model=model, devices=1, algorithm="data-parallel")
        others = [at[k] for k in ("data-parallel", "model-parallel", "one-weird-trick") if k in at]
        best = min(others, key=lambda r: r["time"], default=None)
        scale = 16 * ratio(first, at.get("optcnn"))
        gain[model], less[model] = ratio(best, at.get("optcnn")), ratio(at.get("one-weird-trick"), at.get("optcnn"), "sent")
        longer += [f"{ratio(at.get('one-weird-trick'), at.get('optcnn')):.4g}"] if less[model] < NO_LOSS else []
        rows.append((
            model, f"{paper.OPTCNN_GAIN[model]}", times(gain[model]), times(ratio(best, at.get("unity"))),
            f"{own:g} ({other:g})", f"{times(scale)} ({times(16 * ratio(first, best))})",
            str(paper.OPTCNN_SENT[1]), times(less[model]),
        ))  # fmt: skip
    columns = (
        *("model", "paper: best other / OptCNN, at most", "here", "best other / unity"),
        *("paper: speedup on 16 GPUs (best other)", "here", "paper: bytes OWT / OptCNN", "here"),
    )
    why = WHY_BYTES.format(" and ".join(longer))
    notes = (WHY_OPTCNN, *differs("Best other / OptCNN", gain, ""), *differs("Bytes of OWT / OptCNN", less, why))
    return Table("OptCNN, figures 7 and 8, on 16 P100", columns, tuple(rows), notes)


def vgg(results: Results) -> Table:
    """OptCNN's table 5: how VGG-16's layers are split on 4 GPUs, and how here."""
    found = [results.one("optcnn7", model="vgg16", devices=4, algorithm=a) for a in ("optcnn", "unity")]
    columns = [r["layers"] if r is not None else [] for r in found]
    rows = [
        (str(k + 1), said_, *(c[k] if k < len(c) else "" for c in columns)) for k, said_ in enumerate(paper.OPTCNN_VGG)
    ]  # fmt: skip
    notes = [
        f"{name}: {sum(row[1] == row[k] for row in rows)} of {len(rows)} layers as in the paper."
        for k, name in ((2, "optcnn here"), (3, "unity"))
        if columns[k - 2]
    ]
    notes += _as_published(results)
    return Table("OptCNN, table 5: VGG-16 on 4 P100", ("layer", "paper", "optcnn here", "unity"), tuple(rows), (*notes, WHY_VGG))


def _as_published(results: Results) -> list[str]:
    """What the paper's strategy takes here."""
    paper_s, own = (results.one("optcnn7", model="vgg16", devices=4, algorithm=a) for a in (PUBLISHED, "optcnn"))
    if paper_s is None or own is None:
        return []
    computing, sent = paper_s["compute"] - own["compute"], paper_s["sent"] - own["sent"]
    return [
        f"Split as in the paper, a step takes {paper_s['time'] * 1e3:.5g} ms here, and as optcnn splits it {own['time'] * 1e3:.5g} "
        f"ms: {computing * 1e3:+.3g} ms of computing, {(paper_s['time'] - own['time'] - computing) * 1e3:+.3g} ms of communicating "
        f"({sent / 1e6:+.4g} MB sent by all devices)."
    ]


def flexflow(results: Results) -> Table:
    """FlexFlow's figures 6 and 9: gains over data parallelism and experts, and over OptCNN."""
    note = f"OptCNN / FlexFlow in the paper, on 16 P100, for Inception-v3 and the recurrent networks: {paper.FLEXFLOW_OPTCNN}."
    rows, gain, over = [], dict[str, float](), dict[str, float]()
    for part in dict.fromkeys(r["part"] for r in results.of("flexflow6")):
        for model in results.values(part, "model"):
            for devices in dict.fromkeys(r["devices"] for r in results.of(part, model=model)):
                at = {r["algorithm"]: r for r in results.of(part, model=model, devices=devices) if usable(r)}
                other = min((at[k] for k in ("data-parallel", "expert") if k in at), key=lambda r: r["time"], default=None)
                found = paper.FLEXFLOW_SECONDS[model].get(devices)
                seconds = said(at.get("flexflow"), lambda r: f"{r[CPU]:.3g}")
                gain[f"{model} on {devices} {part.split()[-1].upper()}"] = ratio(other, at.get("flexflow"))
                if (part.split()[-1], devices) == ("p100", 16) and model in paper.FLEXFLOW_NO_CHAINS:
                    over[model] = ratio(at.get("optcnn"), at.get("flexflow"))
                published = str(paper.FLEXFLOW_GAIN) if model != "resnet101" else "1.0"
                rows.append((
                    part.split()[-1], model, str(devices), published, times(ratio(other, at.get("flexflow"))),
                    times(ratio(other, at.get("unity"))), times(ratio(at.get("optcnn"), at.get("flexflow"))),
                    "" if found is None else f"{found:g}", seconds,
                ))  # fmt: skip
    columns = (
        *("cluster", "model", "GPUs", "paper: best other / FlexFlow", "here", "best other / unity", "OptCNN / FlexFlow"),
        *("paper: search s", "here, CPU s"),
    )
    notes = (note, *differs("OptCNN / FlexFlow", over, WHY_NOT_OVER), *differs("Best other / FlexFlow", gain, WHY_FLEXFLOW))
    return Table("FlexFlow, figures 6 and 9, table 5", columns, tuple(rows), notes)


def unity(results: Results) -> Table:
    """Unity's figures 14 and 15 (b)."""
    rows, gains, joint = [], dict[str, float](), list[float]()
    for model, gain in paper.UNITY_GAIN.items():
        for devices in dict.fromkeys(r["devices"] for r in results.of("unity14", model=model)):
            at = {r["algorithm"]: r for r in results.of("unity14", model=model, devices=devices) if usable(r)}
            known = [at[k] for k in ("data-parallel", "megatron", "expert", "flexflow") if k in at]
            best = min(known, key=lambda r: r["time"], default=None)
            seconds = said(at.get("unity"), lambda r: f"{r[CPU]:.3g}")
            gains[f"{model} on {devices}"] = ratio(best, at.get("unity"))
            joint.append(ratio(at.get("sequential"), at.get("unity")))
            rows.append((
                model, str(devices), f"{gain:g}", times(ratio(best, at.get("unity"))), best["algorithm"] if best else "",
                str(paper.UNITY_JOINT), times(ratio(at.get("sequential"), at.get("unity"))),
                times(ratio(at.get("unity-rules"), at.get("unity"))), f"{paper.UNITY_SECONDS[model]:g}", seconds,
            ))  # fmt: skip
    columns = (
        *("model", "GPUs", "paper: best other / Unity, at most", "here", "the best other"),
        *("paper: sequential / joint, at most", "here", "by substitution alone / unity"),
        *("paper: search s, 192 GPUs, at most", "here, CPU s"),
    )
    known = [x for x in joint if not math.isnan(x)]
    notes = (WHY_UNITY, *differs("Best other / Unity", gains, ""))
    notes += (WHY_JOINT.format(max(known) - 1),) if known and max(known) < LITTLE else ()
    return Table("Unity, figures 14 and 15 (b), on Summit", columns, tuple(rows), notes)


def dimensions(results: Results) -> Table:
    """Unity's figure 15 (a): speedup over data and model parallelism."""
    at = {r["algorithm"]: r for r in results.of("unity15")}
    first = at.get("data+model")
    rows = []
    for name, said_ in paper.UNITY_DIMENSIONS.items():
        found = at.get(name)
        rows.append((name, f"{said_:g}", "not available" if name not in at else said(found, lambda r: times(ratio(first, r)))))
    rows.append(("everything there is here", "", times(ratio(first, at.get("captured")))))
    gain = ratio(first, at.get("data+model+reduction+heads"))
    why = "On this price list data parallelism is all but the best for BERT-Large, so further dimensions gain little."
    notes = (why,) if gain < LITTLE else ()
    return Table("Unity, figure 15 (a): BERT-Large on 96 V100", ("dimensions", "paper", "here"), tuple(rows), notes)


OURS = ("unity", "captured", "frontier", PIPELINE)


def fastest(result: Result) -> float | None:
    """Seconds of a strategy, or of a frontier's fastest; None where there is none."""
    points = result.get("points", [])
    return result.get("time", min((p[1] for p in points), default=None))


def never_slower(results: Results) -> Table:
    """This project's promise: no other algorithm's strategy is faster. By how much it is slower, of all that were compared."""
    rows, broken, mixed = [], list[str](), 0
    every = (r for r in results.every if not r["part"].startswith(stepped.PART))  # what is priced of these is of figure 6, too
    for key in dict.fromkeys((r["part"], r["model"], r["machine"], str(r["limit"])) for r in every):
        own = [r for r in results.every if (r["part"], r["model"], r["machine"], str(r["limit"])) == key and usable(r)]
        own = [r | {"time": seconds} for r in own if r.get("fits", True) and (seconds := fastest(r)) is not None]
        best: Result | None = next((r for name in ("unity", "captured") for r in own if r["algorithm"] == name), None)
        others = [r for r in own if r["algorithm"] not in OURS]
        if best is None or not others:
            continue
        mixed += len({r.get("code") for r in (best, *others)}) > 1
        nearest = min(others, key=lambda r: r["time"])
        over = nearest["time"] / best["time"] - 1
        if over < -ROUNDING:
            broken.append(f"{key[0]}, {key[1]} on {key[2]}: {nearest['algorithm']} is faster by {-over:.2%}")
        every = ", ".join(f"{r['algorithm']} {r['time'] / best['time'] - 1:+.2%}" for r in others)
        rows.append((key[0], key[1], key[2], best["algorithm"], f"{best['time'] * 1e3:.4g}", f"{over:+.2%}", every))
    columns = ("part", "model", "machine", "ours", "ms", "the nearest other", "all others")
    notes = tuple(broken) or (f"No other strategy is faster, in {len(rows)} comparisons.",)
    if mixed:
        notes += (f"In {mixed} of them not all results are of the same code; at the end the page says which are older.",)
    return Table("Against every other algorithm and baseline, same costs", columns, tuple(rows), notes)


def absent(results: Results) -> Table:
    """Every case without figures, and why."""
    rows = [
        (r["part"], r["model"], r["machine"], r["algorithm"], str(next(r[k] for k in ("missing", "error", "failed") if k in r)))
        for r in results.every
        if not usable(r)
    ]
    return Table("What there are no figures of", ("part", "model", "machine", "algorithm", "why"), tuple(rows))


def tables(results: Results) -> list[Table]:
    """Everything on the page, of the parts that were run."""
    made = [never_slower(results)]
    if results.of("tensoropt6"):
        made += [frontiers(results), tracking(results)]
    if results.of("tensoropt7"):
        made.append(factors(results))
    if results.of("tensoropt8"):
        title = "TensorOpt, figure 8: milliseconds of a step under a GPU's memory"
        made.append(throughput(results, "tensoropt8", title, flexibility(results)))
    if results.of("optcnn7"):
        made += [optcnn(results), vgg(results), throughput(results, "optcnn7", "OptCNN, figure 7: milliseconds of a step")]
    if results.of("flexflow6"):
        made += [flexflow(results), throughput(results, "flexflow6", "FlexFlow, figure 6: milliseconds of a step")]
        made += studies.tables(results)
    if results.of("flexsteps"):
        made += stepped.tables(results)
    if results.of("unity14"):
        made += [unity(results), throughput(results, "unity14", "Unity, figure 14: milliseconds of a step")]
    if results.of("unity15"):
        made.append(dimensions(results))
    return [*made, age.table(results), absent(results)]
