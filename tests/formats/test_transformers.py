"""transformers loads what we write, and we read what it writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.formats import hf, torchsave
from tests.checkpoint.formats.helpers import bare, read_tree

pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).with_name("make_transformers.py")
MODELS = ["gpt2-tied", "llama-bf16"]


@pytest.fixture(scope="module")
def saved(run_formats: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers, as torch.save files and as it saves them itself."""
    folder = tmp_path_factory.mktemp("transformers")
    run_formats(SCRIPT, "save", folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_we_read_what_transformers_writes(saved: Path, name: str) -> None:
    theirs = saved / f"{name}-theirs"
    assert len(list(theirs.glob("*.safetensors"))) > 1, "the control: more than one file"
    catalogue = hf.open(theirs)
    state = torch.load(saved / f"{name}.pt")["model"]
    found = read_tree(catalogue)["model"]
    assert bare(found) == bare({key: state[key] for key in found})
    kept = set(state) if name == "llama-bf16" else set(state) - {"lm_head.weight"}
    assert set(found) == kept


def test_transformers_loads_what_we_write(saved: Path, run_formats: Callable[..., str]) -> None:
    for name in MODELS:
        catalogue = torchsave.open(saved / f"{name}.pt")
        for out, limit in ((f"{name}-ours", hf.SHARD_BYTES), (f"{name}-ours-sharded", 8000)):
            hf.write(catalogue, saved / out, max_shard_bytes=limit)
            for file in (saved / f"{name}-config").iterdir():
                shutil.copy(file, saved / out)
        assert "model.safetensors" in os.listdir(saved / f"{name}-ours")
        index = json.loads((saved / f"{name}-ours-sharded" / hf.INDEX).read_text())
        assert len(set(index["weight_map"].values())) > 1
    said = run_formats(SCRIPT, "load", saved)
    assert said.count("loaded") == 4
