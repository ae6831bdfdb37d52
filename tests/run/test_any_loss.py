"""Runs whose loss calls the model, with batches of any kind and weights of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from holdfast import Data, LossNotFinite, Placement, Run, UsageError

IGNORED, WORDS, WIDTH = -100, 17, 8


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Sentences:
    """Sentences of 2 to 9 words, as dicts."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        words = torch.randint(WORDS, (2 + i * 7 % 8,), generator=torch.Generator().manual_seed(i)).tolist()
        return {"input_ids": words, "labels": [*words[1:], IGNORED]}


def padded(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """What a padding collator makes: a dict, with labels that do not count."""
    longest = max(len(sample["labels"]) for sample in samples)
    fill = {"input_ids": 0, "labels": IGNORED}
    return {
        name: torch.tensor([sample[name] + [empty] * (longest - len(sample[name])) for sample in samples])
        for name, empty in fill.items()
    }


class Language(nn.Module):
    """A model as transformers has them: names of a dict in, an object with a loss out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.norm(self.words(input_ids)).tanh())
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return type("Output", (), {"loss": loss, "logits": logits})


def tokens(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def make(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "model": Language(),
        "loss": lambda model, batch: model(**batch).loss,
        "weight": tokens,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.05),
        "data": Data(Sentences(), collate=padded),
        "global_batch": 16,
        "micro_batch": 4,
    }
    return Run(**{**settings, **changes})


def weights(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.engine.model.module.parameters()])


def losses(run: Run, steps: int = 5) -> list[float]:
    return [step.loss for step in run.steps(steps)]


def test_the_mean_over_tokens_does_not_depend_on_the_micro_batch() -> None:
    runs = [make(micro_batch=size, clip_norm=0.1) for size in (1, 4, 16)]
    first, *others = [losses(run) for run in runs]
    for each in others:
        assert each == pytest.approx(first, rel=1e-5)
    for run in runs[1:]:
        assert torch.allclose(weights(run), weights(runs[0]), atol=1e-5)


def test_without_weights_it_does() -> None:
    """The control: means of micro-batches, of which each counts as much as its samples."""
    first, second = (losses(make(micro_batch=size, weight=None)) for size in (1, 16))
    assert first != pytest.approx(second, rel=1e-3)


def test_a_step_is_that_of_a_plain_loop() -> None:
    model, plain = Language(), Language()
    run = make(model=model, data=Data(Sentences(), collate=padded, shuffle=False), clip_norm=0.1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    data = Sentences()
    for step in run.steps(3):
        batch = padded([data[i] for i in range(16 * step.number, 16 * step.number + 16)])
        loss = plain(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        assert step.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert torch.allclose(weights(run), torch.cat([p.flatten() for p in plain.parameters()]), atol=1e-5)


def test_a_model_and_its_layers_give_the_same_bits() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    common: dict[str, Any] = {"data": data, "weight": None}
    as_model = make(model=net(), loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]), **common)
    as_layers = make(model=None, layers=net(), loss=cross_entropy, **common)
    assert losses(as_model) == losses(as_layers)
    assert as_model.sha256() == as_layers.sha256()


class SomeEmpty(Sentences):
    """Sentences of which some have no label that counts: the mean over a micro-batch of these alone is NaN."""

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        sample = super().__getitem__(i)
        return sample if i % 4 else {**sample, "labels": [IGNORED] * len(sample["labels"])}


def test_a_micro_batch_in_which_nothing_counts_counts_nothing() -> None:
    data = Data(SomeEmpty(), collate=padded)
    first, second = (losses(make(micro_batch=size, data=data)) for size in (1, 16))
    assert first == pytest.approx(second, rel=1e-5)


def test_groups_of_named_parameters() -> None:
    def groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        plain = [p for name, p in named if "bias" in name or "norm" in name]
        rest = [p for name, p in named if "bias" not in name and "norm" not in name]
        decayed = {"params": rest, "weight_decay": 0.5}
        return torch.optim.AdamW([decayed, {"params": plain, "weight_decay": 0.0}], lr=0.01)

    run = make(optimizer=groups)
    losses(run, 2)
    names = {id(p): name for name, p in run.engine.model.module.named_parameters()}
    decays = [[names[id(p)] for p in group["params"]] for group in run.engine.update.optimizer.param_groups]
    assert decays == [["words.weight", "head.weight"], ["norm.weight", "norm.bias", "head.bias"]]


def test_other_modules_in_a_loss() -> None:
    teacher = Language(seed=1).requires_grad_(False).eval()

    def distil(model: nn.Module, batch: Any) -> Tensor:
        mine, theirs = model(**batch), teacher(**batch)
        between = kl_div(
            log_softmax(mine.logits, -1), log_softmax(theirs.logits, -1), reduction="batchmean", log_target=True
        )
        return mine.loss + between + 1e-3 * sum(p.square().sum() for p in model.parameters())

    before = torch.cat([p.flatten() for p in teacher.parameters()]).clone()
    found = losses(make(loss=distil))
    assert found[-1] < found[0]
    assert torch.equal(before, torch.cat([p.flatten() for p in teacher.parameters()]))


def test_an_evaluation_calls_the_measure_with_the_model() -> None:
    run = make()
    losses(run, 1)
    value = run.evaluate(Sentences(), lambda model, batch: model(**batch).loss)
    assert 0 < value < 10


@pytest.mark.parametrize(
    ("given", "said"),
    [(lambda batch: -1, "-1"), (lambda batch: float("nan"), "nan"), (lambda batch: batch, "dict")],
    ids=["negative", "nan", "dict"],
)
def test_weights_that_are_none(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        losses(make(weight=given))


def test_a_step_in_which_nothing_counts() -> None:
    with pytest.raises(UsageError, match="step 0"):
        losses(make(weight=lambda batch: 0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda model, batch: model(**batch), r"loss gave a .* and must give a tensor of one number .*\.loss"),
        (lambda model, batch: model(**batch).logits, "loss must give one number"),
        (lambda model, batch: model(**batch).loss * 1j, "loss must give one number"),
    ],
)
def test_losses_that_are_none(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        losses(make(loss=given))


def test_a_loss_of_output_and_target_is_refused_with_a_model() -> None:
    with pytest.raises(UsageError, match="layers="):
        make(loss=cross_entropy)


def test_a_model_is_not_cut() -> None:
    with pytest.raises(UsageError, match="layers="):
        make(placement=Placement(stages=2))


# --- losses that read parameters ----------------------------------------------------------------------------


def penalised(read: Any) -> dict[str, Any]:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    loss = lambda output, target: cross_entropy(output, target) + read(layers)  # noqa: E731
    return {"model": None, "layers": layers, "data": data, "loss": loss, "weight": None}


READS = {
    "weights": lambda layers: 1e-3 * layers[0].weight.square().sum(),
    "without a gradient": lambda layers: 1e-3 * layers[2].bias.detach().abs().sum(),
    "a view": lambda layers: layers[0].weight.view(-1)[0].detach(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_loss_that_reads_parameters_is_refused_where_they_may_go(read: Any) -> None:
    with pytest.raises(UsageError, match=r"the loss reads '[02]\."):
        losses(make(**penalised(read), placement=Placement(stages="auto")))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_loss_may_read_parameters_of_whole_replicas(read: Any) -> None:
    assert len(losses(make(**penalised(read)))) == 5


def test_a_loss_that_reads_none_trains_in_pipelines() -> None:
    run = make(**penalised(lambda layers: 0.0), placement=Placement(stages="auto"))
    assert len(losses(run)) == 5


@pytest.mark.parametrize(("share", "wrong"), [(1e-3, UsageError), (0.0, LossNotFinite)])
def test_a_loss_that_reads_parameters_later_is_refused_too(share: float, wrong: type[Exception]) -> None:
    """As one whose penalty begins at some step. Parameters that a worker does not hold are NaN."""
    calls = 0

    def late(layers: nn.Sequential) -> Any:
        nonlocal calls
        calls += 1
        penalty = share * layers[0].weight.sum() if share and calls > 6 else 0.0
        return penalty + float("nan") if calls > 6 else penalty

    with pytest.raises(wrong, match="the loss reads '0.weight'" if share else "the loss is nan at step 1"):
        losses(make(**penalised(late), placement=Placement(stages="auto")))
