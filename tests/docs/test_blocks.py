"""The code in README and docs: complete scripts run, fragments fit the library, commands have the options they show.

A Python block is run, unless a comment above it says otherwise: ``<!-- fragment: why -->`` for one that needs what only
a reader has, ``<!-- run by tests/… -->`` for one that another test runs with more care. ``<!-- every block is run by
tests/… -->`` under the title of a page is for all of them.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.checkpoint
from bench.__main__ import app as races
from docs.site.commands import commands
from docs.site.markdown import CODE, Block, blocks_of, without_blocks
from docs.site.places import ROOT, sources
from tests import warm

PAGES = [page for page in sources() if page != "CHANGELOG.md"]  # it tells what was
FRAGMENTS = 10  # at most: a page whose code cannot be tried is believed by nobody
COMMANDS = {**commands(), **commands(races, "python -m bench")}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
README_NEEDS = """
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
model = torch.nn.Linear(2, 3)
dataset = TensorDataset(torch.randn(64, 2), torch.randint(3, (64,)))
"""


def python_blocks(page: str) -> Iterator[Block]:
    """The Python blocks of a page. A note for every block stands once, under the title."""
    text = (ROOT / page).read_text()
    whole = re.match(r"# .*\n\n<!-- every block is (.*) -->\n", text)
    for block in blocks_of(text):
        if block.language == "python":
            yield replace(block, note=whole[1]) if whole and not block.note else block


PYTHON = [(page, block) for page in PAGES for block in python_blocks(page)]


def named(case: object) -> str:
    return f"line-{case.line}" if isinstance(case, Block) else str(case)


# --- Python -----------------------------------------------------------------------------------------


def run_script(folder: Path, script: str) -> int:
    """The exit code of ``python script.py`` in a fork that has imported torch already."""
    (folder / "documented_script.py").write_text(script)
    before = Path.cwd()
    os.chdir(folder)
    try:
        return warm.start("documented_script", environment={**os.environ, "OMP_NUM_THREADS": "1"}, passed=[]).wait(120)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("page", "block"), [case for case in PYTHON if not case[1].note], ids=named)
def test_a_complete_script_runs(page: str, block: Block, tmp_path: Path) -> None:
    assert run_script(tmp_path, block.text) == 0


def test_a_script_that_fails_is_noticed(tmp_path: Path) -> None:
    assert run_script(tmp_path, "import holdfast\nholdfast.Placement(stages=0)\n") == 2


def test_the_change_in_the_readme_runs(tmp_path: Path) -> None:
    [change] = [block.text for block in blocks_of((ROOT / "README.md").read_text()) if block.language == "diff"]
    added, gone = ([line[1:] for line in change.splitlines() if line.startswith(sign)] for sign in "+-")
    ast.parse("\n".join(gone))
    script = "\n".join([README_NEEDS, *added])
    assert "run.steps(1000)" in script
    assert run_script(tmp_path, script.replace("run.steps(1000)", "run.steps(3)")) == 0


@pytest.mark.parametrize(("page", "block"), [case for case in PYTHON if case[1].note], ids=named)
def test_a_block_that_is_not_run_here_says_why(page: str, block: Block) -> None:
    kind, _, rest = block.note.partition(" ")
    if kind == "fragment:":
        assert len(rest.split()) > 1, "a fragment needs a reason"
        assert not misfits(block.text)
        return
    runner = re.fullmatch(r"run by (tests/[\w/]+\.py)", block.note)
    assert runner is not None, block.note
    assert Path(page).name in (ROOT / runner[1]).read_text()


def test_there_are_few_fragments() -> None:
    assert len([block for _, block in PYTHON if block.note.startswith("fragment:")]) <= FRAGMENTS
    assert len(PYTHON) > 10


def misfits(code: str) -> list[str]:
    """What a fragment asks of holdfast that holdfast does not have: names, and arguments by name."""
    tree = ast.parse(code)
    known: dict[str, Any] = {"holdfast": holdfast}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
            home = __import__(node.module or "", fromlist=["*"])
            known |= {alias.name: getattr(home, alias.name, None) for alias in node.names}
    return [wrong for node in ast.walk(tree) for wrong in _wrong_in(node, known)]


def _wrong_in(node: ast.AST, known: dict[str, Any]) -> Iterator[str]:
    what = _meant(node, known)
    if isinstance(node, ast.Attribute) and _meant(node.value, known) is not None and what is None:
        yield ast.unparse(node)
    if isinstance(node, ast.Call) and (called := _meant(node.func, known)) is not None:
        taken = inspect.signature(called).parameters
        if not any(each.kind == each.VAR_KEYWORD for each in taken.values()):
            yield from (
                f"{ast.unparse(node.func)}({word.arg}=)" for word in node.keywords if word.arg not in {*taken, None}
            )


def _meant(node: ast.AST, known: dict[str, Any]) -> Any:
    """The part of holdfast that an expression names, or None."""
    if isinstance(node, ast.Attribute):
        return getattr(_meant(node.value, known), node.attr, None)
    return known.get(node.id) if isinstance(node, ast.Name) else None


def test_a_fragment_that_does_not_fit_is_noticed() -> None:
    assert not misfits("run = holdfast.Run(..., data=holdfast.Data(mine, shuffle=False))")
    assert misfits("holdfast.Runs(data=mine)") == ["holdfast.Runs"]
    assert misfits("from holdfast import Data\nholdfast.Run(datas=Data(mine, shufle=False))") == [
        "holdfast.Run(datas=)",
        "Data(shufle=)",
    ]
    assert misfits("from holdfast.checkpoint import save\nsave(path, tree, grup=None)") == ["save(grup=)"]


def test_scripts_of_the_quick_start_come_to_the_same_hash(tmp_path: Path) -> None:
    page = blocks_of((ROOT / "docs" / "quickstart.md").read_text())
    [script] = [block.text for block in page if block.language == "python"]
    [fault] = re.findall(r'HOLDFAST_FAULTS="([^"]*)"', "".join(block.text for block in page))
    hashes = {}
    for name, words, environment in (("alone", ["-n", "1"], {}), ("killed", ["-n", "4"], {"HOLDFAST_FAULTS": fault})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(script)
        done = warm.Command("run", *words, "train.py", folder=folder, **environment)
        assert done.wait(120) == 0, done.stderr
        hashes[name] = done.stdout.split()[-1]
        assert len(hashes[name]) == 64
    assert hashes["alone"] == hashes["killed"]
    events = (tmp_path / "killed" / "holdfast-logs" / "events.jsonl").read_text()
    assert '"failure"' in events


# --- commands ---------------------------------------------------------------------------------------


def commands_in(text: str) -> list[list[str]]:
    """The commands of a block or a line, as words; without comments, prompts and variables set for them."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:
            continue  # not a command: an apostrophe in a sentence
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
            words = words[1:]
        if words:
            found.append(words)
    return found


