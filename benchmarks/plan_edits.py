"""Random edits of saved plans: every file is refused with a PlanError, or is the plan that was saved, written differently.

`python -m benchmarks.plan_edits`; with a number, so many edits, not recorded. Half of the edits change a value of the document: it
is deleted, replaced by others, cut, repeated, renamed or swapped. The other half change the text: it is cut or joined, bytes are
changed, numbers become NaN or too large, values are nested deeply, keys are given twice, spaces and the order of keys are changed.

Each document whose values were edited is read a second time with right checksums, as if another program had written it: it is
refused with a PlanError or read. `tests/plan/files/test_edited_plan_files.py` checks the types of the plans that are read.
"""

from __future__ import annotations

import copy
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import unity
from benchmarks.record import record, show
from unity.base.errors import PlanError
from unity.plan.files.plan_file import sealed

EDITS = 10_000
GRID = unity.Machine.grid(2, 4, "a100")
OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**30, -(2**63), 0.5, float("nan"), float("inf"), "", "x", "P9/0", "é\ud800", [], [[]], [1, 2], {},
    {"a": 1},
)  # fmt: skip
DEEP = b"[" * 100_000
VALUES = (b"NaN", b"-Infinity", b"1e999", b"1" * 5000, DEEP, DEEP + b"]" * 100_000, b'"\xff"', b'"\\ud800"', b"")


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def plain(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def layered(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)[0] ** 2)


def shared(w: Any, x: Any) -> Any:
    """Its products are joined by rules."""
    return jnp.mean((x @ w["a"]) * jnp.tanh(x @ w["b"]) + x @ w["c"])


W, X = f(32, 32), f(64, 32)
PLANS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "plain": (plain, (W, X), {"search": "captured"}),
    "pipeline": (layered, (f(4, 32, 32), X), {"pipeline": unity.PipelineShape(2, 4), "search": "captured"}),
    "rewritten": (shared, ({"a": W, "b": W, "c": W}, X), {"budget": 8, "pack": True}),
    "constrained": (plain, (W, X), {"search": "captured", "constraints": unity.pin("x", jax.sharding.PartitionSpec("node"))}),
    "by rules": (plain, (W, X), {"search": "unity-rules", "budget": 20}),
}


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every item in a document, as its container and its key there."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        yield from places(value)


def edited(data: Any, draw: random.Random) -> tuple[Any, str]:
    """Returns a copy of a document with one edit, which changes it, and what that was."""
    while True:
        changed = copy.deepcopy(data)
        # all depths alike: a large part of a file would have nearly all edits otherwise
        holder, key = draw.choice([(changed, k) for k in changed])
        while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.75:
            holder = holder[key]
            key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        kinds = ["delete", "replace", "replace", "insert", "truncate", "repeat", "swap", "number", "rename"]
        value, kind = holder[key], draw.choice(kinds)
        if kind == "delete":
            del holder[key]
        elif kind == "replace":
            holder[key] = copy.deepcopy(draw.choice(OTHERS))
        elif kind == "insert" and isinstance(value, list):
            value.insert(draw.randint(0, len(value)), copy.deepcopy(draw.choice(OTHERS)))
        elif kind == "truncate" and isinstance(value, list | str) and value:
            holder[key] = value[: draw.randrange(len(value))]
        elif kind == "repeat" and isinstance(value, list | str) and value:
            holder[key] = value * 2
        elif kind == "swap":
            other_holder, other = draw.choice(list(places(changed)))
            try:
                other_holder[other], holder[key] = value, other_holder[other]
            except (TypeError, LookupError):
                continue
        elif kind == "number" and isinstance(value, int | float):
            holder[key] = draw.choice([-value, value + 1, value * 2, value / 2, 10**20])
        elif kind == "rename" and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        else:
            continue
        try:
            if not same(changed, data):
                return changed, f"{kind} {key}"
        except RecursionError:  # something was put into itself
            continue


def text_of(data: Any) -> bytes:
    """Returns a document as JSON, or nearly: with NaN and lone surrogates if it has any."""
    return json.dumps(data).encode()


