"""The tensor log: keeps what it was given, whatever the disk does, or says that it does not."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.engine.pipe import describe
from holdfast.errors import UsageError
from holdfast.log import log as log_module
from holdfast.log import spill
from holdfast.log.log import Damaged, Log, LogSettings
from holdfast.log.record import Message
from holdfast.log.spill import size_of
from holdfast.plan.log_records import Direction, HeldRecords, Key, holdings_of
from holdfast.words import size_text
from tests.checkpoint.child import in_child, mount_tmpfs
from tests.log.test_spill import key_of, same

MB = 1 << 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything happens with kilobytes that would happen with megabytes."""
    monkeypatch.setattr(spill, "FILE", 8 << 10)
    monkeypatch.setattr(log_module, "BATCH", 2 << 10)


class Town:
    """Logs and what they said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self._logs: list[Log] = []

    def log(self, *, memory: int = 0, budget: int | None = None) -> Log:
        settings = LogSettings(budget=budget, memory=memory, folder=self.folder)
        self._logs.append(Log(settings, name="w0", say=self.said.append))
        return self._logs[-1]

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    def close(self) -> None:
        for log in self._logs:
            log.close()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path / "log")
    yield town
    town.close()


def message_of(number: int, elements: int = 100) -> Message:
    return describe({"number": number, "x": torch.full((elements,), float(number))})


# --- keeping -------------------------------------------------------------------------------------------


def test_what_is_in_memory_is_read(town: Town) -> None:
    log = town.log(memory=MB)
    for number in range(10):
        log.keep(key_of(number), message_of(number))
    log.settle()
    for number in range(10):
        assert same(log.read(key_of(number)), message_of(number))
    assert (log.bytes, log.spilled) == (10 * size_of(message_of(0)), 0)
    assert not town.folder.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "log of w0"]


def test_the_oldest_is_spilled_and_read(town: Town, small: None) -> None:
    log = town.log(memory=5000)
    messages = {key_of(number // 8, micro_batch=-number % 8): message_of(number) for number in range(50)}
    for key, message in messages.items():
        log.keep(key, message)
    log.settle()
    assert log.bytes == sum(map(size_of, messages.values()))
    assert log.bytes - 5000 <= log.spilled < log.bytes
    spilled = [log._steps[key.step].records[key].place is not None for key in messages]
    assert spilled == sorted(spilled, reverse=True)
    for key, message in messages.items():
        assert same(log.read(key), message)


def test_memory_is_free_after_spilling(town: Town) -> None:
    log = town.log(memory=MB)
    references = []
    for number in range(16):
        message = message_of(number, elements=MB // 16)  # a quarter of a megabyte
        references.append(weakref.ref(message[1][0]))
        log.keep(key_of(number), message)
        del message
    log.settle()
    alive = [reference() is not None for reference in references]
    on_disk = log.spilled // size_of(message_of(0, elements=MB // 16))
    assert on_disk >= 12
    assert alive == [False] * on_disk + [True] * (16 - on_disk)


@pytest.mark.parametrize("end", ["begin", "drop", "give_up", "renew", "close"])
@pytest.mark.parametrize("memory", [0, MB])
def test_memory_and_files_are_free_after_forgetting(town: Town, end: str, memory: int) -> None:
    log = town.log(memory=memory)
    message = message_of(0, elements=1000)
    reference = weakref.ref(message[1][0])
    log.keep(key_of(3), message)
    log.note(3, {"norm": 1.0})
    del message
    log.settle()
    assert (reference() is None, len(town.files)) == ((True, 1) if memory == 0 else (False, 0))
    arguments: dict[str, tuple[Any, ...]] = {"begin": (3,), "drop": (4,), "give_up": ("no reason",)}
    getattr(log, end)(*arguments.get(end, ()))
    assert (log.bytes, log.spilled, log.terms(3, 4)) == (0, 0, None)
    with pytest.raises(Damaged, match=r"step 3, boundary 1, micro-batch 0, forward in the log of w0"):
        log.read(key_of(3))
    log.settle()
    assert reference() is None
    assert town.files == []


def test_begin_forgets_the_step_and_later_ones(town: Town) -> None:
    log = town.log()
    for number in range(5):
        log.keep(key_of(number), message_of(number))
        log.note(number, {"norm": number})
    log.begin(3)
    log.keep(key_of(3), message_of(33))
    log.settle()
    assert same(log.read(key_of(2)), message_of(2))
    assert same(log.read(key_of(3)), message_of(33))
    with pytest.raises(Damaged):
        log.read(key_of(4))
    assert log.terms(0, 3) == [{"norm": 0}, {"norm": 1}, {"norm": 2}]
    assert log.terms(0, 4) is None
    assert log.terms(2, 2) == []


def test_drop_forgets_older_ones(town: Town) -> None:
    log = town.log()
    for number in range(5):
        log.keep(key_of(number), message_of(number))
        log.note(number, {"norm": number})
    log.drop(3)
    log.settle()
    with pytest.raises(Damaged):
        log.read(key_of(2))
    assert same(log.read(key_of(3)), message_of(3))
    assert log.terms(2, 5) is None
    assert log.terms(3, 5) == [{"norm": 3}, {"norm": 4}]
    assert log.bytes == 2 * size_of(message_of(3))


def test_a_record_that_is_kept_twice_is_the_later_one(town: Town) -> None:
    for memory in (0, MB):
        log = town.log(memory=memory)
        message = message_of(1)
        reference = weakref.ref(message[1][0])
        log.keep(key_of(1), message)
        log.settle()
        del message
        log.keep(key_of(1), message_of(2, elements=7))
        log.settle()
        assert reference() is None
        assert same(log.read(key_of(1)), message_of(2, elements=7))
        assert log.bytes == size_of(message_of(2, elements=7))
        assert log.spilled == (0 if memory else log.bytes)


def test_files_go_with_their_last_record(town: Town, small: None) -> None:
    log = town.log()
    for number in range(60):
        log.keep(key_of(number), message_of(number))
        log.settle()
    many = len(town.files)
    assert many > 3
    for number in range(60):
        log.drop(number)
        log.settle()
        assert all(same(log.read(key_of(n)), message_of(n)) for n in range(number, 60))
        if number == 30:
            assert 0 < len(town.files) <= many // 2 + 1
    log.drop(60)
    log.settle()
    assert town.files == []


def test_files_are_not_removed_in_the_callers_thread(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    removers = []
    real = spill._unlink
    monkeypatch.setattr(spill, "_unlink", lambda path: removers.append(threading.current_thread().name) or real(path))
    log = town.log()
    log.keep(key_of(0), message_of(0))
    log.settle()
    log.drop(1)
    log.settle()
    assert removers == ["log of w0"]


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do: a copy, or anything else that grows with the bytes of a tensor."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_keeping_costs_nothing_that_grows_with_the_bytes(town: Town) -> None:
    """No tensor is copied or looked at, and as long as there is memory no thread is woken."""
    log = town.log(memory=1 << 50)
    message = message_of(0, elements=4 * MB)
    with Operations() as operations:
        for number in range(100):
            log.keep(key_of(number // 8, micro_batch=number % 8), message)
        assert operations.number == 0
        message[1][0].clone()
        assert operations.number == 1, "control: a copy is counted"
    assert log.read(key_of(0))[1][0] is message[1][0]
    assert log._thread is None


# --- trouble -------------------------------------------------------------------------------------------


def expect_useless(log: Log, town: Town, *words: str) -> None:
    """That the log was given up, said so once, and has nothing left."""
    log.settle()
    assert not log.usable
    assert len(town.said) == 1, town.said
    assert all(word in town.said[0] for word in words), town.said
    assert (log.bytes, log.spilled, log.holdings(10**9)) == (0, 0, [])
    log.keep(key_of(99), message_of(99))
    log.note(99, {})
    log.settle()
    assert (log.bytes, log.terms(99, 100), len(town.said)) == (0, None, 1)
    with pytest.raises(Damaged):
        log.read(key_of(99))
    assert town.files == []


def expect_good_again(log: Log, town: Town) -> None:
    log.renew()
    town.said.clear()
    for number in range(5):
        log.keep(key_of(number), message_of(number))
    log.settle()
    assert log.usable
    for number in range(5):
        assert same(log.read(key_of(number)), message_of(number))
    assert town.said == []


def test_giving_up_and_beginning_again(town: Town) -> None:
    for memory in (0, MB):
        log = town.log(memory=memory)
        log.keep(key_of(0), message_of(0))
        log.give_up("because")
        log.give_up("because of something else")
        expect_useless(log, town, "because")
        expect_good_again(log, town)
        log.give_up("again")
        expect_useless(log, town, "again")
        town.said.clear()


def test_more_than_the_budget(town: Town) -> None:
    size = size_of(message_of(0))
    log = town.log(memory=2 * size, budget=5 * size)
    for number in range(5):
        log.keep(key_of(number), message_of(number))
    log.settle()
    assert log.usable
    log.drop(1)
    log.keep(key_of(5), message_of(5))
    assert log.usable
    log.keep(key_of(6), message_of(6))
    expect_useless(log, town, f"it would hold {size_text(6 * size)}, and its budget is {size_text(5 * size)}")
    expect_good_again(log, town)


@pytest.mark.parametrize(("call", "number"), [("pwritev", 0), ("pwritev", 1), ("pwritev", 3), ("open", 0)])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails(
    town: Town, monkeypatch: pytest.MonkeyPatch, small: None, call: str, number: int, error: int
) -> None:
    real, left = getattr(os, call), [number]

    def fail(*args: Any, **more: Any) -> Any:
        if threading.current_thread().name != "log of w0":
            return real(*args, **more)
        left[0] -= 1
        if left[0] < 0:
            raise OSError(error, os.strerror(error), *[str(args[0])] * (call == "open"))
        return real(*args, **more)

    log = town.log()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        for step in range(100):
            log.keep(key_of(step), message_of(step))
        log.settle()
        full = error in (errno.ENOSPC, errno.EDQUOT)
        expect_useless(log, town, "the disk is full: cannot write" if full else "Input/output error", "w0-")
    expect_good_again(log, town)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    def work() -> None:
        mount_tmpfs(tmp_path, megabytes=2)
        town = Town(tmp_path / "log")
        log = town.log(memory=MB)
        for number in range(40):  # 4 MB
            log.keep(key_of(number), message_of(number, elements=25_000))
            if number == 15:
                log.settle()
                assert log.usable
        expect_useless(log, town, "the disk is full: cannot write", f"{town.folder}/w0-{os.getpid()}-")
        assert os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_bsize > 1.9 * MB
        expect_good_again(log, town)
        log.close()

    in_child(work)


def test_a_folder_that_cannot_be_made(town: Town) -> None:
    town.folder.write_text("in the way")
    log = town.log()
    log.keep(key_of(0), message_of(0))
    expect_useless(log, town, "cannot write", str(town.folder))
    town.folder.unlink()
    expect_good_again(log, town)


def test_a_folder_that_vanishes(town: Town) -> None:
    log = town.log()
    log.keep(key_of(0), message_of(0))
    log.settle()
    shutil.rmtree(town.folder)
    with pytest.raises(Damaged, match="No such file"):
        log.read(key_of(0))
    assert log.usable
    log.keep(key_of(1), message_of(1))
    expect_useless(log, town, "cannot write", str(town.folder), "No such file")
    expect_good_again(log, town)


def test_a_record_that_cannot_be_written(town: Town) -> None:
    log = town.log()
    log.keep(key_of(0), ("no description", [torch.ones(3)]))
    expect_useless(log, town, "a record cannot be written")
    expect_good_again(log, town)


def test_one_who_is_told_may_fail_for_the_same_reason(tmp_path: Path) -> None:
    def say(text: str) -> None:
        raise OSError(errno.ENOSPC, "the file of events is on that disk too")

    log = Log(LogSettings(budget=600, folder=tmp_path), name="w0", say=say)
    log.keep(key_of(0), message_of(0))
    log.keep(key_of(1), message_of(1))
    assert not log.usable


class Gate:
    """A disk that does nothing until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        real = spill._transfer

        def transfer(call: Callable[..., int], *args: Any) -> int:
            if call is os.pwritev:
                self.entered.set()
                assert self._open.wait(20)
            return real(call, *args)

        monkeypatch.setattr(spill, "_transfer", transfer)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, town: Town) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def test_a_slow_disk(town: Town, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ``keep`` waits for the disk: its gate opens only after the log was given up."""
    monkeypatch.setattr(log_module, "BEHIND", 0)
    monkeypatch.setattr(log_module, "BATCH", MB // 4)
    log = town.log(memory=MB)
    size = size_of(message_of(0, elements=10_000))
    kept, references = 0, []
    while log.usable:
        message = message_of(kept, elements=10_000)
        references.append(weakref.ref(message[1][0]))
        log.keep(key_of(kept // 8, micro_batch=kept % 8), message)
        kept += 1
        del message
        if kept == 40:
            assert gate.entered.wait(10)
            assert all(same(log.read(key_of(0, micro_batch=n)), message_of(n, elements=10_000)) for n in range(8))
    assert (kept - 1) * size <= 2 * MB < kept * size  # given up with the first that is too much
    assert len(town.said) == 1
    assert all(fact in town.said[0] for fact in ("too slow", size_text(kept * size), size_text(MB))), town.said
    assert (log.bytes, log.spilled) == (0, 0)
    alive = sum(reference() is not None for reference in references) * size
    assert alive <= MB // 4 + size  # what is just being written
    gate.open()
    expect_useless(log, town)
    assert not any(reference() for reference in references)
    expect_good_again(log, town)


def test_little_memory_is_no_reason_to_give_up(town: Town, gate: Gate) -> None:
    log = town.log(memory=0)
    for number in range(50):
        log.keep(key_of(number), message_of(number, elements=10_000))
    assert log.usable
    gate.open()
    log.settle()
    assert log.usable
    assert log.spilled == log.bytes


@pytest.mark.parametrize("end", ["begin", "drop", "replace"])
def test_what_is_forgotten_while_it_is_written(town: Town, gate: Gate, end: str) -> None:
    log = town.log()
    log.keep(key_of(3), message_of(3))
    assert gate.entered.wait(10)
    if end == "begin":
        log.begin(3)
    elif end == "drop":
        log.drop(4)
    log.keep(key_of(3), message_of(33, elements=50))
    assert same(log.read(key_of(3)), message_of(33, elements=50))
    gate.open()
    log.settle()
    assert same(log.read(key_of(3)), message_of(33, elements=50))
    assert log.bytes == log.spilled == size_of(message_of(33, elements=50))
    log.begin(0)
    log.settle()
    assert log._held == 0
    assert town.files == []


def test_a_new_log_while_the_old_one_is_written(town: Town, gate: Gate) -> None:
    """What the thread was busy with belongs to nobody when it comes back."""
    log = town.log()
    log.keep(key_of(0), message_of(0))
    assert gate.entered.wait(10)
    log.give_up("in the middle")
    log.renew()
    log.keep(key_of(0), message_of(1, elements=30))
    gate.open()
    log.settle()
    assert log.usable
    assert same(log.read(key_of(0)), message_of(1, elements=30))
    assert log.bytes == log.spilled == size_of(message_of(1, elements=30))
    assert len(town.files) == 1
    assert town.said == ["in the middle"]


def test_an_error_of_before_is_none_of_the_new_log(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    log = town.log()
    real = spill.SpillFiles.write

    def renew_and_fail(self: spill.SpillFiles, records: Any) -> Any:
        monkeypatch.setattr(spill.SpillFiles, "write", real)
        log.give_up("in the middle")
        log.renew()
        log.keep(key_of(0), message_of(1))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spill.SpillFiles, "write", renew_and_fail)
    log.keep(key_of(0), message_of(0))
    log.settle()
    assert town.said == ["in the middle"]
    assert log.usable
    assert same(log.read(key_of(0)), message_of(1))


@pytest.mark.parametrize("memory", [0, MB])
def test_a_new_log_while_the_thread_sweeps(town: Town, monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Nothing may be written to the old files any more: they go. Nor is it the new log's memory that becomes free."""
    log = town.log(memory=memory)
    log.keep(key_of(0), message_of(0))
    log.settle()
    real = Log._sweep

    def renew(self: Log, *args: Any) -> None:
        monkeypatch.setattr(Log, "_sweep", real)
        log.give_up("in the middle")
        log.renew()
        log.keep(key_of(2), message_of(2))
        real(self, *args)

    monkeypatch.setattr(Log, "_sweep", renew)
    log.begin(0)
    log.settle()
    assert log.usable
    assert same(log.read(key_of(2)), message_of(2))
    assert log.bytes == size_of(message_of(2))
    assert (log.spilled, log._held) == ((0, log.bytes) if memory else (log.bytes, 0))


def test_an_end_does_not_wait_for_a_disk_for_ever(town: Town, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "LONGEST", 0.05)
    log = town.log()
    log.keep(key_of(0), message_of(0))
    assert gate.entered.wait(10)
    log.close()
    assert not log.usable
    assert town.said == []
    gate.open()
    log.settle()
    assert town.files == []


def test_after_its_end_a_log_keeps_nothing(town: Town) -> None:
    log = town.log()
    log.keep(key_of(0), message_of(0))
    log.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "log of w0"]
    log.keep(key_of(0), message_of(0))
    log.renew()
    assert not log.usable
    log.keep(key_of(0), message_of(0))
    assert log.bytes == 0
    log.drop(5)
    log.close()
    assert (log.usable, log.bytes, town.files, town.said) == (False, 0, [], [])


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="a log of 0 bytes is none"):
        LogSettings(budget=0)
    with pytest.raises(UsageError, match="-1 bytes of memory"):
        LogSettings(memory=-1)


