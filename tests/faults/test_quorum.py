"""Runs whose coordinator is elected through a real etcd: lose the machine that holds the role, or parts of etcd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.lease import Chain
from holdfast.cluster.events import read_events
from holdfast.cluster.membership import machine_of
from holdfast.cluster.quorum.etcd import Etcd, EtcdSettings
from holdfast.cluster.quorum.records import Keys
from tests.certificates import standard
from tests.etcd_cluster import EtcdCluster, needs_etcd
from tests.faults.judge import covered
from tests.harness import TRAIN, Result, assert_every_worker_commits_each_step_once, wait_until
from tests.namespaces import machines as namespaces
from tests.warm import Command

pytestmark = needs_etcd

STEPS = 150  # slow ones until the test is in a hurry: half a minute for machines to come and to be lost
LEASE = 2.0  # seconds


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Shared by tests that leave it whole."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    cluster.wait()
    yield cluster
    cluster.end()


class Machines:
    """Agents of one run, each with a worker, as processes of their own. One is killed with all that runs on it."""

    def __init__(self, folder: Path, endpoints: str, *options: str, **environment: str) -> None:
        self.folder, self._endpoints, self._options = folder, endpoints, options
        self.agents: list[Command] = []
        self._settings = {
            "HOLDFAST_TOKEN": "a secret of the test",
            "HOLDFAST_TRACE": "1",
            "RESULTS": str(folder / "results.jsonl"),
            "HURRY": str(folder / "hurry"),
            "STEPS": str(STEPS),
            "WANTED": "99",
            "PAUSE": "0.2",
            **environment,
        }

    def start(
        self, *options: str, endpoints: str = "", hosts: str = "1:4", namespace: str = "", **environment: str
    ) -> Command:
        words = ["run", "-n", "1", "--nnodes", hosts, "--heartbeat-timeout", "3", "--rdzv-id", self.folder.name]
        words += ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints or self._endpoints]
        number = len(self.agents)
        words += ["--log-dir", str(self.folder / f"logs{number}"), *self._options, *options, str(TRAIN)]
        settings = {**self._settings, **environment}
        self.agents.append(Command(*words, folder=self.folder, name=f"agent{number}", namespace=namespace, **settings))
        return self.agents[-1]

    def begin(self, number: int, *, already: int = 0) -> None:
        """Start so many, and wait until they train together with those that were there already."""
        for _ in range(number):
            self.start()
        wait_until("all train", lambda: len(self.members()) == number + already and self.commits() > 2 * number)

    def events(self, *names: str) -> list[dict[str, Any]]:
        logs = sorted(self.folder.glob("logs*/events.jsonl"))
        found = [e for log in logs for e in read_events(log) if not names or e["event"] in names]
        return sorted(found, key=lambda e: e["t"])

    @property
    def generation(self) -> dict[str, Any]:
        """The newest one."""
        return max(self.events("generation"), key=lambda e: e["number"], default={"number": 0, "workers": []})

    def members(self) -> list[str]:
        return list(self.generation["workers"])

    def commits(self) -> int:
        return len(self.events("commit"))

    @property
    def holder(self) -> int:
        """The agent that was elected last."""
        elected: dict[int, float] = {}
        for number in range(len(self.agents)):
            log = self.folder / f"logs{number}" / "events.jsonl"
            for event in read_events(log) if log.exists() else ():
                if event["event"] == "elected":
                    elected[number] = event["t"]
        return max(elected, key=lambda number: elected[number])

    def kill(self, number: int) -> None:
        """Kill all processes of a machine. Workers have a session of their own."""
        log = self.folder / f"logs{number}" / "events.jsonl"
        workers = [e["pid"] for e in read_events(log) if e["event"] == "started"]
        os.killpg(self.agents[number].pid, signal.SIGKILL)
        for pid in workers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # one of before

    def wait_for_members(self, number: int) -> None:
        """Wait until so many train in a new generation."""
        before = self.generation["number"]
        wait_until(
            f"{number} train",
            lambda: self.generation["number"] > before and len(self.members()) == number and self.is_training(),
        )

    def is_training(self) -> bool:
        """Whether the newest generation has committed a step."""
        return any(e["generation"] == self.generation["number"] for e in self.events("commit"))

    def finish(self, *numbers: int) -> Result:
        """Let the rest of the steps be fast; these agents must end well."""
        (self.folder / "hurry").touch()
        codes = [self.agents[number].wait(120.0) for number in numbers]
        text = "\n".join(self.agents[n].stderr + self.agents[n].stdout[-2000:] for n in numbers)
        assert codes == [0] * len(numbers), text
        lines = (self.folder / "results.jsonl").read_text().splitlines()
        return Result(code=0, events=self.events(), said=[], results=[json.loads(line) for line in lines])

    def end(self) -> None:
        for agent in self.agents:
            agent.kill()


@pytest.fixture
def machines(tmp_path: Path, etcd: EtcdCluster) -> Iterator[Machines]:
    made = Machines(tmp_path, etcd.endpoints)
    yield made
    made.end()


def assert_undisturbed(result: Result, undisturbed: Any) -> None:
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses
    assert_every_worker_commits_each_step_once(result)


def test_the_machine_of_the_coordinator_is_lost_twice(machines: Machines, undisturbed: Any) -> None:
    machines.begin(3)
    lost: list[int] = []
    for left in (2, 1):
        lost.append(machines.holder)
        machines.kill(lost[-1])
        machines.wait_for_members(left)
    machines.start()  # and another may join
    machines.wait_for_members(2)
    (rest,) = {0, 1, 2} - {*lost}
    result = machines.finish(rest, 3)
    assert_undisturbed(result, undisturbed)
    assert len(result.of("elected")) == 3


@pytest.mark.parametrize(
    "phase",
    [
        "vote",
        "voted",
        covered("the machine is lost in the middle of a step, as with vote", "forward"),
        covered("the machine is lost in the middle of a step, as with vote", "backward"),
        covered("the machine is lost in the middle of a step, as with vote", "reduce"),
        covered("the machine is lost when some may have updated, as with voted", "update"),
        covered("the machine is lost in the middle of a step, as with vote", "data"),
        covered("tests/world/test_fail_overs.py loses it while others regroup and copy", "enter"),
        covered("tests/world/test_fail_overs.py loses it while others regroup and copy", "copy"),
    ],
)
def test_the_machine_of_the_coordinator_is_lost_in_a_phase(machines: Machines, undisturbed: Any, phase: str) -> None:
    when = "" if phase in ("enter", "copy") else "step=5"  # these come when the first generation forms
    machines.start(hosts="2:4", HOLDFAST_FAULTS=f"lose worker=0.0 {when} phase={phase}")  # the first gets the number 0
    wait_until("it is elected", lambda: machines.events("elected"))
    machines.start(hosts="2:4")
    machines.start(hosts="2:4")
    assert machines.agents[0].wait(60.0) == -signal.SIGKILL
    others = {1, 2, 1000, 1001}  # one that comes after the loss gets its number from the second coordinator
    wait_until(
        "the others go on",
        lambda: (
            len(machines.members()) == 2
            and others.issuperset(map(machine_of, machines.members()))
            and machines.is_training()
        ),
    )
    assert_undisturbed(machines.finish(1, 2), undisturbed)


def test_with_tls_the_elected_coordinator_shows_a_certificate_for_its_own_address(
    tmp_path: Path, etcd: EtcdCluster, undisturbed: Any
) -> None:
    """Any machine may be elected. ``head`` is for 127.0.0.1, ``elsewhere`` for another name."""
    certificates = standard(tmp_path / "certificates")
    machines = Machines(tmp_path, etcd.endpoints, *certificates.options("head", "ca"), "--tls-tensors")
    try:
        machines.begin(2)
        first = machines.holder
        machines.kill(first)
        machines.wait_for_members(1)
        assert_undisturbed(machines.finish(1 - first), undisturbed)
    finally:
        machines.end()
    strange = Machines(tmp_path / "strange", etcd.endpoints, *certificates.options("elsewhere", "ca"))
    strange.folder.mkdir()
    alone = strange.start()
    assert alone.wait(60.0) == 2
    assert "not valid for '127.0.0.1'" in alone.stderr


def test_a_worker_is_lost_with_the_machine_of_the_coordinator(machines: Machines, undisturbed: Any) -> None:
    """The second's agent lives, and replaces it."""
    machines.begin(3)
    first = machines.holder
    second, third = sorted({0, 1, 2} - {first})
    (pid,) = [e["pid"] for e in read_events(machines.folder / f"logs{second}/events.jsonl") if e["event"] == "started"]
    machines.kill(first)
    os.kill(pid, signal.SIGKILL)
    machines.wait_for_members(2)
    result = machines.finish(second, third)
    assert_undisturbed(result, undisturbed)


