"""The plan of a departure: how long it may take, what is said on the way, and the exit code at its end."""

from __future__ import annotations

import signal

import pytest

from holdfast.cluster.grace import DEFAULT_SECONDS, NOT_SAVED, Departure, seconds_of

TERMINATED = 128 + signal.SIGTERM


def departure(*reports: dict[str, object], begun: bool = True, left: str = "", seconds: float = 30.0) -> Departure:
    """One of worker 0.0's reports after the other; the workers in ``left`` have ended with 0."""
    plan = Departure(signal=signal.SIGTERM, seconds=seconds, begin=100.0, begun=begun)
    for report in reports:
        plan.hear("0.0", report)
    for worker in left.split():
        plan.ended(worker, 0)
    return plan


def saving(step: int, done: int, size: int = 100) -> dict[str, object]:
    return {"report": "saving", "step": step, "done": done, "size": size}


def unsaved(*, wanted: bool) -> dict[str, object]:
    return {"report": "unsaved", "step": 7, "reason": "of a reason", "wanted": wanted}


SAVED = {"report": "saved", "step": 7}


@pytest.mark.parametrize(
    ("number", "end", "seconds"),
    [
        (signal.SIGUSR1, "1120", 120.0),
        (signal.SIGUSR2, "1015", 15.0),
        (
            signal.SIGTERM,
            "1120",
            DEFAULT_SECONDS,
        ),  # a preemption, or the end itself: KillWait is not in the environment
        (signal.SIGUSR1, "999", DEFAULT_SECONDS),  # the end was before
        (signal.SIGUSR1, "9999999999", DEFAULT_SECONDS),  # no limit of time
        (signal.SIGUSR1, "soon", DEFAULT_SECONDS),
        (signal.SIGUSR1, "", DEFAULT_SECONDS),
    ],
)
def test_the_grace_is_what_the_schedulers_environment_says(number: int, end: str, seconds: float) -> None:
    assert seconds_of(number, {"SLURM_JOB_END_TIME": end} if end else {}, now=1000.0) == seconds


def test_sigterm_is_as_far_ahead_as_slurm_has_told() -> None:
    known = {"HOLDFAST_SIGTERM_GRACE": "8", "SLURM_JOB_END_TIME": "1120"}
    assert [seconds_of(number, known, now=1000.0) for number in (signal.SIGTERM, signal.SIGUSR1)] == [8.0, 120.0]


@pytest.mark.parametrize(("seconds", "deadline"), [(30.0, 128.0), (2.0, 101.5)])
def test_a_margin_is_kept_back(seconds: float, deadline: float) -> None:
    assert departure(seconds=seconds).deadline == deadline


def test_progress_is_that_of_all_workers_and_of_the_newest_checkpoint() -> None:
    plan = departure()
    assert plan.line(101.0) == "SIGTERM: leaving; 29 s of grace left; on the way to a step boundary"
    plan.hear("0.0", saving(6, 100))
    plan.hear("0.1", saving(7, 30))
    assert plan.line(102.0).endswith("28 s of grace left; saving step 7: 30 %")
    plan.hear("0.0", saving(7, 90, size=200))
    assert plan.line(102.0).endswith("saving step 7: 40 %")
    plan.hear("0.0", SAVED)
    assert plan.line(131.0).endswith("0 s of grace left; step 7 is saved; ending")


@pytest.mark.parametrize(
    ("plan", "late", "code", "words"),
    [
        (departure(SAVED, left="0.0"), (), TERMINATED, "step 7 is saved"),
        (departure(SAVED), ("0.0",), TERMINATED, "step 7 is saved"),  # it had only to end
        (departure(left="0.0"), (), TERMINATED, "the other workers train on"),
        (departure(unsaved(wanted=False), left="0.0"), (), TERMINATED, "nothing is saved of the 7 steps"),
        (departure(unsaved(wanted=True), left="0.0"), (), NOT_SAVED, "of a reason"),
        (departure(unsaved(wanted=True), SAVED, left="0.0"), (), TERMINATED, "step 7 is saved"),  # the second time
        (departure(saving(7, 43)), ("0.0",), NOT_SAVED, "step 7 is not saved: 43 % of it is written"),
        (departure(left="0.1"), ("0.0",), NOT_SAVED, "workers 0.0 had not come to a step boundary"),
        (departure({"report": "idle"}, left="0.0"), (), TERMINATED, "waiting to join"),
        (departure({"report": "idle"}, left="0.0 0.1"), (), TERMINATED, "the other workers train on"),
        (departure(), (), NOT_SAVED, "no worker is left"),  # all were killed by somebody else
        (departure({"report": "saved", "step": 0}, left="0.0"), (), TERMINATED, "nothing was trained"),
        (departure(begun=False), ("0.0",), TERMINATED, "before training began"),
    ],
)
def test_the_exit_code_tells_whether_work_was_lost(plan: Departure, late: tuple[str], code: int, words: str) -> None:
    outcome = plan.outcome(late)
    assert outcome.code == code
    assert words in outcome.text
    assert outcome.is_loss == (code == NOT_SAVED)
