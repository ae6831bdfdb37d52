"""What a crash leaves: the judgements with made-up answers, then real saves that are killed and damaged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.study import crash_axis, damage, witness
from holdfast.study.crash_axis import Killer, judge, kill_row
from holdfast.study.damage import SMALL, cut, damage_rows, flipped, spots
from holdfast.study.models import StudyModel, gpt
from holdfast.study.process import Failed
from holdfast.study.witness import Witness
from tests.study.conftest import Fork, starting
from tests.study.fakes import fake

OLD, NEW = {"a": "1", "b": "1"}, {"a": "2", "b": "2"}
LARGE = list(gpt(layers=4))  # 43 MB: long enough to be hit

DYING = """
def answer(op, given):
    if op == "look" and os.path.exists(given["folder"] + "/bad"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if op == "look" and os.path.exists(given["folder"] + "/endless"):
        time.sleep(100)
    return {"1": {"a": "1"}, "2": {"a": "2"}, "error": None, "digests": {"a": "1"}}
"""


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (OLD, "old"),
        (NEW, "new"),
        ({"a": "1", "b": "2"}, "mixed"),
        ({"a": "2", "b": "1"}, "mixed"),
        ({"a": "1", "b": "0"}, "mixed"),
        ({"a": "1"}, "mixed"),
        (None, "nothing"),
    ],
)
def test_only_all_of_a_version_is_that_version(found: dict[str, str] | None, expected: str) -> None:
    assert judge(OLD, NEW, {"error": None if found else "gone", "digests": found}) == expected


def test_a_kill_that_comes_too_late_is_none() -> None:
    late = {"old": 0, "new": 4, "mixed": 0, "nothing": 0}
    assert crash_axis.verdict(late, 0)[0] == "failed"
    assert crash_axis.verdict(late, 1) == ("safe", "always the old or the new one (1 kill)")


def test_a_mixture_is_unsafe_and_so_is_nothing() -> None:
    both = {"old": 1, "new": 0, "mixed": 2, "nothing": 1}
    assert crash_axis.verdict(both, 4) == (
        "unsafe",
        "1 of 4 kills left nothing that loads, 2 left a mixture of old and new",
    )


def test_one_that_goes_unnoticed_is_unsafe() -> None:
    assert damage.verdict("bit flip", {"noticed": 7, "silent": 1, "harmless": 0})[0] == "unsafe"
    assert damage.verdict("bit flip", {"noticed": 0, "silent": 0, "harmless": 8})[0] == "safe"


def test_moments_are_spread_and_the_same_for_the_same_seed() -> None:
    found = spots(10, 2.0, random.Random(3))
    assert [int(spot / 0.2) for spot in found] == list(range(10))
    assert found == spots(10, 2.0, random.Random(3)) != spots(10, 2.0, random.Random(4))


def test_damage_is_real_and_is_repaired(tmp_path: Path) -> None:
    file, content = tmp_path / "x", bytes(range(100))
    file.write_bytes(content)
    with flipped(file, 50, 0):
        assert file.read_bytes() == content[:50] + bytes([51]) + content[51:]
    with cut(file, 30):
        assert file.read_bytes() == content[:30]
    with pytest.raises(KeyError), flipped(file, 0, 7):
        raise KeyError
    assert file.read_bytes() == content


@pytest.mark.parametrize("name", ["bad", "endless"])
def test_a_process_that_dies_or_hangs_has_noticed_and_is_started_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "LIMIT", 2.0)
    bad, good = tmp_path / "1", tmp_path / "2"
    bad.mkdir()
    (bad / name).touch()
    with Witness("pytorch", starting("pytorch", fake(tmp_path / "python", DYING)), tmp_path) as who:
        who.model(SMALL)
        assert who.old == {"a": "1"}
        looked = who.look("form", bad)
        assert looked["error"]
        assert damage.judge(who.old, looked) == "noticed"
        assert damage.judge(who.old, who.look("form", good)) == "harmless"


@pytest.fixture(scope="module")
def torch_witness(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    with Witness("pytorch", fork("pytorch"), tmp_path_factory.mktemp("logs")) as who:
        yield who


@pytest.fixture(scope="module")
def killer(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killer]:
    with Killer(fork("pytorch"), tmp_path_factory.mktemp("logs") / "killer.log") as who:
        yield who


def test_killed_in_place_both_versions_are_lost_renamed_never(
    torch_witness: Witness, killer: Killer, tmp_path: Path
) -> None:
    torch_witness.model(LARGE)
    given = {"shapes": LARGE, "kills": 1, "source": random.Random(0)}
    place = kill_row(torch_witness, killer, "torch.save", tmp_path, **given)  # type: ignore[arg-type]
    assert place["verdict"] == "unsafe", place
    assert place["nothing"] >= 1
    assert place["errors"]
    renamed = kill_row(torch_witness, killer, "torch.save, renamed", tmp_path, **given)  # type: ignore[arg-type]
    assert renamed["verdict"] == "safe", renamed
    for row in (place, renamed):
        assert row["tries"] == sum(row[outcome] for outcome in crash_axis.OUTCOMES)
        assert 1 <= row["killed"] <= row["tries"]


IN_PLACE = """
def answer(op, given):
    raise RuntimeError("not this one")
"""


def test_a_process_that_fails_at_once_is_a_row_for_each_question(tmp_path: Path) -> None:
    given = {"folder": tmp_path / "x", "logs": tmp_path, "kills": 1, "seed": 0, "say": lambda _: None}
    start = starting("jax", fake(tmp_path / "python", IN_PLACE))
    rows = crash_axis.measure("jax", start, ["orbax", "flax"], model=StudyModel(name="tiny", shapes=SMALL), **given)  # type: ignore[arg-type]
    assert [row["id"] for row in rows] == [f"crash/jax/{f}/{w}" for f in ("orbax", "flax") for w in crash_axis.WHATS]
    assert {row["error"] for row in rows} == {"not this one"}


def test_a_kill_can_be_aimed_at_the_first_change_of_what_was_there(killer: Killer, tmp_path: Path) -> None:
    """New files beside the old one are no such change: nothing is lost there."""
    state = tmp_path / "state"
    state.mkdir()
    assert not killer.doom(LARGE, "torch.save", state, 0.0, from_change=True)["killed"], "there was nothing to change"
    before = (state / "state.pt").stat().st_size
    done = killer.doom(LARGE, "torch.save", state, 0.0, from_change=True)
    assert done["killed"]
    assert done["touched"] <= done["seconds"]
    assert (state / "state.pt").stat().st_size < before


def test_a_save_that_cannot_be_done_is_told_in_words(killer: Killer, tmp_path: Path) -> None:
    with pytest.raises(Failed, match="does not exist"):
        killer.doom(SMALL, "torch.save", tmp_path / "none", None)
    tmp_path.joinpath("there").mkdir()
    assert not killer.doom(SMALL, "torch.save", tmp_path / "there", None)["killed"], "it is to serve on"


def test_a_row_whose_undisturbed_save_is_not_the_new_one_has_failed(
    torch_witness: Witness, killer: Killer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_witness.model(SMALL)
    monkeypatch.setattr(torch_witness, "new", torch_witness.old | {"weights/tokens": "another"})
    row = kill_row(torch_witness, killer, "torch.save", tmp_path, shapes=SMALL, kills=1, source=random.Random(0))
    assert row["verdict"] == "failed"
    assert "without a kill is not the new one" in row["error"]
    assert "old" not in row


def test_safetensors_does_not_see_a_flipped_bit(torch_witness: Witness, tmp_path: Path) -> None:
    torch_witness.model(SMALL)
    flip, short = damage_rows(torch_witness, "safetensors", tmp_path / "state", seed=0)
    assert (flip["verdict"], flip["silent"], flip["tries"]) == ("unsafe", damage.FLIPS, damage.FLIPS), flip
    assert (short["verdict"], short["noticed"], short["tries"]) == ("safe", damage.CUTS, damage.CUTS), short
    assert str(tmp_path) not in "".join(short["errors"])


def test_holdfast_sees_every_flipped_bit(fork: Fork, tmp_path: Path) -> None:
    with Witness("holdfast", fork("holdfast"), tmp_path) as who:
        who.model(SMALL)
        flip, short = damage_rows(who, "holdfast", tmp_path / "state", seed=0)
    assert (flip["verdict"], flip["noticed"], flip["silent"]) == ("safe", damage.FLIPS, 0), flip
    assert (short["verdict"], short["noticed"]) == ("safe", damage.CUTS), short


def test_all_rows_of_a_framework(fork: Fork, tmp_path: Path) -> None:
    said: list[str] = []
    model = StudyModel(name="tiny", shapes=SMALL)
    given = {"model": model, "folder": tmp_path / "x", "logs": tmp_path, "kills": 1, "seed": 0, "say": said.append}
    rows = crash_axis.measure("pytorch", fork("pytorch"), ["safetensors"], **given)  # type: ignore[arg-type]
    names = ["kill", "bit flip", "truncation"]
    assert [row["id"] for row in rows] == [f"crash/pytorch/safetensors/{what}" for what in names]
    assert [row["what"] for row in rows] == names
    assert rows[0]["model"] == "tiny"
    assert len(said) == 2
    assert not list((tmp_path / "x").iterdir()), "nothing is left behind"
