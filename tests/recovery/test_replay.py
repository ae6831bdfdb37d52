"""Layers that nobody holds any more, in threads: whoever is lost when, they come back as they were, or not at all."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.cluster import faults
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import End
from holdfast.engine import again
from holdfast.engine.pipe import describe
from holdfast.engine.progress import Progress
from holdfast.engine.state import State
from holdfast.engine.step import TrainingStep
from holdfast.engine.update import Terms
from holdfast.log.log import Log, LogSettings
from holdfast.log.spill import Damaged
from holdfast.plan.log_records import Direction, Key
from holdfast.plan.replay_plan import Sources
from holdfast.recovery import arrange, replay
from holdfast.recovery.arrange import Arranger, Wishes
from holdfast.recovery.replay import Replayer
from holdfast.run.saver import Saver, Settings
from tests.engine.memory_group import MemoryGroup, Network
from tests.engine.pipelines import CPU, Job, Layer, Result, lay, linear, train_alone
from tests.recovery.town import Fate, Town, Voice, assert_trained, random_layout

LAYERS, STEPS = 5, 6


def layers() -> list[nn.Module]:
    """The first and the last share a weight; one has none; one is frozen, and one has a buffer that is not saved."""
    first, last, middle = linear(), linear(), linear()
    last.weight = first.weight
    middle.register_buffer("shift", torch.full((1,), 0.25), persistent=False)
    frozen = linear().requires_grad_(False)
    return [first, nn.Tanh(), Layer(lambda x, m: m(x) + m.shift, middle), Layer(lambda x, m: m(x).tanh(), frozen), last]


JOB = Job(layers=layers, steps=STEPS, clip_norm=0.5, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.05))


class LoggedTown(Town):
    """Workers that keep a log and save checkpoints; the coordinator lets them go on while the log may help."""

    folder: Path
    every: int
    memory: int
    patient: bool  # the first checkpoint is durable before anything happens

    def _script(self, name: str, engine: Any) -> None:
        log = Log(LogSettings(folder=self.folder / "log", memory=self.memory), name=name, say=self.words.append)
        engine.log = log
        progress = Progress(label="a test")
        state = State(engine.model, engine.update, progress, holdings=engine.holdings)
        saver = Saver(Settings(root=self.folder, every=self.every), state, self, log)  # type: ignore[arg-type]
        replayer = Replayer(engine, state, log, saver, self)  # type: ignore[arg-type]
        arranger = Arranger(engine, state, self, Wishes(stages=1), saver, replayer)  # type: ignore[arg-type]
        voice = Voice(name, self)
        voice.doing = lambda operation, kind: self.doing(voice, operation, kind)  # type: ignore[method-assign]
        members = Cohort(voice, arranger, CPU, self, connect=self.form)  # type: ignore[arg-type]
        try:
            members.boundary()
            while progress.step < self.job.steps:
                saver.if_due(members)
                number = progress.step
                members.commit(TrainingStep(engine, progress))
                self.after_step(name, number)
                saver.if_due(members)
                self.settle(saver)
                if self.patient and number == 0:
                    self.wait_for_checkpoint(saver)
                members.boundary()
            saver.if_due(members, last=True)
            members.commit(End())
            saver.leave()
        finally:
            saver._everywhere.set()  # one that is killed waits for nobody
            log.close()

    def wait_for_checkpoint(self, saver: Saver) -> None:
        """As long as somebody may still write it."""
        for _ in range(1000):
            if saver.steps() or len(self.generations) > 1 or self.over:
                return
            time.sleep(0.01)

    def doing(self, voice: Voice, operation: int, kind: str) -> None:
        """For tests that must know what a worker is about to do."""

    def settle(self, saver: Saver) -> None:
        """For tests that want a checkpoint to be durable before the next step."""

    @property
    def words(self) -> list[str]:
        return self.__dict__.setdefault("_words", [])

    @property
    def heard(self) -> list[tuple[str, dict[str, Any]]]:
        return self.__dict__.setdefault("_heard", [])

    def write(self, event: str, **fields: Any) -> None:
        """As ``Events`` does."""
        self.heard.append((event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.heard if name == event]


@pytest.fixture(scope="module")
def expected() -> Result:
    return train_alone(JOB)


@pytest.fixture
def make_town(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    count = iter(range(1000))

    def make(
        fate: Fate, target: int, layouts: Any, *, every: int = 100, memory: int = 1 << 20, patient: bool = True
    ) -> LoggedTown:
        town = LoggedTown(JOB, fate, target, layouts)
        town.folder, town.every, town.memory, town.patient = tmp_path / str(next(count)), every, memory, patient
        monkeypatch.setattr(faults, "point", town.point)
        monkeypatch.setattr(arrange, "lay_out", town.lay_out)
        return town

    return make


def at(*strikes: tuple[str, str, int]) -> Fate:
    """Strikes as they are listed: (worker, point, how often it was there)."""
    return lambda worker, point, count: (worker, point, count) in strikes


def in_a_row(size: int, seed: str) -> Any:
    """One copy of each layer, cut into as many stages as there are workers."""
    counts = {1: [LAYERS], 2: [2, 3], 3: [1, 3, 1], 4: [1, 1, 2, 1], 5: [1] * 5}[min(size, 5)]
    return lay((range(len(counts)), counts), size=size)


def run(town: LoggedTown, workers: int) -> LoggedTown:
    town.start(workers)
    town.join()
    return town


# --- one copy of each layer ----------------------------------------------------------------------

PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]


@pytest.mark.parametrize(("phase", "worker"), [(phase, f"0.{n % 4}") for n, phase in enumerate([*PHASES, "vote"])])
def test_a_stage_is_lost(make_town: Any, expected: Result, phase: str, worker: str) -> None:
    town = run(make_town(at((worker, phase, 12 if phase in ("data", "forward", "backward") else 4)), 4, in_a_row), 4)
    assert_trained(town, expected)
    assert len(town.trained) == 3
    place = in_a_row(4, "").role(int(worker[-1])).layers
    assert {event["layers"][0][0] for event in town.of("replay")} == {place.start}
    assert {event["layers"][0][1] for event in town.of("replay")} == {place.stop}


@pytest.mark.parametrize("lost", [["0.0", "0.1"], ["0.0", "0.3"], ["0.1", "0.3"], ["0.0", "0.2", "0.3"]])
def test_several_are_lost(make_town: Any, expected: Result, lost: list[str]) -> None:
    town = run(make_town(at(*((worker, "vote", 5) for worker in lost)), 4, in_a_row), 4)
    assert_trained(town, expected)
    assert len(town.trained) == 4 - len(lost)
    assert town.of("replay")


@pytest.mark.parametrize("second", [("0.0", 1), ("0.2", 3), ("0.3", 2)])
def test_one_more_is_lost_in_the_replay(make_town: Any, expected: Result, second: tuple[str, int]) -> None:
    worker, count = second
    town = run(make_town(at(("0.1", "vote", 5), (worker, "replay", count)), 4, in_a_row), 4)
    assert_trained(town, expected)
    assert len(town.trained) == 2


@pytest.mark.parametrize("point", ["regroup", "layout", "copy"])
def test_one_more_is_lost_while_the_others_regroup(make_town: Any, expected: Result, point: str) -> None:
    town = run(make_town(at(("0.1", "vote", 5), ("0.2", point, 2)), 4, in_a_row), 4)
    assert_trained(town, expected)
    assert len(town.trained) == 2


def test_a_vote_that_only_some_have_heard(make_town: Any, expected: Result) -> None:
    """0.0 has voted and hears nobody, 0.1 commits and dies: the lost layers have to take that step as well."""
    town = run(make_town(at(("0.0", "unlucky", 5), ("0.1", "voted", 5)), 4, in_a_row), 4)
    assert_trained(town, expected)
    assert {event["stop"] for event in town.of("replay")} == {4}


@pytest.mark.parametrize("memory", [0, 3000])
def test_records_in_files_serve_as_well(make_town: Any, expected: Result, memory: int) -> None:
    town = run(make_town(at(("0.1", "vote", 5)), 4, in_a_row, memory=memory), 4)
    assert_trained(town, expected)
    assert not list(town.folder.glob("log/*.log")), "files stay when all is over"


def test_survivors_compute_nothing_else(make_town: Any, expected: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: set[tuple[int, ...]] = set()
    real = again._Span.compute

    def compute(span: Any, step: int, index: int) -> None:
        computed.add(tuple(span._stage.post.role.layers))
        real(span, step, index)

    monkeypatch.setattr(again._Span, "compute", compute)
    town = run(make_town(at(("0.2", "vote", 5)), 4, in_a_row), 4)
    assert_trained(town, expected)
    assert computed == {(2, 3)}


def test_a_checkpoint_that_only_some_have_begun(make_town: Any, expected: Result) -> None:
    """At a boundary one comes, and a checkpoint is due. 0.1 is in the midst of it when the one who came is lost, while
    0.0 has not even got into the generation: next, both must mean the same."""
    begun, gone = threading.Event(), threading.Event()

    def fate(worker: str, point: str, count: int) -> bool:
        if (worker, point) == ("0.2", "layout"):
            assert begun.wait(10), "nobody begins the checkpoint"
            gone.set()
            return True
        if (worker, point, count) == ("0.0", "layout", 2):
            assert gone.wait(10)
        return False

    town: LoggedTown = make_town(fate, 2, lambda size, seed: lay(([0, 1], [2, 3]), size=size))

    def after_step(worker: str, step: int) -> None:
        if (worker, step) == ("0.0", 1):
            town.let_in(1)

    def doing(voice: Voice, operation: int, kind: str) -> None:
        if voice.worker == "0.1" and kind == "checkpoint" and len(town.generations) == 2:
            begun.set()

    town.after_step = after_step  # type: ignore[method-assign]
    town.doing = doing  # type: ignore[method-assign]
    run(town, 2)
    assert [generation.workers for generation in town.generations] == [
        ["0.0", "0.1"],
        ["0.0", "0.1", "0.2"],
        ["0.0", "0.1"],
    ]
    assert_trained(town, expected)


# --- whatever happens ----------------------------------------------------------------------------


def chances(seed: int, size: int) -> Fate:
    chance = random.Random(seed)
    strikes: set[tuple[str, str, int]] = set()
    for _ in range(chance.randint(1, 3)):
        phase = chance.choice([*PHASES, "regroup", "copy", "replay", "layout", "snapshot"])
        most = {"data": 30, "forward": 30, "backward": 30}.get(phase, 8 if phase in PHASES else 4)
        strikes.add((f"0.{chance.randrange(size + 1)}", phase, chance.randint(1, most)))
    for _ in range(chance.randint(0, 2)):
        strikes.add((f"0.{chance.randrange(size)}", chance.choice(["unlucky", "rash"]), chance.randint(1, STEPS + 4)))
    return at(*strikes)


def random_run(make_town: Any, seed: int) -> LoggedTown:
    chance = random.Random(seed)
    size = chance.randint(2, 5)
    layouts: Callable[[int, str], Any] = in_a_row if chance.random() < 0.7 else lambda n, s: random_layout(LAYERS, n, s)
    every, memory = chance.choice([2, 100]), chance.choice([0, 1 << 20])
    town: LoggedTown = make_town(
        chances(seed, size), size, layouts, every=every, memory=memory, patient=chance.random() < 0.7
    )
    comes, goes = chance.randrange(STEPS), chance.randrange(2 * STEPS)

    def after_step(worker: str, step: int) -> None:
        with town._changed:
            first = [w for w in town.members if w in town._alive][:1] == [worker]
        if first and step == comes and chance.random() < 0.5:
            town.start(chance.randint(1, 2))
            town.target += 1
        if first and step == goes and len(town.members) > 2:
            town.asked.add(worker)

    town.after_step = after_step  # type: ignore[method-assign]
    return run(town, size)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(4 * metafunc.config.getoption("--soak")))


def test_whatever_happens_the_weights_are_those_of_one_worker(make_town: Any, expected: Result, seed: int) -> None:
    town = random_run(make_town, seed)
    if town.over is None and town.trained:
        assert_trained(town, expected)
    else:
        assert town.over in (None, "nobody is left", "a part of the state is lost")


def test_many_of_these_runs_replay_and_go_on_to_the_end(make_town: Any) -> None:
    """The control: there is something to recover from, and the log helps."""
    found: Counter[str] = Counter()
    for seed in range(1000, 1012):
        town = random_run(make_town, seed)
        replayed = bool(town.of("replay"))
        found["replayed" if replayed else "without"] += 1
        found["ended after a replay"] += replayed and town.over is None
    assert found["replayed"] >= 3, found
    assert found["ended after a replay"] >= 2, found


# --- what a checkpoint makes superfluous ---------------------------------------------------------


def test_records_go_when_a_checkpoint_is_durable(make_town: Any, expected: Result) -> None:
    town = make_town(at(), 3, in_a_row, every=2)
    kept: dict[int, set[int]] = {}

    def settle(saver: Saver) -> None:
        saver.leave()
        first = saver._state.progress.saved
        if threading.current_thread().name == "0.0":
            while first not in saver.steps():
                pass
        assert saver._log is not None
        kept.setdefault(saver._state.progress.step, set()).update(saver._log._steps)

    town.settle = settle
    run(town, 3)
    assert_trained(town, expected)
    assert all(len(steps) <= 3 for steps in kept.values()), kept


def test_what_a_worker_finds_in_its_own_log_is_a_copy(tmp_path: Path) -> None:
    """Autograd may give it to a parameter as its gradient, and add to it: the next replay needs it as it was."""
    log = Log(LogSettings(folder=tmp_path), name="0.0", say=print)
    key = Key(step=0, boundary=1, micro_batch=0, direction=Direction.BACKWARD)
    log.keep(key, describe([torch.ones(16)]))
    group: Any = MemoryGroup(0, Network(1))
    traffic = replay._Traffic(group, log, Sources([log.holdings(1)]), lambda step, rank: [], range(1), CPU)
    (gradient,) = traffic.find(key)
    gradient.add_(1.0)
    (once_more,) = traffic.find(key)
    assert torch.equal(once_more, torch.ones(16))


def test_a_damaged_record_ends_in_words(make_town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record that is said to be there cannot be read: nobody is given wrong layers."""
    real = Log.read

    def read(log: Log, key: Any) -> Any:
        if log.name == "0.0" and key.step == 2:
            raise Damaged(key, "somewhere", "a test")
        return real(log, key)

    monkeypatch.setattr(Log, "read", read)
    town = run(make_town(at(("0.1", "vote", 5)), 4, in_a_row), 4)
    assert town.over == "a part of the state is lost"
    assert any("step 2, boundary 1" in event["reason"] for event in town.of("log-useless"))
    assert any("step 2, boundary 1" in words for words in town.words)


# --- controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sabotage", ["a bit", "no clipping", "another rate"])
def test_control_a_wrong_replay_shows(
    make_town: Any, expected: Result, monkeypatch: pytest.MonkeyPatch, sabotage: str
) -> None:
    def flipped(message: Any) -> Any:
        """The next larger number, in all that a neighbour gave."""
        text, tensors = message
        return real_read((text, [torch.nextafter(tensor, tensor + 1) for tensor in tensors]))

    def apply(each: Any, terms: Terms) -> None:
        if sabotage == "no clipping":
            terms = Terms(groups=terms.groups, norm=None)
        if sabotage == "another rate":
            terms = Terms(groups=[{**group, "lr": 0.051} for group in terms.groups], norm=terms.norm)
        real_apply(each, terms)

    real_apply, real_read = again.Again.apply, replay.read
    monkeypatch.setattr(again.Again, "apply", apply)
    if sabotage == "a bit":
        monkeypatch.setattr(replay, "read", flipped)
    town = run(make_town(at(("0.1", "vote", 5), ("0.0", "vote", 5), ("0.3", "vote", 5)), 4, in_a_row), 4)
    assert town.over is None
    with pytest.raises(AssertionError):
        assert_trained(town, expected)
