"""What ``bench undo`` reckons with."""

from __future__ import annotations

import torch

from bench.pipelines.entries import PipelineShape
from bench.pipelines.update_entry import held_bytes
from bench.races import undo


def test_memory_counts_each_tensor_once_and_forgets_what_is_gone() -> None:
    before = held_bytes()
    tensor = torch.zeros(1000)
    view = tensor[10:]
    assert held_bytes() - before == tensor.nbytes
    del tensor
    assert held_bytes() - before == 4000, "a view keeps all of it"
    del view
    assert held_bytes() == before


def test_an_undo_is_timed_beside_its_update() -> None:
    found = undo.undo_times(PipelineShape(model="wide", layers=2, width=8), rounds=3)
    assert all(len(values) == 3 and min(values) > 0 for values in found.values())


def test_all_ways_end_a_turn_with_a_whole_block() -> None:
    every = [int(way[way.index("--copy-every") + 1]) for way in undo.WAYS.values() if "--copy-every" in way]
    assert every
    assert all(undo.BURST % steps == 0 for steps in every)
