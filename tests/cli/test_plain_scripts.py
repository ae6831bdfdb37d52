"""Scripts without a ``Run`` under ``holdfast run``: they start, fail and start again together, as under torchrun."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from holdfast.cluster.agent import Agent
from tests.harness import TRAIN, Hosts, Result, count_events, launch, launch_hosts, until, wait_until
from tests.warm import Command

# Sums ranks. In the first DEATHS rounds the last rank kills itself in the middle. Rank 0 holds the store: it ends last.
SUMS = """
import json, os, signal, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size, restarts = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(4):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if step == 2 and rank == size - 1 and restarts < int(os.environ.get("DEATHS", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
with open(os.environ["RESULTS"], "a") as results:
    results.write(json.dumps({"rank": rank, "size": size, "restarts": restarts, "total": total.item()}) + "\\n")
store = dist.distributed_c10d._get_default_store()
if rank: store.add("done", 1)
else:
    while store.add("done", 0) < size - 1: pass
"""


def script(folder: Path, text: str = SUMS) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def rows(result: Result) -> list[tuple[int, int, int, float]]:
    return sorted((row["rank"], row["size"], row["restarts"], row["total"]) for row in result.results)


def test_all_workers_start_again_in_a_new_group_after_a_loss(tmp_path: Path) -> None:
    result = launch(tmp_path, script=script(tmp_path), workers=3, environment={"DEATHS": "2"}, max_restarts=2)
    assert result.code == 0, result.said
    assert rows(result) == [(rank, 3, 2, 3.0) for rank in range(3)]
    assert [event["round"] for event in result.of("restart")] == [1, 2]
    assert [event["worker"] for event in result.of("started")] == [f"0.{n}" for n in range(9)]


def test_teams_are_groups_of_their_own_and_start_again_together(tmp_path: Path) -> None:
    result = launch(tmp_path, script=script(tmp_path), workers=2, team=2, environment={"DEATHS": "1"})
    assert result.code == 0, result.said
    assert rows(result) == [(0, 2, 1, 1.0)] * 2 + [(1, 2, 1, 1.0)] * 2
    assert [event["round"] for event in result.of("restart")] == [1]


def test_too_many_losses_end_the_run_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = launch(tmp_path, script=script(tmp_path), workers=2, environment={"DEATHS": "9"}, max_restarts=1)
    assert (result.code, result.results) == (1, [])
    said = capsys.readouterr().err
    assert said.startswith("holdfast: worker 0.3 was lost (killed by SIGKILL)")
    assert said.count("\n") == 1
    assert "--max-restarts" in said


def test_an_error_that_comes_again_ends_the_run_and_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import os\nif os.environ['RANK'] == '1': raise ValueError('a bug')\nimport signal; signal.pause()\n"
    result = launch(tmp_path, script=script(tmp_path, text), workers=2)
    assert (result.code, len(result.of("restart"))) == (1, 1)
    assert capsys.readouterr().err.count("ValueError: a bug") == 1


def test_the_last_lines_before_an_error_are_shown_and_the_traceback_is_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "print('almost there')\nraise ValueError('a bug')\n")
    result = launch(tmp_path, script=path, workers=1)
    assert result.said.count("[0.0] almost there") == 1
    assert result.said.count("[0.1] almost there") == 1
    shown = capsys.readouterr().err
    assert f'Traceback (most recent call last):\n  File "{path}", line 2, in <module>\n    raise' in shown


@pytest.mark.parametrize("name", ["nonsense", "nonsense.part", "folder"])
def test_a_module_that_is_not_there_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").touch()
    process = Command("run", "-n", "2", "-m", name, folder=tmp_path)
    assert process.wait(60) == 2
    assert process.stderr.startswith(f"holdfast: -m {name} cannot be run: ")
    assert process.stderr.count("\n") == 1


def test_a_module_that_fails_by_itself_shows_its_traceback(tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "mine.py").write_text("import nonsense\n")
    process = Command("run", "-m", "mine", folder=tmp_path)
    assert process.wait(60) == 1
    assert 'mine.py", line 1, in <module>' in process.stderr


def test_a_worker_that_fails_after_others_have_ended_is_not_forgotten(tmp_path: Path) -> None:
    text = (
        "import os, time\nif os.environ['RANK'] == '0': raise SystemExit(0)\n"
        "while not os.path.exists('ended'): time.sleep(0.01)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(7)\n"
    )
    ended = tmp_path / "ended"
    text = text.replace("'ended'", repr(str(ended)))

    async def wait(agent: Agent) -> None:
        await until(lambda: agent.workers.keys() == {"0.1"})
        ended.touch()

    result = launch(tmp_path, script=script(tmp_path, text), workers=2, meddle=wait)
    assert result.code == 0, result.said
    (event,) = result.of("restart")
    assert "worker 0.1 was lost (exited with code 7)" in event["reason"]


def test_several_hosts_start_again_together(tmp_path: Path) -> None:
    async def watch(hosts: Hosts) -> None:
        await asyncio.gather(*hosts.jobs)

    result = launch_hosts(tmp_path, script=script(tmp_path), workers=[2, 2], meddle=watch, environment={"DEATHS": "1"})
    assert result.code == 0, result.said
    assert rows(result) == [(rank, 4, 1, 6.0) for rank in range(4)]


def test_a_restarted_coordinator_is_no_loss(tmp_path: Path) -> None:
    """It learns from the agent that the workers of a script without a ``Run`` have ended."""
    text = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n".replace(
        "'go'", repr(str(tmp_path / "go"))
    )

    async def kill(agent: Agent) -> None:
        await until(lambda: count_events(agent, "started") == 2)
        assert agent.coordinator is not None
        agent.coordinator.kill()
        (tmp_path / "go").touch()
        await until(lambda: not agent.workers)

    result = launch(tmp_path, script=script(tmp_path, text), workers=2, meddle=kill)
    assert result.code == 0, result.said
    assert not result.of("restart")


@pytest.mark.parametrize("own", [True, False])
def test_a_notice_is_passed_on_to_the_script(tmp_path: Path, own: bool) -> None:
    """Its own handler can save something. Without one it ends at once, long before the grace is over."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n" if own else ""
    path = script(tmp_path, f"import signal, sys\n{handler}print('here', flush=True)\nwhile True: signal.pause()\n")
    process = Command("run", "-n", "2", "--grace", "600", str(path), folder=tmp_path)
    wait_until("both are there", lambda: process.stdout.count("here") == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert process.stdout.count("saved") == (2 if own else 0)
    assert "saving was left to the script" in process.stdout


def test_a_script_with_a_run_loses_no_more_than_one_worker_once_it_is_known(tmp_path: Path) -> None:
    """A loss before any ``Run`` is made starts all again; later ones do not. The weights are the same."""
    dies = "if os.environ['HOLDFAST_WORKER'] == '0.1': os.kill(os.getpid(), 9)\n"
    waits = "if os.environ['HOLDFAST_WORKER'] == '0.0': signal.pause()\n"  # it makes no Run before the other dies
    text = f"import os, runpy, signal\n{dies}{waits}runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
    (tmp_path / "undisturbed").mkdir()
    expected = launch(tmp_path / "undisturbed", workers=1, environment={"STEPS": "6"}).sha256
    result = launch(
        tmp_path,
        script=script(tmp_path, text),
        workers=2,
        faults="kill worker=0.3 step=2 phase=vote",
        environment={"STEPS": "6"},
    )
    assert result.code == 0, result.said
    assert result.sha256 == expected
    assert len(result.of("restart")) == 1
    started = [event["worker"] for event in result.of("started")]
    assert started[:4] == ["0.0", "0.1", "0.2", "0.3"]
    assert started[4:] in (["0.4"], []), "0.2 has gone on; it may be done before the lost one is replaced"
    assert {row["worker"] for row in result.results} >= {"0.2"}
