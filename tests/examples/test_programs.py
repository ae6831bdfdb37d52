"""The programs of examples/: each survives kills, joins and a resume on more workers, with the hash of one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.judge import covered
from tests.harness import Result, launch

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENT = Path(__file__).with_name("patient.py")

# What each program is called with beside --steps, and what it needs.
PROGRAMS: dict[str, list[str]] = {
    "bert": [],
    "distillation": [],
    "gpt2": ["--stages", "2", "--tolerate", "1"],
    "lora": [],
    "nanogpt": ["--every", "3", "--folder", "{folder}/nanogpt"],
    "packed_stream": [],
    "reinforce": [],
    "resnet": ["--every", "4"],
}
LOOPS: dict[str, list[str]] = {"gan": []}  # a loop of their own: docs/loop.md, and not on the page of porting
TRAINERS: dict[str, list[str]] = {"accelerate_loop": [], "lightning_module": []}  # on trainers that people use
NEEDS = {
    "bert": "transformers", "gpt2": "transformers", "lora": "peft",
    "accelerate_loop": "accelerate", "lightning_module": "lightning",
}  # fmt: skip
HEAVY = ("transformers.BertForSequenceClassification", "transformers.GPT2LMHeadModel", "peft")  # seconds to import
PRELOAD = tuple(name for name in HEAVY if find_spec(name.partition(".")[0]))
HALF, ALL = 5, 13  # steps before and after the resume
# Workers before and after it. A pipeline that is alone would begin again from its checkpoint after each kill, under
# new names, which later kills do not hit.
WORKERS = {"gpt2": (4, 5)}


def train(folder: Path, name: str, *, steps: int, checkpoint: Path | None = None, **settings: object) -> Result:
    folder.mkdir(exist_ok=True)
    arguments = [str(EXAMPLES / f"{name}.py"), "--steps", str(steps)]
    arguments += [each.format(folder=folder.parent) for each in {**PROGRAMS, **LOOPS, **TRAINERS}[name]]
    arguments += [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
    preload = (NEEDS[name],) if name in TRAINERS else PRELOAD if name in NEEDS else ()
    result = launch(folder, script=PATIENT, arguments=arguments, preload=preload, **settings)  # type: ignore[arg-type]
    assert result.code == 0, result.said
    return result


@pytest.mark.parametrize(
    "name", [*PROGRAMS, *LOOPS, *(covered("tests/integrations have more of the same", name) for name in TRAINERS)]
)
def test_a_program_survives_kills_joins_and_a_resume(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"examples/{name}.py needs {NEEDS[name]}")
    monkeypatch.chdir(tmp_path)  # some write a model where they are
    whole = train(tmp_path / "whole", name, steps=ALL, workers=1)
    folder = tmp_path / "checkpoint"
    few, more = WORKERS.get(name, (2, 3))
    first = "kill worker=0.0 step=2 phase=vote"
    before = train(
        tmp_path / "before", name, steps=HALF, workers=few, checkpoint=folder, faults=first,
        environment={"WANTED": f"{few}", "PATIENT": "2"},
    )  # fmt: skip
    # Not in the first step after the resume: if nobody else has begun it yet, reading the checkpoint again is right.
    second = "kill worker=0.1 step=7 phase=backward; kill worker=0.0 step=8 phase=update"
    after = train(
        tmp_path / "after", name, steps=ALL, workers=more, checkpoint=folder, faults=second,
        environment={"WANTED": f"{more}", "PATIENT": "8"},
    )  # fmt: skip
    assert {event["worker"] for event in before.of("failure")} == {"0.0"}, "others were killed, or nobody"
    assert sum("worker 0.0 was lost (killed by SIGKILL)" in line for line in before.said) == 1, "the console says it"
    assert {event["worker"] for event in after.of("failure")} == {"0.0", "0.1"}, "others were killed, or nobody"
    assert {line["workers"] for line in before.results} == {few}, "nobody has joined"
    assert {line["workers"] for line in after.results} == {more}, "nobody has joined"
    assert not before.of("resumed"), "it began again, instead of going on with those that are left"
    assert [event["step"] for event in after.of("resumed")] == [HALF], "it began anew, or twice"
    assert after.sha256 == whole.sha256


def test_the_program_of_teams(tmp_path: Path) -> None:
    """As docs/teams.md shows it: two teams of two ranks, of which one is lost, have the hash of one team."""
    found = []
    for teams, faults in ((1, ""), (2, "kill worker=0.0.1 step=2 phase=backward")):
        folder = tmp_path / f"{teams}"
        folder.mkdir()
        arguments = [str(EXAMPLES / "fsdp_teams.py"), "--steps", "5"]
        result = launch(folder, script=PATIENT, arguments=arguments, workers=teams, team=2, faults=faults)
        assert result.code == 0, result.said
        found.append(result.sha256)
    assert found[0] == found[1]


def test_a_program_with_a_sample_twice_has_another_hash(tmp_path: Path) -> None:
    """The control."""
    whole = train(tmp_path / "whole", "distillation", steps=4, workers=1)
    wrong = train(tmp_path / "wrong", "distillation", steps=4, workers=2, faults="repeat-sample worker=0.1 step=2")
    assert wrong.sha256 != whole.sha256
