"""Measures and predictions: the same bits whoever computes what, weighted as asked, in the data set's order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from holdfast.cluster import tags
from holdfast.cluster.group import alone
from holdfast.data.source import Data
from holdfast.data.stream import Stream
from holdfast.engine import predictions
from holdfast.engine.measures import evaluate
from holdfast.engine.predictions import Forgotten, both, predict, recalled, to_remember
from holdfast.engine.rooms import Rooms
from holdfast.engine.walk import check_dataset
from holdfast.errors import HoldfastError, UsageError
from holdfast.plan.layout import Layout, side_by_side
from tests.engine.memory_group import on_workers
from tests.engine.pipelines import Job, lay, mlp, numbers, one_step, same_bits, take_place

LAYOUTS = {
    "two workers": side_by_side(6, 2),
    "more workers than micro-batches": side_by_side(6, 9),
    "a pipeline, the last stage first": lay(([1, 0], [1, 5])),
    "pipelines of different depths, and a spare": lay(([2, 0], [1, 5]), ([1], [6]), size=4),
}
MEASURES = {"loss": mse_loss, "worst": lambda output, target: (output - target).abs().max()}


def largest_first(output: Tensor, target: Tensor) -> Any:
    """As many columns as a padding collator would give: the first sample of a micro-batch decides."""
    wide = 1 + int(target[0, 0] > 0)
    return {"rows": output[:, :wide], "all": (target, None), "bits": output[:, 0] > 0}


def on(layout: Layout, work: Any) -> list[Any]:
    job = Job(layers=mlp)

    def run(group: Any) -> Any:
        engine = job.engine()
        take_place(engine, layout, group)
        found = work(engine, group)
        group.vote(torch.zeros(1))
        return found

    return on_workers(layout.size, run)


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else [] if value is None else value
    return [leaf for item in items for leaf in leaves(item)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_and_predictions_are_those_of_one_worker(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "BLOCK", 100)  # several messages for a share
    data = numbers(13)

    def work(engine: Any, group: Any) -> Any:
        found = [predict(engine, data, keep, group, Rooms(memory=64)) for keep in (both, largest_first)]
        return evaluate(engine, data, MEASURES, group), *found

    (expected,) = on(side_by_side(6, 1), work)
    assert expected[0].keys() == MEASURES.keys()
    assert same_bits(expected[1][1], data.tensors[1]), "targets come in the order of the data set"
    assert [row.numel() for row in expected[2]["rows"]] != [expected[2]["rows"][0].numel()] * 13, "they are ragged"
    for found in on(LAYOUTS[layout], work):
        assert found[0] == expected[0]
        assert found[2]["all"][1] is None
        pairs = zip(leaves(found[1:]), leaves(expected[1:]), strict=True)
        assert all(same_bits(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize(("workers", "most"), [(8, 3), (16, 4), (19, 5)])
def test_predictions_go_to_few_partners(workers: int, most: int) -> None:
    data = numbers(40)
    (expected,) = on(side_by_side(6, 1), lambda engine, group: predict(engine, data, both, group, Rooms()))

    def work(engine: Any, group: Any) -> tuple[int, Any]:
        sent, start = 0, group.start

        def counted(sends: Any, receives: Any) -> Any:
            nonlocal sent
            sent += sum(tag == tags.MODEL for _, _, tag in sends)
            return start(sends, receives)

        group.start = counted
        found = predict(engine, data, lambda output, target: output, group, Rooms())
        return sent, found

    told = on(side_by_side(6, workers), work)
    assert all(same_bits(found, expected[0]) for _, found in told)
    assert 0 < max(sent for sent, _ in told) <= most  # it was one to each of the others


def test_norms_of_gradients_are_those_of_one_worker_and_of_torch() -> None:
    def work(engine: Any, group: Any) -> float:
        one_step(engine, group, 0)
        assert engine.terms is not None
        return float(engine.terms.norm)

    (expected,) = on(side_by_side(6, 1), work)
    assert {norm for layout in LAYOUTS.values() for norm in on(layout, work)} == {expected}
    job = Job(layers=mlp)
    engine = job.engine()
    engine.attempt(0, alone())
    assert math.isclose(torch.nn.utils.get_total_norm([p.grad for p in engine.model.trainable]), expected, rel_tol=1e-6)


def test_a_mean_is_weighted_by_samples_by_the_runs_weight_or_by_the_measures_own() -> None:
    engine, data = Job(layers=mlp).engine(), numbers(5)  # micro-batches of 2, 2 and 1
    first = lambda output, target: target[0, 0]  # noqa: E731
    a, b, c = (float(data.tensors[1][i, 0]) for i in (0, 2, 4))
    assert evaluate(engine, data, {"": first}, alone())[""] == pytest.approx((2 * a + 2 * b + c) / 5)
    engine.weight = lambda batch: 3 if len(batch[0]) == 1 else 1
    own = {"run": first, "own": lambda output, target: (first(output, target), len(target) == 2)}
    found = evaluate(engine, data, own, alone())
    assert found["run"] == pytest.approx((a + b + 3 * c) / 5)
    assert found["own"] == pytest.approx((a + b) / 2)


def test_what_has_no_weight_does_not_count() -> None:
    engine, data = Job(layers=mlp).engine(), numbers(5)
    nothing = lambda output, target: (torch.tensor([]).mean(), 0)  # noqa: E731
    some = lambda output, target: nothing(output, target) if len(target) == 1 else 4.0  # noqa: E731
    found = evaluate(engine, data, {"some": some, "nothing": nothing, "one": lambda output, target: 1.0}, alone())
    assert found["some"] == 4.0
    assert math.isnan(found["nothing"])
    assert found["one"] == 1.0, "to the bit: weights are whole numbers"


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda output, target: output.mean(), "shape"),
        (lambda output, target: output.flatten(), "samples"),
        (lambda output, target: ["a", "b"], "str"),
        (lambda output, target: 0.5, "float"),
        (lambda output, target: None, "no tensor"),
        (lambda output, target: {"a": ()}, "no tensor"),
        (lambda output, target: np.array(["a", "b"]), "array of <U1"),
        (lambda output, target: output.to_sparse(), "no plain tensor"),
        (lambda output, target: output if len(output) == 2 else (output,), "form"),
        (lambda output, target: output if len(output) == 2 else output.double(), "dtype"),
    ],
)
def test_what_cannot_be_kept_is_named(keep: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        predict(Job(layers=mlp).engine(), numbers(5), keep, alone(), Rooms())


def test_a_measure_that_gives_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="measure 'all' gave a Tensor"):
        evaluate(Job(layers=mlp).engine(), numbers(5), {"all": both, "": mse_loss}, alone())
    with pytest.raises(UsageError, match="empty"):
        predict(Job(layers=mlp).engine(), numbers(0), both, alone(), Rooms())


@pytest.mark.parametrize(
    "keep",
    [
        lambda output, target: target.numpy(),
        lambda output, target: target.flip(0).numpy()[::-1],
        lambda output, target: target.numpy().astype(">f4"),
    ],
)
def test_arrays_of_numpy_are_kept_as_tensors(keep: Any) -> None:
    found = predict(Job(layers=mlp).engine(), numbers(5), keep, alone(), Rooms())
    assert same_bits(found, numbers(5).tensors[1])


def test_what_is_kept_has_the_keys_that_it_was_given() -> None:
    found = predict(Job(layers=mlp).engine(), numbers(5), lambda o, t: {1: o, "1": t, (0, 2): t}, alone(), Rooms())
    assert [*found] == [1, "1", (0, 2)]
    assert same_bits(found["1"], numbers(5).tensors[1])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Stream(range, shards=[3]), "Stream"),
        (iter([1]), "list_iterator"),
        (None, "NoneType"),
        (Data(numbers(5)), "the data set itself"),
        (DataLoader(numbers(5)), r"loader\.dataset"),
    ],
)
def test_a_data_set_without_numbered_samples_is_refused_in_words(data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_dataset(data)


def test_what_is_large_is_in_files_that_nobody_has_to_remove(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path / "new", memory=0)
    found = predict(Job(layers=mlp).engine(), numbers(50), both, alone(), rooms)
    assert rooms.in_files > 0
    assert not [*(tmp_path / "new").iterdir()]
    assert same_bits(found[1], numbers(50).tensors[1])


def test_a_full_disk_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=r"no room for .* bytes of predictions"):
        Rooms(tmp_path, memory=0).take(2**60)


def test_predictions_are_remembered_up_to_a_size() -> None:
    value = {"labels": torch.arange(1000) % 3, "rows": [torch.ones(2, dtype=torch.bfloat16), torch.empty(0, 3)]}
    found = recalled(to_remember(value))
    assert all(same_bits(mine, theirs) for mine, theirs in zip(leaves(found), leaves(value), strict=True))
    large = torch.from_numpy(np.random.default_rng(0).integers(0, 255, 2**20 + 2**18, dtype=np.uint8))
    with pytest.raises(Forgotten, match="1,310,720 bytes"):
        recalled(to_remember(large))
