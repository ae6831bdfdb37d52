"""``holdfast profile`` as a user meets it: scripts that train, fail, or never come to it; the cache; bad options."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from holdfast.cli.profile import profile
from holdfast.engine.profile import links
from holdfast.errors import UsageError
from holdfast.plan.profile import Link, Profile
from tests.harness import TRAIN

SCRIPT = """
import sys
import torch
from torch import nn
import holdfast

class Tanh(nn.Module):
    def forward(self, x):
        return x.tanh() if "tanh" in {"relu", "tanh", "gelu", "silu"} else x  # a set: its order is another each time


print("the script's own words", *sys.argv[1:])
run = holdfast.Run(
    layers=[nn.Linear(4, WIDTH), Tanh(), nn.Linear(WIDTH, 1)],
    loss=nn.functional.mse_loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=RATE),
    data=torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1)),
    global_batch=16,
    micro_batch=MICRO,
    checkpoint="saved",
)
for step in run.steps(3):
    print("trained")
print("ended")
"""


def script(folder: Path, *, width: int = 8, rate: float = 0.1, micro: int = 4, name: str = "train.py") -> str:
    text = SCRIPT.replace("WIDTH", str(width)).replace("RATE", str(rate)).replace("MICRO", str(micro))
    (folder / name).write_text(text)
    return name


def holdfast(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), "HOLDFAST_TOKEN": "", **environment}
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "profile", *arguments],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- the whole way ----------------------------------------------------------------------------------------


def test_a_script_is_measured_and_not_trained_and_the_second_time_it_is_known(tmp_path: Path) -> None:
    first = holdfast("--json", script(tmp_path), "--its", "own", folder=tmp_path, PYTHONHASHSEED="1")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "profile.json").read_text())
    made = Profile.from_json(document)
    assert [layer.name for layer in made.layers] == ["0 Linear", "1 Tanh", "2 Linear"]
    assert made.inside.bandwidth > 10e6
    assert len(first.stdout.splitlines()) == 1  # everything else went to stderr
    assert "the script's own words --its own" in first.stderr
    assert "trained" not in first.stderr
    assert not (tmp_path / "saved").exists()
    # Python's hashes are others in another process; the key is not.
    again = holdfast("--bandwidth", "10", "train.py", folder=tmp_path, PYTHONHASHSEED="2")
    assert "from the cache, measured 20" in again.stdout
    assert "between hosts: 10 Gbit/s" in again.stdout
    assert "the script's own words" in again.stdout
    known = json.loads((tmp_path / "profile.json").read_text())
    assert (known["layers"], known["between"]["bandwidth"]) == (document["layers"], 1.25e9)


# --- in this process, and with links made up: to measure them takes seconds --------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the command in this process; returns what it said and the profile it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made_up = links.Measured(link=Link(bandwidth=1e9, latency=1e-4), seconds={}, error=0.0)
    monkeypatch.setattr(links, "measure_inside", lambda: made_up)

    def call(name: str, **options: Any) -> tuple[str, Profile]:
        profile([name], rounds=3, **options)
        return capsys.readouterr().out, Profile.from_json(json.loads((tmp_path / "profile.json").read_text()))

    return call


Call = Callable[..., tuple[str, Profile]]


def test_the_tables_total_is_the_sum_of_its_rows(measured: Call) -> None:
    shown, _ = measured(str(TRAIN))
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines() if re.match(r"^(\d \w+|all) ", line)]
    assert len(rows) == 8
    *layers, total = ([float(cell) for cell in row[1:3]] for row in rows)
    for column in (0, 1):
        assert sum(layer[column] for layer in layers) == pytest.approx(total[column], rel=0.02)
    assert "not measured: taken to be as inside a host" in shown


def test_two_machines_played_by_one(tmp_path: Path, measured: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret")
    command = [sys.executable, "-m", "holdfast.cli", "profile", "--serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        try:
            assert waiting.stdout is not None
            said = waiting.stdout.readline()
            found = re.search(r"--peer (127\.0\.0\.1:\d+) train\.py", said)
            assert found is not None, said
            shown, made = measured(script(tmp_path), peer=found[1])
            assert f"measured: with {found[1]}" in shown
            assert made.between != made.inside
            assert waiting.wait(10) == 0
            assert "measured with 127.0.0.1" in waiting.stdout.read()
        finally:
            waiting.kill()


@pytest.mark.parametrize(
    ("change", "hit"),
    [({}, True), ({"rate": 0.2}, True), ({"width": 9}, False), ({"micro": 8}, False), ({"name": "other.py"}, True)],
)
def test_the_cache_knows_what_matters(tmp_path: Path, measured: Call, change: dict[str, Any], hit: bool) -> None:
    said, before = measured(script(tmp_path))
    assert "from the cache" not in said
    said, after = measured(script(tmp_path, **change))
    assert ("from the cache" in said) == hit
    assert (before.key == after.key) == hit
    assert len(list((tmp_path / "cache/holdfast/profiles").iterdir())) == (1 if hit else 2)


def test_fresh_measures_again_and_a_damaged_cache_does_no_harm(tmp_path: Path, measured: Call) -> None:
    _, before = measured(script(tmp_path))
    said, after = measured("train.py", fresh=True)
    assert "from the cache" not in said
    assert after.notes["measured"] > before.notes["measured"]
    (kept,) = (tmp_path / "cache/holdfast/profiles").iterdir()
    kept.write_text(kept.read_text()[:500])
    said, _ = measured("train.py")
    assert "from the cache" not in said
    assert "from the cache" in measured("train.py")[0]


def test_without_a_cache_folder_it_is_measured_all_the_same(
    tmp_path: Path, measured: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said, made = measured(script(tmp_path))
    assert "not kept in the cache" in said
    assert len(made.layers) == 3


def test_what_the_options_say_is_in_the_profile(tmp_path: Path, measured: Call) -> None:
    said, made = measured(script(tmp_path), memory=16, bandwidth=10, latency=0.5)
    assert (made.memory, made.between) == (16 * 10**9, Link(bandwidth=1.25e9, latency=5e-4))
    assert made.inside == Link(bandwidth=1e9, latency=1e-4)
    assert "given: bandwidth and latency" in said
    _, plain = measured("train.py")  # from the cache: options of another call are not in it
    assert (plain.memory, plain.between) == (None, plain.inside)


def test_the_data_may_vanish_with_the_script(tmp_path: Path, measured: Call) -> None:
    text = (tmp_path / script(tmp_path)).read_text()
    (tmp_path / "train.py").write_text(f"try:{indent(text, '    ')}finally:\n    run.engine.data = None\n")
    assert len(measured("train.py")[1].layers) == 3


# --- what goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["print('done')", "import sys; sys.exit(0)"])
def test_a_script_that_never_trains(tmp_path: Path, measured: Call, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(UsageError, match=r"train\.py has ended without training: it never came to"):
        measured("train.py")


@pytest.mark.parametrize("code", [7, "no data"])
def test_a_script_that_ends_itself_has_its_own_exit_code(tmp_path: Path, measured: Call, code: int | str) -> None:
    (tmp_path / "train.py").write_text(f"import sys; sys.exit({code!r})")
    with pytest.raises(SystemExit) as ended:
        measured("train.py")
    assert ended.value.code == code


def test_a_script_that_fails_shows_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def f():\n    raise KeyError('mine')\n\nf()\n")
    result = holdfast("train.py", folder=tmp_path)
    assert result.returncode == 1
    first, *_, last = result.stderr.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'mine'")
    assert "runpy" not in result.stderr
    assert not (tmp_path / "profile.json").exists()


def test_a_run_that_is_refused_is_a_sentence(tmp_path: Path, measured: Call) -> None:
    with pytest.raises(UsageError, match="global_batch=16 is not a multiple of micro_batch=5"):
        measured(script(tmp_path, micro=5))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": None}, "there is no script to profile"),
        ({"command": ["missing.py"]}, "there is no script 'missing.py'"),
        ({"memory": 0}, "--memory must be more than 0"),
        ({"memory": float("nan")}, "--memory must be more than 0"),
        ({"bandwidth": -1}, "--bandwidth must be more than 0"),
        ({"latency": float("inf")}, "--latency must be 0 or more"),
        ({"peer": "head"}, "'head' is not HOST:PORT"),
        ({"peer": "head:1", "latency": 1}, "--peer measures what"),
        ({"peer": "head:1"}, "several machines need the job's token"),
        ({"serve": "29800"}, "--serve only waits for a peer"),
        ({"serve": "29800", "command": None}, "several machines need the job's token"),
        ({"serve": "here", "command": None}, "'here' is not HOST:PORT"),
        ({"output": Path("missing/profile.json")}, "cannot be written"),
        ({"output": Path()}, "cannot be written"),
    ],
)
def test_bad_use_is_a_sentence_before_the_script_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    with pytest.raises(UsageError, match=re.escape(said)):
        profile(**{"command": ["train.py"], **options})
    assert not (tmp_path / "started").exists()
