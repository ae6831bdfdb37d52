"""Resuming in parts: each worker reads what it holds, all from the same checkpoint, and of this model only."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import save
from holdfast.checkpoint.lease import Chain
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.series import folder_of
from holdfast.cluster.events import Events
from holdfast.cluster.texts import Texts
from holdfast.engine.state import State
from holdfast.errors import CheckpointError
from holdfast.recovery.resume import Checkpoints, Resumer, Unfit
from tests.run.parts import CPU, OPTIMIZERS, PARTS, WIDTH, Parts, keep, on_workers, plain, save_parts, train, whole


def resumer(root: Path, state: State) -> Resumer:
    return Resumer(Checkpoints(folder=root), state, Events(None))


def resume(root: Path, parts: Parts, **kind: Any) -> list[State]:
    """Workers with other initial values resume, and hold their layers only once they know the step."""

    states = [keep(whole(seed=rank + 1, steps=1, **kind), []) for rank in range(parts.size)]

    def work(group: Any) -> State:
        state, held = states[group.rank], []

        def hold() -> None:
            held.append(state.progress.step)
            state.model.hold(parts.layers[group.rank])

        assert resumer(root, state).resume(Texts(group, CPU), hold=hold)
        assert held[-1] == state.progress.step
        group.vote(torch.zeros(1))
        return state

    return on_workers(parts.size, work)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_what_some_parts_saved_other_parts_go_on_from(tmp_path: Path, parts: Parts, optimizer: str) -> None:
    save_parts(tmp_path, PARTS[4], optimizer=optimizer)
    expected = whole(optimizer=optimizer)
    states = resume(tmp_path, parts, optimizer=optimizer)
    digests = expected.digests()
    for state, layers in zip(states, parts.layers, strict=True):
        assert state.digests().items() <= digests.items()
        assert {unit.number for unit in state.model.units_of(layers)} == {
            unit.number for unit in state.model.units if state.model.is_held(unit)
        }
        assert state.update.settings() == expected.update.settings()
        assert state.progress.resumed == 1
        for name, buffer in expected.model.module.named_buffers():
            if int(name[0]) in layers:
                assert torch.equal(state.model.module.get_buffer(name), buffer), f"{name} too, saved by itself or not"
    for state in [expected, *states]:
        train(state, 2)
    assert expected.combine([state.digests() for state in states]) == expected.sha256()


def test_control_a_slot_that_is_lost_changes_the_outcome(tmp_path: Path) -> None:
    save_parts(tmp_path, PARTS[4])
    expected, states = whole(), resume(tmp_path, PARTS[1])
    states[1].update.forget(states[1].model.trainable[-1:])
    for state in [expected, *states]:
        train(state, 2)
    assert expected.combine([state.digests() for state in states]) != expected.sha256()


def test_only_what_is_held_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = save_parts(tmp_path, PARTS[0])
    loading, wanted = importlib.import_module("holdfast.checkpoint.loading"), []
    read = loading.read

    def counted(catalogue: Catalogue, wants: list[Any], **more: Any) -> None:
        wanted.extend(want.name for want in wants)
        read(catalogue, wants, **more)

    monkeypatch.setattr(loading, "read", counted)
    state = keep(whole(seed=1), [])
    resumer(tmp_path, state).open(3)
    assert wanted == [], "what all share has no tensor"
    state.model.hold([1, 2])
    resumer(tmp_path, state).fill(3)
    mine = [n for n in catalogue.tensors if re.match(r"(model|optimizer/state|run/transient)/1\.", n)]
    assert sorted(wanted) == sorted(mine)
    assert len(mine) == 5 + 4 * 3 + 2, "weights and a buffer, slots, buffers that the module does not save"


class Own(torch.optim.SGD):
    """An optimizer that knows better how it is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "own"})


def test_an_optimizer_that_loads_itself_keeps_slots_of_what_is_here_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "own", lambda ps: Own(ps, lr=0.1, momentum=0.9))
    save_parts(tmp_path, PARTS[1], optimizer="own")
    states = resume(tmp_path, PARTS[1], optimizer="own")
    expected = whole(optimizer="own")
    assert expected.combine([state.digests() for state in states]) == expected.sha256()
    counts = [len(state.update.optimizer.state) for state in states]
    assert counts == [5, 10], "the first and the last layer share a weight"
    assert sum(counts) == len(expected.update.optimizer.state) + 1


def damage(root: Path, step: int) -> None:
    for data in folder_of(root, step).glob("data-*"):
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)


