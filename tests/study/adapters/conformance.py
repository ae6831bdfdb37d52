"""What every adapter must do, checked through its real process.

def test_it_saves_and_loads(start, tmp_path):
    conformance.check_saves(start("jax"), tmp_path)

def test_its_lesson_restarts(start, tmp_path):
    conformance.check_lesson(lambda: start("jax"), tmp_path)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.measuring import free_port
from holdfast.study.adapters.base import EVERY_RANK, SAVES, STATES, STEPS
from holdfast.study.inside.file_control import files_of
from holdfast.study.models import elements, lenet
from holdfast.study.process import Failed, Process

SHAPES = list(lenet())
RAW = 2 * 4 * elements(lenet())  # weights and momentum
OLD, NEW = 1, 2
Start = Callable[[], Process]
AT_ONCE = 2  # processes that train a lesson at the same time

# --- saving -------------------------------------------------------------------------------------


def check_saves(process: Process, folder: Path) -> None:
    """All that is asked of a ``ModelInTraining``, for every format."""
    hello = check_hello(process)
    check_made(process)
    for number, form in enumerate(hello["formats"]):
        place = folder / str(number)
        check_round_trip(process, form, place / "save")
        check_overwrites(process, form["name"], place / "overwrite")
        check_steps(process, form["name"], place / "beside")
        check_notices_a_loss(process, form["name"], place / "save")


def check_hello(process: Process) -> dict[str, Any]:
    hello = process.ask("hello")
    assert hello["versions"], "the report names the versions"
    assert len({form["name"] for form in hello["formats"]}) == len(hello["formats"]) > 0
    assert set(hello["usual"]) <= {part["name"] for part in hello["parts"]}
    assert hello["usual_means"]
    assert "" in hello["variants"]
    return hello


def check_made(process: Process) -> None:
    """It has the shapes' bytes, and the loss of its first step is the one that base.ModelInTraining describes.

    ``reset`` gives weights a deviation of 0.05; x is standard normal.
    """
    made = process.ask("make", shapes=SHAPES, seed=0)
    assert made["bytes"] == RAW
    expected = sum(0.05**2 * math.prod(shape[1:]) for _, shape in SHAPES)
    assert 0.7 * expected < made["loss"] < 1.4 * expected, f"loss {made['loss']}, about {expected:.3f} were expected"
    assert process.ask("make", shapes=SHAPES, seed=0)["loss"] == pytest.approx(made["loss"])


def check_round_trip(process: Process, form: dict[str, Any], folder: Path) -> None:
    saved = process.ask("save", form=form["name"], folder=str(folder), memory=True)
    files = files_of(folder)
    assert saved["files"] == len(files) > 0
    assert saved["bytes"] == sum(file.stat().st_size for file in files)
    assert saved["bytes"] >= RAW / 2 if form["compressed"] else RAW <= saved["bytes"] < 1.5 * RAW
    assert 0 < saved["stall_s"] <= saved["called_s"] <= saved["durable_s"]
    loaded = process.ask("load", form=form["name"], folder=str(folder))
    assert loaded["same"], f"{form['name']} does not give back what was saved"
    assert loaded["cold_s"] > 0 < loaded["warm_s"]


def check_overwrites(process: Process, form: str, folder: Path) -> None:
    """The second version takes the first one's place, all of it."""
    folder.mkdir(parents=True)
    versions = process.ask("versions_of")
    assert all(versions["1"][name] != versions["2"][name] for name in versions["1"])
    assert {name[: name.index("/") + 1] for name in versions["1"]} == set(STATES)
    for version in (OLD, NEW):
        process.ask("overwrite", form=form, folder=str(folder), version=version)
        assert process.ask("look", form=form, folder=str(folder)) == {"error": None, "digests": versions[str(version)]}


def check_steps(process: Process, form: str, folder: Path) -> None:
    """A step changes every weight and every momentum; saving beside the steps is measured."""
    (folder.parent / "before").mkdir(parents=True)
    process.ask("overwrite", form=form, folder=str(folder.parent / "before"), version=OLD)
    beside = process.ask("beside", form=form, folder=str(folder))
    assert beside["stall_s"] > 0 < beside["step_s"]
    assert beside["steps"] > 0
    assert math.isfinite(beside["lost_s"])
    before, after = process.ask("versions_of")["1"], process.ask("look", form=form, folder=str(folder))
    assert after["error"] is None
    still = [name for name in before if after["digests"][name] == before[name]]
    assert not still, f"a step leaves {still} as they are"


