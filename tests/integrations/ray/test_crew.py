"""Which agents Ray is asked for, and when a run gives up."""

from __future__ import annotations

import sys
import threading

import pytest

from holdfast.errors import UsageError
from holdfast.integrations.ray import HoldfastTrainer, checkpoint_folder
from holdfast.integrations.ray.agent_actor import AgentEnd
from holdfast.integrations.ray.attempt import outcome_of
from holdfast.integrations.ray.crew import NO_DEADLINE_SECONDS, TRIES, AgentCrew, GiveUp, Leave, Start
from holdfast.integrations.ray.worker import _pickled, takes_config


def crew_of(minimum: int, maximum: int, *, placed: int) -> AgentCrew:
    """A crew that has asked for its maximum, of which so many are placed, on nodes a, b, c."""
    crew = AgentCrew(minimum=minimum, maximum=maximum, patience=60.0, needs="1 CPU", has="2 CPU")
    assert crew.orders(0.0) == [Start(number=number) for number in range(maximum)]
    for number in range(placed):
        crew.placed(number, node="abc"[number], now=0.0)
    return crew


def test_those_that_do_not_fit_are_asked_for_once() -> None:
    crew = crew_of(2, 4, placed=2)
    assert crew.orders(1000.0) == []


def test_a_lost_agent_is_replaced_and_the_others_are_left_alone() -> None:
    crew = crew_of(2, 3, placed=3)
    crew.lost(1, cause="its node has died", now=10.0)
    assert crew.orders(11.0) == [Start(number=3)]
    assert crew.orders(12.0) == []


def test_an_agent_on_a_draining_node_leaves_once_and_another_is_asked_for_at_once() -> None:
    crew = crew_of(1, 2, placed=2)
    assert crew.orders(1.0, {"b": 40.0, "elsewhere": 5.0}) == [Leave(number=1, seconds=40.0), Start(number=2)]
    assert crew.orders(2.0, {"b": 39.0}) == []
    crew.ended(1)
    assert not crew.finishing
    assert crew.orders(3.0) == []
    assert crew.orders(4.0, {"a": 0.0})[0] == Leave(number=0, seconds=NO_DEADLINE_SECONDS)


def test_nobody_is_started_when_the_training_is_over() -> None:
    crew = crew_of(1, 2, placed=2)
    crew.ended(0)
    crew.lost(1, cause="it is slow to end", now=10.0)
    assert crew.orders(20.0) == []


def test_too_few_for_too_long_is_told_with_what_there_is() -> None:
    crew = crew_of(2, 2, placed=1)
    assert crew.orders(60.0) == []
    (order,) = crew.orders(61.0)
    assert isinstance(order, GiveUp)
    for words in ("1 of at least 2 workers", "1 CPU", "2 CPU", "60 s"):
        assert words in order.text


def test_patience_counts_anew_from_each_loss() -> None:
    crew = crew_of(2, 2, placed=2)
    assert crew.orders(100.0) == []
    crew.lost(0, cause="its node has died", now=100.0)
    assert crew.orders(101.0) == [Start(number=2)]
    assert crew.orders(160.0) == []
    assert isinstance(crew.orders(162.0)[0], GiveUp)


def test_agents_that_end_at_once_are_not_started_for_ever() -> None:
    crew = crew_of(1, 1, placed=0)
    for number in range(TRIES):
        crew.placed(number, node="a", now=10.0 * number)
        crew.lost(number, cause="no module named x", now=10.0 * number + 1)
        orders = crew.orders(10.0 * number + 5)
    assert isinstance(orders[0], GiveUp)
    assert "no module named x" in orders[0].text


def test_the_outcome_of_several_ends() -> None:
    lost = AgentEnd(code=3, text="too few")
    error = AgentEnd(code=1, text="ValueError")
    notice = AgentEnd(code=143, text="")
    assert outcome_of([error, AgentEnd(code=0, text="")]).code == 0
    assert outcome_of([notice, error, lost]).text == "ValueError"
    assert outcome_of([notice, notice]).preempted
    assert outcome_of([notice, AgentEnd(code=5, text="not saved")]).preempted
    assert outcome_of([]).code == 1


@pytest.mark.parametrize("train", [lambda a, b: None, lambda *, config: None, 3])
def test_what_is_no_train_function_is_refused_in_words(train: object) -> None:
    with pytest.raises(UsageError, match="train_loop_per_worker"):
        takes_config(train)  # type: ignore[arg-type]


def test_a_result_that_cannot_be_sent_is_a_sentence() -> None:
    pytest.importorskip("cloudpickle", reason="needs cloudpickle: pip install 'holdfast[ray]'")
    with pytest.raises(UsageError, match="a lock, cannot be sent"):
        _pickled(threading.Lock())


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"holdfast\[ray\]"):
        HoldfastTrainer(lambda config: None)


def test_another_version_of_ray_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'holdfast[ray]'")
    monkeypatch.setattr(ray, "__version__", "2.49.2")
    with pytest.raises(UsageError, match=r"2\.60.*2\.49\.2"):
        HoldfastTrainer(lambda config: None)


def test_there_is_no_folder_for_checkpoints_without_a_trainer() -> None:
    with pytest.raises(UsageError, match="no HoldfastTrainer"):
        checkpoint_folder()
