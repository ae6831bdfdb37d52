"""Training on a real Ray: a head and raylets on loopback. Workers, actors and raylets are killed; hashes are compared.

One cluster serves the module. ``RayCluster.end`` ends all of its processes at the end of it, whatever has failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.events import read_events
from holdfast.errors import UsageError
from holdfast.integrations.ray import HoldfastTrainer
from holdfast.integrations.ray.worker import LOGS
from tests.harness import Result, assert_every_worker_commits_each_step_once, launch, wait_until
from tests.injected import note
from tests.integrations.ray.training import train
from tests.ray_cluster import RayCluster, needs_ray

pytestmark = [needs_ray, pytest.mark.timeout(600)]
STEPS = 400


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(2)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The hash of one process that trains so many steps undisturbed."""

    def hash_of(steps: int) -> str:
        folder = tmp_path_factory.mktemp("whole")
        (folder / "hurry").touch()
        settings = {"STEPS": str(steps), "HURRY": str(folder / "hurry")}
        result = launch(folder, script=Path(__file__).with_name("alone.py"), workers=1, environment=settings)
        return result.sha256

    return hash_of


class Fit:
    """A ``fit`` in a thread of its own. It trains slowly until ``hurry``."""

    def __init__(self, folder: Path, workers: int | tuple[int, int], *, steps: int = STEPS, **more: Any) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig

        self.folder = folder
        self.result: Any = None
        self.error: Exception | None = None
        keep = {name: more.pop(name) for name in ("every", "fail_at") if name in more}
        failures = FailureConfig(max_failures=more.pop("max_failures", 0))
        run = RunConfig(
            name="run",
            storage_path=str(folder),
            failure_config=failures,
            callbacks=more.pop("callbacks", None),
            worker_runtime_env={"env_vars": more.pop("environment")} if "environment" in more else None,
        )
        self._trainer = HoldfastTrainer(
            more.pop("train", train),
            train_loop_config={"steps": steps, "hurry": str(folder / "hurry"), **keep},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=run,
            heartbeat_timeout=10.0,
            **{"patience": 120.0, **more},
        )
        self._thread = threading.Thread(target=self._fit)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self.result = self._trainer.fit()
        except Exception as e:
            self.error = e

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / LOGS / "events.jsonl"
        return [e for e in read_events(path) if e["event"] == name] if path.exists() else []

    def commits(self, generation: int) -> list[dict[str, Any]]:
        return [e for e in self.events("commit") if e["generation"] >= generation]

    def wait_for(self, workers: int, *, after: int = 0) -> list[str]:
        """Wait until so many workers have committed a step together after a generation; return their names."""

        def together() -> list[str]:
            self.check()
            for generation in self.events("generation"):
                names: list[str] = generation["workers"]
                number = generation["number"]
                if number > after and len(names) == workers:
                    done = {e["worker"] for e in self.events("commit") if e["generation"] == number}
                    if done >= {*names}:
                        return names
            return []

        wait_until(f"{workers} workers train", together, seconds=300.0)
        return together()

    @property
    def generation(self) -> int:
        return max((e["number"] for e in self.events("generation")), default=0)

    def check(self) -> None:
        """Fail at once if ``fit`` is over before its time."""
        assert self._thread.is_alive(), f"fit is over: {self.error or self.result}"

    def pid_of(self, worker: str) -> int:
        return int(next(e["pid"] for e in self.events("started") if e["worker"] == worker))

    def agent_of(self, worker: str) -> int:
        """The process of the actor that has started a worker."""
        return int((self.folder / f"hurry.{worker}").read_text())

    def finish(self) -> Any:
        (self.folder / "hurry").touch()
        self._thread.join(300.0)
        assert not self._thread.is_alive()
        return self.result

    def judge(self) -> None:
        """Each worker has committed each of its steps once."""
        path = self.folder / "run" / LOGS / "events.jsonl"
        assert_every_worker_commits_each_step_once(Result(code=0, events=list(read_events(path)), said=[]))


def kill(pid: int, kind: str) -> None:
    note(f"kill {kind} of Ray")
    os.kill(pid, signal.SIGKILL)


def test_growth_and_the_loss_of_a_worker_an_actor_and_a_raylet(
    cluster: RayCluster, tmp_path: Path, whole: Callable[..., str]
) -> None:
    fit = Fit(tmp_path, (2, 3))
    try:
        fit.wait_for(2)
        node = cluster.add()
        first = fit.wait_for(3)
        (grown,) = [name for name in first if name.startswith("2.")]

        before = fit.generation
        kill(fit.pid_of("1.0"), "worker")  # its agent replaces it
        with_another = fit.wait_for(3, after=before + 1)
        assert {"0.0", grown} < {*with_another}

        before = fit.generation
        kill(fit.agent_of("0.0"), "actor")  # Ray places another
        after_actor = fit.wait_for(3, after=before + 1)
        assert {*with_another} - {"0.0"} < {*after_actor}

        before = fit.generation
        cluster.lose(node)  # nobody can replace it
        note("kill raylet of Ray")
        left = fit.wait_for(2, after=before)
        assert {*left} == {*after_actor} - {grown}
    finally:
        result = fit.finish()
    assert fit.error is None
    assert result.error is None
    assert result.return_value == whole(STEPS)
    assert result.metrics["step"] == STEPS - 1
    table = result.metrics_dataframe
    assert list(table["squared"]) == list(table["loss"] * table["loss"])
    assert list(table["step"]) == list(range(STEPS))
    fit.judge()


