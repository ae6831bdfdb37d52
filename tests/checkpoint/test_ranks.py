"""Saving and loading together: what goes wrong on one rank is known on all, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint import async_save, load, open_checkpoint, save
from holdfast.checkpoint.ranks import SHORT, current
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.errors import HoldfastError
from tests.checkpoint.layouts import mesh
from tests.checkpoint.world import World, world

saving = import_module("holdfast.checkpoint.saving")  # the package has a function of that name
LARGE = (1 << 20) // 4 + 1  # elements of float32; copies of smaller tensors are compared


def value(rank: int, kind: str) -> dict[str, Any]:
    """Trees that cannot be saved, for a reason that only one rank can know, or all of them together."""
    return {
        "an object": lambda: {"a": {"thing": object() if rank else 1}},
        "a key": lambda: {"thing": {object(): 1} if rank else {}},
        "a dtype": lambda: {"thing": torch.zeros(2, dtype=torch.complex32 if rank else torch.float32)},
        "a value": lambda: {"a": {"thing": rank}},
        "a list": lambda: {"a": {"thing": [3, rank]}},
        "a shape": lambda: {"thing": torch.zeros(2 + rank)},
        "copies": lambda: {"thing": torch.full((4,), float(rank))},
        "a sum": lambda: {"thing": DTensor.from_local(torch.ones(()), mesh(2), [Partial()])},
        "a hole": lambda: {"thing": DTensor.from_local(torch.ones(2 + rank, 2), mesh(2), [Shard(0)])},
        "meta": lambda: {"thing": torch.zeros(2, device="meta") if rank else torch.zeros(2)},
        "sparse": lambda: {"thing": torch.zeros(2, 2).to_sparse() if rank else torch.zeros(2, 2)},
    }[kind]()


def try_to_save(folder: Path, kind: str) -> str:
    save(folder / "good", {"step": 1})
    try:
        save(folder / "bad", value(dist.get_rank(), kind))
    except HoldfastError as e:
        save(folder / "good", {"step": 2})  # and they still understand each other
        return str(e)
    return "saved"


KINDS = ["an object", "a key", "a dtype", "a value", "a list", "a shape", "copies", "a sum", "a hole", "meta", "sparse"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_on_one_rank_is_raised_on_all(kind: str, tmp_path: Path) -> None:
    said = world(2).run(try_to_save, tmp_path, kind, seconds=20)
    assert all("thing" in text for text in said), said
    assert not (tmp_path / "bad").exists()
    assert open_checkpoint(tmp_path / "good").tree == {"step": 2}


def tell_texts(lengths: list[int]) -> list[bytes]:
    found = current().exchange(bytes([65 + dist.get_rank()]) * lengths[dist.get_rank()])
    current().exchange(b"")  # and the next one is not mixed up with it
    return found


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3], [SHORT, SHORT - 1], [SHORT + 1, 0], [2, 5 * SHORT]])
def test_texts_of_any_length_are_exchanged(lengths: list[int]) -> None:
    """Short ones in one message, longer ones in two."""
    assert world(2).run(tell_texts, lengths, seconds=20) == [[b"A" * lengths[0], b"B" * lengths[1]]] * 2


def fail_to_write(folder: Path) -> str:
    tree = {"w": torch.ones(LARGE)}
    save(folder, tree)
    tree["w"] += 1
    write = saving.write_blocks

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "no space left")
        return write(path, *arguments, **options)

    saving.write_blocks = full
    try:
        save(folder, tree)
    except (HoldfastError, OSError) as e:
        return str(e)
    finally:
        saving.write_blocks = write
    return "saved"


def test_when_one_cannot_write_the_old_checkpoint_stays_and_nothing_else(tmp_path: Path) -> None:
    said = world(2).run(fail_to_write, tmp_path)
    assert "rank 1 could not save" in said[0]
    assert "no space left" in said[1]
    assert read_tensor(open_checkpoint(tmp_path), "w").unique().tolist() == [1.0]
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["data", "data", "index.json"]


def save_in_groups(folder: Path) -> int:
    """Ranks 1 and 2 are in a group that rank 0 has never heard of; then all save, and these two alone."""
    rank = dist.get_rank()
    pair = dist.new_group([1, 2], use_local_synchronization=True)
    save(folder / "all", {f"of {rank}": torch.ones(1), "w": torch.ones(9)})
    if rank:
        save(folder / "pair", {f"of {rank}": torch.ones(1), "w": torch.ones(9)}, group=pair)
        load(folder / "all", {f"of {rank}": torch.zeros(1)}, group=pair)
    return current().size


def test_ranks_may_be_in_different_groups(tmp_path: Path) -> None:
    mine = World(3)
    try:
        assert mine.run(save_in_groups, tmp_path, seconds=20) == [3, 3, 3]
    finally:
        mine.close()
    assert len(open_checkpoint(tmp_path / "all").files) == 3
    assert sorted(open_checkpoint(tmp_path / "pair").tree) == ["of 1", "of 2", "w"]


# --- loading --------------------------------------------------------------------------------------


def load_stages(folder: Path, names: list[list[str]], strict: bool) -> Any:
    mine = {name: torch.zeros(1) for name in names[dist.get_rank()]}
    try:
        load(folder, {"parts": mine}, strict=strict)
    except HoldfastError as e:
        return str(e)
    return {name: tensor.item() for name, tensor in mine.items()}


def test_what_no_rank_takes_is_unexpected_and_what_one_rank_lacks_is_missing(tmp_path: Path) -> None:
    save(tmp_path, {"parts": {"a": torch.ones(1), "b": torch.ones(1) * 2, "c": torch.ones(1) * 3}})
    run = world(2).run
    assert run(load_stages, tmp_path, [["a", "b"], ["b", "c"]], True) == [{"a": 1, "b": 2}, {"b": 2, "c": 3}]
    said = run(load_stages, tmp_path, [["a"], ["c"]], True)
    assert all("parts has b, which nothing here takes" in text for text in said)
    assert run(load_stages, tmp_path, [["a"], ["c"]], False) == [{"a": 1}, {"c": 3}]
    first, second = run(load_stages, tmp_path, [["a", "b"], ["c", "d"]], False)
    assert "rank 1 could not load" in first
    assert "parts has no d" in first
    assert "parts has no d" in second


# --- copies that may differ -----------------------------------------------------------------------


def save_statistics(folder: Path) -> None:
    model = DistributedDataParallel(nn.BatchNorm1d(3))
    with torch.no_grad():
        model.module.running_mean += dist.get_rank()  # as after a step on different batches
    save(folder, {"model": model, f"random of {dist.get_rank()}": torch.full((3,), dist.get_rank())})


def test_of_buffers_the_first_rank_s_count(tmp_path: Path) -> None:
    world(2).run(save_statistics, tmp_path)
    catalogue = open_checkpoint(tmp_path)
    assert read_tensor(catalogue, "model/running_mean").tolist() == [0, 0, 0]
    assert read_tensor(catalogue, "random of 1").tolist() == [1, 1, 1]


class Local(torch.optim.Optimizer):
    """Keeps a plain tensor for its shard: nothing says that it is one."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["own"] = torch.full((LARGE,), float(dist.get_rank()))


