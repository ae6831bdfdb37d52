"""The page's server, and its metrics: what it tells, what it refuses, and strangers."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.measuring import free_port
from tests.harness import TRAIN, wait_until
from tests.warm import Command
from tests.watch.server import Site, site
from tests.watch.test_fold import RECORDED, events_of, until
from tests.watch.test_top import folder_with

prometheus_client = pytest.importorskip("prometheus_client", reason="holdfast[watch] is not installed")
HOSTILE = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under way, with names that somebody hostile has chosen."""
    events = until(events_of("stage_lost"), "checkpoint", 2)
    next(event for event in events if event["event"] == "run")["command"] = [HOSTILE]
    logs = folder_with(events, tmp_path_factory.mktemp("run") / "logs")
    (logs / "worker-0.1.log").write_text("a line of worker 0.1\n")
    return logs


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    other = folder_with(events_of("replicas_apart"), tmp_path_factory.mktemp("other") / "apart")
    shutil.copy(RECORDED / "replicas_apart_metrics.jsonl", other / "metrics.jsonl")
    return other


@pytest.fixture(scope="module")
def served(logs: Path, other: Path) -> Iterator[Site]:
    with site(str(logs), str(other), "--actions", folder=logs.parent) as found:
        yield found


def test_views_of_several_runs_their_past_and_their_logs(served: Site) -> None:
    status, text = served.ask("/api/view")
    view = json.loads(text)
    assert (status, view["run"], view["runs"], view["step"]) == (200, "logs", ["logs", "apart"], 8)
    assert json.loads(served.ask("/api/view?run=apart")[1])["phase"] == "finished"
    assert len(json.loads(served.ask("/api/curves?run=apart")[1])["lr"]["steps"]) > 5
    lost = next(moment["t"] for moment in view["moments"] if moment["kind"] == "loss")
    past = json.loads(served.ask(f"/api/past?t={lost - 0.001}")[1])
    assert [worker["name"] for worker in past["workers"]] == ["0.0", "0.1", "0.2", "0.3"]
    assert served.ask("/api/log?worker=0.1") == (200, "a line of worker 0.1\n")
    for path in ("/api/log?worker=../x", "/api/view?run=x", "/api/past?run=x&t=1", "/etc/passwd", "/../feed.py"):
        assert served.ask(path)[0] == 404, path
    assert served.ask("/api/past?t=x")[0] == 400


def test_news_are_streamed(served: Site, logs: Path) -> None:
    connection = http.client.HTTPConnection(served.host, served.port, timeout=60)
    connection.request("GET", "/api/stream")
    answer = connection.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")

    def next_view() -> dict[str, object]:
        while answer.readline() != b"event: view\n":
            pass
        found: dict[str, object] = json.loads(answer.readline().removeprefix(b"data: "))
        return found

    assert next_view()["counts"] == {"run": 1, "join": 1, "checkpoint": 2, "loss": 1, "replay": 1, "recovery": 1}
    with (logs / "events.jsonl").open("a") as file:
        file.write('{"t": 1.0, "event": "coordinator-restart"}\n')
    assert "notice" in next_view()["counts"]  # type: ignore[operator]
    connection.close()


def test_the_server_needs_no_torch() -> None:
    """It starts at once, and takes 40 MB instead of 300."""
    code = "import holdfast.watch.server, holdfast.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_strangers_change_nothing(served: Site) -> None:
    act = {"run": "logs", "action": "kill", "worker": "0.1"}
    assert served.ask("/", host="evil.example")[0] == 403
    assert served.ask("/api/view", host="evil.example")[0] == 403
    assert served.ask("/api/act", act)[0] == 403
    assert served.ask("/api/act", act, authorization="Bearer x")[0] == 403
    assert served.ask("/api/act")[0] == 405
    assert served.ask("/api/enter", {"code": served.code}, origin="http://evil.example")[0] == 400
    assert served.ask("/api/enter", {"code": served.code}, content_type="text/plain")[0] == 400
    assert served.ask("/api/enter", {"code": "x" * 10_000})[0] == 400
    assert served.ask("/api/enter", ["code"])[0] == 400
    status, text = served.ask("/api/enter", {"code": served.code})
    assert status == 200
    key = f"Bearer {json.loads(text)['secret']}"
    assert served.ask("/api/enter", {"code": served.code})[0] == 403
    assert served.ask("/api/act", act, authorization=key, origin="http://evil.example")[0] == 400
    status, text = served.ask("/api/act", act, authorization=key)  # the numbers of those processes are others' by now
    assert (status, "does not run on this machine" in text) == (400, True)
    assert served.ask("/api/act", {**act, "worker": HOSTILE}, authorization=key)[0] == 400


