"""The first machine dies and is started anew, while the others train: the run that goes on is not another one."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.cluster.admission import Admission
from tests.world.aimed import History
from tests.world.history import Fate
from tests.world.world import Process, World


def restart_at(phase: str, seconds: float, nth: int = 2) -> Fate:
    """Restart the head when a worker of another machine is in a phase for the nth time."""
    seen: Counter[str] = Counter()

    def fate(world: World, process: Process, at: str) -> None:
        if not process.name.startswith("0.") and at == phase:
            seen[process.name] += 1
            if seen[process.name] == nth and not world.of("head"):
                world.log("fault", kind="head", phase=phase, worker=process.name)
                world.restart_head(seconds)

    return fate


@pytest.mark.parametrize("seconds", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("phase", ["data", "vote", "voted", "update"])
def test_the_others_go_on_under_the_new_head(phase: str, seconds: float) -> None:
    history = History(workers=[2, 2], fate=restart_at(phase, seconds), minimum_hosts=1)
    assert history.judge()
    assert history.struck == 1
    numbers = [event["number"] for event in history.of("generation")]
    assert numbers == sorted(set(numbers)), "no number is used twice"


def dead(history: History) -> set[str]:
    """The workers of the first machine, before it died."""
    return {name for name in history.of("generation")[0]["workers"] if name.startswith("0.")}


def joined(history: History) -> set[str]:
    """The members of all later generations."""
    return {name for event in history.of("generation")[1:] for name in event["workers"]}


@pytest.mark.parametrize("seed", range(5))
def test_the_new_head_takes_part(seed: int) -> None:
    """Its workers have names that were never used before, although it counts from 0 like the first."""
    history = History(workers=[2, 1], fate=restart_at("data", 0.1, nth=1), minimum_hosts=1, seed=seed)
    assert history.judge()
    assert not joined(history) & dead(history), "the dead are not taken for members that came back"


def test_control_without_incarnations_the_dead_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "is_another", lambda self, name, incarnation: False)
    histories = (
        History(workers=[2, 1], fate=restart_at("data", 0.1, nth=1), minimum_hosts=1, seed=seed) for seed in range(40)
    )
    assert any(joined(history) & dead(history) for history in histories)