# --- holdings ------------------------------------------------------------------------------------------


def spread_out(holdings: list[HeldRecords]) -> list[Key]:
    return [
        Key(step=step, boundary=h.boundary, micro_batch=number, direction=h.direction)
        for h in holdings
        for step in range(h.first, h.stop)
        for first, stop in h.micro_batches
        for number in range(first, stop)
    ]


def test_holdings_say_exactly_what_is_there() -> None:
    chance = random.Random(0)
    for _ in range(300):
        keys = {
            key_of(chance.randrange(5), chance.randrange(1, 3), chance.randrange(4), Direction(chance.randrange(3)))
            for _ in range(chance.randrange(60))
        }
        shuffled = chance.sample(sorted(keys), len(keys))
        holdings = holdings_of(shuffled)
        assert sorted(spread_out(holdings)) == sorted(keys)
        assert holdings == sorted(holdings) == holdings_of(keys)
        assert [HeldRecords.from_json(h.to_json()) for h in holdings] == holdings


def test_holdings_are_short() -> None:
    keys = [
        key_of(step, boundary, number, direction)
        for step in range(100)
        for boundary in (1, 2)
        for number in range(4, 12)
        for direction in (Direction.FORWARD, Direction.BACKWARD)
    ]
    holdings = holdings_of(keys)
    assert len(holdings) == 4
    assert holdings[0] == HeldRecords(
        direction=Direction.FORWARD, boundary=1, first=0, stop=100, micro_batches=((4, 12),)
    )