def torn(text: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Returns a text with one edit, and what that was."""
    kind = draw.choice(["cut", "cut out", "join", "byte", "byte", "value", "value", "twice", "layout", "order"])
    at = draw.randrange(len(text))
    if kind == "cut":
        return text[:at], kind
    if kind == "cut out":
        return text[:at] + text[at + draw.randint(1, 100) :], kind
    if kind == "join":
        return text + text[at:], kind
    if kind == "byte":
        return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :], kind
    if kind == "value":
        number = draw.choice(list(re.finditer(rb"(?<=[\[:,])-?[0-9][0-9.e+-]*", text)))
        return text[: number.start()] + draw.choice(VALUES) + text[number.end() :], kind
    if kind == "twice":  # the last of two keys counts
        pair = draw.choice(list(re.finditer(rb'"\w+":(?:[0-9][0-9.e+-]*|"[^"]*"|true|false)(?=[,}])', text)))
        key = pair[0].partition(b":")[0]
        more = draw.choice([key + b":7,", pair[0] + b"," + key + b":7,", key + b":[],"])
        return text[: pair.start()] + more + text[pair.start() :], kind
    form = {"indent": draw.choice([None, 1]), "sort_keys": kind == "order", "ensure_ascii": draw.random() < 0.5}
    return json.dumps(json.loads(text), **form).encode(), kind


def same(a: Any, b: Any) -> bool:
    """Returns whether two documents are equal, and of equal kinds: 1 and 1.0 and true differ. The order of keys does not count."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def has_content(text: bytes, data: Any) -> bool:
    """Returns whether a text is JSON of the same content as a document."""
    try:
        return same(json.loads(text), data)
    except (ValueError, RecursionError):
        return False


def outcome(path: Path, text: bytes, fn: Any, args: tuple[Any, ...]) -> unity.Plan | None:
    """Returns the plan in a file, or None if it was refused. Any other error than a PlanError is raised."""
    path.write_bytes(text)
    try:
        return unity.load(path, fn, *args)
    except PlanError:
        return None


def examined(name: str, path: Path, edits: int, draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Returns the counts of a plan's edits by their ends, and the edits that ended otherwise than they may."""
    fn, args, options = PLANS[name]
    plan = unity.optimize(fn, *args, machine=GRID, progress=False, **options)
    plan.files.save(path)
    text = path.read_bytes()
    data, ends, wrong = json.loads(text), Counter[str](), list[str]()

    def end(changed: bytes, what: str, sealed_again: bool) -> None:
        try:
            loaded = outcome(path, changed, fn, args)
        except Exception as error:  # the fault that is looked for
            wrong.append(f"{name}: {what}: {type(error).__name__}: {error}")
            return
        if loaded is None:
            ends["refused with right checksums" if sealed_again else "refused"] += 1
        elif sealed_again:
            ends["read with right checksums"] += 1
        elif has_content(changed, data) and (loaded.program.pcg.key, loaded.time, loaded.memory) == (
            plan.program.pcg.key,
            plan.time,
            plan.memory,
        ):
            ends["the same, written differently"] += 1
        else:
            wrong.append(f"{name}: {what}: accepted")

    for k in range(edits):
        if k % 2:
            end(*torn(text, draw), sealed_again=False)
            continue
        changed, what = edited(data, draw)
        end(text_of(changed), what, sealed_again=False)
        try:
            again = text_of(sealed(changed))
        except (ValueError, RecursionError):  # a document that has no checksums, as JSON cannot say it
            continue
        end(again, what, sealed_again=True)
    return {"plan": name, "bytes": len(text), "edits": edits, **ends, "wrong": len(wrong)}, wrong


def main() -> None:
    edits = int(sys.argv[1]) if len(sys.argv) > 1 else EDITS
    began, rows, wrong = time.perf_counter(), [], list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for k, name in enumerate(PLANS):
            row, faults = examined(name, Path(folder) / "plan.json", edits // len(PLANS), random.Random(k))
            rows.append(row)
            wrong += faults
    show("random edits of saved plans", rows)
    print(*wrong[:50], sep="\n")
    if len(sys.argv) == 1:
        print(record("plan_edits", rows, seconds=round(time.perf_counter() - began, 1)))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
