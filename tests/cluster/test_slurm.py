"""What SLURM's answers mean: which steps still run, and where a node is reached. Its commands are stood in for."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence

import pytest

from holdfast.cluster import slurm
from holdfast.cluster.slurm import JobStep, address_of, is_running

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


def answers(*, steps: str = "", restarts: str = "") -> slurm.Ask:
    return lambda command: steps if "squeue" in command else restarts


@pytest.mark.parametrize(
    ("other", "steps", "restarts", "running"),
    [
        ("7.0.0", "7.0\n8.0\n", "JobId=7 Restarts=0", True),
        ("7.0.0", "7.0\n8.0\n", "JobId=7 Restarts=1", False),  # another start of that job
        ("7.0.0", "7.0\n8.0\n", "", True),  # scontrol did not answer: the list counts
        ("7.0.0", "7.1\n7.batch\n8.0\n", "JobId=7 Restarts=0", False),
        ("8.0.0", "8.0\n", "JobId=8 Restarts=1", False),  # the asker's own job, before it was requeued
    ],
)
def test_whether_another_step_still_runs(other: str, steps: str, restarts: str, running: bool) -> None:
    assert is_running(other, "8.0.1", answers(steps=steps, restarts=restarts)) is running


@pytest.mark.parametrize(("squeue", "running"), [("/usr/bin/squeue", True), (None, False)])
def test_a_slurm_that_does_not_answer_lets_nobody_begin_a_run_twice(
    monkeypatch: pytest.MonkeyPatch, squeue: str | None, running: bool
) -> None:
    """Where there is no such command at all, as in a container, each job has a run of its own."""
    monkeypatch.setattr(shutil, "which", lambda name: squeue)
    assert is_running("7.0.0", "8.0.0", answers()) is running


def test_a_task_of_an_array_is_known_by_the_name_that_slurm_lists() -> None:
    """squeue lists the steps of job 9 as 7_2.0. ``scontrol show job 7`` would tell of all tasks of the array."""
    step = JobStep.of({**STEP, "SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"})
    assert step is not None
    assert not is_running("7_1.0.0", step.name, answers(steps="7_2.0\n7_2.batch\n"))
    asked: list[str] = []
    slurm.notice_of(
        {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"},
        lambda command: asked.append(command[-1]) or "",  # type: ignore[func-returns-value]
    )
    assert "7_3" in asked


@pytest.mark.parametrize("number", ["4294967290", "4294967291", "", "batch"])
def test_steps_of_slurms_own_are_no_steps_of_agents(number: str) -> None:
    assert JobStep.of(STEP) is not None
    assert JobStep.of({**STEP, "SLURM_STEP_ID": number}) is None  # the shell of salloc, the batch script


def test_a_name_that_means_loopback_here_is_not_told_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where a machine's own name is 127.0.1.1."""
    known = {"n1": "127.0.1.1", "n1-data": "127.0.0.1", "n2": "10.0.0.2", "10.0.0.9": "10.0.0.9", "head": "127.0.0.1"}
    real = socket.getaddrinfo

    def resolve(name: str, *more: object, **others: object) -> object:
        return real(known[name], *more, **others) if name in known else real("no-such-name.invalid", None)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    def ask(address: str, controller: str = "SlurmctldHost[0] = head(127.0.0.1)\n") -> slurm.Ask:
        def answer(command: Sequence[str]) -> str:
            return controller if "config" in command else f"NodeName=n1 NodeAddr={address} Port=1"

        return answer

    assert address_of("n2", ask("10.0.0.9")) == "n2"
    assert address_of("n1", ask("10.0.0.9")) == "10.0.0.9"
    known["127.0.0.1"] = "127.0.0.1"
    assert address_of("n1", ask("n1-data")) == "127.0.0.1"  # this machine's, on the way to the controller
    assert address_of("n1", ask("n1-data", "")) == "n1-data"  # nothing better is known
