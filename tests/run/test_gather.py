"""The model as one file and the hash of everything, from workers that hold parts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_model
from torch import nn

from holdfast.checkpoint import load
from holdfast.checkpoint.disk import BLOCK, write_blocks
from holdfast.cluster import tags
from holdfast.engine.model import LayeredModel
from holdfast.engine.state import State
from holdfast.errors import Broken, HoldfastError, UsageError
from holdfast.run import gather
from holdfast.run.gather import gather_sha256, write_model
from tests.run.parts import CPU, PARTS, Parts, keep, on_workers, plain, whole


def simple(seed: int = 0) -> nn.Sequential:
    return plain(seed, extra=False)


def states_of(parts: Parts, **kind: Any) -> list[State]:
    return [keep(whole(module=simple(), **kind), layers) for layers in parts.layers]


def write(path: Path, parts: Parts, states: Sequence[State], groups: Any = lambda group: group) -> None:
    def work(group: Any) -> None:
        write_model(groups(group), states[group.rank].model, parts, path)
        group.vote(torch.zeros(1))

    on_workers(parts.size, work)


def metadata(path: Path) -> dict[str, str] | None:
    with safe_open(str(path), "pt") as file:
        return file.metadata()


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_file_holds_what_save_model_of_safetensors_writes(tmp_path: Path, parts: Parts) -> None:
    write(tmp_path / "new" / "model.safetensors", parts, states_of(parts))
    save_model(whole(module=simple()).model.module, str(tmp_path / "expected"))
    found, expected = load_file(tmp_path / "new" / "model.safetensors"), load_file(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert (
        metadata(tmp_path / "new" / "model.safetensors") == metadata(tmp_path / "expected") == {"6.weight": "0.weight"}
    )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_the_file_is_the_same_to_the_byte_whoever_holds_what(tmp_path: Path) -> None:
    for number, parts in enumerate(PARTS):
        write(tmp_path / str(number), parts, states_of(parts))
    assert len({(tmp_path / str(number)).read_bytes() for number in range(len(PARTS))}) == 1


def test_a_plain_model_loads_the_file(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", PARTS[5], states_of(PARTS[5]))
    module = simple(seed=1)
    load(tmp_path / "model.safetensors", {"model": module})
    expected = whole(module=simple()).model.module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_before_training_a_worker_writes_by_itself(tmp_path: Path) -> None:
    state = whole(module=simple())
    write_model(None, state.model, None, tmp_path / "model")
    assert len(load_file(tmp_path / "model")) == 10
    with pytest.raises(HoldfastError, match=r"4\.weight is not held here"):
        write_model(None, keep(state, range(4)).model, None, tmp_path / "model")


class Large(nn.Module):
    """Larger than a block, strided, and of a size that no block is a multiple of."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(BLOCK // 4 + 37, 3).to(kind).t())
        self.register_buffer("small", torch.rand(()))


class Counting:
    """A group that counts what comes and goes, and how much of it at once."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.received: list[int] = []
        self.sent: list[torch.Tensor] = []

    def start(self, sends: Any, receives: Any) -> Any:
        assert all(tag == tags.MODEL for _, _, tag in [*sends, *receives])
        self.received += [tensor.nbytes for _, tensor, _ in receives]
        self.sent += [tensor for _, tensor, _ in sends]
        assert len(receives) <= 1
        return self._group.start(sends, receives)

    def finish(self, works: Any) -> None:
        self._group.finish(works)


def test_the_writer_needs_one_block_beside_its_layers_and_gets_only_what_it_lacks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [Large(kind) for kind in (torch.float32, torch.bfloat16, torch.float64)]
    models = [LayeredModel(nn.Sequential(*layers), seed=0, device=CPU)]
    save_model(models[0].module, str(tmp_path / "expected"))
    models += [LayeredModel(nn.Sequential(*(Large(layer.weight.dtype) for layer in layers)), seed=0, device=CPU)]
    models[1].module.load_state_dict(models[0].module.state_dict())
    models[0].release([1, 2])
    parts, groups = Parts([[0], [0, 1, 2]]), {}

    def work(group: Any) -> None:
        groups[group.rank] = Counting(group)
        write_model(groups[group.rank], models[group.rank], parts, tmp_path / "model")
        group.vote(torch.zeros(1))

    on_workers(2, work)
    writer, sender = groups[0], groups[1]
    lacking = sum(t.nbytes for name, t in models[1].module.state_dict().items() if name[0] != "0")
    assert max(writer.received) <= BLOCK
    assert sum(writer.received) == sum(tensor.nbytes for tensor in sender.sent) == lacking
    assert not writer.sent
    assert not sender.received
    found, expected = load_file(tmp_path / "model"), load_file(tmp_path / "expected")
    assert all(torch.equal(found[name], expected[name]) for name in expected | found)


def test_contiguous_weights_are_sent_from_where_they_are(tmp_path: Path) -> None:
    states, groups = states_of(PARTS[1]), {}

    def counted(group: Any) -> Any:
        return groups.setdefault(group.rank, Counting(group))

    write(tmp_path / "model", PARTS[1], states, counted)
    own = {p.untyped_storage().data_ptr() for p in states[1].model.module.parameters()}
    assert groups[1].sent
    assert all(tensor.untyped_storage().data_ptr() in own for tensor in groups[1].sent)


class Breaking(Counting):
    """Loses its peer after so many receives."""

    def finish(self, works: Any) -> None:
        if len(self.received) > 2:
            raise Broken("lost")
        super().finish(works)


def test_a_loss_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("the old one")
    states = states_of(PARTS[1])

    def work(group: Any) -> str:
        try:
            write_model(Breaking(group), states[group.rank].model, PARTS[1], tmp_path / "model")
        except Broken:
            return "broken"
        return "sent"

    assert on_workers(2, work) == ["broken", "sent"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model", "the old one")]


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    for name in (".model.unfinished", ".model.0123456789ab.unfinished"):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, times=(0, 0))
    (tmp_path / ".other.0123456789ab.unfinished").write_text("of another file")
    (tmp_path / ".model.ba9876543210.unfinished").write_text("somebody writes this just now")
    write(tmp_path / "model", PARTS[0], states_of(PARTS[0]))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model", ".other.0123456789ab.unfinished", ".model.ba9876543210.unfinished"}


def test_the_name_of_an_unfinished_file_cannot_be_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link under a name that can be foreseen would have the model written over what it leads to."""
    seen: list[Path] = []

    def watched(path: Path, *args: Any, **options: Any) -> Any:
        seen.append(path)
        return write_blocks(path, *args, **options)

    monkeypatch.setattr(gather, "write_blocks", watched)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".model.unfinished").symlink_to(tmp_path / "victim")
    for _ in range(2):
        write(tmp_path / "model", PARTS[0], states_of(PARTS[0]))
    first, second = seen
    assert first != second
    assert all(re.fullmatch(r"\.model\.[0-9a-f]{12}\.unfinished", path.name) for path in seen)
    assert (tmp_path / ".model.unfinished").is_symlink(), "what another has put there is not touched"
    assert (tmp_path / "victim").read_text() == "precious"
    old = os.umask(0o077)
    try:
        write(tmp_path / "private", PARTS[0], states_of(PARTS[0]))
    finally:
        os.umask(old)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HoldfastError, match=r"cannot write .*model: "):
        write(tmp_path / "file" / "model", PARTS[0], states_of(PARTS[0]))