def test_holdings_of_a_log_end_where_asked(town: Town) -> None:
    log = town.log(memory=1000)
    for step in range(4):
        for number in range(2):
            log.keep(key_of(step, micro_batch=number), message_of(step))
    log.begin(3)
    log.keep(key_of(3), message_of(3))
    log.drop(1)
    log.settle()
    assert sorted(spread_out(log.holdings(3))) == [key_of(step, micro_batch=n) for step in (1, 2) for n in (0, 1)]
    assert len(spread_out(log.holdings(100))) == 5
    assert log.holdings(1) == []


# --- against a plain dict ------------------------------------------------------------------------------


class Model:
    """What a log should hold."""

    def __init__(self, log: Log, town: Town, seed: int) -> None:
        self.log, self.town, self.chance = log, town, random.Random(seed)
        self.records: dict[Key, Message] = {}
        self.terms: dict[int, dict[str, Any]] = {}
        self.step = 0
        self.kept = 0

    def some_key(self, step: int) -> Key:
        chance = self.chance
        return key_of(step, chance.randrange(1, 4), chance.randrange(4), Direction(chance.randrange(3)))

    def some_message(self) -> Message:
        shape = [self.chance.randrange(0, 12) for _ in range(self.chance.randrange(4))]
        self.kept += 1
        dtype = self.chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
        tensor = torch.full(shape, self.kept % 251, dtype=torch.float32).to(dtype)
        return describe([self.kept, *[tensor.mT if tensor.dim() > 1 else tensor] * self.chance.randrange(2)])

    def act(self) -> None:
        way = self.chance.random()
        if way < 0.8:
            key, message = self.some_key(self.step), self.some_message()
            self.log.keep(key, message)
            self.records[key] = message
        elif way < 0.92:
            self.log.note(self.step, {"norm": self.kept})
            self.terms[self.step] = {"norm": self.kept}
            self.step += 1
            self.log.begin(self.step)
        elif way < 0.95:
            self.step = max(0, self.step - self.chance.randrange(3))
            self.log.begin(self.step)
            self.forget(lambda step: step >= self.step)
        elif way < 0.98:
            before = max(0, self.step - self.chance.randrange(12))
            self.log.drop(before)
            self.forget(lambda step: step < before)
        elif way < 0.985:
            self.log.give_up("chance")
            self.log.renew()
            self.forget(lambda step: True)
        else:
            self.log.settle()

    def forget(self, chosen: Callable[[int], bool]) -> None:
        self.records = {key: message for key, message in self.records.items() if not chosen(key.step)}
        self.terms = {step: terms for step, terms in self.terms.items() if not chosen(step)}

    def compare(self, key: Key) -> None:
        if key in self.records:
            assert same(self.log.read(key), self.records[key])
        else:
            with pytest.raises(Damaged):
                self.log.read(key)
        assert self.log.bytes == sum(map(size_of, self.records.values()))
        assert 0 <= self.log.spilled <= self.log.bytes
        terms = self.terms.get(key.step)
        assert self.log.terms(key.step, key.step + 1) == (None if terms is None else [terms])

    def compare_all(self) -> None:
        self.log.settle()
        assert self.log.usable
        for key in self.records:
            self.compare(key)
        assert sorted(spread_out(self.log.holdings(10**9))) == sorted(self.records)
        assert self.log._held == self.log.bytes - self.log.spilled <= self.log.settings.memory
        places = [r.place for step in self.log._steps.values() for r in step.records.values() if r.place]
        assert sum(size_of(self.records[key]) for key in self.records) - self.log._held == self.log.spilled
        assert {place.file.path for place in places} == set(self.town.files)

    def run(self, actions: int) -> None:
        for number in range(actions):
            self.act()
            self.compare(self.some_key(max(0, self.step - self.chance.randrange(4))))
            if number % 500 == 499:
                self.compare_all()
        self.log.drop(10**9)
        self.forget(lambda step: True)
        self.compare_all()
        assert self.town.files == []