def cut(one: int, other: int) -> int:
    """Break all connections between two processes, as a firewall that forgets them does; return how many."""
    lines = subprocess.run(["ss", "-Htnp", "state", "established"], capture_output=True, text=True).stdout.splitlines()
    ends = {pid: {tuple(line.split()[2:4]) for line in lines if f"pid={pid}," in line} for pid in (one, other)}
    both = [(here, there) for here, there in ends[one] if (there, here) in ends[other]]
    for here, there in both:
        (host, port), (peer, peer_port) = here.rsplit(":", 1), there.rsplit(":", 1)
        words = ["ss", "-K", "src", host, "sport", "=", port, "dst", peer, "dport", "=", peer_port]
        subprocess.run(words, check=True, capture_output=True)
    return len(both)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ss") is None, reason="needs root, and iproute2's ss")
def test_an_agent_that_ray_does_not_reach_for_a_moment_trains_on(
    cluster: RayCluster, tmp_path: Path, whole: Callable[..., str]
) -> None:
    fit = Fit(tmp_path, 2, steps=100)
    try:
        (first, _) = fit.wait_for(2)
        assert cut(os.getpid(), fit.agent_of(first))
        note("connection of Ray cut")
        wait_until("some more steps", lambda: fit.events("commit")[-1]["step"] >= 60)
    finally:
        result = fit.finish()
    assert fit.error is None
    assert fit.events("failure") == []
    assert result.return_value == whole(100)


@pytest.mark.thorough("tests/integrations/ray/test_crew.py, and tests/faults/test_preemption.py")
def test_a_node_that_is_drained_is_left_in_time_and_another_takes_its_place(
    cluster: RayCluster, tmp_path: Path, whole: Callable[..., str]
) -> None:
    cluster.add()  # in place of the one that is drained
    fit = Fit(tmp_path, (1, 2), steps=600)
    try:
        first = fit.wait_for(2)
        before = fit.generation
        drained = cluster.drain(cluster.node_of(fit.agent_of(first[1])), seconds=60)
        wait_until("its agent has left", lambda: [e for e in fit.events("left") if e["code"] == 128 + signal.SIGTERM])
        assert fit.events("failure") == []  # it was told in time
        fit.wait_for(2, after=before)
        assert drained
    finally:
        result = fit.finish()
    assert fit.error is None
    assert result.return_value == whole(600)
    fit.judge()


@pytest.mark.thorough("tests/faults, and the outcomes in tests/integrations/ray/test_crew.py")
def test_a_script_that_fails_for_good_begins_again_from_its_checkpoint(
    cluster: RayCluster, tmp_path: Path, whole: Callable[..., str]
) -> None:
    from ray.train import UserCallback

    class Told(UserCallback):
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.errors: list[str] = []

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            self.steps += [row["step"] for row in metrics]

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            self.errors += [str(error) for error in worker_exceptions.values()]

    told = Told()
    (tmp_path / "hurry").touch()
    fit = Fit(tmp_path, 2, steps=20, every=5, fail_at=12, max_failures=1, callbacks=[told])
    result = fit.finish()
    assert fit.error is None
    assert result.return_value == whole(20)
    assert [e["step"] for e in fit.events("resumed")][:1] == [10]
    assert Path(result.checkpoint.path).name == "step-00000020"
    assert [Path(found.path).name for found, _ in result.best_checkpoints][-1] == "step-00000020"
    assert told.steps == list(range(20))
    assert "injected into the train function" in told.errors[0]


@pytest.mark.thorough("the hashes of tests/faults/test_controls.py")
def test_a_sabotaged_gradient_shows(cluster: RayCluster, tmp_path: Path, whole: Callable[..., str]) -> None:
    (tmp_path / "hurry").touch()
    fit = Fit(tmp_path, 2, steps=10, environment={"HOLDFAST_FAULTS": "skip-gradient worker=1.0 step=3"})
    result = fit.finish()
    assert fit.error is None
    assert result.return_value != whole(10)


@pytest.mark.thorough("tests/integrations/ray/test_crew.py")
def test_more_workers_than_the_cluster_can_hold(cluster: RayCluster, tmp_path: Path) -> None:
    fit = Fit(tmp_path, 5, patience=3.0)
    fit.finish()
    assert "of at least 5 workers" in str(fit.error)
    assert "each needs 1 CPU, and the cluster has" in str(fit.error)


@pytest.mark.thorough("it is one branch of worker.main")
def test_a_train_function_without_a_run(cluster: RayCluster, tmp_path: Path) -> None:
    fit = Fit(tmp_path, 1, train=lambda config: None)
    fit.finish()
    assert isinstance(fit.error, UsageError)
    assert "without a holdfast.Run or Loop" in str(fit.error)


@pytest.mark.thorough("it is the same trainer with another train function")
def test_the_example(cluster: RayCluster, tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "STEPS": "100", "STORAGE": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).parents[3] / "examples" / "ray_trainer.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "example" / "checkpoints" / "step-00000100") in done.stdout
    assert "sha256 of weights and optimizer state: " in done.stdout


@pytest.mark.parametrize(
    ("words", "scaling", "run", "more"),
    [
        ("num_workers", {"num_workers": 0}, {}, {}),
        ("STRICT_SPREAD", {"placement_strategy": "STRICT_SPREAD"}, {}, {}),
        ("no folder", {}, {"storage_path": "s3://bucket/runs"}, {}),
        ("patience", {}, {}, {"patience": 0}),
        ("heartbeat_timeout", {}, {}, {"heartbeat_timeout": float("nan")}),
    ],
)
def test_settings_that_make_no_sense_get_one_sentence(
    words: str, scaling: dict[str, Any], run: dict[str, Any], more: dict[str, Any]
) -> None:
    from ray.train import RunConfig, ScalingConfig

    with pytest.raises(UsageError, match=words):
        HoldfastTrainer(train, scaling_config=ScalingConfig(**scaling), run_config=RunConfig(**run), **more)