def test_an_agent_that_is_asked_to_leave_gives_the_role_back(machines: Machines, undisturbed: Any) -> None:
    machines.begin(2)
    first = machines.holder
    machines.agents[first].send_signal(signal.SIGTERM)
    assert machines.agents[first].wait(60.0) == 128 + signal.SIGTERM
    machines.start()
    machines.wait_for_members(2)
    result = machines.finish(1 - first, 2)
    assert_undisturbed(result, undisturbed)
    assert not [e for e in result.of("failure") if e["member"]], "nobody was lost"


def test_the_agent_alone_is_killed_and_its_coordinator_lives_on_as_an_orphan(
    machines: Machines, undisturbed: Any
) -> None:
    """Its port does not refuse; the lease runs out. What the orphan decides then does not count."""
    machines.begin(2)
    first = machines.holder
    machines.agents[first].kill()
    machines.wait_for_members(1)
    result = machines.finish(1 - first)
    assert_undisturbed(result, undisturbed)
    orphan = [e for e in machines.events("coordinator") if e["epoch"] == machines.events("elected")[0]["epoch"]]
    wait_until("the orphan has ended", lambda: not Path(f"/proc/{orphan[0]['pid']}").exists())


def test_who_holds_the_folder_is_who_etcd_says(tmp_path: Path, etcd: EtcdCluster, undisturbed: Any) -> None:
    """The lease of the run's folder is granted in the transaction that commits the generation, and moves with it."""
    machines = Machines(tmp_path, etcd.endpoints, CHECKPOINT=str(tmp_path / "saved"), LEASE="9")
    key, chain = Keys(run=tmp_path.name).generation, Chain(tmp_path / "saved")

    async def granted() -> dict[str, Any] | None:
        async with Etcd(EtcdSettings.given(etcd.endpoints, {})) as client:
            entry = await client.get(key)
            return None if entry is None else json.loads(entry.value)["lease"]

    def agree() -> bool:
        held = chain.newest()
        return held is not None and asdict(held.claim) == asyncio.run(granted())

    try:
        machines.begin(2)
        wait_until("the folder is held as granted", agree)
        first = machines.holder
        machines.kill(first)
        machines.wait_for_members(1)
        (rest,) = machines.members()
        wait_until("it is granted to the survivor", lambda: agree() and asyncio.run(granted())["worker"] == rest)
        assert_undisturbed(machines.finish(1 - first), undisturbed)
    finally:
        machines.end()


