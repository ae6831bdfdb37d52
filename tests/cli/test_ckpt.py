"""``holdfast ckpt`` as a user meets it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import open_checkpoint, save
from holdfast.checkpoint.convert import convert
from holdfast.checkpoint.listing import find
from tests.checkpoint.child import become_nobody, in_child
from tests.cli.conftest import Call


@pytest.fixture
def holdfast(call: Call) -> Call:
    return partial(call, "ckpt")


def tree(step: int, lr: float = 0.1) -> dict[str, Any]:
    torch.manual_seed(step)
    layers = [(f"a_rather_long_name_for_layer_{n:02d}", nn.Linear(8, 8)) for n in range(15)]
    model = nn.ModuleDict(dict(layers))
    model["first"] = nn.Linear(3, 2)
    model["tied"] = nn.Linear(3, 2, bias=False)
    model["tied"].weight = model["first"].weight
    model["first"].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    sum(p.sum() for p in trained).backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": step, "note": "a sentence that is long" * 9}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: two checkpoints, and a save that was not completed."""
    folder = tmp_path_factory.mktemp("run")
    for step in (10, 20):
        save(folder / f"step-{step:08d}", tree(step))
    shutil.copytree(folder / "step-00000020", folder / "step-00000030")
    (folder / "step-00000030" / "index.json").unlink()
    return folder


def damaged(run: Path, place: Path) -> Path:
    shutil.copytree(run / "step-00000020", place)
    path = next(place.glob("data-*"))
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    return place


# --- ls -------------------------------------------------------------------------------------------


def test_ls_of_a_run(holdfast, run: Path) -> None:
    said = holdfast("ls", run, "--json")
    assert said.code == 0
    found = said.json["checkpoints"]
    assert [(one["step"], one["state"], one["newest"]) for one in found] == [
        (10, "complete", False),
        (20, "complete", True),
        (30, "not completed", False),
    ]
    assert found[0]["format"] == "holdfast"
    assert found[0]["bytes"] == sum(path.stat().st_size for path in (run / "step-00000010").glob("data-*"))
    assert found[0]["tensors"] == len(open_checkpoint(run / "step-00000010").tensors)
    rows = holdfast("ls", run).out.splitlines()
    assert any("step-00000020" in row and row.endswith("newest       ") for row in rows)


def test_ls_finds_every_format_below_a_folder(holdfast, run: Path, tmp_path: Path) -> None:
    source = open_checkpoint(run)
    for to in ("holdfast", "hf", "dcp", "torch", "deepspeed-universal"):
        convert(source, tmp_path / "models" / to, to)
    damaged(run, tmp_path / "cut")
    next((tmp_path / "cut").glob("data-*")).unlink()
    (tmp_path / "cut" / "data-0123456789ab-0.safetensors").write_bytes(b"x")
    (tmp_path / "other" / "folder").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("nothing")
    said = holdfast("ls", tmp_path, "--json")
    found = {Path(one["path"]).relative_to(tmp_path).as_posix(): one for one in said.json["checkpoints"]}
    cut = found.pop("cut")
    assert "does not exist" in cut["state"]
    assert "does not exist" in said.err
    assert {name: one["format"] for name, one in found.items()} == {
        "models/dcp": "dcp",
        "models/deepspeed-universal/global_step20_universal": "deepspeed-universal",
        "models/hf": "hf",
        "models/holdfast": "holdfast",
        "models/torch": "torch",
    }
    assert all(one["state"] == "complete" for one in found.values())
    assert sum(one["newest"] for one in found.values()) == 1


def test_ls_of_nothing(holdfast, tmp_path: Path) -> None:
    said = holdfast("ls", tmp_path)
    assert (said.code, said.out) == (0, f"there is no checkpoint in {tmp_path}\n")


