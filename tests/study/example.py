"""Made-up results of a study, near what such a machine gives: all frameworks, failures, the untestable."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

KILLS, FLIPS = 20, 12
SIZES = {"lenet": 493_648, "gpt": 68_374_528, "resnet50": 204_456_256, "vgg16": 1_106_860_352}
RAW = 0.0004  # seconds per raw MB, beside what each file takes
FORMATS: dict[str, dict[str, Row]] = {
    "pytorch": {
        "torch.save": {"x": 2.4, "lost": 1.05, "over": 0.0015, "mb": 3},
        "torch.save, renamed": {"x": 2.5, "lost": 1.05, "over": 0.0015, "mb": 3, "durable": True, "safe": True},
        "safetensors": {"x": 1.7, "lost": 1.05, "over": 0.001, "mb": 205, "safe": True},
        "DCP": {"x": 4.2, "lost": 1.1, "over": 0.004, "mb": 210, "files": 2, "durable": True},
        "DCP async": {"x": 4.8, "lost": 0.95, "stall": 0.1, "over": 0.004, "mb": 420, "files": 2, "durable": True},
    },
    "holdfast": {
        "holdfast": {"x": 1.15, "lost": 1.0, "over": 0.002, "mb": 40, "files": 3, "durable": True, "safe": True},
        "holdfast async": {"x": 1.5, "lost": 0.6, "stall": 0.07, "over": 0.002, "mb": 205, "files": 3, "durable": True},
    },
    "tensorflow": {
        "tf.train.Checkpoint": {"x": 5.9, "lost": 1.0, "over": 0.002, "mb": 230, "files": 2},
        "keras": {"x": 9.1, "lost": 1.0, "over": 0.004, "mb": 430},
    },
    "jax": {
        "orbax": {"x": 9.8, "lost": 0.8, "stall": 0.06, "over": -0.07, "mb": 500, "files": 14, "safe": True, "z": True},
        "orbax raw": {"x": 5.2, "lost": 0.7, "stall": 0.08, "over": 0.003, "mb": 480, "files": 14, "safe": True},
        "flax msgpack": {"x": 6.0, "lost": 1.0, "over": 0.001, "mb": 640},
    },
    "chainer": {
        "npz": {"x": 90.0, "lost": 1.0, "over": -0.073, "mb": 25, "z": True},
        "npz raw": {"x": 3.5, "lost": 1.0, "over": 0.002, "mb": 25},
        "hdf5": {"x": 70.0, "lost": 1.0, "over": -0.061, "mb": 30, "z": True},
        "hdf5 raw": {"x": 3.6, "lost": 1.0, "over": 0.004, "mb": 30},
    },
}
PARTS = {
    "pytorch": {"model": 0, "optimizer": 1, "scheduler": 2, "loader": 0, "torch RNG": 0, "numpy RNG": 0, "average": 3},
    "holdfast": {},
    "tensorflow": {"model": 0, "optimizer": 1, "seed generator": 0, "numpy RNG": 0, "loader": 0},
    "jax": {"model": 0, "optimizer": 1, "key": 0, "loader": 0, "average": None},
    "chainer": {"model": 0, "optimizer": 1, "iterator": 0, "numpy RNG": 0},
}
USUAL_DIFFERS = {"pytorch", "tensorflow", "chainer"}
UNTESTABLE = "tensorflow"
VARIANTS = {"pytorch": "worker processes", "tensorflow": "augmentation in tf.data"}
SAVES = ("step 0", "mid-epoch", "epoch's end")
SILENT = {"npz raw", "hdf5 raw", "flax msgpack", "safetensors"}
WHY_MISSING = "No matching distribution found for chainer==7.8.1 (see .study/chainer.log)"


def spread(value: float, *, by: float = 0.15) -> dict[str, float]:
    return {"median": round(value, 4), "low": round(value * (1 - by), 4), "high": round(value * (1 + 2 * by), 4)}


def example(missing: str | None = "chainer") -> Row:
    """Results as `holdfast study` writes them, ``missing`` not installed; without advice, which is made from them."""
    there = {name: forms for name, forms in FORMATS.items() if name != missing}
    return {
        "version": "0.1.0",
        "when": "2026-11-16T20:00:00",
        "machine": {
            "cores": 2,
            "memory_gb": 8.2,
            "platform": "Linux-6.1-x86_64",
            "python": "3.11.9",
            "folder_filesystem": "ext4",
        },
        "settings": {"quick": True, "mtbf_s": 21600.0, "models": ["gpt", "resnet50"], "rounds": 3, "seed": 0},
        "frameworks": [
            {
                "framework": name,
                "ok": name != missing,
                "why": WHY_MISSING if name == missing else "made before",
                "versions": {} if name == missing else {name: "2.1.0", "numpy": "2.4.6"},
                "install_s": 0.0 if name == "holdfast" else 41.2,
            }
            for name in FORMATS
        ],
        "limits": [row for model in SIZES for row in _limits(model)],
        "cost": [_cost(model, *one) for model in ("gpt", "resnet50") for one in _each(there)],
        "formats": [_format(model, *one) for model in SIZES for one in _each(there)],
        "scale": [row for name in there for row in _scale(name)],
        "determinism": [row for name in there for row in _determinism(name)],
        "crash_safety": [row for one in _each(there) for row in _crash(*one)],
        "advice": [],
    }


def _each(there: dict[str, dict[str, Row]]) -> list[tuple[str, str, Row]]:
    return [(name, form, facts) for name, forms in there.items() for form, facts in forms.items()]


def _raw(model: str) -> float:
    return 0.002 + RAW * SIZES[model] / 1e6


def _limits(model: str) -> list[Row]:
    times = {"raw disk": 1.0, "raw buffered": 1.5, "raw fsync": 0.9, "raw read": 0.9, "memory copy": 0.3}
    return [
        {
            "id": f"limits/{model}/{name}",
            "model": model,
            "name": name,
            "bytes": SIZES[model],
            "seconds": spread(_raw(model) * times[name]),
            "gb_s": spread(SIZES[model] / 1e9 / _raw(model) / times[name]),
        }
        for name in times
    ]


def _head(axis: str, model: str, framework: str, form: str, facts: Row) -> Row:
    return {
        "id": f"{axis}/{model}/{framework}/{form}",
        "model": model,
        "framework": framework,
        "format": form,
        "compressed": facts.get("z", False),
        "background": "stall" in facts,
    }


def _cost(model: str, framework: str, form: str, facts: Row) -> Row:
    head = _head("cost", model, framework, form, facts)
    if (model, form) == ("resnet50", "keras"):
        return head | {"error": "ValueError: the layer 'dense_3' was never built"}
    durable = _raw(model) * facts["x"]
    parts = {"serialise": 0.55 * durable, "write": 0.2 * durable, "fsync": 0.25 * durable}
    return head | {
        "bytes": int(SIZES[model] * (1 + facts["over"])),
        "stall_s": spread(durable * facts.get("stall", 1.0)),
        "durable_s": spread(durable),
        "of_raw": spread(facts["x"]),
        "lost_s": spread(durable * facts["lost"]),
        "step_s": spread(SIZES[model] * 2e-9),
        "peak_mb": spread(facts["mb"] * SIZES[model] / SIZES["resnet50"]),
        "parts": None if "stall" in facts else parts,
        "durable_on_return": facts.get("durable", False),
        "load_cold_s": spread(durable * 1.4),
        "load_warm_s": spread(durable * 0.8),
        "load_of_raw": spread(facts["x"] * 1.5),
    }


def _format(model: str, framework: str, form: str, facts: Row) -> Row:
    head = _head("formats", model, framework, form, facts)
    if (model, form) == ("vgg16", "keras"):
        return head | {"error": "the process of tensorflow ended by signal SIGKILL"}
    size = int(SIZES[model] * (1 + facts["over"]) + 4000 * facts.get("files", 1))
    return head | {
        "raw_bytes": SIZES[model],
        "bytes": size,
        "of_raw_bytes": round(size / SIZES[model], 4),
        "files": facts.get("files", 1),
        "save_s": spread(_raw(model) * facts["x"]),
        "load_s": spread(_raw(model) * facts["x"] * 1.4),
        "of_raw": spread(facts["x"]),
    }


def _scale(framework: str) -> list[Row]:
    strategies = {"rank 0 only": (0.50, 0.48, 0.82), "every rank its own file": (0.75, 0.71, 1.56)}
    shared = {"pytorch": ("DCP", (0.56, 0.40, 0.39)), "holdfast": ("holdfast", (0.31, 0.26, 0.24))}
    strategies |= dict([shared[framework]]) if framework in shared else {}
    slower = 1 + 0.4 * list(FORMATS).index(framework)
    size, rows = SIZES["resnet50"], []
    for strategy, times in strategies.items():
        for ranks, seconds in zip((1, 2, 4), times, strict=True):
            row = {"id": f"scale/{framework}/{strategy}/{ranks}", "framework": framework, "strategy": strategy}
            row |= {"ranks": ranks, "state_bytes": size}
            if (framework, strategy, ranks) == ("jax", "every rank its own file", 4):
                rows.append(row | {"error": "the ranks did not meet within 60 s"})
                continue
            written = [size] * ranks if "every" in strategy else [size] + [0] * (ranks - 1)
            written = written if "rank" in strategy else [size // ranks] * ranks
            rows.append(
                row
                | {
                    "written_by_rank": written,
                    "on_disk": sum(written),
                    "duplicated": max(0, sum(written) - size),
                    "slowest_s": spread(seconds * slower),
                    "fastest_s": spread(seconds * slower * 0.8),
                }
            )
    return rows


def _determinism(framework: str) -> list[Row]:
    rows = [_verdict(framework, None, "control"), _verdict(framework, None, "saving itself")]
    for save_at in SAVES:
        rows += [_verdict(framework, save_at, "everything"), _verdict(framework, save_at, "usual")]
        rows += [_verdict(framework, save_at, f"without {part}") for part in PARTS[framework]]
    if framework in VARIANTS:
        more = [_verdict(framework, save_at, "everything", VARIANTS[framework]) for save_at in SAVES]
        rows += [_verdict(framework, None, "control", VARIANTS[framework]), *more]
    return rows


def _verdict(framework: str, save_at: str | None, case: str, variant: str = "") -> Row:
    left_out = case.removeprefix("without ") if case.startswith("without ") else None
    names = [framework, variant, save_at or "", case]
    row: Row = {
        "id": "/".join(["determinism", *filter(None, names)]),
        "framework": framework,
        "variant": variant,
        "save_at": save_at,
        "case": case,
        "left_out": left_out,
    }
    if framework == UNTESTABLE:
        says = "two undisturbed runs differ already, from the third step on: no restart can be judged"
        return row | {"verdict": "not testable", "first_step": None, "where": [], "says": says}
    if left_out == "numpy RNG" and save_at == "epoch's end" and framework == "pytorch":
        return row | {
            "verdict": "failed",
            "first_step": None,
            "where": [],
            "says": "KeyError: 'numpy'",
            "error": "KeyError",
        }
    step = _first_step(framework, save_at, case, left_out, variant)
    if step is None:
        return row | {
            "verdict": "identical",
            "first_step": None,
            "where": [],
            "says": "losses and weights are bit-equal",
        }
    says = f"differs from the {['first', 'second', 'third', '4th'][step]} step after the restart"
    return row | {"verdict": "differs", "first_step": step, "where": ["losses", "weights"], "says": says}


def _first_step(framework: str, save_at: str | None, case: str, left_out: str | None, variant: str) -> int | None:
    if variant and case == "everything":
        return 0 if save_at == "mid-epoch" else None
    if case == "usual":
        return 0 if framework in USUAL_DIFFERS and save_at != "step 0" else None
    if left_out in ("optimizer", "scheduler", "average") and save_at == "step 0":
        return None
    return PARTS[framework].get(left_out or "")


def _crash(framework: str, form: str, facts: Row) -> list[Row]:
    def row(what: str, **found: Any) -> Row:
        head = {"id": f"crash/{framework}/{form}/{what}", "framework": framework, "format": form, "what": what}
        return head | found

    if form == "DCP async":
        return [row("kill", model="gpt", error="the save was over before it could be killed")]
    lost = 0 if facts.get("safe") else 6
    if form == "holdfast async":
        counts = {"old": 0, "new": KILLS, "mixed": 0, "nothing": 0, "errors": []}
        says = "every save was over before it was killed"
        return [row("kill", model="gpt", tries=KILLS, killed=0, verdict="failed", says=says, **counts)]
    kill = row("kill", model="gpt", tries=KILLS + 2, killed=KILLS, old=9, new=KILLS - 7 - lost, mixed=0, nothing=lost)
    kill |= {"verdict": "unsafe" if lost else "safe", "errors": ["EOFError: Ran out of input"] if lost else []}
    kill["says"] = f"{lost} of {KILLS} kills left nothing" if lost else f"all {KILLS} left the old or the new"
    silent = 5 if form in SILENT else 0
    flip = row("bit flip", tries=FLIPS, noticed=FLIPS - 1 - silent, silent=silent, harmless=1, errors=[])
    flip |= {"verdict": "unsafe" if silent else "safe", "says": f"{silent} of {FLIPS} were not noticed"}
    cut = row("truncation", tries=FLIPS, noticed=FLIPS, silent=0, harmless=0, errors=[], verdict="safe")
    return [kill, flip, cut | {"says": f"all {FLIPS} were noticed"}]