def check_notices_a_loss(process: Process, form: str, folder: Path) -> None:
    """Half of its largest file is gone, then all of its files: errors, and the process lives on."""
    largest = max(files_of(folder), key=lambda file: file.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    assert process.ask("look", form=form, folder=str(folder))["error"], f"{form}: a truncated file is loaded"
    for each in files_of(folder):
        each.unlink()
    assert process.ask("look", form=form, folder=str(folder))["error"], f"{form}: nothing is loaded without an error"
    with pytest.raises(Failed):
        process.ask("load", form=form, folder=str(folder))
    assert process.ask("hello")["formats"]


# --- on several ranks, in a fork -----------------------------------------------------------------


def check_ranks(start: Start, folder: Path) -> dict[str, list[int]]:
    """Two ranks save the same state with each strategy, and then one alone; the bytes that each of two has written."""
    ranks = [start(), start()]
    hello, states = ranks[0].ask("hello"), []
    for process in ranks:
        process.ask("make", shapes=SHAPES, seed=0)
        states.append(process.ask("versions_of"))
    assert states[0] == states[1]
    written = {}
    _together(ranks, "join", address=f"127.0.0.1:{free_port()}")
    for number, strategy in enumerate(hello["strategies"]):
        (folder / str(number)).mkdir(parents=True)
        answers = _together(ranks, "save_ranked", strategy=strategy, folder=str(folder / str(number)))
        written[strategy] = [answer["written"] for answer in answers]
    _together(ranks[:1], "join", address=f"127.0.0.1:{free_port()}")
    for number, strategy in enumerate(hello["strategies"]):
        if strategy != EVERY_RANK:  # whose files have other names
            names = [form["name"] for form in hello["formats"]]
            form = strategy if strategy in names else names[0]
            found = ranks[0].ask("look", form=form, folder=str(folder / str(number)))
            assert found == {"error": None, "digests": states[0][str(NEW)]}, strategy
            ranks[0].ask("versions_of")
        (folder / f"alone-{number}").mkdir()
        _together(ranks[:1], "save_ranked", strategy=strategy, folder=str(folder / f"alone-{number}"))
        assert files_of(folder / f"alone-{number}"), strategy
    return written


def _together(ranks: Sequence[Process], op: str, **given: Any) -> list[dict[str, Any]]:
    for rank, process in enumerate(ranks):
        process.send(op, rank=rank, ranks=len(ranks), **given)
    return [process.answer() for process in ranks]


def check_forks(process: Process, folder: Path) -> None:
    """A fork of a process that has made nothing yet saves in every format, as a save that is to be killed does."""
    forms = [form["name"] for form in process.ask("hello")["formats"]]
    for number, form in enumerate(forms):
        (folder / str(number)).mkdir(parents=True)
        process.ask("doom", shapes=SHAPES, form=form, folder=str(folder / str(number)), delay=None)
    process.ask("make", shapes=SHAPES, seed=0)
    new = process.ask("versions_of")[str(NEW)]
    for number, form in enumerate(forms):
        found = process.ask("look", form=form, folder=str(folder / str(number)))
        assert found == {"error": None, "digests": new}, form


# --- lessons ------------------------------------------------------------------------------------


def check_lesson(start: Start, folder: Path, *, cannot: Collection[str] = (), unseen: Collection[str] = ()) -> None:
    """Restarts with every part are identical, and each part that is left out in mid-epoch is noticed.

    ``cannot``: of ``SAVES``, those after which this framework differs even with every part. ``unseen``: parts that
    make no difference. A test that gives either says why.
    """
    found = restarts(start, folder)
    assert found["again"] == [], f"two undisturbed runs differ in {found['again']}"
    assert found["saving"] == [], f"a save disturbs the run that saves, in {found['saving']}"
    for name in SAVES:
        assert bool(found[name]) == (name in cannot), f"saved at {name}: {found[name] or 'nothing'} differs"
    without = {case.removeprefix("without "): what for case, what in found.items() if case.startswith("without ")}
    for part, what in without.items():
        assert bool(what) == (part not in unseen), f"without {part}: {what or 'nothing'} differs"


def restarts(start: Start, folder: Path, *, variant: str = "", seed: int = 7) -> dict[str, list[str]]:
    """What differs from an undisturbed run, by case: again, saving, each of ``SAVES``, and ``without`` each part."""
    given = {"seed": seed, "variant": variant}
    process = start()
    everything = [part["name"] for part in process.ask("hello")["parts"]]
    saves = {name: (step, str(folder / name), everything) for name, step in SAVES.items()}
    for part in everything:
        rest = [name for name in everything if name != part]
        saves[f"without {part}"] = (SAVES["mid-epoch"], str(folder / f"without {part}"), rest)
    control = process.ask("train", **given)
    process.kill()
    assert len(control["losses"]) == STEPS
    assert control["digests"]
    ordered = sorted(saves.values(), key=lambda save: save[0])
    [again], [saving] = _trained(start, [[given], [{**given, "saves": ordered}]])
    resumed = {case: {**given, "restore": (place, step, parts)} for case, (step, place, parts) in saves.items()}
    after = _resumed(start, resumed)
    return {case: differences(control, other) for case, other in {"again": again, "saving": saving, **after}.items()}


def _resumed(start: Start, requests: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Restarts with every part in fresh processes; those without one in one process, which takes less time.

    To be sure that they differ for what was left out, and not for what the process did before, it ends with a
    restart that has every part.
    """
    one = ["mid-epoch", *(case for case in requests if case not in SAVES), "mid-epoch"]
    others = [case for case in SAVES if case != "mid-epoch"]
    found = _trained(start, [[requests[case] for case in one], *([requests[case]] for case in others)])
    assert found[0][0] == found[0][-1], "a lesson depends on what its process did before"
    alone = {case: answer for case, [answer] in zip(others, found[1:], strict=True)}
    return {**dict(zip(one, found[0], strict=True)), **alone}


def differences(control: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same, the losses among them."""
    assert control["digests"].keys() == other["digests"].keys()
    names = [name for name in control["digests"] if control["digests"][name] != other["digests"][name]]
    same = control["losses"][other["first"] :] == other["losses"]
    return names if same else ["losses", *names]


def _trained(start: Start, groups: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Each group in a fresh process, a few of them at a time."""

    def answers(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        with start() as process:
            return [process.ask("train", **request) for request in requests]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(answers, groups))