def test_ls_goes_on_past_a_folder_without_rights() -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    folder.chmod(0o755)
    for name in ("a", "b", "c"):
        save(folder / name, {"step": 1})
    (folder / "b").chmod(0o000)

    def work() -> None:
        become_nobody()
        found = {one.path.name: one.state for one in find(folder)}
        assert (found["a"], found["c"]) == ("complete", "complete")
        assert "no right to read" in found["b"]

    try:
        in_child(work)
    finally:
        shutil.rmtree(folder)


# --- inspect --------------------------------------------------------------------------------------


def test_inspect_shows_the_newest_of_a_run(holdfast, run: Path) -> None:
    said = holdfast("inspect", run)
    assert said.code == 0
    assert f"{run / 'step-00000020'}: holdfast checkpoint of step 20" in said.out
    assert "rank 0 of 1 on" in said.out
    assert "more (--all shows them)" in said.out
    assert "betas (0.9, 0.999)" in said.out


def test_inspect_all(holdfast, run: Path) -> None:
    out = holdfast("inspect", run, "--all").out
    assert "more (--all" not in out
    assert "tied: tied.weight" in out
    assert "frozen" in out
    for name in open_checkpoint(run).tensors:
        assert name.removeprefix("model/").removeprefix("optimizer/state/") in out


def test_inspect_as_json(holdfast, run: Path) -> None:
    said = holdfast("inspect", run, "--json")
    catalogue = open_checkpoint(run)
    found = {tensor["name"]: tensor for tensor in said.json["tensors"]}
    assert said.json["step"] == 20
    assert list(found) == list(catalogue.tensors)
    assert found["model/first.bias"]["marks"] == ["frozen"]
    stored = catalogue.tensors["model/first.bias"].pieces[0].stored
    assert found["model/first.bias"]["pieces"] == [
        {"file": stored.file, "byte": stored.offset, "offset": [0], "shape": [2]}
    ]
    assert said.json["groups"]["optimizer"][0]["lr"] == 0.1
    assert said.json["values"]["step"] == 20


def test_inspect_some_tensors(holdfast, run: Path) -> None:
    said = holdfast("inspect", run, "--tensors", "first.*", "--json")
    assert [tensor["name"] for tensor in said.json["tensors"]] == ["model/first.weight", "model/first.bias"]
    assert "[0:2, 0:3]" in said.err
    assert holdfast("inspect", run, "--tensors", "nothing*").code == 2


def test_inspect_says_what_was_not_read(holdfast, run: Path, tmp_path: Path) -> None:
    catalogue = open_checkpoint(run)
    catalogue.tree["device"] = torch.device("cpu")
    convert(catalogue, tmp_path / "b", "holdfast")
    assert "not read: device" in holdfast("inspect", tmp_path / "b").out


# --- verify ---------------------------------------------------------------------------------------


def test_verify(holdfast, run: Path, tmp_path: Path) -> None:
    said = holdfast("verify", run, "--json")
    assert (said.code, said.json["ok"], said.json["damaged"]) == (0, True, [])
    bad = damaged(run, tmp_path / "bad")
    said = holdfast("verify", bad, "--json")
    assert said.code == 4
    [damage] = said.json["damaged"]
    assert "model/first.bias" in damage["tensors"]
    assert damage["file"] in said.err
    assert holdfast("verify", bad).code == 4


# --- diff -----------------------------------------------------------------------------------------