def test_a_layer_that_nobody_holds_is_named_by_everybody(tmp_path: Path) -> None:
    parts = Parts([range(3), range(4, 7)])
    states = states_of(parts)

    def work(group: Any) -> str:
        with pytest.raises(HoldfastError, match=r"no worker holds 3.weight \(layer 3\)") as error:
            write_model(group, states[group.rank].model, parts, tmp_path / "model")
        return str(error.value)

    assert len(set(on_workers(2, work))) == 1
    assert not list(tmp_path.iterdir())


def test_a_filler_is_never_written_even_if_the_layout_is_wrong(tmp_path: Path) -> None:
    states, wrong = states_of(Parts([range(3), range(3, 7)])), Parts([range(4), range(3, 7)])

    def work(group: Any) -> None:
        if group.rank:
            write_model(group, states[1].model, wrong, tmp_path / "model")
        else:
            with pytest.raises(HoldfastError, match=r"3\.weight is not held here"):
                write_model(group, states[0].model, wrong, tmp_path / "model")

    on_workers(2, work)
    assert not (tmp_path / "model").exists()


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"1\._extra_state is no tensor"):
        write_model(None, whole().model, None, tmp_path / "model")


# --- the hash -------------------------------------------------------------------------------------


def hashes(states: Sequence[State], **kind: Any) -> list[str]:
    return on_workers(len(states), lambda group: gather_sha256(group, states[group.rank], **kind))


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("weights_only", [False, True])
def test_every_worker_gets_the_hash_of_the_whole(parts: Parts, weights_only: bool) -> None:
    states = [keep(whole(), layers) for layers in parts.layers]
    expected = whole().sha256(weights_only=weights_only)
    assert hashes(states, weights_only=weights_only) == [expected] * parts.size
    assert gather_sha256(None, whole(), weights_only=weights_only) == expected


@pytest.mark.parametrize("what", ["weight", "slot", "buffer", "extra"])
def test_one_bit_anywhere_changes_it(what: str) -> None:
    states = [keep(whole(), layers) for layers in PARTS[1].layers]
    layer = states[1].model.layers[4]
    if what == "extra":
        layer.calls += 1
    else:
        slots = states[1].update.optimizer.state[layer.linear.weight]
        tensor = {"weight": layer.linear.weight, "slot": slots["exp_avg"], "buffer": layer.scale}[what]
        tensor.detach().view(-1).view(torch.int32)[-1] ^= 1
    assert hashes(states)[0] != whole().sha256()
    assert (hashes(states, weights_only=True)[0] == whole().sha256(weights_only=True)) == (what == "slot")


def test_copies_that_differ_are_no_hash_but_an_error() -> None:
    states = [keep(whole(), layers) for layers in PARTS[3].layers]
    states[2].model.layers[4].linear.weight.detach()[0, 0] += 1
    with pytest.raises(HoldfastError, match=r"disagree on 4\.linear\.weight: 0\.2 has another value than 0\.\d"):
        hashes(states)


def test_a_layer_that_nobody_holds_is_named() -> None:
    states = [keep(whole(), layers) for layers in ([0, 1, 2, 3], [5, 6])]
    with pytest.raises(HoldfastError, match=r"no worker holds model/4.scale"):
        hashes(states)
    with pytest.raises(HoldfastError, match=r"no worker holds model/"):
        states[0].sha256()


def test_only_digests_are_sent() -> None:
    state = keep(whole(), range(3))
    assert len(json.dumps(state.digests())) < 110 * len(state.digests())
