"""The table of TrainingArguments, and what is refused, each in a sentence that names it."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError

pytest.importorskip("transformers", reason="this is about transformers' TrainingArguments, which is not installed")

import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from holdfast.integrations import hf_checkpoints, training_arguments
from holdfast.integrations.alone import be_alone
from holdfast.integrations.transformers import Trainer

MODULES = (
    "alone",
    "hf_checkpoints",
    "hf_losses",
    "hf_reporters",
    "sampled",
    "trainer_state",
    "training_arguments",
    "transformers",
)


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((x * self.weight).sum(1) - labels).pow(2).mean()}


DATA = [{"x": torch.ones(2), "labels": torch.tensor(1.0)}] * 4


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **given)


def test_every_argument_is_in_one_place_of_the_table() -> None:
    """It fails when transformers adds one: decide whether it is honoured, harmless or refused."""
    places = [training_arguments.HONOURED, set(training_arguments.HARMLESS), set(training_arguments.REFUSED)]
    known = sorted(name for place in places for name in place)
    assert known == sorted(each.name for each in fields(TrainingArguments))


def test_the_page_names_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    assert [name for name in training_arguments.REFUSED if f"`{name}" not in page] == []


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"fsdp_config": {"min_num_params": 2}}, "fsdp_config"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"optim": "lomo"}, "optim"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(tmp_path: Path, given: Any, name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name}="):
        Trainer(model=Line(), args=arguments(tmp_path, **given), train_dataset=DATA)


def test_an_argument_that_is_not_known_must_have_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_arguments, "HONOURED", training_arguments.HONOURED - {"seed"})
    with pytest.raises(UsageError, match=r"^seed=7"):
        training_arguments.check(arguments(tmp_path, seed=7), own_optimizer=False)
    training_arguments.check(arguments(tmp_path), own_optimizer=False)


def test_fields_of_a_subclass_are_its_own(tmp_path: Path) -> None:
    @dataclass
    class Mine(TrainingArguments):
        teacher: str = ""

    training_arguments.check(Mine(output_dir=str(tmp_path), use_cpu=True, teacher="x"), own_optimizer=False)


class Steps(Trainer):
    def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
        return super().training_step(*given, **more)


class Norms(TrainerCallback):
    def on_pre_optimizer_step(self, *given: Any, **more: Any) -> None:
        pass


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Early(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = True


def uneven(trainer: Trainer) -> None:
    trainer._train_batch_size = 2
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(DATA, batch_sampler=[[0], [1, 2]])  # type: ignore
    trainer.train()


@pytest.mark.parametrize(
    ("make", "use", "said"),
    [
        ({"kind": Steps}, Trainer.train, "training_step of Steps"),
        ({"callbacks": [Norms()]}, Trainer.train, "Norms waits for on_pre_optimizer_step"),
        ({"callbacks": [Early()]}, Trainer.train, "ends an epoch early"),
        ({"train_dataset": Stream()}, Trainer.train, "no numbered samples"),
        ({}, lambda trainer: trainer.train(resume_from_checkpoint=True), "there is no checkpoint"),
        ({}, lambda trainer: trainer.train(trial=1), "trial="),
        ({}, Trainer.hyperparameter_search, "hyperparameter_search"),
        ({}, lambda trainer: (trainer.train(), trainer.train()), "trains once"),
        ({}, uneven, "batches of several sizes"),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, Trainer.train, "has 4 samples, fewer"),
    ],
)
def test_bad_use_is_a_sentence(tmp_path: Path, make: Any, use: Callable[[Any], Any], said: str) -> None:
    given = {"train_dataset": DATA, **make}
    kind = given.pop("kind", Trainer)
    sizes = {name: given.pop(name) for name in [*given] if name.endswith(("_size", "_steps"))}
    with pytest.raises(UsageError, match=said):
        use(kind(model=Line(), args=arguments(tmp_path, max_steps=2, save_strategy="no", **sizes), **given))


def test_a_path_to_resume_from_is_one_of_this_folder(tmp_path: Path) -> None:
    trainer = Trainer(model=Line(), args=arguments(tmp_path, max_steps=2, save_steps=1), train_dataset=DATA)
    trainer.train()
    folder, root = str(tmp_path), tmp_path / hf_checkpoints.OURS
    for good in (None, False, True, f"{folder}/checkpoint-1", tmp_path / "checkpoint-2"):
        hf_checkpoints.check_resume(good, folder, root)  # type: ignore[arg-type]
    for bad in (f"{folder}/checkpoint-3", f"{folder}/other/checkpoint-1", f"{folder}/final"):
        with pytest.raises(UsageError, match=r"^resume_from_checkpoint="):
            hf_checkpoints.check_resume(bad, folder, root)
    again = Trainer(model=Line(), args=arguments(tmp_path, max_steps=2, save_steps=1), train_dataset=DATA)
    assert again.train(resume_from_checkpoint=True).global_step == 2, "there was nothing left to train"
    assert torch.equal(again.model.weight, trainer.model.weight)
    assert again.state.log_history[:-1] == trainer.state.log_history[:-1]


def test_the_last_checkpoint_of_transformers_may_be_newer_than_ours(tmp_path: Path) -> None:
    """Ours is written meanwhile. A worker that joins then, or begins again, has found it by ``get_last_checkpoint``."""
    (tmp_path / "checkpoint-2").mkdir()
    root = tmp_path / hf_checkpoints.OURS
    with pytest.raises(UsageError, match="there is no checkpoint"):
        hf_checkpoints.check_resume(get_last_checkpoint(str(tmp_path)), str(tmp_path), root)  # it is none of ours
    root.mkdir()
    hf_checkpoints.check_resume(get_last_checkpoint(str(tmp_path)), str(tmp_path), root)
    with pytest.raises(UsageError, match="of step 2"):
        hf_checkpoints.check_resume(str(tmp_path / "checkpoint-3"), str(tmp_path), root)


def test_a_team_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_WORKER", "0.0")
    monkeypatch.setenv("HOLDFAST_TEAM", "2")
    with pytest.raises(UsageError, match="--team"):
        be_alone()


def test_nothing_imports_an_integration() -> None:
    """So ``import holdfast`` needs no library of theirs."""
    package = Path(training_arguments.__file__).parents[1]
    others = [path for path in package.rglob("*.py") if "integrations" not in path.relative_to(package).parts]
    assert [path for path in others if "import holdfast.integrations" in (text := path.read_text())
            or "from holdfast.integrations" in text] == []  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    """Not collected with the others: they need transformers."""
    module = import_module(f"holdfast.integrations.{name}")
    assert doctest.testmod(module).failed == 0
