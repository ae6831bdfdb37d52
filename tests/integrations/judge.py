"""Starts programs of integrations under an agent, and compares what their workers report."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.journal import rows
from holdfast.journal.rows import Row
from tests.harness import Result, launch
from tests.s3_server import needs_seaweed, stored

STEPS = 12  # of the usual training: three epochs of four


@dataclass(frozen=True, kw_only=True)
class Program:
    """A script of these tests, and what its workers import before they are forked."""

    script: Path
    preload: tuple[str, ...]

    def train(self, folder: Path, *, workers: int, faults: str = "", **settings: object) -> Result:
        """Start workers, with the settings in their environment."""
        folder.mkdir(exist_ok=True)
        environment = {name: str(value) for name, value in settings.items()}
        with chdir(folder):  # paths are part of what is compared
            result = launch(
                folder,
                script=self.script,
                workers=workers,
                preload=self.preload,
                faults=faults,
                environment=environment,
            )
        assert result.code == 0, result.said
        return result


def reported(result: Result) -> dict[str, Any]:
    """What all workers report alike, but for their number."""
    found = [{key: value for key, value in line.items() if key != "workers"} for line in result.results]
    assert found, "nobody has come to the end"
    assert all(line == found[0] for line in found), found
    return found[0]


def lost(result: Result) -> set[str]:
    return {event["worker"] for event in result.of("failure")}


class TrainedAlike:
    """Tests that are the same for each trainer: the bits of its program are those of a ``Loop``, with kills and joins.

    A test module has a subclass of it, and a ``PROGRAM``.
    """

    program: Program

    def check_journal(self, found: list[Row]) -> None:
        """Look at the rows of a training with kills."""
        raise NotImplementedError

    def test_it_has_the_bits_of_a_loop(self, tmp_path: Path, alone: dict[str, Any]) -> None:
        loop = reported(self.program.train(tmp_path, workers=1, FORM="loop"))
        assert (loop["weights"], loop["step"]) == (alone["weights"], STEPS)

    def test_what_the_page_shows(self, tmp_path: Path) -> None:
        """The code of its page in docs."""
        result = self.program.train(tmp_path, workers=2, FORM="documented")
        assert reported(result)["step"] == 3 * 2  # epochs of two steps

    def test_kills_and_joins(self, tmp_path: Path, alone: dict[str, Any]) -> None:
        """Two are left, then one and who has joined, which begins in the third epoch."""
        kills = ["0.0 step=2 phase=backward", "0.1 step=3 phase=voted", "0.2 step=10 phase=data"]
        faults = "; ".join(f"kill worker={each}" for each in kills)
        result = self.program.train(tmp_path, workers=3, faults=faults, WANTED=2, PATIENT=8)
        assert lost(result) == {"0.0", "0.1", "0.2"}
        assert reported(result) == alone
        self.check_journal(rows.read(tmp_path / "logs" / rows.NAME))

    @needs_seaweed
    def test_a_resume_from_a_store(self, tmp_path: Path, alone: dict[str, Any]) -> None:
        with stored(tmp_path) as around:
            self.program.train(tmp_path, workers=1, STEPS=4, **around)
            (tmp_path / "results.jsonl").unlink()
            faults = "kill worker=0.0 step=7 phase=vote"
            second = self.program.train(tmp_path, workers=2, faults=faults, **around)
        assert {event["step"] for event in second.of("resumed")} == {4}
        assert reported(second) == alone

    def test_control_a_gradient_that_is_missing_is_seen(self, tmp_path: Path, alone: dict[str, Any]) -> None:
        result = self.program.train(tmp_path, workers=2, faults="skip-gradient worker=0.1 step=2")
        assert reported(result)["weights"] != alone["weights"]
