"""Models of transformers, held in parts: one checkpoint, one file, one hash, which the whole model has too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model

from holdfast.checkpoint import load, open_checkpoint, save
from holdfast.cluster.texts import Texts
from holdfast.engine.layers_of import layers_of
from holdfast.run.gather import gather_sha256, write_model
from tests.engine.hf.models import build
from tests.run.parts import CPU, OPTIMIZERS, Parts, bytes_in, holds_nan, keep, on_workers, whole

PARTS = Parts([range(3, 5), range(2), range(2, 3), range(1)])  # of the embedding, three blocks and the head


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_parts_are_the_whole(tmp_path: Path, name: str) -> None:
    expected = whole(module=layers_of(build(name)))
    states = [keep(whole(module=layers_of(build(name))), layers) for layers in PARTS.layers]

    def work(group: Any) -> str:
        state = states[group.rank]
        save(tmp_path / "parts", state.tree(), ranks=Texts(group, CPU))
        write_model(group, state.model, PARTS, tmp_path / "model.safetensors")
        group.vote(torch.zeros(1))
        return gather_sha256(group, state)

    assert on_workers(4, work) == [expected.sha256()] * 4
    save(tmp_path / "whole", expected.tree())
    found, other = open_checkpoint(tmp_path / "parts"), open_checkpoint(tmp_path / "whole")
    assert (found.tree, found.tied, found.buffers) == (other.tree, other.tied, other.buffers)
    assert bytes_in(found) == bytes_in(other)
    assert not holds_nan(found)
    save_model(expected.model.module, str(tmp_path / "expected"))
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "expected")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_the_model_as_transformers_makes_it_loads_what_parts_saved(tmp_path: Path, name: str) -> None:
    expected = whole(module=layers_of(build(name)))
    save(tmp_path, expected.tree())
    model = build(name)
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    load(tmp_path, {"model": model, "optimizer": optimizer})
    values = expected.model.module.state_dict()
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert len(optimizer.state) == len(expected.update.optimizer.state)