def test_verify_says_no_more_than_it_knows(holdfast, tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": {"w": torch.ones(2)}, "step": 3})
    for to in ("torch", "dcp"):
        convert(open_checkpoint(tmp_path / "a"), tmp_path / to, to)
    assert "a: every byte is as it was written" in holdfast("verify", tmp_path / "a").out
    assert "torch: every record is as it was written" in holdfast("verify", tmp_path / "torch").out
    said = holdfast("verify", tmp_path / "dcp").out
    assert "dcp: nothing wrong was found" in said
    assert "not checked: .metadata" in said


def test_paths_are_shown_as_they_were_given(holdfast, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    assert holdfast("verify", run.name).out.startswith(f"{run.name}/step-00000020: every byte")
    assert holdfast("verify", f"{run.name}/step-00000010", "--json").json["path"] == f"{run.name}/step-00000010"


def test_diff(holdfast, run: Path) -> None:
    a, b = run / "step-00000010", run / "step-00000020"
    assert holdfast("diff", a, a).code == 0
    said = holdfast("diff", a, b, "--json")
    assert said.code == 1
    assert {"name": "step", "kind": "value", "a": "10", "b": "20"}.items() <= next(
        row for row in said.json["rows"] if row["name"] == "step"
    ).items()
    assert holdfast("diff", a, b, "--tolerance", 100, "--section", "model").code == 0


def test_diff_of_things_that_have_nothing_in_common(holdfast, tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": {"w": torch.ones(2)}})
    save(tmp_path / "b", {"weights": {"w": torch.ones(2)}})
    said = holdfast("diff", tmp_path / "a", tmp_path / "b")
    assert said.code == 1
    assert "different: 2 differences; equal: nothing" in said.out


def test_diff_draws_settings_of_many_parameters_together(holdfast, run: Path, tmp_path: Path) -> None:
    save(tmp_path / "b", tree(20, lr=0.2))
    out = holdfast("diff", run, tmp_path / "b", "--all").out
    assert "optimizer/param_groups/* (31 parameters)/lr" in out
    assert "0.1 in A, 0.2 in B" in out


def test_diff_of_a_damaged_checkpoint(holdfast, run: Path, tmp_path: Path) -> None:
    said = holdfast("diff", run, damaged(run, tmp_path / "bad"))
    assert said.code == 4
    assert "is damaged between bytes" in said.err


# --- convert --------------------------------------------------------------------------------------


def test_convert(holdfast, run: Path, tmp_path: Path) -> None:
    said = holdfast("convert", run, tmp_path / "hf", "--to", "hf", "--json")
    assert said.code == 0
    assert said.json["left_out"][0].startswith("optimizer (")
    assert "left out, as hf cannot hold it: optimizer (" in said.err
    assert holdfast("diff", run, tmp_path / "hf").code == 0
    assert holdfast("convert", run, tmp_path / "hf", "--to", "hf").code == 2
    half = holdfast("convert", run, tmp_path / "hf", "--to", "hf", "--overwrite", "--dtype", "bf16")
    assert half.code == 0
    assert holdfast("diff", run, tmp_path / "hf", "--json").json["rows"][0]["b"] == "bfloat16"


def test_convert_makes_folders_above(holdfast, run: Path, tmp_path: Path) -> None:
    assert holdfast("convert", run, tmp_path / "x" / "y" / "m.pt", "--to", "torch", "--section", "model").code == 0
    assert list(torch.load(tmp_path / "x" / "y" / "m.pt", weights_only=True)) == ["model"]


# --- errors, and how it looks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ls", "nowhere"], 4, "nowhere does not exist"),
        (["inspect", "nowhere"], 4, "nowhere does not exist"),
        (["inspect", "file"], 4, "file is not a checkpoint of a known format"),
        (["inspect", "{run}/step-00000030"], 4, "has no index.json (a save that was not completed"),
        (["inspect", "{run}", "--format", "zip"], 2, "there is no format 'zip'"),
        (["inspect", "{run}", "--rules", "nowhere.yaml"], 2, "nowhere.yaml: the rules cannot be read"),
        (["inspect", "{run}", "--rules", "file"], 2, "file: rules are a list"),
        (["verify", "nowhere"], 4, "nowhere does not exist"),
        (["diff", "{run}", "nowhere"], 4, "nowhere does not exist"),
        (["diff", "{run}", "{run}", "--rename", "x"], 2, "is not REGEX=REPLACEMENT"),
        (["diff", "{run}", "{run}", "--section", "ema"], 2, "neither checkpoint has a section 'ema'"),
        (["convert", "nowhere", "b", "--to", "hf"], 4, "nowhere does not exist"),
        (["convert", "{run}", "b", "--to", "megatron"], 2, "there is no writer for 'megatron'"),
        (["convert", "{run}", "b", "--to", "hf", "--dtype", "int3"], 2, "--dtype int3 is not known"),
        (["convert", "{run}", "b", "--to", "hf", "--section", "ema"], 4, "has no section 'ema'"),
        (["convert", "{run}", "file", "--to", "torch"], 2, "file exists already"),
        (["convert", "{run}", "file", "--to", "torch", "--overwrite"], 2, "file is not a checkpoint, and is not"),
        (["convert", "{run}", "file/b", "--to", "hf"], 4, "cannot create file/b"),
    ],
)
def test_errors_are_a_sentence_and_a_code(
    holdfast, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "file").write_text("text")
    monkeypatch.chdir(tmp_path)
    found = holdfast(*(argument.format(run=run) for argument in arguments))
    assert found.code == code
    assert said in found.err.replace("\n", " ")
    assert found.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["file"]


def test_no_traceback_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "ckpt", "verify", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("holdfast: ")
    assert done.stderr.endswith("nowhere does not exist (check the path)\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_nothing_is_wider_than_the_terminal(holdfast, run: Path, tmp_path: Path, columns: int) -> None:
    bad = damaged(run, tmp_path / "bad")
    convert(open_checkpoint(run), tmp_path / "universal", "deepspeed-universal")
    for arguments in (
        ["ls", run],
        ["ls", tmp_path],
        ["inspect", run, "--all"],
        ["inspect", tmp_path / "universal"],
        ["inspect", run, "--tensors", "*.bias"],
        ["verify", bad],
        ["diff", run / "step-00000010", run / "step-00000020"],
        ["convert", run, tmp_path / f"b{columns}", "--to", "hf"],
    ):
        out = holdfast(*arguments, columns=columns).out
        assert max(map(len, out.splitlines())) <= columns, out
        assert "…" not in out.replace("… and", "").replace(" … ", "").replace("… (", ""), out


def test_a_pipe_gets_every_name_whole(holdfast, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "a_rather_long_name_for_layer_00.weight/exp_avg_sq"
    assert any(row.startswith(name) for row in holdfast("inspect", run).out.splitlines())


def test_ls_of_a_relative_path_is_that_of_an_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path / "run" / f"step-{step:08d}", {"step": step, "x": torch.ones(2)})
    monkeypatch.chdir(tmp_path)
    relative, absolute = find(Path("run")), find(tmp_path / "run")
    assert [one.path for one in relative] == [Path("run/step-00000001"), Path("run/step-00000002")]
    assert [one.path for one in absolute] == [tmp_path / one.path for one in relative]
    assert [one.newest for one in relative] == [False, True]


def test_names_in_a_checkpoint_do_not_steer_the_terminal(holdfast, tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": {"w\x1b[2J\u202e": torch.ones(2)}, "note": "\x1b]0;title\x07"})
    said = holdfast("inspect", tmp_path / "a")
    assert said.code == 0
    assert "w\\x1b[2J\\u202e" in said.out
    assert not {"\x1b", "\x07", "\u202e"} & {*said.out}


@pytest.mark.parametrize("command", ["inspect", "verify", "ls"])
def test_a_pickle_that_wants_all_memory_is_one_sentence(holdfast, tmp_path: Path, command: str) -> None:
    (tmp_path / "a.pt").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}X\x05\x00\x00\x00model(" + b"]" * 100_000 + b"ls.")
        archive.writestr("a/version", b"3\n")
    said = holdfast(command, tmp_path / "a.pt")
    text = said.out if command == "ls" else said.err  # a list names what is wrong, and goes on
    assert said.code == (0 if command == "ls" else 4)
    assert "a.pt" in text
    assert "repeats its own parts" in " ".join(text.split())
