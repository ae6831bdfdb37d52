"""Adapters without their base: only what is trained is saved, and another base is refused in words."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.checkpoint import async_save, index, load, open_checkpoint, save, series
from holdfast.checkpoint.convert import convert
from holdfast.checkpoint.diff import Comparison
from holdfast.checkpoint.verify import open_to_verify, verify
from holdfast.errors import CheckpointError
from tests.checkpoint.adapters import adapted, is_right, optimizer_of, same, save_step, shared, train, tree_at, written
from tests.checkpoint.cases import refusal, rewrite
from tests.checkpoint.world import world

BASE = 2 << 20  # bytes of the frozen weights


def fresh() -> dict[str, Any]:
    """The base of the save, and adapters that are none of it."""
    tree = tree_at(0)
    for name, p in tree["model"].named_parameters():
        if p.requires_grad:
            nn.init.zeros_(p)
        assert p.requires_grad == ("base" not in name)
    return tree


def test_only_what_is_trained_is_written(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 3, trainable_only=True)
    assert written(folder) < BASE / 20
    assert not shared(tmp_path)
    catalogue = index.open(folder)
    assert catalogue.left_out == ["model/0.base.weight", "model/1.base.weight"]
    assert not any("base" in name for name in catalogue.tensors)
    assert "model/0.calls" in catalogue.tensors, "buffers change"
    assert verify(open_to_verify(folder)).ok


@pytest.mark.parametrize("beside", [False, True])
def test_the_rest_of_a_training_is_the_same(tmp_path: Path, beside: bool) -> None:
    if beside:
        async_save(tmp_path / "a", tree_at(3), trainable_only=True).wait()
    else:
        save(tmp_path / "a", tree_at(3), trainable_only=True)
    into = fresh()
    assert load(tmp_path / "a", into, trainable_only=True)["step"] == 3
    for number in range(3, 6):
        train(into["model"], into["optimizer"], number)
    assert same(into["model"], tree_at(6)["model"])


def test_another_base_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path / "a", tree_at(3), trainable_only=True)
    into = fresh()
    into["model"][1].base.weight.data.view(-1)[-1] += 1
    before = copy.deepcopy(into["model"])
    with pytest.raises(CheckpointError, match=r"frozen weights are not those of the save: model/1.base.weight differs"):
        load(tmp_path / "a", into, trainable_only=True)
    assert same(into["model"], before)
    with pytest.raises(CheckpointError, match="base"):
        load(tmp_path / "a", tree_at(0, width=256), trainable_only=True)


def test_without_the_word_it_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", tree_at(3), trainable_only=True)
    with pytest.raises(CheckpointError, match="trainable_only=True"):
        load(tmp_path / "a", fresh())


def test_a_model_that_lacks_a_part_of_the_base(tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": adapted()}, trainable_only=True)
    half = adapted()
    del half[1].base
    with pytest.raises(CheckpointError, match=r"1\.base\.weight, which nothing here takes"):
        load(tmp_path / "a", {"model": half}, trainable_only=True)
    load(tmp_path / "a", {"model": half}, trainable_only=True, strict=False)


def test_a_whole_checkpoint_is_compared_too(tmp_path: Path) -> None:
    """A base that is in the checkpoint with its digests is not read, but must be the same."""
    folder = save_step(tmp_path, 2)
    into = fresh()
    load(folder, into, trainable_only=True)
    assert same(into["model"], tree_at(2)["model"])
    with pytest.raises(CheckpointError, match="frozen"):
        load(folder, tree_at(0, seed=9), trainable_only=True)
    assert is_right(folder, 2), "without it, everything is filled"


def test_a_model_that_is_all_frozen_when_it_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": tree_at(3)["model"]}, trainable_only=True)
    model = fresh()["model"].requires_grad_(False)
    load(tmp_path / "a", {"model": model}, trainable_only=True)
    assert same(model, tree_at(3)["model"])


def test_an_average_of_weights_is_no_base(tmp_path: Path) -> None:
    """Nothing in it has a gradient, and all of it changes."""
    average = copy.deepcopy(tree_at(1)["model"]).requires_grad_(False)
    save(tmp_path / "a", {"model": adapted(), "average": average}, trainable_only=True)
    into = {"model": adapted(), "average": adapted(5)}
    load(tmp_path / "a", into, trainable_only=True)
    assert same(into["average"], average)


def test_tied_and_frozen(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        torch.manual_seed(0)
        model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "up": nn.Linear(4, 4)})
        model["head"].weight = model["embed"].weight
        model["embed"].weight.requires_grad_(False)
        return model

    save(tmp_path / "a", {"model": tied()}, trainable_only=True)
    assert index.open(tmp_path / "a").left_out == ["model/embed.weight"]
    into = tied()
    nn.init.zeros_(into["up"].weight)
    load(tmp_path / "a", {"model": into}, trainable_only=True)
    assert same(into, tied())


def test_diff_and_convert(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 9)):
        save(tmp_path / name, {"model": adapted(seed), "step": 1}, trainable_only=True)
    a, b, c = (open_checkpoint(tmp_path / name) for name in "abc")
    assert Comparison(a, b).run().same
    assert "model/0.base.weight" in [row.name for row in Comparison(a, c).run().rows]
    assert any("frozen" in sentence for sentence in convert(a, tmp_path / "hf", "hf"))
    convert(a, tmp_path / "again", "holdfast")
    into = {"model": adapted()}
    load(tmp_path / "again", into, trainable_only=True)
    with pytest.raises(CheckpointError):
        load(tmp_path / "again", {"model": adapted(9)}, trainable_only=True)


# --- on several ranks -------------------------------------------------------------------------------------


def save_replicas(folder: Path) -> None:
    save(folder, tree_at(2), trainable_only=True)


def load_replicas(folder: Path, seed: int) -> bool:
    into = tree_at(0, seed=seed)
    load(folder, into, trainable_only=True)
    return same(into["model"], tree_at(2)["model"])


def sharded(seed: int = 0) -> nn.Module:
    model = adapted(seed)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def save_shards(folder: Path) -> None:
    model = sharded()
    save(folder, {"model": model, "optimizer": optimizer_of(model), "step": 0}, trainable_only=True)


def load_shards(folder: Path, seed: int) -> list[str]:
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear()
    logging.getLogger("holdfast").addHandler(ear)
    try:
        model = sharded(seed)
        load(folder, {"model": model}, trainable_only=True)
    finally:
        logging.getLogger("holdfast").removeHandler(ear)
    return heard


def test_on_another_number_of_ranks(tmp_path: Path) -> None:
    world(2).run(save_replicas, tmp_path / "a")
    assert world(3).run(load_replicas, tmp_path / "a", 0) == [True] * 3
    assert load_replicas(tmp_path / "a", 0)
    assert all("frozen" in str(one.error) for one in world(3).outcomes(load_replicas, tmp_path / "a", 9))


def test_shards_compare_what_they_hold(tmp_path: Path) -> None:
    world(2).run(save_shards, tmp_path / "a")
    assert world(2).run(load_shards, tmp_path / "a", 0) == [[], []]
    assert all("frozen" in str(one.error) for one in world(2).outcomes(load_shards, tmp_path / "a", 9))
    # In other shards no rank holds the boxes of the save: that is said, not hidden.
    assert all("not compared" in said for (said,) in world(3).run(load_shards, tmp_path / "a", 0))


def test_refused_by_name_where_an_index_is_forged(tmp_path: Path) -> None:
    folder = series.folder_of(tmp_path, 1)
    save(folder, tree_at(1), trainable_only=True)
    rewrite(folder, lambda said: said["digests"]["model/0.base.weight"].update(shape=[1 << 70]))
    assert index.NAME in refusal(folder)
