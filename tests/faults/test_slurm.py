"""Jobs of a real SLURM: nodes are lost, jobs are requeued, preempted and ended by their time limit, a job joins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import series
from holdfast.cluster.events import read_events
from tests.faults.judge import covered
from tests.harness import TRAIN, Result, assert_every_worker_commits_each_step_once, wait_until
from tests.slurm_cluster import SlurmCluster, needs_slurm, wait_for_state

pytestmark = needs_slurm

STEPS = 120  # slow ones until the test is in a hurry: a minute for jobs to start
ROOT = Path(__file__).parents[2]
BATCH = ROOT / "examples" / "slurm" / "train.sbatch"


@pytest.fixture(scope="module")
def nodes() -> Iterator[SlurmCluster]:
    folder = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))  # sockets have short paths
    cluster = SlurmCluster(folder)
    yield cluster
    cluster.end()
    shutil.rmtree(folder)


class Jobs:
    """Jobs of the example's batch script, in one folder. They train slowly until ``hurry``."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.numbers: list[str] = []
        cluster.wait()

    def submit(self, nodes: int, *options: str, flags: tuple[str, ...] = ()) -> str:
        """Start one on so many nodes. ``options`` are for sbatch, ``flags`` for ``holdfast run``."""
        environment = {
            "PYTHONPATH": str(ROOT),
            "RESULTS": str(self.folder / "results.jsonl"),
            "CHECKPOINT": str(self.folder / "saved"),
            "EVERY": "1000",  # only the last checkpoint, of a notice
            "HURRY": str(self.folder / "hurry"),
            "STEPS": str(STEPS),
            "WANTED": "99",
            "PAUSE": "0.5",
        }
        words = [f"--nodes={nodes}", f"--chdir={self.folder}", *options]
        self.numbers.append(self.cluster.submit(BATCH, words, *flags, str(TRAIN), **environment))
        return self.numbers[-1]

    def events(self, *names: str) -> list[dict[str, Any]]:
        log = self.folder / "holdfast-logs" / "events.jsonl"
        return [e for e in read_events(log) if e["event"] in names] if log.exists() else []

    def wait_for_workers(self, number: int) -> None:
        """Wait until so many train, and have committed in the newest generation."""

        def train() -> bool:
            newest = (self.events("generation") or [{"workers": []}])[-1]
            commits = self.events("commit")
            return len(newest["workers"]) == number and commits and commits[-1]["generation"] == newest["number"]

        wait_until(f"{number} train: {self.said}", train)

    @property
    def said(self) -> str:
        """What all jobs have printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("slurm-*.out")))

    def finish(self) -> Result:
        """Let the rest of the steps be fast, and wait until all jobs are done."""
        (self.folder / "hurry").touch()
        for job in self.numbers:
            wait_for_state(self.cluster, job, "COMPLETED", "")
        lines = (self.folder / "results.jsonl").read_text().splitlines()
        names = ("commit", "generation", "resumed", "preempted", "left")
        return Result(
            code=0, events=self.events(*names), said=[self.said], results=[json.loads(line) for line in lines]
        )

    def end(self) -> None:
        for job in self.numbers:
            self.cluster.ask("scancel", "--signal=KILL", "--full", job)
            self.cluster.ask("scancel", job)


@pytest.fixture
def jobs(tmp_path: Path, nodes: SlurmCluster) -> Iterator[Jobs]:
    made = Jobs(tmp_path, nodes)
    yield made
    made.end()


def assert_undisturbed(result: Result, undisturbed: Any) -> None:
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses


def test_a_node_is_lost_and_another_job_joins(jobs: Jobs, nodes: SlurmCluster, undisturbed: Any) -> None:
    """No flag says where to meet: SLURM does. The second job knows only the name of the run."""
    flags = ("--rdzv-id", "together")
    jobs.submit(3, flags=flags)
    jobs.wait_for_workers(3)
    nodes.lose("n3")  # n1 has the coordinator
    jobs.wait_for_workers(2)
    jobs.submit(1, flags=flags)
    jobs.wait_for_workers(3)
    result = jobs.finish()
    nodes.revive("n3")
    assert_undisturbed(result, undisturbed)
    assert_every_worker_commits_each_step_once(result)
    meeting = jobs.folder / "holdfast-logs" / "together.meeting"
    assert os.stat(meeting).st_mode & 0o077 == 0
    assert json.loads(meeting.read_text())["token"] not in jobs.said


def test_a_script_without_a_run_begins_with_all_tasks_of_its_step(jobs: Jobs, nodes: SlurmCluster) -> None:
    """Two tasks on a node. Neither is alone at first, and the script is over when both are."""
    script = jobs.folder / "script.py"
    script.write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    words = ["--nodes=1", "--ntasks-per-node=2", f"--chdir={jobs.folder}"]
    jobs.numbers.append(nodes.submit(BATCH, words, str(script), PYTHONPATH=str(ROOT)))
    wait_for_state(nodes, jobs.numbers[-1], "COMPLETED", "", seconds=180.0)
    assert sorted(line for line in jobs.said.replace("] rank", "]\nrank").split("\n") if line[:5] == "rank ") == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
    assert not jobs.events("restart")


@pytest.mark.thorough("it starts three jobs; tests/cluster/test_slurm.py has what a task of an array is called")
def test_tasks_of_an_array_carry_one_run_on(jobs: Jobs, nodes: SlurmCluster, undisturbed: Any) -> None:
    """One after another, under one name: the second knows that the first has ended, and begins from its checkpoint."""
    array = jobs.submit(1, "--array=1-2%1", flags=("--rdzv-id", "chain"))
    jobs.numbers = [f"{array}_2"]
    jobs.wait_for_workers(1)
    nodes.ask("scancel", f"{array}_1")
    wait_until("the second has begun", lambda: jobs.events("resumed"))
    os.kill(jobs.events("run")[-1]["pid"], signal.SIGTERM)  # it requeues itself, and not the array
    wait_until("it has begun again", lambda: len(jobs.events("resumed")) == 2)
    assert_undisturbed(jobs.finish(), undisturbed)
    assert nodes.ask("squeue", "-h", "-j", array, "-t", "all", "-o", "%T").split() == ["CANCELLED", "COMPLETED"]


@pytest.mark.parametrize(
    "reason", ["requeue", covered("as with requeue: SIGTERM, and SLURM itself starts it again", "preemption")]
)
def test_slurm_starts_the_job_again(jobs: Jobs, nodes: SlurmCluster, undisturbed: Any, reason: str) -> None:
    job = jobs.submit(2)
    jobs.wait_for_workers(2)
    if reason == "requeue":
        nodes.ask("scontrol", "requeue", job)
    else:
        other = nodes.ask(
            "sbatch",
            "--parsable",
            "--nodes=4",
            "--exclusive",
            "--partition=high",
            "--output=/dev/null",
            "--wrap=sleep 60",
        )
        wait_for_state(nodes, other, "RUNNING")
        nodes.ask("scancel", other)
    wait_until("all is saved", lambda: len(jobs.events("left")) == 2)
    assert [e["grace"] for e in jobs.events("preempted")] == [8, 8]  # the partition's GraceTime; KillWait is 10
    wait_until("it runs again", lambda: jobs.events("resumed"))
    assert_undisturbed(jobs.finish(), undisturbed)
    assert max(series.steps_in(jobs.folder / "saved")) == STEPS


@pytest.mark.thorough("SLURM's shortest time limit is a minute; tests/cluster/test_grace.py has the decision")
def test_the_job_starts_itself_again_at_its_time_limit(jobs: Jobs, undisturbed: Any) -> None:
    jobs.submit(2, "--time=1", "--signal=USR1@35")
    wait_until("all is saved", lambda: [e for e in jobs.events("left") if e["saved"]])
    grace = [e["grace"] for e in jobs.events("preempted") if e["signal"] == "SIGUSR1"]
    assert grace
    assert all(15 < seconds <= 60 for seconds in grace)  # what is left until the limit; SLURM sends it early
    wait_until("it runs again", lambda: jobs.events("resumed"))
    assert_undisturbed(jobs.finish(), undisturbed)
