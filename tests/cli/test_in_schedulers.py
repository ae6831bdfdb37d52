"""What ``holdfast run`` takes from SLURM and Kubernetes, as far as no scheduler is needed to see it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import in_kubernetes, in_slurm
from holdfast.cli.in_slurm import Options
from holdfast.cluster.keeper import CoordinatorKeeper
from holdfast.errors import UsageError
from holdfast.measuring import free_port
from holdfast.processes import descendants_of
from tests.harness import until, wait_until
from tests.warm import Command


def options(folder: Path, *, job: str = "7", step: str = "0", starts: str = "0", name: str = "") -> Options:
    environment = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_RESTART_COUNT": starts, "SLURM_PROCID": "0"}
    environment |= {"SLURM_STEP_NUM_TASKS": "4", "SLURMD_NODENAME": "10.255.255.1"}
    found = in_slurm.options_of(environment, rdzv_id=name, log_dir=folder, patience=0.1, token="")
    assert found is not None
    return found


def test_two_steps_of_a_job_are_two_runs(tmp_path: Path) -> None:
    """As in a batch script that starts several trainings side by side."""
    first, second = options(tmp_path), options(tmp_path, step="1")
    assert (first.rdzv_id, second.rdzv_id) == ("slurm-7.0", "slurm-7.1")
    assert first.token != second.token
    assert options(tmp_path).token == first.token  # the same step: holdfast run once more in it
    assert (first.tasks, first.hosts) == (4, "node-10.255.255.1")


def test_a_requeued_job_begins_anew(tmp_path: Path) -> None:
    for name in ("", "together"):
        tokens = {options(tmp_path, starts=starts, name=name).token for starts in ("0", "1", "2")}
        assert len(tokens) == 3


def test_a_log_dir_that_nobody_may_write_to_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot meet"):
        options(tmp_path / "file" / "logs")


PODS = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("train-3.train.ml.svc.cluster.local", "train-0.train.ml.svc.cluster.local:29700"),  # a StatefulSet
        ("train-0.train.ml.svc.cluster.local", "train-0.train.ml.svc.cluster.local:29700"),
        ("train-worker-0-2.train.ml.svc", "train-worker-0-0.train.ml.svc:29700"),  # a JobSet
        ("train-7d9c5b-x2x4z.train", ""),  # a Deployment
        ("train-3", ""),  # no headless Service
        ("localhost", ""),
    ],
)
def test_the_first_pod_has_a_name_like_the_others(name: str, endpoint: str) -> None:
    assert in_kubernetes.endpoint_of(PODS, name) == endpoint
    assert in_kubernetes.endpoint_of({}, name) == ""


def test_only_in_kubernetes_a_name_is_waited_for() -> None:
    unknown = "train-0.no-such-name.invalid:29700"
    for environment, endpoint in [({}, unknown), (PODS, ""), (PODS, "127.0.0.1:29700")]:
        in_kubernetes.wait_for_name(environment, endpoint, 1e9)
    in_kubernetes.wait_for_name(PODS, unknown, 0.2)  # it gives up, and leaves the sentence to others


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and util-linux's unshare")
def test_a_pod_that_waits_for_another_ends_when_it_is_deleted(tmp_path: Path) -> None:
    """As process 1 of a container, which dies of no signal by default."""
    (tmp_path / "script.py").touch()
    words = ["--nnodes", "2", "--patience", "600", "--rdzv-endpoint", "train-0.no-such-name.invalid:29700", "script.py"]
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "holdfast.cli", "run", *words]
    environment = {**os.environ, **PODS, "HOLDFAST_TOKEN": "a secret of these two pods"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as container:
        try:
            wait_until("it minds SIGTERM", lambda: [pid for pid in descendants_of(container.pid) if minds_sigterm(pid)])
            os.kill(descendants_of(container.pid)[0], signal.SIGTERM)
            assert container.wait(60) == 128 + signal.SIGTERM
        finally:
            container.kill()


def minds_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    try:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) & 1 << signal.SIGTERM - 1)


def test_variables_of_kubeflow_are_enough(tmp_path: Path) -> None:
    """Two pods on this machine. What the pods of a TrainJob are told, and nothing else."""
    (tmp_path / "script.py").write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    told = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", **PODS}
    told |= {"PET_MASTER_PORT": str(free_port()), "HOLDFAST_TOKEN": "a secret of these two pods"}
    pods = [
        Command("run", "script.py", folder=tmp_path, name=f"pod{rank}", PET_NODE_RANK=str(rank), **told)
        for rank in range(2)
    ]
    assert [pod.wait(60) for pod in pods] == [0, 0]
    said = "".join(pod.stdout for pod in pods)
    assert "rank 0 of 2" in said
    assert "rank 1 of 2" in said


async def _found_again() -> None:
    addresses = ["192.0.2.1", "192.0.2.2"]  # of nobody

    def resolve(name: str, port: int, **more: object) -> list[object]:
        return [(2, 1, 6, "", (addresses.pop(0), port))]

    keeper = CoordinatorKeeper("train-0.train:29700", resolve)
    assert (keeper.is_ours, keeper.address) == (False, ("192.0.2.1", 29700))
    for _ in range(3):  # asked once at a time
        keeper.unreached(("192.0.2.1", 29700), ConnectionRefusedError())
    await until(lambda: keeper.address == ("192.0.2.2", 29700))


def test_a_first_pod_that_comes_back_with_another_address_is_found() -> None:
    asyncio.run(_found_again())
