"""Checkpoints with anything in the place of anything: only errors that are named come out, in bounded memory."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.checkpoint import index, open_checkpoint, save
from holdfast.checkpoint.convert import convert
from holdfast.checkpoint.formats import hf
from holdfast.checkpoint.inspection import to_json
from holdfast.checkpoint.verify import open_to_verify, verify
from holdfast.errors import HoldfastError
from tests.checkpoint.bounded import bounded
from tests.checkpoint.cases import rewrite

MODEL = {"layers.0.weight": torch.ones(4, 6), "layers.1.weight": torch.ones(6), "embed.weight": torch.ones(3, 2)}
OPTIMIZER = {
    "state": {name: {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(value)} for name, value in MODEL.items()},
    "param_groups": [{"params": [*MODEL], "lr": 0.1, "betas": (0.9, 0.99)}],
}
TREE: dict[str, Any] = {"model": MODEL, "optimizer": OPTIMIZER, "step": 3, "seen": [1, "two", None, {"x": b"y"}]}
ATTEMPTS = 40


def ours(folder: Path) -> None:
    save(folder, TREE)


def sharded(folder: Path) -> None:
    save(folder.with_name("source"), TREE)
    hf.write(open_checkpoint(folder.with_name("source")), folder, max_shard_bytes=100)


def dcp(folder: Path) -> None:
    torch_dcp.save(TREE, checkpoint_id=folder, no_dist=True)


def universal(folder: Path) -> None:
    save(folder.with_name("source"), TREE)
    convert(open_checkpoint(folder.with_name("source")), folder, "deepspeed-universal")


def states_of_deepspeed() -> list[dict[str, Any]]:
    shapes = {name: value.shape for name, value in MODEL.items()}
    flat = torch.cat([value.reshape(-1) for value in MODEL.values()])
    info = {"parameter_with_row_parallelism_patterns": [".*weight"], "original_vocab_size": 3}
    model = {
        "module": MODEL, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}, "dp_world_size": 1,
        "mp_world_size": 1, "global_steps": 7, "universal_checkpoint_info": info, "frozen_param_shapes": None,
    }  # fmt: skip
    inner = {"state": {0: {"step": 3, "exp_avg": flat}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    optimizer = {
        "single_partition_of_fp32_groups": [flat], "base_optimizer_state": inner, "zero_stage": 2,
        "partition_count": [1], "group_paddings": [0], "param_slice_mappings": [],
    }  # fmt: skip
    return [model, {"optimizer_state_dict": optimizer}]


def write_deepspeed(folder: Path, states: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(states[0], folder / "mp_rank_00_model_states.pt")
    torch.save(states[1], folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def deepspeed(folder: Path) -> None:
    write_deepspeed(folder, states_of_deepspeed())


def states_of_megatron() -> list[dict[str, Any]]:
    model = {
        "embedding.word_embeddings.weight": torch.ones(4, 2),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(8, 2),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(2, 8),
    }
    inner = {"state": {0: {"exp_avg": torch.ones(4, 2)}}, "param_groups": [{"params": [0, 1, 2], "lr": 0.1}]}
    return [{"model": model, "optimizer": {"optimizer": inner}, "iteration": 3, "checkpoint_version": 3.0}]


def write_megatron(folder: Path, states: list[Any]) -> None:
    (folder / "mp_rank_00").mkdir(parents=True, exist_ok=True)
    torch.save(states[0], folder / "mp_rank_00" / "model_optim_rng.pt")


def megatron(folder: Path) -> None:
    write_megatron(folder, states_of_megatron())


def torch_file(folder: Path) -> None:
    folder.mkdir()
    torch.save(TREE, folder / "a.pt")


def old_file(folder: Path) -> None:
    folder.mkdir()
    torch.save(TREE, folder / "a.pt", _use_new_zipfile_serialization=False)


KINDS = [ours, sharded, dcp, universal, deepspeed, megatron, torch_file, old_file]


def outcome(folder: Path) -> str:
    """What is wrong with how a checkpoint was taken; nothing if it was read, or refused by name."""
    place = folder / "a.pt" if (folder / "a.pt").exists() else folder
    try:
        catalogue = open_to_verify(place)
        json.dumps(to_json(catalogue, place, catalogue.tensors))
        verify(catalogue, threads=1)
    except HoldfastError as error:
        return "" if len(str(error)) < 3000 else f"{len(str(error))} characters of error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def flipped(data: bytes, draw: random.Random) -> bytes:
    """Bytes with a few changes: some are others, left out, or there twice."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 3, 10])):
        at = draw.randrange(max(len(changed), 1))
        way = draw.randrange(4)
        if way <= 1 and changed:
            changed[at] = draw.choice([0, 255, draw.randrange(256)])
        elif way == 2:
            del changed[at : at + draw.randrange(1, 30)]
        else:
            changed[at:at] = changed[at : at + draw.randrange(1, 30)]
    return bytes(changed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_bytes_that_are_others(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    """Without checksums, which would catch it all."""
    torch.serialization.set_crc32_options(False)
    try:
        kind(tmp_path / "sound")
    finally:
        torch.serialization.set_crc32_options(True)
    assert outcome(tmp_path / "sound") == "", "the control"

    def attempts() -> list[str]:
        draw, found = random.Random(kind.__name__), []
        for _ in range(ATTEMPTS):
            folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "fuzzed"
            shutil.copytree(tmp_path / "sound", folder)
            file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
            file.write_bytes(flipped(file.read_bytes(), draw))
            found.append(outcome(folder))
            shutil.rmtree(folder.parent)
        return sorted({said for said in found if said})

    assert bounded(attempts, memory=500 << 20, seconds=60) == "[]"


# --- values that are others -------------------------------------------------------------------------

ODD: list[Any] = [
    None, True, 0, -1, 1 << 40, 1 << 70, 0.5, float("inf"), float("nan"), "", "..", "a/b", "(a+)+$", "x" * 5000, [], {},
    (), [[]], {"a": {}}, {1: 2}, [1, "a"], "model", b"\xff", [-1], [1 << 62], {"__numpy__": 3},
    {"$tensor": 1}, [None],
]  # fmt: skip


def changed(node: Any, draw: random.Random, odd: list[Any]) -> Any:
    """A tree with something else at one place: another value, nothing, or a part of itself."""
    if isinstance(node, dict) and node and draw.random() < 0.9:
        key = draw.choice([*node])
        if draw.random() < 0.1:
            return {k: v for k, v in node.items() if k != key}
        if draw.random() < 0.05:
            return {**node, draw.choice(["", "..", "a/b", "params", "state"]): node[key]}
        return {k: changed(v, draw, odd) if k == key else v for k, v in node.items()}
    if isinstance(node, list | tuple) and node and draw.random() < 0.8:
        at = draw.randrange(len(node))
        items = [changed(v, draw, odd) if k == at else v for k, v in enumerate(node)]
        return type(node)(items + items[:1] * (draw.random() < 0.1)) if type(node) in (list, tuple) else tuple(items)
    return draw.choice(odd)


def in_index(folder: Path, draw: random.Random) -> None:
    def change(said: dict[str, Any]) -> None:
        key = draw.choice(["tensors", "tensors", "files", "tree", "details", "tied", "frozen", "buffers"])
        said[key] = changed(said[key], draw, JSON)

    rewrite(folder, change)


def in_shard_index(folder: Path, draw: random.Random) -> None:
    said = json.loads((folder / hf.INDEX).read_text())
    (folder / hf.INDEX).write_text(json.dumps(changed(said, draw, JSON)))


def in_states(write: Callable[[Path, list[Any]], None], states: Callable[[], list[Any]]) -> Any:
    def change(folder: Path, draw: random.Random) -> None:
        shutil.rmtree(folder)
        said = states()
        at = draw.randrange(len(said))
        said[at] = changed(said[at], draw, ODD)
        write(folder, said)

    return change


def in_torch_file(folder: Path, draw: random.Random) -> None:
    torch.save(changed(TREE, draw, ODD), folder / "a.pt")


def in_table(folder: Path, draw: random.Random) -> None:
    """DCP's own classes hold the values: their attributes are changed."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    items = [table, *table.state_dict_metadata.values(), *table.storage_data.values()]
    one = draw.choice([item for item in items if vars(item)])
    key = draw.choice([*vars(one)])
    object.__setattr__(one, key, changed(getattr(one, key), draw, ODD))
    stream = io.BytesIO()
    pickle.dump(table, stream)
    (folder / ".metadata").write_bytes(stream.getvalue())


JSON = [value for value in ODD if not isinstance(value, bytes | tuple) and value != {1: 2}]
VALUES: dict[str, tuple[Callable[[Path], None], Callable[[Path, random.Random], None]]] = {
    "our index": (ours, in_index),
    "an index of shards": (sharded, in_shard_index),
    "a table of DCP": (dcp, in_table),
    "DeepSpeed's states": (deepspeed, in_states(write_deepspeed, states_of_deepspeed)),
    "Megatron's states": (megatron, in_states(write_megatron, states_of_megatron)),
    "a file of torch.save": (torch_file, in_torch_file),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_that_are_others(tmp_path: Path, kind: str) -> None:
    make, change = VALUES[kind]
    make(tmp_path / "sound")
    assert outcome(tmp_path / "sound") == "", "the control"

    def attempts() -> list[str]:
        draw, found = random.Random(kind), []
        for _ in range(2 * ATTEMPTS):
            folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "fuzzed"
            shutil.copytree(tmp_path / "sound", folder)
            try:
                change(folder, draw)
            except (TypeError, OverflowError, pickle.PicklingError):  # what cannot be written is no case
                continue
            found.append(outcome(folder))
            shutil.rmtree(folder.parent)
        assert len(found) > ATTEMPTS
        return sorted({said for said in found if said})

    assert bounded(attempts, memory=500 << 20, seconds=60) == "[]"


def test_the_sound_index_is_read_in_the_fuzzer_too(tmp_path: Path) -> None:
    """The control of the limits: what is refused above is not refused for lack of memory."""
    ours(tmp_path / "sound")
    assert bounded(lambda: len(index.open(tmp_path / "sound").tensors), memory=500 << 20, seconds=60) == "9"
