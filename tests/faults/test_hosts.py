"""Several agents: one machine with several agents, and hosts in network namespaces that lose their link."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.measuring import free_port
from tests.harness import TRAIN, Result, collect, wait_until
from tests.namespaces import Machines, machines
from tests.warm import Command

STEPS = 120  # slow ones until the test is in a hurry: a minute for other hosts to start, on a busy machine too


def start_agent(
    folder: Path, name: str, *options: str, inside: str = "", token: str = "a secret of the tests", **environment: str
) -> Command:
    (folder / name).mkdir(exist_ok=True)
    settings = {
        "HOLDFAST_TOKEN": token,
        "HOLDFAST_TRACE": "1",
        "RESULTS": str(folder / "results.jsonl"),
        "STEPS": str(STEPS),
        "WANTED": "99",
        "PATIENT": "2",
        "PAUSE": "0.5",
        "HURRY": str(folder / "hurry"),
        **environment,
    }
    words = ("run", "--log-dir", str(folder / name / "logs"), *options, str(TRAIN))
    return Command(*words, folder=folder, name=name, namespace=inside, **settings)


def hurry(folder: Path) -> None:
    """All that was to be seen was seen: the other steps need not be slow."""
    (folder / "hurry").touch()


def wait_for_step(folder: Path, step: int, workers: int) -> None:
    def there() -> bool:
        commits = collect(folder).of("commit")
        return len({e["worker"] for e in commits if e["step"] >= step}) >= workers

    wait_until(f"step {step} on {workers} workers", there)


def test_two_agents_and_one_is_preempted(tmp_path: Path, undisturbed) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    first = start_agent(tmp_path, "first", *options)
    wait_for_step(tmp_path, 1, 2)
    second = start_agent(tmp_path, "second", *options)
    wait_for_step(tmp_path, 1, 4)  # host 1 came in later, by itself
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 128 + signal.SIGTERM
    hurry(tmp_path)
    assert first.wait(60) == 0
    result = collect(tmp_path)
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses
    assert not result.of("failure"), "leaving is no failure"


def test_a_whole_host_is_killed(tmp_path: Path, undisturbed) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    first = start_agent(tmp_path, "first", *options)
    wait_for_step(tmp_path, 1, 2)
    second = start_agent(tmp_path, "second", *options)
    wait_for_step(tmp_path, 1, 4)
    second.kill()  # its workers notice that their agent is gone, and end
    second.wait()
    hurry(tmp_path)
    assert first.wait(60) == 0
    result = collect(tmp_path)
    assert result.sha256 == undisturbed(STEPS).sha256
    assert {e["worker"] for e in result.of("failure")} == {"1.0", "1.1"}


def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("-n", "1", "--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    first = start_agent(tmp_path, "first", *options)
    wait_for_step(tmp_path, 1, 1)
    second = start_agent(tmp_path, "second", *options, token="a guess of the token")
    assert second.wait(60) == 2
    assert "HOLDFAST_TOKEN" in second.stderr, "where the right one comes from"
    hurry(tmp_path)
    assert first.wait(60) == 0


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        agent = start_agent(tmp_path, "agent", "-n", "1", "--rdzv-endpoint", f"127.0.0.1:{port}")
        assert agent.wait(60) == 2
    assert port in agent.stderr
    assert "--rdzv-endpoint" in agent.stderr, "what to change"


@pytest.fixture
def two() -> Iterator[Machines]:
    with machines(2) as made:
        yield made


@pytest.mark.thorough("test_domains.py cuts a link between hosts that hold stages")
def test_a_host_whose_traffic_vanishes(tmp_path: Path, undisturbed, two: Machines) -> None:
    """The link is cut: no reset, no end of stream, only silence."""
    common = ("-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", two.endpoint, "--heartbeat-timeout", "1")
    first = start_agent(tmp_path, "first", *common, inside=two.names[0])
    wait_for_step(tmp_path, 1, 2)
    second = start_agent(tmp_path, "second", *common, inside=two.names[1])
    wait_for_step(tmp_path, 1, 4)
    two.cut(1)
    hurry(tmp_path)
    assert first.wait(60) == 0
    second.send_signal(signal.SIGTERM)  # cut off from everybody, its workers cannot leave in order
    wait_until("the notice is understood", lambda: collect(tmp_path).of("preempted"))
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 128 + signal.SIGTERM
    result = collect(tmp_path)
    kept = [r for r in result.results if r["worker"].startswith("0.")]
    assert {r["sha256"] for r in kept} == {undisturbed(STEPS).sha256}
    assert len(kept) == 2
    causes = [e["cause"] for e in result.of("failure") if e["worker"].startswith("1.")]
    assert causes
    assert all("no heartbeat" in cause for cause in causes)


def four_without(dead: set[str], result: Result) -> bool:
    """Whether four train now, and none of them has the name of one that died with its machine."""
    *_, last = result.of("generation")
    return len(last["workers"]) == 4 and not dead & {*last["workers"]}


def test_the_head_is_started_anew_while_the_other_host_trains(tmp_path: Path, undisturbed, two: Machines) -> None:
    """Agent, coordinator and workers of the first machine die at once. The next agent counts from 0 again."""
    common = ("-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", two.endpoint, "--heartbeat-timeout", "1")
    start_agent(tmp_path, "first", *common, inside=two.names[0])
    wait_for_step(tmp_path, 1, 2)
    second = start_agent(tmp_path, "second", *common, inside=two.names[1])
    wait_for_step(tmp_path, 1, 4)
    two.kill(0)
    dead = {name for name in collect(tmp_path).of("generation")[-1]["workers"] if name.startswith("0.")}
    again = start_agent(tmp_path, "again", *common, inside=two.names[0])
    wait_until("four others train", lambda: four_without(dead, collect(tmp_path)))
    hurry(tmp_path)
    assert [again.wait(60), second.wait(60)] == [0, 0]
    result = collect(tmp_path)
    assert result.sha256 == undisturbed(STEPS).sha256
    numbers = [event["number"] for event in result.of("generation")]
    assert numbers == sorted(set(numbers)), "one run, not two"
    assert four_without(dead, result), "the dead are not taken for the living"