def test_without_actions_nobody_gets_in(logs: Path, tmp_path: Path) -> None:
    with site(str(logs), folder=tmp_path) as reading:
        assert reading.code == ""
        assert reading.ask("/api/enter", {"code": ""})[0] == 403
        assert not json.loads(reading.ask("/api/view")[1])["actions"]


def test_a_thousand_silent_connections_keep_nobody_out(served: Site) -> None:
    held = [socket.create_connection((served.host, served.port), timeout=60) for _ in range(1_000)]
    try:
        assert served.ask("/api/view")[0] == 200
    finally:
        for connection in held:
            connection.close()


def test_metrics_are_what_prometheus_reads(served: Site) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    status, text = served.ask("/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {(each.name, *sorted(each.labels.items())): each.value for f in families.values() for each in f.samples}
    assert samples["holdfast_step", ("run", "logs")] == 8
    assert samples["holdfast_recoveries_total", ("run", "logs")] == 1
    assert samples["holdfast_phase", ("phase", "finished"), ("run", "apart")] == 1
    assert samples["holdfast_recovery_seconds_bucket", ("le", "+Inf"), ("run", "logs")] == 1
    named = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    for family in families.values():
        full = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{full}`" in named, f"{full} is not documented"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not here (apt install prometheus)")
def test_a_real_prometheus_scrapes_it(served: Site, tmp_path: Path) -> None:
    port, found = free_port(), {}
    target = f"{served.host}:{served.port}"
    job = {"job_name": "holdfast", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
    words = [f"--web.listen-address=127.0.0.1:{port}", f"--config.file={tmp_path}/prometheus.yml"]
    command = ["prometheus", *words, f"--storage.tsdb.path={tmp_path}/data", "--log.level=error"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def is_there() -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", '/api/v1/query?query=holdfast_step%7Brun="logs"%7D')
            found.update(json.loads(connection.getresponse().read()))
        except (OSError, ValueError, http.client.HTTPException):
            return False
        return bool(found["data"]["result"])

    try:
        wait_until("a scrape", is_there)
        [result] = found["data"]["result"]
        assert result["value"][1] == "8"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def test_the_dashboard_asks_for_metrics_that_there_are(served: Site) -> None:
    root = Path(__file__).parents[2]
    dashboard = json.loads((root / "examples" / "grafana" / "holdfast.json").read_text())
    asked = {word for panel in dashboard["panels"] for each in panel["targets"] for word in named_in(each["expr"])}
    told = served.ask("/metrics")[1]
    assert len(asked) > 12
    assert [name for name in asked if f"\n{name}" not in told and name not in LATER] == []


LATER = {"holdfast_learning_rate", "holdfast_gradient_norm", "holdfast_samples_per_second"}  # the journal has them


def named_in(expression: str) -> set[str]:
    return set(re.findall(r"holdfast_\w+", expression))


def test_a_worker_that_hangs_by_request_is_replaced_and_a_preempted_machine_leaves(tmp_path: Path) -> None:
    settings = {"STEPS": "100000", "WANTED": "9", "RESULTS": str(tmp_path / "results.jsonl")}
    words = ["-n", "2", "--heartbeat-timeout", "1", "--log-dir", "logs", str(TRAIN)]
    run = Command("run", *words, folder=tmp_path, **settings)
    (tmp_path / "logs").mkdir(exist_ok=True)
    try:
        with site("logs", "--actions", folder=tmp_path) as served:
            secret = json.loads(served.ask("/api/enter", {"code": served.code})[1])["secret"]

            def trains(worker: str) -> bool:
                view = json.loads(served.ask("/api/view")[1])
                return worker in {each["name"] for each in view["workers"] if each["state"] == "training"}

            def act(action: str, worker: str) -> tuple[int, str]:
                asked = {"run": "logs", "action": action, "worker": worker}
                return served.ask("/api/act", asked, authorization=f"Bearer {secret}")

            wait_until("both train", lambda: trains("0.1"))
            assert act("shout", "0.1")[0] == 400
            assert act("hang", "0.1")[0] == 200
            wait_until("a replacement trains", lambda: trains("0.2"))
            assert act("kill", "0.1")[0] == 400  # it is gone
            assert act("preempt", "0.2")[0] == 200
        assert run.wait(120) == 128 + signal.SIGTERM
    finally:
        run.kill()
    events = (tmp_path / "logs" / "events.jsonl").read_text()
    assert '"preempted"' in events
    assert "no heartbeat" in events