class Cable:
    """A connection to a port of this machine that can be cut: then nothing passes, and nothing is closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = threading.Event()
        self._whole.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            self._whole.wait()
            far = socket.create_connection(("127.0.0.1", self._port))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._whole.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side has closed it


def test_the_coordinator_is_cut_off_from_etcd(machines: Machines, etcd: EtcdCluster, undisturbed: Any) -> None:
    """Another is elected. What the old one decides does not count. When it is back, its workers join again."""
    cables = [Cable(port) for port in etcd.ports]
    machines.start(endpoints=",".join(f"127.0.0.1:{cable.port}" for cable in cables))
    wait_until("it is elected", lambda: machines.events("elected"))
    machines.begin(2, already=1)
    for cable in cables:
        cable.cut()
    wait_until("others go on", lambda: sorted(machines.members()) == ["1.0", "2.0"] and machines.is_training())
    for cable in cables:
        cable.mend()
    machines.wait_for_members(3)
    result = machines.finish(0, 1, 2)
    assert_undisturbed(result, undisturbed)
    epochs = [e["epoch"] for e in result.of("coordinator")]
    assert len(epochs) == 2
    assert epochs[0] < epochs[1]


def test_the_coordinator_is_cut_off_from_etcd_for_good(machines: Machines, etcd: EtcdCluster, undisturbed: Any) -> None:
    """It gives the role up after its patience. Its worker, whose step broke, waits as long again, and ends in words."""
    cables = [Cable(port) for port in etcd.ports]
    endpoints = ",".join(f"127.0.0.1:{cable.port}" for cable in cables)
    cut_off = machines.start("--patience", "3", endpoints=endpoints)
    wait_until("it is elected", lambda: machines.events("elected"))
    machines.begin(2, already=1)
    for cable in cables:
        cable.cut()
    wait_until("others go on", lambda: sorted(machines.members()) == ["1.0", "2.0"] and machines.is_training())
    assert cut_off.wait(60.0) == 1
    assert "the coordinator at" in cut_off.stderr
    assert "etcd has not answered for 3 s: this machine gives up the coordinator's role" in cut_off.stdout
    assert_undisturbed(machines.finish(1, 2), undisturbed)


def test_the_coordinator_is_cut_off_from_the_others_but_not_from_etcd(tmp_path: Path, undisturbed: Any) -> None:
    """It leaves the role to them, as they are more. It decides nothing before: with a minimum of two they go on."""
    with namespaces(3) as network:
        urls = "http://0.0.0.0:2379"
        words = ["--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", urls, "--advertise-client-urls", urls]
        with (tmp_path / "etcd.log").open("wb") as log:
            command = ["ip", "netns", "exec", network.router, "etcd", *words]
            server = subprocess.Popen(command, stdout=log, stderr=log)
        machines = Machines(tmp_path, "10.77.0.1:2379", "--patience", "20")
        try:
            machines.start(hosts="2:4", namespace=network.names[0])
            wait_until("it is elected", lambda: machines.events("elected"))
            for name in network.names[1:]:
                machines.start(hosts="2:4", namespace=name)
            wait_until("all train", lambda: len(machines.members()) == 3 and machines.commits() > 6)
            network.separate(0, 1)
            network.separate(0, 2)
            wait_until("others go on", lambda: sorted(machines.members()) == ["1.0", "2.0"] and machines.is_training())
            reasons = [e["reason"] for e in machines.events("resigned")]
            assert reasons == ["it reaches 1 of 3 workers, and 2 are on machines that are alive in etcd"]
            assert machines.agents[0].wait(90.0) == 1
            assert "the coordinator at" in machines.agents[0].stderr
            assert "this machine leaves the role to another" in machines.agents[0].stdout
            assert_undisturbed(machines.finish(1, 2), undisturbed)
        finally:
            machines.end()
            server.kill()
            server.wait()


def test_a_script_without_a_run_starts_twice_under_the_same_name(tmp_path: Path, etcd: EtcdCluster) -> None:
    """Hosts of the second start have higher numbers, which are no ranks."""
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    for _ in range(2):
        words = ["run", "-n", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints]
        words += ["--rdzv-id", tmp_path.name, str(script)]
        agent = Command(*words, folder=tmp_path, HOLDFAST_TOKEN="a secret of the test")
        assert agent.wait(60.0) == 0, agent.stderr
        assert sorted(line.partition("] ")[2] for line in agent.stdout.splitlines()) == ["0 of 2", "1 of 2"]


# --- parts of etcd -----------------------------------------------------------------------------------------


def test_members_of_etcd_are_lost_and_then_all_of_it(tmp_path: Path, undisturbed: Any) -> None:
    """One of three may go. With two gone nobody can join or be replaced, but training goes on; then all is well."""
    cluster = EtcdCluster(tmp_path)
    machines = Machines(tmp_path / "run", cluster.endpoints)
    machines.folder.mkdir()
    try:
        cluster.wait()
        machines.begin(2)
        cluster.kill(0)
        machines.kill(machines.holder)
        machines.wait_for_members(1)
        (rest,) = {0, 1} - {max(range(2), key=lambda n: machines.agents[n].poll() is not None)}
        cluster.kill(1)
        cluster.kill(2)
        before = machines.commits()
        wait_until("it trains without etcd", lambda: machines.commits() > before + 15)
        for number in range(3):
            cluster.start(number)
        machines.start()
        machines.wait_for_members(2)
        assert_undisturbed(machines.finish(rest, 2), undisturbed)
    finally:
        machines.end()
        cluster.end()


@pytest.mark.thorough("another test loses the machine, and all of etcd, one after the other")
def test_the_machine_of_the_coordinator_is_lost_while_etcd_is_away(tmp_path: Path, undisturbed: Any) -> None:
    """If etcd comes back in time, another is elected; if not, the rest says what is missing."""
    cluster = EtcdCluster(tmp_path)
    machines = Machines(tmp_path / "run", cluster.endpoints, STEPS="200")
    impatient = Machines(tmp_path / "impatient", cluster.endpoints, "--patience", "1", STEPS="2000")
    try:
        cluster.wait()
        for each in (machines, impatient):
            each.folder.mkdir()
            each.begin(2)
        for number in range(3):
            cluster.kill(number)
        lost = [each.holder for each in (machines, impatient)]
        machines.kill(lost[0])
        impatient.kill(lost[1])
        rest = impatient.agents[1 - lost[1]]
        assert rest.wait(60.0) == 1
        assert "the coordinator at" in rest.stderr
        assert len(rest.stderr.splitlines()) == 1
        for number in range(3):
            cluster.start(number)
        machines.wait_for_members(1)
        assert machines.finish(1 - lost[0]).sha256 == undisturbed(200).sha256
    finally:
        machines.end()
        impatient.end()
        cluster.end()
