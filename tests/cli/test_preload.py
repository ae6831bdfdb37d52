"""``--preload``: modules that the zygote imports once; and what ``ps`` and events.jsonl say of a run's processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.events import read_events
from tests.harness import wait_until
from tests.warm import Command

HEAVY = "import os\nIMPORTED_BY = os.getpid()\n"
# Each worker shows who has imported the module; the second one's first life ends with SIGKILL.
SCRIPT = """
import os, sys
import heavy
print("imported by", heavy.IMPORTED_BY, flush=True)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os.kill(os.getpid(), 9)
"""


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "holdfast-logs" / "events.jsonl"
    return [event for event in read_events(path) if event["event"] == kind] if path.exists() else []


def start(folder: Path, *words: str, heavy: str = HEAVY, text: str = SCRIPT) -> Command:
    (folder / "heavy.py").write_text(heavy)
    (folder / "script.py").write_text(text)
    return Command("run", "-n", "2", *words, "script.py", folder=folder)


def importers(process: Command) -> set[int]:
    return {int(line.split()[-1]) for line in process.stdout.splitlines() if "imported by" in line}


def test_the_zygote_imports_a_module_once_for_all_workers_and_their_successors(tmp_path: Path) -> None:
    process = start(tmp_path, "--preload", "json,heavy", "--preload", "json.JSONDecoder")
    assert process.wait(60) == 0, process.stderr
    (zygote,) = events_of(tmp_path, "zygote")
    assert importers(process) == {zygote["pid"]}
    assert len(events_of(tmp_path, "started")) == 4


def test_without_it_each_worker_imports_it_itself(tmp_path: Path) -> None:
    """The control."""
    process = start(tmp_path)
    assert process.wait(60) == 0, process.stderr
    pids = {event["pid"] for event in events_of(tmp_path, "started")}
    assert importers(process) <= pids
    assert len(importers(process)) > 1


@pytest.mark.parametrize(
    ("preload", "heavy", "said"),
    [
        ("nonsense", HEAVY, "--preload nonsense cannot be imported: ModuleNotFoundError"),
        ("heavy", "raise OSError('no such disk')", "--preload heavy cannot be imported: OSError: no such disk"),
        ("heavy", "import nonsense", "--preload heavy cannot be imported: ModuleNotFoundError: No module named 'nons"),
        ("json.nothing", HEAVY, "--preload json.nothing cannot be imported"),
        ("a b", HEAVY, "--preload 'a b' is no module's name"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_sentence(tmp_path: Path, preload: str, heavy: str, said: str) -> None:
    process = start(tmp_path, "--preload", preload, heavy=heavy)
    assert process.wait(60) == 2
    assert said in process.stderr
    assert process.stderr.count("\n") == 1
    assert "imported by" not in process.stdout


def test_a_module_whose_import_ends_the_process_is_one_sentence(tmp_path: Path) -> None:
    """As one that crashes does: no new zygote would survive it either."""
    process = start(tmp_path, "--preload", "json,heavy", heavy="import os; os._exit(3)")
    assert process.wait(120) == 2
    assert "--preload json,heavy ends the process that imports it" in process.stderr
    assert process.stderr.count("\n") == 1


def test_a_module_that_leaves_threads_behind_is_left_out(tmp_path: Path) -> None:
    """Its lock would be held for ever in every fork: here by a thread that is in the middle of something."""
    threads = (
        f"{HEAVY}import threading\nLOCK, HELD = threading.Lock(), threading.Event()\n"
        "def hold():\n    with LOCK:\n        HELD.set()\n        threading.Event().wait()\n"
        "threading.Thread(target=hold, daemon=True).start()\nHELD.wait()\n"
    )
    process = start(tmp_path, "--preload", "heavy,json", heavy=threads)
    assert process.wait(120) == 0, process.stderr
    assert "--preload heavy is left out: its import leaves 1 thread behind" in process.stdout
    assert importers(process) <= {event["pid"] for event in events_of(tmp_path, "started")}


def test_a_thread_that_ends_with_the_import_does_no_harm(tmp_path: Path) -> None:
    threads = f"{HEAVY}import threading\nthreading.Thread(target=threading.Event().wait, args=[0.05]).start()\n"
    process = start(tmp_path, "--preload", "heavy", heavy=threads)
    assert process.wait(60) == 0, process.stderr
    (zygote,) = events_of(tmp_path, "zygote")
    assert importers(process) == {zygote["pid"]}


def test_events_have_pids_and_ps_shows_what_each_process_is(tmp_path: Path) -> None:
    waits = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.01)\n"
    process = start(tmp_path, text=waits)
    wait_until("both have started", lambda: len(events_of(tmp_path, "started")) == 2)
    expected = {
        event["pid"]: f"holdfast: worker {event['worker']} script.py" for event in events_of(tmp_path, "started")
    }
    for kind, title in (("run", "agent script.py"), ("zygote", "zygote"), ("coordinator", "coordinator")):
        (event,) = events_of(tmp_path, kind)
        expected[event["pid"]] = f"holdfast: {title}"

    def shown() -> dict[int, str]:
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in expected}
        return {pid: line.rstrip(b"\0").decode() for pid, line in lines.items()}

    wait_until("all have their titles", lambda: shown() == expected)
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in expected}
    assert names == {"holdfast:agent", "holdfast:zygote", "holdfast:coordi", "holdfast:0.0", "holdfast:0.1"}
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"PATH=" in environment, "what lies behind the command line is untouched"
    (tmp_path / "end").touch()
    assert process.wait(60) == 0
    assert {event["pid"] for event in events_of(tmp_path, "exit")} < expected.keys()


def test_standalone_is_accepted_and_takes_the_place_of_an_endpoint(tmp_path: Path) -> None:
    process = start(tmp_path, "--standalone", "--rdzv-endpoint", "elsewhere.invalid:29700", text="print('here')\n")
    assert process.wait(60) == 0, process.stderr
    process = start(tmp_path, "--standalone", "--nnodes", "2")
    assert process.wait(60) == 2
    assert "--standalone is for one machine" in process.stderr