@pytest.mark.parametrize("memory", [0, 3000, 50_000])
@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_random_actions(town: Town, small: None, memory: int, seed: int) -> None:
    model = Model(town.log(memory=memory), town, seed)
    model.run(2000)
    assert model.kept > 1000


def always_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was forgotten while it was written is taken for a record all the same."""
    monkeypatch.setattr(Log, "_is_live", lambda self, record: record.key.step in self._steps)


def no_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are not removed when everything is forgotten."""
    monkeypatch.setattr(spill.SpillFiles, "remove", lambda self: None)


def off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file forgets to count a record now and then."""
    real = Log._move

    def move(self: Log, record: Any, place: Any) -> None:
        real(self, record, place)
        place.file.live -= record.number % 50 == 0

    monkeypatch.setattr(Log, "_move", move)


@pytest.mark.parametrize("sabotage", [always_live, no_epochs, off_by_one])
def test_the_model_notices(
    town: Town, small: None, monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    sabotage(monkeypatch)

    def attempt() -> None:
        for seed in range(10):
            Model(town.log(), town, seed).run(2000)

    with pytest.raises((AssertionError, Damaged)):
        attempt()


# --- threads -------------------------------------------------------------------------------------------


def test_many_threads(town: Town, small: None) -> None:
    """Whoever reads gets a record whole, of the newest attempt that can be meant, or none."""
    log = town.log(memory=3000)
    current, attempt, over = [0], [0], threading.Event()
    problems: list[BaseException] = []

    def guarded(work: Callable[[random.Random], None]) -> Callable[[int], None]:
        def run(seed: int) -> None:
            chance = random.Random(seed)
            try:
                while not over.is_set():
                    work(chance)
            except BaseException as e:
                problems.append(e)

        return run

    def keeper(chance: random.Random) -> None:
        key = key_of(current[0], threading.get_native_id() % 1000, chance.randrange(8))
        number = key.step * 1000 + key.micro_batch
        log.keep(key, describe([number, torch.full((chance.randrange(1, 200),), number)]))
        time.sleep(0)

    def reader(chance: random.Random) -> None:
        for holding in log.holdings(current[0] + 1):
            for key in spread_out([holding]):
                try:
                    text, (tensor,) = log.read(key)
                except Damaged:
                    continue  # it was forgotten in between
                number = key.step * 1000 + key.micro_batch
                assert text.startswith(f"[[{number}, ")
                assert bool((tensor == number).all())

    workers = [(keeper, 1), (keeper, 2), (reader, 3), (reader, 4)]
    threads = [threading.Thread(target=guarded(work), args=(seed,)) for work, seed in workers]
    for thread in threads:
        thread.start()
    chance = random.Random(0)
    for _ in range(300):
        attempt[0] += 1
        if chance.random() < 0.8:
            current[0] += 1
        log.begin(current[0])
        if chance.random() < 0.3:
            log.drop(current[0] - 3)
        time.sleep(0.003)
    over.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert log.usable
    log.settle()
    assert log._held == log.bytes - log.spilled
    assert log.bytes == sum(r.size for step in log._steps.values() for r in step.records.values())
    log.begin(0)
    log.settle()
    assert (log.bytes, log.spilled, log._held, town.files) == (0, 0, 0, [])