def save_local_slots(folder: Path) -> str:
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh(2), [Shard(0)]))
    optimizer = Local(model.parameters(), {})
    optimizer.step()
    with pytest.raises(HoldfastError) as caught:
        save(folder, {"model": model, "optimizer": optimizer})
    return str(caught.value)


def test_an_optimizer_s_own_slots_of_a_shard_are_not_taken_for_copies(tmp_path: Path) -> None:
    for text in world(2).run(save_local_slots, tmp_path):
        assert "optimizer/state/weight/own" in text


# --- in the background ----------------------------------------------------------------------------


def save_beside_collectives(folder: Path) -> float:
    weight = torch.full((LARGE,), 1.0)
    total = torch.zeros(3)
    for step in range(5):
        pending = async_save(folder / str(step), {"w": weight, "step": step})
        weight += 1  # is not in the file
        for _ in range(20):
            total += 1
            dist.all_reduce(total)
            total /= dist.get_world_size()
        if step == 4:
            pending.wait()
    return total[0].item()


def test_async_saves_keep_out_of_the_script_s_collectives(tmp_path: Path) -> None:
    assert world(2).run(save_beside_collectives, tmp_path) == [100, 100]
    for step in range(5):
        catalogue = open_checkpoint(tmp_path / str(step))
        assert catalogue.tree["step"] == step
        assert len(catalogue.files) == 2
        assert read_tensor(catalogue, "w").unique().tolist() == [step + 1]


def fail_in_background(folder: Path) -> list[str]:
    folder.touch()
    said = []
    pending = async_save(folder / "never", {"w": torch.ones(3)})
    if dist.get_rank() == 0:  # the other never asks
        try:
            pending.wait()
        except HoldfastError as e:
            said.append(str(e))
    try:
        save(folder.parent / "next", {"w": torch.ones(3)})
    except HoldfastError as e:
        said.append(str(e))
    return said


def test_a_failed_background_save_is_told_to_all_even_if_one_has_heard_it(tmp_path: Path) -> None:
    first, second = world(2).run(fail_in_background, tmp_path / "file", seconds=20)
    assert len(first) == 2
    assert len(second) == 1
    assert all("never" in text for text in [*first, *second])


# --- a rank dies ----------------------------------------------------------------------------------


def die_while_saving(folder: Path, moment: str) -> str:
    tree = {"w": torch.ones(20 * LARGE)}  # several blocks for each
    save(folder, tree)
    tree["w"] += 1
    ranks, dying = current(), dist.get_rank() == 1
    exchange, calls = ranks.exchange, 0

    def counted(text: bytes) -> list[bytes]:
        nonlocal calls
        calls += 1
        if dying and moment == f"exchange {calls}":
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(text)

    ranks.exchange = counted  # type: ignore[method-assign]
    if dying and moment == "write":
        # Half of the blocks are on the disk by then.
        fill = saving.Image.fill
        saving.Image.fill = lambda *words: fill(*words) if words[1] == 0 else os.kill(os.getpid(), signal.SIGKILL)
    try:
        save(folder, tree)
    except HoldfastError as e:
        return str(e)
    return "saved"


# wait, describe, inventory, image, write, reports, commit
@pytest.mark.parametrize("moment", ["write", *(f"exchange {n}" for n in range(1, 8))])
def test_a_rank_that_dies_is_noticed_and_costs_only_the_new_checkpoint(moment: str, tmp_path: Path) -> None:
    mine = World(2)
    try:
        survivor, dead = mine.outcomes(die_while_saving, tmp_path, moment, seconds=20)
    finally:
        mine.close()
    assert dead.died
    assert "a rank was lost" in survivor.value
    catalogue = open_checkpoint(tmp_path)
    # Whoever dies after the commit has lost nothing.
    assert read_tensor(catalogue, "w").unique().tolist() == ([2.0] if moment == "exchange 7" else [1.0])
