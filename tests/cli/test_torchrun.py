"""torchrun's flags, variables and environment: what it takes is taken, or refused by its name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
import typer.main
from torch.distributed.run import get_args_parser

from holdfast.cli.main import app
from holdfast.cli.torchrun import FOREIGN, SHARED, VARIABLES, parse_hidden, parse_patience, parse_workers, variable
from holdfast.errors import UsageError
from tests.warm import Command

ROOT = Path(__file__).parents[2]
TORCHS_OWN = {"-h", "--help"}
# Variables that differ by their nature: where the run is, its name, files and ports; and what our processes need.
OWN_VALUES = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PWD", "OLDPWD", "_"]
# torchrun's agent keeps the store; ours does not: rank 0 does. It also handles other signals, and restarts more often.
DIFFERENT = {
    "TORCHELASTIC_USE_AGENT_STORE": ("True", "False"),
    "TORCHELASTIC_SIGNALS_TO_HANDLE": ("SIGTERM,SIGINT,SIGHUP,SIGQUIT", "SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2"),
}
TELL = """
import json, os, sys
text = json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)})
open(os.path.join(os.environ["TOLD"], os.environ["RANK"]), "w").write(text)
print("told", os.environ["RANK"], flush=True)
"""


def options_of_run() -> dict[str, Any]:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    return {name: option for option in command.params for name in option.opts}


def unknown(flags: list[str]) -> list[str]:
    known = options_of_run().keys() | TORCHS_OWN
    return [flag for flag in flags if flag.replace("_", "-") not in known]


def test_every_flag_of_torchrun_is_known() -> None:
    flags = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    assert len(flags) > 40
    assert unknown(flags) == []
    assert unknown([*flags, "--a-flag-of-tomorrow"]) == ["--a-flag-of-tomorrow"]  # the control


def test_every_flag_has_its_variable() -> None:
    options = options_of_run()
    for name in [*SHARED, *(foreign.name for foreign in FOREIGN)]:
        assert variable(name) in options[name].envvar


def test_every_flag_is_in_the_table_of_the_documentation() -> None:
    table = (ROOT / "docs" / "cluster.md").read_text().partition("## torchrun")[2].partition("\n## ")[0]
    missing = [name for name in [*SHARED, *(foreign.name for foreign in FOREIGN)] if f"`{name}`" not in table]
    assert not missing


def variables_of_torch() -> set[str]:
    """The variables that the sources of torchrun and of its agent read, as their literals or constants name them."""
    folder = Path(torch.distributed.__file__).parent
    sources = [folder / "run.py", *(folder / "launcher").rglob("*.py"), *(folder / "elastic" / "agent").rglob("*.py")]
    text = "\n".join(source.read_text() for source in sources)
    read = re.findall(r"""(?:environ(?:\.get)?|getenv)[\[(]\s*["'](\w+)""", text)
    constants = re.findall(r"""^TORCHELASTIC_\w+ = ["'](\w+)""", text, re.MULTILINE)
    return {*read, *constants}


# What a script reads, or is given: not torchrun's agent itself. CUDA_VISIBLE_DEVICES is left as it is.
OF_SCRIPTS = {"LOCAL_RANK", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
OF_SCRIPTS |= {"CUDA_VISIBLE_DEVICES"}
# An option of ``holdfast run`` reads it, and a check of its own; the file is the timer's, which is refused.
OTHERS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PYTHON_EXEC", "TORCHELASTIC_TIMER_FILE"}


def test_every_variable_of_torchruns_agent_is_known() -> None:
    found = variables_of_torch()
    assert {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_ENABLE_FILE_TIMER", "PYTHON_EXEC"} <= found
    assert found - OF_SCRIPTS - OTHERS - {known.name for known in VARIABLES} == set()
    table = (ROOT / "docs" / "cluster.md").read_text().partition("## torchrun")[2].partition("\n## ")[0]
    assert [name for name in [*OTHERS, *(known.name for known in VARIABLES)] if f"`{name}`" not in table] == []


class Torchrun(Command):
    """torchrun itself."""

    module = "torch.distributed.run"


def told(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / str(rank)).read_text())
    return found


def test_a_script_sees_what_it_sees_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELL)
    words = [
        "--nproc_per_node",
        "2",
        "--max-restarts=3",
        "--role",
        "trainer",
        str(script),
        "--lr",
        "1",
        "${local_rank}",
    ]
    for name in ("torchrun", "ours"):
        (tmp_path / name).mkdir()
    processes = [
        Torchrun(*words, folder=tmp_path, name="them", TOLD=str(tmp_path / "torchrun")),
        Command("run", *words, folder=tmp_path, TOLD=str(tmp_path / "ours")),
    ]
    for process in processes:
        assert process.wait(60) == 0, process.stderr
    for rank in range(2):
        theirs, ours = told(tmp_path / "torchrun", rank), told(tmp_path / "ours", rank)
        assert ours["arguments"] == theirs["arguments"] == ["--lr", "1", str(rank)]
        expected, seen = theirs["environment"], ours["environment"]
        for name, pair in DIFFERENT.items():
            assert (expected.pop(name), seen.pop(name)) == pair
        for name in OWN_VALUES:
            assert (name in expected) <= (name in seen), name
            expected.pop(name, None)
        expected.pop("TOLD")
        assert {name: seen.get(name) for name in expected} == expected


@pytest.mark.parametrize("flag", FOREIGN, ids=lambda flag: flag.name)
def test_what_is_not_possible_is_refused_by_its_name(flag: Any) -> None:
    if flag.accepts("x"):
        flag.check("x")  # there is nothing to refuse
        return
    with pytest.raises(UsageError) as refused:
        flag.check("x")
    assert flag.name in str(refused.value)
    assert flag.hint in str(refused.value)


ACCEPTED = (
    "--monitor_interval 0.5 --start-method fork --run-path -t 3 --node-rank 0 --event_log_handler null --standalone"
)


def test_flags_that_ask_for_what_is_done_anyway(tmp_path: Path) -> None:
    """Two workers by a variable, of which one is shown by a flag; its log has what is not shown."""
    (tmp_path / "script.py").write_text(TELL)
    words = [*ACCEPTED.split(), "--local_ranks_filter", "1", "script.py"]
    process = Command("run", *words, folder=tmp_path, TOLD=str(tmp_path), PET_NPROC_PER_NODE="2", PET_REDIRECTS="0")
    assert process.wait(60) == 0, process.stderr
    assert "told 1" in process.stdout
    assert "told 0" not in process.stdout
    assert (tmp_path / "holdfast-logs" / "worker-0.0.log").read_text() == "told 0\n"


@pytest.mark.parametrize(
    ("variables", "words", "said"),
    [
        ({}, ["--no_python"], "--no-python"),
        ({"PET_NO_PYTHON": "1"}, [], "--no-python"),
        ({"PET_RDZV_BACKEND": "zookeeper"}, [], "--rdzv-backend zookeeper"),
        ({}, ["--rdzv-conf", "read_timeout=3"], "--rdzv-conf read_timeout"),
        ({"PET_NNODES": "4", "PET_MASTER_ADDR": "127.0.0.1"}, [], "HOLDFAST_TOKEN"),
        ({"PYTHON_EXEC": "/bin/sh"}, [], "PYTHON_EXEC"),
        ({"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}"}, [], "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, [], "TORCHELASTIC_ENABLE_FILE_TIMER"),
        ({}, ["--redirects", "1"], "--redirects 1"),
        ({}, ["-n", "gpu"], "-n gpu"),
    ],
)
def test_bad_use_is_a_sentence(tmp_path: Path, variables: dict[str, str], words: list[str], said: str) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(9)")
    process = Command("run", *words, "script.py", folder=tmp_path, **variables)
    assert process.wait(60) == 2
    assert said in process.stderr
    assert process.stderr.count("\n") == 1


def test_a_flag_counts_more_than_its_variable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TELL)
    words = ["--nproc-per-node", "1", "script.py", "--nproc_per_node", "7"]
    variables = {"PET_NPROC_PER_NODE": "gpu", "PET_NO_PYTHON": "0", "PET_START_METHOD": "fork"}
    process = Command("run", *words, folder=tmp_path, TOLD=str(tmp_path), **variables)
    assert process.wait(60) == 0, process.stderr
    assert told(tmp_path, 0)["arguments"] == ["--nproc_per_node", "7"]  # the script's own are left alone
    assert not (tmp_path / "1").exists()


def test_how_many_workers() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [parse_workers(text) for text in ("3", "cpu")] == [3, cores]
    for text in ("0", "-1", "two", ""):
        with pytest.raises(UsageError, match="-n"):
            parse_workers(text)


def test_which_workers_are_shown() -> None:
    assert parse_hidden("3", "", 3) == {0, 1, 2}
    assert parse_hidden("1:3", "0", 3) == {1, 2}
    for redirects, only in [("4", ""), ("0:2", ""), ("", ""), ("0", "all")]:
        with pytest.raises(UsageError):
            parse_hidden(redirects, only, 3)


def test_patience_of_the_rendezvous() -> None:
    assert parse_patience("timeout=5,join_timeout=600", 30.0) == 600.0
    for conf in ("join_timeout=soon", "join_timeout", "is_host=1"):
        with pytest.raises(UsageError, match="rdzv-conf"):
            parse_patience(conf, 30.0)
