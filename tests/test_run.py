"""``holdfast.Run`` in one process: a plain PyTorch loop's numbers, and clear words for bad use."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, TensorDataset

import holdfast
from holdfast import Checkpoints, Data, Numerics, Placement
from holdfast.errors import HoldfastError, UsageError
from holdfast.run import saver
from holdfast.run.run import Run, Step

SIZE, GLOBAL, MICRO = 26, 8, 2  # the last of four batches has two samples


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def net(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def points(size: int = SIZE) -> TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def make(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "layers": net(),
        "loss": cross_entropy,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.05),
        "data": points(),
        "global_batch": GLOBAL,
        "micro_batch": MICRO,
    }
    return Run(**{**settings, **changes})


def train(run: Run, steps: int) -> list[Step]:
    return list(run.steps(steps))


def samples_of(run: Run, step: int) -> list[int]:
    order = run.engine.order
    return [s for index in range(order.micro_batches(step)) for s in order.samples(step, index)]


def plain_loop(
    run: Run, model: nn.Module, steps: int, *, clip: float | None = None, decay: bool = False
) -> list[float]:
    """What a user would write without us, one batch at a time."""
    inputs, targets = points().tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5) if decay else None
    losses = []
    for step in range(steps):
        batch = samples_of(run, step)
        loss = cross_entropy(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def assert_close(a: nn.Module, b: nn.Module) -> None:
    for (name, mine), theirs in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5), name


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("extra", ["plain", "clip", "schedule"])
def test_training_is_that_of_a_plain_loop(numerics: str, extra: str) -> None:
    clip = 0.1 if extra == "clip" else None
    schedule = (lambda o: StepLR(o, step_size=2, gamma=0.5)) if extra == "schedule" else None
    run = make(numerics=numerics, clip_norm=clip, schedule=schedule)
    reference = net()
    steps = train(run, 10)
    expected = plain_loop(run, reference, 10, clip=clip, decay=schedule is not None)
    assert [step.loss for step in steps] == pytest.approx(expected, abs=1e-5)
    assert_close(run.engine.model.module, reference)


def test_the_extras_do_change_the_numbers() -> None:
    """The control of the test above."""
    variants: list[dict[str, Any]] = [{}, {"clip_norm": 0.1}, {"schedule": lambda step: 0.01}]
    runs = [make(**extra) for extra in variants]
    for run in runs:
        train(run, 3)
    assert len({run.sha256() for run in runs}) == 3


def test_a_ragged_batch_weighs_each_sample_the_same() -> None:
    """Two micro-batches, of two samples and of one: not the mean of their means."""
    data = TensorDataset(*(tensor[:7] for tensor in points().tensors))
    model = net()
    weights = copy.deepcopy(model)
    run = make(
        layers=model, data=Data(data, shuffle=False), global_batch=4, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0)
    )
    step = train(run, 2)[1]
    inputs, targets = data.tensors
    loss = cross_entropy(weights(inputs[4:7]), targets[4:7])
    assert step.loss == pytest.approx(loss.item(), abs=1e-6)
    halves = [cross_entropy(weights(inputs[a:b]), targets[a:b]).item() for a, b in [(4, 6), (6, 7)]]
    assert step.loss != pytest.approx(sum(halves) / 2, abs=1e-4)


def test_the_gradient_of_a_ragged_batch_is_that_of_the_whole_batch() -> None:
    data = TensorDataset(*(tensor[:7] for tensor in points().tensors))
    model, reference = net(), net()
    rate = lambda step: 1.0 if step == 1 else 0.0  # noqa: E731 - only the ragged batch counts
    run = make(
        layers=model,
        data=Data(data, shuffle=False),
        global_batch=4,
        optimizer=lambda ps: torch.optim.SGD(ps),
        schedule=rate,
    )
    train(run, 2)
    inputs, targets = data.tensors
    cross_entropy(reference(inputs[4:7]), targets[4:7]).backward()
    with torch.no_grad():
        for p in reference.parameters():
            p -= p.grad
    assert_close(model, reference)


def test_a_function_of_the_step_is_the_learning_rate() -> None:
    start = net()
    run = make(layers=copy.deepcopy(start), schedule=lambda step: 0.0)
    train(run, 2)
    assert_close(run.engine.model.module, start)


def test_steps_are_numbered_and_know_their_epoch() -> None:
    steps = train(make(), 9)
    assert [step.number for step in steps] == list(range(9))
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4 + [2]
    assert all(step.is_first_worker and step.workers == 1 for step in steps)


def test_two_runs_have_one_hash_and_another_seed_another() -> None:
    hashes = []
    for seed in (0, 0, 1):
        run = make(layers=net(dropout=0.3), seed=seed)
        torch.rand(int(torch.randint(100, ())))  # what was drawn before does not matter
        losses = [step.loss for step in train(run, 6)]
        hashes.append((run.sha256(), run.sha256(weights_only=True), tuple(losses)))
    assert hashes[0] == hashes[1]
    assert all(a != b for a, b in zip(hashes[0], hashes[2], strict=True))


def test_what_user_code_draws_between_steps_does_not_matter() -> None:
    quiet, noisy = make(layers=net(dropout=0.3)), make(layers=net(dropout=0.3))
    train(quiet, 5)
    for _ in noisy.steps(5):
        torch.rand(3)
        noisy.evaluate(points())
    assert quiet.sha256() == noisy.sha256()


def test_dropout_differs_between_micro_batches_and_steps() -> None:
    class Ones(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> Any:
            return torch.ones(64), torch.zeros(1)

    seen: list[torch.Tensor] = []

    def loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.append(output.detach().clone())
        return output.mean()

    layers = [nn.Linear(64, 64), nn.Dropout(0.5)]
    still = lambda ps: torch.optim.SGD(ps, lr=0.0)  # noqa: E731
    train(make(layers=layers, loss=loss, data=Ones(), optimizer=still, global_batch=4, micro_batch=2), 4)
    assert len({tuple(output.flatten().tolist()) for output in seen}) == len(seen) == 8


def test_bf16_autocast_trains_and_keeps_float32_weights() -> None:
    seen: set[torch.dtype] = set()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.add(output.dtype)
        return cross_entropy(output, target)

    runs = [make(numerics=Numerics(autocast=torch.bfloat16), loss=loss) for _ in range(2)]
    losses = [[step.loss for step in train(run, 30)] for run in runs]
    assert seen == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in runs[0].engine.model.module.parameters())
    assert losses[0][-1] < losses[0][0]
    assert runs[0].sha256() == runs[1].sha256()


def test_a_parameter_that_is_not_used_does_no_harm() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Half()
    before = model.unused.weight.clone()
    train(make(layers=model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)), 3)
    assert torch.equal(model.unused.weight, before)


def test_inputs_may_be_dicts_and_tuples() -> None:
    class Pairs(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> Any:
            return {"x": torch.full((4,), float(i)), "y": (torch.ones(4), torch.ones(4))}, torch.tensor([1.0])

    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            return self.head(batch["x"] + batch["y"][0])

    assert len(train(make(layers=Add(), data=Pairs(), loss=mse_loss), 2)) == 2


# --- evaluation, saving, going on -----------------------------------------------------------------


def test_evaluate_is_the_mean_over_the_samples_without_dropout() -> None:
    run = make(layers=net(dropout=0.5))
    before = run.evaluate(points(11))  # before training, and with a ragged last micro-batch
    train(run, 3)
    model = copy.deepcopy(run.engine.model.module).eval()
    inputs, targets = points(11).tensors
    assert run.evaluate(points(11)) == pytest.approx(cross_entropy(model(inputs), targets).item(), abs=1e-5)
    assert run.evaluate(points(11)) != before


def test_evaluate_takes_another_measure() -> None:
    def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == target).float().mean()

    run = make()
    train(run, 60)
    inputs, targets = points().tensors
    right = (run.engine.model.module(inputs).argmax(1) == targets).float().mean().item()
    assert run.evaluate(points(), measure=accuracy) == pytest.approx(right)
    assert right > 0.8


def test_evaluate_inside_the_loop_changes_nothing() -> None:
    with_it, without = make(), make()
    values = [with_it.evaluate(points()) for _ in with_it.steps(4)]
    train(without, 4)
    assert len(set(values)) == 4
    assert with_it.sha256() == without.sha256()


def test_a_saved_model_has_the_names_and_weights_of_the_model(tmp_path: Path) -> None:
    run = make()
    train(run, 2)
    path = tmp_path / "new folder" / "model.safetensors"
    run.save_model(path)
    run.save_model(path)
    fresh = net(seed=9)
    fresh.load_state_dict(load_file(path))
    assert all(map(torch.equal, fresh.parameters(), run.engine.model.module.parameters()))
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_files_are_written_where_they_are_asked_for() -> None:
    """What happens if the writer is lost is in tests/integrations/test_transformers.py."""
    run, written = make(), []
    run.write_files(lambda: written.append("before"))
    for step in run.steps(2):
        run.write_files(lambda number=step.number: written.append(number))
    run.write_files(lambda: written.append("after"))
    assert written == ["before", 0, 1, "after"]
    with pytest.raises(UsageError, match="write"):
        run.write_files("model.bin")  # type: ignore[arg-type]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    path = tmp_path / "model.safetensors"
    run.save_model(path)
    old = path.read_bytes()

    def fail(name: Path, *_: Any, **__: Any) -> None:
        name.write_bytes(b"half")
        raise OSError(28, "disk full")

    monkeypatch.setattr("holdfast.run.gather.write_blocks", fail)
    with pytest.raises(HoldfastError, match="disk full"):
        run.save_model(path)
    assert path.read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 1


def test_steps_can_be_called_again_to_go_on() -> None:
    parts, whole = make(), make()
    numbers = [step.number for total in (2, 2, 5) for step in parts.steps(total)]
    train(whole, 5)
    assert numbers == [0, 1, 2, 3, 4]
    assert parts.step == 5
    assert parts.sha256() == whole.sha256()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_eager_updates_change_nothing_while_nothing_breaks(tmp_path: Path, checkpoint: bool) -> None:
    found = []
    updates: list[Literal["commit", "eager"]] = ["commit", "eager"]
    for update in updates:
        saved = Checkpoints(folder=tmp_path / update, every=3) if checkpoint else None
        run = make(numerics=Numerics(update=update), checkpoint=saved)
        found.append(([(step.number, step.loss) for step in train(run, 7)], run.sha256()))
        run.finish()
    assert found[0] == found[1]


def test_leaving_the_loop_early_loses_nothing() -> None:
    left, whole = make(), make()
    for step in left.steps(10):
        if step.number == 2:
            break
    assert left.step == 3
    train(left, 5)
    train(whole, 5)
    assert left.sha256() == whole.sha256()


# --- bad use --------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls in a buffer, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.head, self.in_place = nn.Linear(4, 3), in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return self.head(x)


def poisoned() -> TensorDataset:
    inputs, targets = points().tensors
    inputs[13] = float("nan")
    return TensorDataset(inputs, targets)


norm = [nn.Linear(4, 3), nn.SyncBatchNorm(3)]
shared_norm = nn.BatchNorm1d(3)
linear = nn.Linear(4, 3)
EAGER = Numerics(update="eager")


BAD_USE = {
    "a batch that micro-batches do not divide": ({"micro_batch": 3}, ["global_batch=9", "micro_batch=3"]),
    "a micro-batch of none": ({"micro_batch": 0}, ["micro_batch=0"]),
    "a data set smaller than a batch": ({"data": points(7)}, ["7", "global_batch=8", "global_batch=6"]),
    "a generator": ({"data": (i for i in range(100))}, ["generator", "Stream("]),
    "unknown numerics": ({"numerics": "nope"}, ["'nope'", "'exact'", "'fast'"]),
    "a negative seed": ({"seed": -1}, ["seed"]),
    "statistics over all workers": ({"layers": norm}, ["'1'", "SyncBatchNorm", "use BatchNorm"]),
    "layers without a shape": ({"layers": [nn.LazyLinear(3)]}, ["'0.weight'", "no shape yet", "lazy"]),
    "a forward pass that writes into a buffer": ({"layers": Counting(in_place=True)}, ["'calls'"]),
    "a loss per sample": ({"loss": nn.CrossEntropyLoss(reduction="none")}, ["reduction='mean'"]),
    "a loss that is no tensor": ({"loss": lambda output, target: 1.0}, ["loss"]),
    "no optimizer": ({"optimizer": lambda params: None}, ["lambda params"]),
    "nothing to train": ({"layers": nn.Linear(4, 3).requires_grad_(False)}, ["requires_grad"]),
    "samples without targets": ({"data": torch.ones(SIZE, 4)}, ["(input, target)"]),
    "a forward pass that replaces a buffer": ({"layers": Counting(in_place=False)}, ["'calls'"]),
    "a log of running statistics of two layers": (
        {"checkpoint": Checkpoints(folder="unused", log=True), "layers": [nn.Linear(4, 3), shared_norm, shared_norm]},
        ["'1'", "log"],
    ),
    "eager updates that are clipped": ({"numerics": EAGER, "clip_norm": 1.0}, ["clip_norm"]),
    "eager updates that nobody can undo": (
        {"numerics": EAGER, "optimizer": lambda ps: torch.optim.RMSprop(ps)},
        ["RMSprop"],
    ),
    "an optimizer instead of a factory": (
        {"layers": linear, "optimizer": torch.optim.SGD(linear.parameters(), lr=0.1)},
        ["lambda params"],
    ),
}
cases = [pytest.param(changes, facts, id=name) for name, (changes, facts) in BAD_USE.items()]


@pytest.mark.parametrize(("changes", "facts"), cases)
def test_bad_use_is_named_with_a_hint(changes: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(holdfast.UsageError) as refused:
        train(make(**changes), 1)
    assert not [fact for fact in facts if fact not in str(refused.value)], str(refused.value)


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_is_wrapped_in_ddp_is_refused(inside: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    finally:
        dist.destroy_process_group()
    with pytest.raises(holdfast.UsageError, match=r"DistributedDataParallel.*\(give what it wraps: model.module\)"):
        make(layers=[nn.Linear(4, 4), wrapped] if inside else wrapped, numerics="fast")


def test_a_model_that_is_wrapped_in_data_parallel_is_refused() -> None:
    with pytest.raises(holdfast.UsageError, match=r"layer '1' is wrapped in DataParallel.*model.module\)"):
        make(layers=[nn.Linear(4, 4), nn.DataParallel(nn.Linear(4, 3))], numerics="fast")


def test_a_model_is_saved_to_a_path() -> None:
    with pytest.raises(holdfast.UsageError, match=r"3 is no path of a file \(as in"):
        make().save_model(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_running_statistics_move(numerics: Any) -> None:
    run = make(layers=[nn.Linear(4, 3), nn.BatchNorm1d(3)], numerics=numerics)
    train(run, 3)
    assert run.engine.model.module[1].num_batches_tracked == 12
    assert run.engine.model.module[1].running_mean.abs().sum() > 0


def test_a_loss_that_is_not_finite_is_named_with_its_place() -> None:
    run = make(data=Data(poisoned(), shuffle=False))
    with pytest.raises(holdfast.LossNotFinite, match=r"step 1\b.*micro-batch 2\b.*\[12, 13\]"):
        train(run, 4)
    assert run.step == 1


def test_an_error_of_the_users_code_comes_out_as_it_is() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(make(loss=loss), 1)


def test_several_workers_without_an_agent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(holdfast.UsageError, match="holdfast run -n 4"):
        make()


def test_too_few_workers_for_the_wanted_tolerance_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    train(make(placement=Placement(tolerate=1)), 3)
    assert caplog.text.count("cannot survive the loss of 1") == 1


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        return torch.rand(4), torch.tensor(0)


def test_evaluate_of_data_that_draws_gives_one_value() -> None:
    run = make()
    train(run, 1)
    assert run.evaluate(Noisy()) == run.evaluate(Noisy())


def test_the_hint_for_a_small_data_set_can_be_followed() -> None:
    with pytest.raises(holdfast.UsageError) as error:
        make(data=points(3), micro_batch=4)
    assert "global_batch=4" not in str(error.value)


def test_evaluate_of_nothing_is_refused() -> None:
    with pytest.raises(holdfast.UsageError):
        make().evaluate(points(0))


def test_float64_models_keep_their_precision() -> None:
    inputs, targets = (t.double() for t in (points().tensors[0][:12], torch.ones(12, 1)))
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    reference = copy.deepcopy(model)
    run = make(
        layers=model,
        loss=mse_loss,
        data=TensorDataset(inputs, targets),
        global_batch=12,
        micro_batch=4,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    train(run, 1)
    mse_loss(reference(inputs), targets).backward()
    with torch.no_grad():
        for p in reference.parameters():
            p -= 0.1 * p.grad
    assert torch.allclose(model.weight, reference.weight, rtol=0, atol=1e-12)


def test_a_second_run_of_a_process_goes_on_from_what_the_first_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go_on = saver.Save.write, threading.Event()

    def late(save: Any, *words: Any, **more: Any) -> Any:
        go_on.wait(30)
        return real(save, *words, **more)

    monkeypatch.setattr(saver.Save, "write", late)
    first = make(checkpoint=tmp_path)
    assert len(train(first, 3)) == 3
    threading.Timer(0.2, go_on.set).start()
    second = make(checkpoint=tmp_path)
    assert [step.number for step in train(second, 5)] == [3, 4]


def test_a_loss_that_takes_one_argument_is_refused() -> None:
    with pytest.raises(holdfast.UsageError, match="output, target"):
        make(loss=lambda output: output.mean())
