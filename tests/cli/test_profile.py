"""``holdfast profile`` as a user meets it: scripts that train, fail, or never come to it; the cache; bad options."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from holdfast.cli.profile import profile
from holdfast.engine.profile import links, round_trips
from holdfast.engine.profile.round_trips import MeasuredLink
from holdfast.errors import UsageError
from holdfast.plan.profile import Link, Profile
from tests.cli.conftest import Said
from tests.cli.profiling import holdfast, script
from tests.harness import TRAIN

# --- with links made up: to measure them takes seconds ----------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the command in this process; returns what it said and the profile it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made_up = MeasuredLink(link=Link(bandwidth=1e9, latency=1e-4), seconds={}, error=0.0)
    monkeypatch.setattr(links, "measure_inside", lambda: made_up)
    monkeypatch.setattr(round_trips, "ROUNDS", 1)

    def call(name: str, **options: Any) -> tuple[str, Profile]:
        profile([name], **{"rounds": 3, **options})
        return capsys.readouterr().out, Profile.from_json(json.loads((tmp_path / "profile.json").read_text()))

    return call


Call = Callable[..., tuple[str, Profile]]


def test_a_script_is_measured_and_not_trained_and_the_second_time_it_is_known(tmp_path: Path, measured: Call) -> None:
    text = (tmp_path / script(tmp_path)).read_text()
    (tmp_path / "train.py").write_text(f"import atexit\natexit.register(print, 'late words'){text}")
    first = holdfast("--json", "--rounds", "3", "train.py", "--its", "own", folder=tmp_path, PYTHONHASHSEED="1")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "profile.json").read_text())
    made = Profile.from_json(document)
    assert [layer.name for layer in made.layers] == ["0 Linear", "1 Tanh", "2 Linear"]
    assert made.inside.bandwidth > 0
    assert first.stdout.splitlines()[:-1] == ["late words"]  # everything else went to stderr
    assert "the script's own words --its own" in first.stderr
    assert "trained" not in first.stderr
    assert not (tmp_path / "saved").exists()
    # Python's hashes are others in this process; the key is not.
    (tmp_path / "train.py").write_text(text)
    said, known = measured("train.py", bandwidth=10)
    assert "from the cache, measured 20" in said
    assert "between hosts: 10 Gbit/s" in said
    assert "the script's own words" in said
    assert (known.layers, known.between.bandwidth) == (made.layers, 1.25e9)


def test_the_tables_total_is_the_sum_of_its_rows(measured: Call) -> None:
    shown, _ = measured(str(TRAIN))
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines() if re.match(r"^(\d \w+|all) ", line)]
    assert len(rows) == 8
    *layers, total = ([float(cell) for cell in row[1:3]] for row in rows)
    for column in (0, 1):
        assert sum(layer[column] for layer in layers) == pytest.approx(total[column], rel=0.02)
    assert "not measured: taken to be as inside a host" in shown


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("where", "shown_as"),
    [
        ("0", "127.0.0.1"),
        pytest.param("[::1]:0", "[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")),
    ],
)
def test_two_machines_played_by_one(
    tmp_path: Path,
    measured: Call,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    shown_as: str,
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "a secret of the tests")
    waiting = threading.Thread(target=lambda: profile(None, serve=where, token_file=None), daemon=True)
    waiting.start()
    said = ""
    while "\n" not in said and waiting.is_alive():
        said += capsys.readouterr().out
        time.sleep(0.01)
    found = re.search(rf"--peer ({re.escape(shown_as)}:\d+) train\.py", said)
    assert found is not None, said
    shown, made = measured(script(tmp_path), peer=found[1])
    waiting.join()
    shown += capsys.readouterr().out
    assert f"measured: with {found[1]}" in shown
    assert f"measured with {shown_as.strip('[]')}" in shown
    assert made.between != made.inside


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


def test_a_cached_profile_has_the_name_of_the_script_that_asks(tmp_path: Path, measured: Call) -> None:
    _, first = measured(script(tmp_path))
    said, second = measured(script(tmp_path, name="other.py"))
    assert "from the cache" in said
    assert first.model.startswith("train: 3 layers, ")
    assert second.model == first.model.replace("train", "other")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text((tmp_path / "train.py").read_text())
    said, third = measured("pack.train", module=True)
    assert "from the cache" in said
    assert third.model == first.model.replace("train", "pack.train")


def test_more_rounds_than_the_cache_has_are_measured(tmp_path: Path, measured: Call) -> None:
    measured(script(tmp_path), rounds=4)
    said, made = measured("train.py", rounds=5)
    assert "from the cache" not in said
    assert made.notes["rounds"] == 5
    said, made = measured("train.py", rounds=4)
    assert "from the cache" in said
    assert made.notes["rounds"] == 5


def test_one_layer_is_one_layer(tmp_path: Path, measured: Call) -> None:
    text = (tmp_path / script(tmp_path)).read_text()
    (tmp_path / "train.py").write_text(re.sub(r"layers=\[.*\]", "layers=nn.Linear(4, 1)", text))
    said, made = measured("train.py")
    assert "measuring 1 layer in 3 passes" in said
    assert made.model.startswith("train: 1 layer, ")


def test_the_profile_goes_where_the_command_was_given(
    tmp_path: Path, measured: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    text = (tmp_path / script(tmp_path)).read_text()
    (tmp_path / "train.py").write_text(f"import os\nos.chdir('elsewhere'){text}")
    said, made = measured("train.py", output=Path("profile.json"))
    assert "written: profile.json" in said
    assert len(made.layers) == 3
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_finally_that_saves_the_model_does_not_harm_it(tmp_path: Path, measured: Call) -> None:
    text, loop = (tmp_path / script(tmp_path)).read_text().split("for step")
    loop = f"try:\n    for step{indent(loop, '    ')}finally:\n    run.save_model('model.safetensors')\n"
    (tmp_path / "train.py").write_text(text + loop)
    (tmp_path / "model.safetensors").write_text("weeks of training")
    for fresh, hit in [(True, False), (False, True)]:
        said, _ = measured("train.py", fresh=fresh)
        assert ("from the cache" in said) == hit
        assert (tmp_path / "model.safetensors").read_text() == "weeks of training"
        assert not (tmp_path / "saved").exists()


def test_the_data_may_vanish_with_the_script(tmp_path: Path, measured: Call) -> None:
    text = (tmp_path / script(tmp_path)).read_text()
    (tmp_path / "train.py").write_text(f"try:{indent(text, '    ')}finally:\n    run.engine.data = None\n")
    assert len(measured("train.py")[1].layers) == 3


# --- what goes wrong --------------------------------------------------------------------------------------


def test_a_script_that_fails_shows_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Said]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def f():\n    raise KeyError('mine')\n\nf()\n")
    said = call("profile", "train.py")
    assert said.code == 1
    first, *_, last = said.err.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'mine'")
    assert "runpy" not in said.err
    assert not (tmp_path / "profile.json").exists()


def test_a_run_that_is_refused_is_a_sentence(tmp_path: Path, measured: Call) -> None:
    with pytest.raises(UsageError, match="micro_batch=5"):
        measured(script(tmp_path, micro=5))