def all_commands(page: str) -> list[list[str]]:
    """The commands of a page: in its blocks for shells, after a ``$`` in any other, and in code within a line."""
    text = (ROOT / page).read_text()
    found = []
    for block in blocks_of(text):
        lines = block.text if block.language == "sh" else "\n".join(re.findall(r"^\$ .*$", block.text, re.MULTILINE))
        found += commands_in(lines)
    return found + [
        words for code in CODE.finditer(without_blocks(text)) for words in commands_in(code[2].replace("\n", " "))
    ]


def unknown(words: list[str]) -> list[str]:
    """What a command line asks for that is not there: a command, an option, a target, a race."""
    program = Path(words[0]).name
    if program == "make":
        return [word for word in words[1:2] if "=" not in word and word not in TARGETS]
    if words[:3] == ["python", "-m", "bench"]:
        return _unknown_in("python -m bench", words[3:])
    return _unknown_in("holdfast", words[1:]) if program == "holdfast" else []


def _unknown_in(program: str, given: list[str]) -> list[str]:
    if not given or given[0] in ("--version", "--help", "NAME"):
        return []
    for length in (2, 1):
        if (command := COMMANDS.get(" ".join([program, *given[:length]]))) is not None:
            return _unknown_options(command, given[length:])
    is_group = any(name.startswith(f"{program} {given[0]} ") for name in COMMANDS)
    return [] if is_group and len(given) == 1 else given[:1]


def _unknown_options(command: Any, words: list[str]) -> list[str]:
    """Options up to the script that a command starts, whose own options come after it."""
    options = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
    wrong = []
    at = 0
    while at < len(words):
        word, _, value = words[at].partition("=")
        at += 1
        if not word.startswith("-"):
            if not command.context_settings.get("allow_interspersed_args", True):
                break
        elif word not in {*options, "--help"}:
            wrong.append(word)
        elif not value and word in options and not options[word].is_flag:
            at += 1
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_that_a_page_shows(page: str) -> None:
    assert [(words, wrong) for words in all_commands(page) if (wrong := unknown(words))] == []


def test_there_are_commands_to_check() -> None:
    assert len([words for page in PAGES for words in all_commands(page) if Path(words[0]).name == "holdfast"]) > 60


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("holdfast run -n 4 --spares 1 train.py --its own", []),
        ("holdfast run -n 4 --spare 1 train.py", ["--spare"]),
        ("holdfast runs train.py", ["runs"]),
        ("HOLDFAST_TOKEN=x holdfast ckpt lst runs", ["ckpt"]),
        ("holdfast ckpt ls runs --jsn  # all of them", ["--jsn"]),
        ("$ make tests", ["tests"]),
        ("python -m bench undone", ["undone"]),
    ],
)
def test_a_command_that_is_not_there_is_noticed(line: str, wrong: list[str]) -> None:
    [words] = commands_in(line)
    assert unknown(words) == wrong