def test_a_damaged_one_is_told_and_all_take_the_one_before(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    for step in (3, 5):
        save_parts(tmp_path, PARTS[1], step=step)
    damage(tmp_path, 5)
    states = resume(tmp_path, PARTS[3])
    assert [state.progress.step for state in states] == [3, 3, 3]
    assert whole().combine([state.digests() for state in states]) == whole().sha256()
    assert "cannot resume from step 5" in caplog.text
    assert caplog.text.count("resumed from") == 1, "one says it for all"


def test_damage_that_only_one_worker_meets_is_everybodys(tmp_path: Path) -> None:
    for step in (3, 5):
        save_parts(tmp_path, PARTS[1], step=step)
    second = next(folder_of(tmp_path, 5).glob("data-*-1.safetensors"))
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    states = resume(tmp_path, PARTS[1])
    assert [state.progress.step for state in states] == [3, 3]


def test_if_all_are_damaged_nobody_starts_afresh(tmp_path: Path) -> None:
    save_parts(tmp_path, PARTS[1])
    damage(tmp_path, 3)
    with pytest.raises(CheckpointError, match="damaged"):
        resume(tmp_path, PARTS[1])


OLD = "parameters 3, numerics exact, clip_norm None, seed 7, threads 1, torch 2.13.0, cpu AVX512"


@pytest.mark.parametrize(
    ("before", "warned"),
    [
        ({"what": "a test"}, []),
        ({"what": "another", "gone": "1"}, [["setting", "then", "now"], ["what", "another", "a test"]]),
        ({"gone": "1"}, []),
        ({}, []),
        (OLD, []),
    ],
    ids=["same", "different", "other facts", "none", "a text, as in older checkpoints"],
)
def test_a_run_that_is_not_as_it_was_saved_is_resumed_with_a_warning(
    tmp_path: Path, caplog: Any, before: Any, warned: list[list[str]]
) -> None:
    def label(rank: int, state: State) -> None:
        state.progress.label = before

    save_parts(tmp_path, PARTS[1], meddle=label)
    states = resume(tmp_path, PARTS[1])
    assert [state.progress.step for state in states] == [3, 3]
    assert all(state.progress.label == {"what": "a test"} for state in states), "the next checkpoint has the new one"
    assert len(caplog.messages) == bool(warned), "one says it for all"
    lines = [re.split(r"  +", line.strip()) for text in caplog.messages for line in text.splitlines()[1:]]
    assert lines == warned


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    assert not resumer(tmp_path / "new", whole()).resume()
    assert "training starts at step 0" in caplog.text


def other(change: str) -> nn.Sequential:
    module = plain(extra=False)
    if change == "shape":
        module[4] = nn.Linear(WIDTH, WIDTH + 1)
    elif change == "missing":
        module[4] = nn.Linear(WIDTH, WIDTH, bias=False)
    elif change == "more":
        module[2] = nn.Linear(WIDTH, WIDTH)
    elif change == "dtype":
        module[4] = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
    return module


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", r"model/4.weight has shape \(6, 6\), not \(7, 6\)"),
        ("missing", r"model has 4.bias, which nothing here takes"),
        ("more", r"model has no 2.weight, 2.bias"),
        ("dtype", r"model/4.weight is torch.float32, not torch.bfloat16"),
    ],
)
def test_another_model_is_refused_also_where_it_is_not_held(tmp_path: Path, change: str, words: str) -> None:
    save(folder_of(tmp_path, 3), whole(module=other("nothing")).tree())
    state = keep(whole(module=other(change)), [0, 1])  # holds nothing of what is different
    with pytest.raises(Unfit, match=words):
        resumer(tmp_path, state).fill(3)
    with pytest.raises(Unfit, match=words):
        resumer(tmp_path, state).resume()
    assert Unfit("").exit_code == 4


def test_control_the_same_model_is_not_refused(tmp_path: Path) -> None:
    save(folder_of(tmp_path, 3), whole(module=other("nothing")).tree())
    assert resumer(tmp_path, keep(whole(module=other("nothing")), [0, 1])).resume()


def test_another_optimizer_is_refused_everywhere(tmp_path: Path) -> None:
    save_parts(tmp_path, PARTS[1])
    with pytest.raises(Unfit, match="the optimizer was a AdamW and is a SGD"):
        resume(tmp_path, PARTS[1], optimizer="momentum")


def test_a_refusal_shows_what_has_changed(tmp_path: Path) -> None:
    def label(rank: int, state: State) -> None:
        state.progress.label = {"what": "another one", "same": "1"}

    save_parts(tmp_path, PARTS[1], meddle=label)
    with pytest.raises(Unfit) as caught:
        resume(tmp_path, PARTS[1], optimizer="momentum")
    sentence, _, *lines = str(caught.value).splitlines()
    assert "the optimizer was a AdamW and is a SGD" in sentence
    assert [re.split(r"  +", line.strip()) for line in lines] == [
        ["setting", "then", "now"],
        ["what", "another one", "a test"],
    ]


def read_only(chain: Chain) -> None:
    raise CheckpointError("no right to write, as on a file system that is read only")


def test_workers_that_see_different_checkpoints_of_a_step_do_not_mix_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [whole(), whole()]
    for name in ("0", "1"):
        save_parts(tmp_path / name, PARTS[1])

    def work(group: Any) -> bool:
        return resumer(tmp_path / str(group.rank), states[group.rank]).resume(Texts(group, CPU))

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "prepare", read_only)
        with pytest.raises(CheckpointError, match="sees another checkpoint of step 3"):
            on_workers(2, work)
        shutil.rmtree(tmp_path / "1")
        shutil.copytree(tmp_path / "0", tmp_path / "1")
        assert on_workers(2, work) == [True, True], "the same, in copies that are only read"
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "1").symlink_to(tmp_path / "0")
    assert on_workers(2, work) == [True, True], "the same, by another path"
