"""The log's files: what was written is read again bit by bit, or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.engine.pipe import describe
from holdfast.log import spill
from holdfast.log.record import Direction, Key, Message
from holdfast.log.spill import Damaged, RecordPlace, SpillFile, SpillFiles, Unspilled, clean, size_of
from tests.checkpoint.child import in_child, say

DOCUMENT = Path(__file__).parents[2] / "docs" / "log.md"


def key_of(step: int, boundary: int = 1, micro_batch: int = 0, direction: Direction = Direction.FORWARD) -> Key:
    return Key(step=step, boundary=boundary, micro_batch=micro_batch, direction=direction)


def write(file: SpillFile | SpillFiles, *messages: Message) -> list[RecordPlace]:
    """Messages as the records of the steps 0, 1, 2, ..."""
    return file.write([Unspilled(key=key_of(n), number=n, message=message) for n, message in enumerate(messages)])


def same(one: Message, other: Message) -> bool:
    """Whether two messages are the same, to the last bit and in memory."""

    def facts(tensor: Tensor) -> Any:
        data = bytes(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).tolist()) if tensor.numel() else b""
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, data

    return one[0] == other[0] and list(map(facts, one[1])) == list(map(facts, other[1]))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpillFile]:
    file = SpillFile(tmp_path, "w0")
    yield file
    file.remove()


# --- what was written is read ----------------------------------------------------------------------

DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
STORED = [dtype for dtype in DTYPES if not re.search(r"^torch\.(q|u?int[1-7]$|bits)", str(dtype))]


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(file: SpillFile, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    message = describe(raw.view(dtype).view(2, 3))
    assert message[1][0].dtype is dtype
    [place] = write(file, message)
    assert same(place.read(key_of(0)), message)


def test_the_dtypes_that_matter_are_among_them() -> None:
    assert {torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64} < set(STORED)
    assert {torch.float8_e4m3fn, torch.float8_e5m2} < set(STORED)


VALUES: dict[str, Any] = {
    "scalar": torch.tensor(3.5),
    "one dimension": torch.arange(5),
    "transposed": torch.randn(3, 4).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
    "ones in the shape": torch.randn(1, 3, 1, 4).transpose(0, 3),
    "empty": torch.randn(0),
    "empty with a shape": torch.randn(3, 0, 4),
    "empty and transposed": torch.randn(0, 3).t(),
    "wants a gradient": torch.randn(2, requires_grad=True),
    "expanded": torch.randn(1, 3).expand(4, 3),
    "a part of another": torch.randn(10)[3:7],
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "not a number": torch.tensor([float("nan"), -0.0, float("inf")]),
    "several": {"x": torch.randn(2, 3), "mask": torch.ones(4, dtype=torch.bool), "n": (7, None)},
    "many": [torch.full((2,), n) for n in range(3000)],
    "twice the same": [torch.ones(2)] * 2,
    "only empty ones": [torch.randn(0), torch.randn(2, 0)],
    "no tensors": {"a": [1, 2.5, "text"]},
    "nothing": None,
}


@pytest.mark.parametrize("name", VALUES)
def test_every_value(file: SpillFile, name: str) -> None:
    message = describe(VALUES[name])
    places = write(file, message, describe("another"), message)
    for step in (0, 2):
        assert same(places[step].read(key_of(step)), message)
    assert same(places[1].read(key_of(1)), describe("another"))


def test_a_text_alone_may_be_anything(file: SpillFile) -> None:
    for text in ("", "no JSON", "x" * 100_000):
        assert write(file, (text, []))[0].read(key_of(0)) == (text, [])


def test_a_record_is_as_long_as_it_is_said_to_be(file: SpillFile) -> None:
    for value in VALUES.values():
        before, message = file.size, describe(value)
        write(file, message)
        assert file.size - before == size_of(message)
    assert file.path.stat().st_size == file.size


def test_keys_of_all_kinds(file: SpillFile) -> None:
    keys = [key_of(2**40, 7, 2**31 - 1, direction) for direction in Direction]
    places = file.write([Unspilled(key=key, number=n, message=describe(n)) for n, key in enumerate(keys)])
    for n, (key, place) in enumerate(zip(keys, places, strict=True)):
        assert place.read(key) == describe(n)


def test_nothing_is_copied() -> None:
    tensor = torch.randn(4, 5).t()
    view = spill.bytes_of(tensor)
    assert view.__array_interface__["data"][0] == tensor.data_ptr()
    assert view.nbytes == tensor.nbytes


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ((describe(torch.ones(2))[0], [torch.ones(3)]), "does not describe"),
        ((describe(torch.ones(2))[0], [torch.ones(2, dtype=torch.float64)]), "does not describe"),
        ((describe(torch.ones(2, 3))[0], [torch.ones(3, 2).t()]), "does not describe"),
        ((describe(torch.ones(2))[0], [torch.ones(2), torch.ones(2)]), "does not describe"),
        (('[0, [["float32", [2, 2], [4, 1], false]]]', [torch.ones(2, 4)[:, :2]]), "has gaps"),
    ],
)
def test_what_could_not_be_read_is_not_written(file: SpillFile, message: Message, reason: str) -> None:
    before = file.size
    with pytest.raises(ValueError, match=reason):
        write(file, message)
    assert file.size == before


# --- what is damaged is noticed ----------------------------------------------------------------------


def refusal(place: RecordPlace, key: Key) -> str | None:
    """Why a record is not given."""
    try:
        place.read(key)
        return None
    except Damaged as e:
        return str(e)


def unnoticed_flips(file: SpillFile, place: RecordPlace, key: Key, positions: range) -> list[int]:
    """The bytes of a file in which a flipped bit is not noticed."""
    unnoticed = []
    content = bytearray(file.path.read_bytes())
    for position in positions:
        for bit in range(8):
            content[position] ^= 1 << bit
            file.path.write_bytes(content)
            content[position] ^= 1 << bit
            sentence = refusal(place, key)
            if sentence is None:
                unnoticed.append(position)
            else:
                assert f"{key} in {file.path}" in sentence
    file.path.write_bytes(content)
    return unnoticed


MESSAGE = describe({"x": torch.arange(4.0), "mask": torch.tensor([True, False, True])})


def test_one_bit_anywhere(file: SpillFile) -> None:
    places = write(file, MESSAGE, MESSAGE, MESSAGE)
    record = range(places[1].offset, places[2].offset)
    assert len(record) == size_of(MESSAGE)
    assert unnoticed_flips(file, places[1], key_of(1), record) == []
    assert all(same(place.read(key_of(step)), MESSAGE) for step, place in enumerate(places))


class _Constant:
    """A hash that notices nothing."""

    def update(self, data: object) -> None: ...

    def intdigest(self) -> int:
        return 0


def test_without_checksums_the_bits_would_not_be_noticed(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill.xxhash, "xxh3_64", lambda data: _Constant())
    [place] = write(file, (MESSAGE[0], [tensor.clone() for tensor in MESSAGE[1]]))
    data = range(file.size - 8 - 16 - 3, file.size - 8)
    assert set(unnoticed_flips(file, place, key_of(0), data)) == set(data)


def test_truncation_at_every_length(file: SpillFile) -> None:
    first, second = write(file, MESSAGE, MESSAGE)
    content = file.path.read_bytes()
    for length in range(len(content)):
        file.path.write_bytes(content[:length])
        with pytest.raises(Damaged, match=re.escape(f"{key_of(1)} in {file.path} cannot be used: the file ends")):
            second.read(key_of(1))
        if length >= second.offset:
            assert same(first.read(key_of(0)), MESSAGE)
    file.path.write_bytes(content)
    assert same(second.read(key_of(1)), MESSAGE)


def test_a_missing_file(file: SpillFile) -> None:
    [place] = write(file, MESSAGE)
    file.path.unlink()
    with pytest.raises(Damaged, match=re.escape(f"{key_of(0)} in {file.path} cannot be used: No such file")):
        place.read(key_of(0))


def move(file: SpillFile, source: int, target: int, length: int) -> None:
    content = bytearray(file.path.read_bytes())
    content[source : source + length], content[target : target + length] = (
        content[target : target + length],
        content[source : source + length],
    )
    file.path.write_bytes(content)


def test_swapped_records(file: SpillFile) -> None:
    places = write(file, MESSAGE, MESSAGE)
    move(file, places[0].offset, places[1].offset, size_of(MESSAGE))
    for step in (0, 1):
        with pytest.raises(Damaged, match=f"another record .number {1 - step}, step {1 - step}, boundary 1"):
            places[step].read(key_of(step))
    move(file, places[0].offset, places[1].offset, size_of(MESSAGE))
    assert same(places[0].read(key_of(0)), MESSAGE)


def test_the_same_record_of_an_earlier_attempt(file: SpillFile) -> None:
    """Key, length and checksum are right, but it was kept by an attempt that came to nothing."""
    records = [Unspilled(key=key_of(5), number=number, message=MESSAGE) for number in (3, 4)]
    places = file.write(records)
    content = bytearray(file.path.read_bytes())
    length = size_of(MESSAGE)
    content[places[1].offset :] = content[places[0].offset : places[0].offset + length]
    file.path.write_bytes(content)
    assert same(places[0].read(key_of(5)), MESSAGE)
    with pytest.raises(Damaged, match="number 3, step 5"):
        places[1].read(key_of(5))


def test_the_file_of_another_log(tmp_path: Path) -> None:
    """All of it is sound, and the keys are the same, but the contents are another worker's."""
    mine, other = SpillFile(tmp_path, "w0"), SpillFile(tmp_path, "w1")
    [place] = write(mine, describe(torch.ones(3)))
    write(other, describe(torch.zeros(3)))
    mine.path.write_bytes(other.path.read_bytes())
    with pytest.raises(Damaged, match="its checksum is wrong"):
        place.read(key_of(0))
    mine.remove()
    other.remove()


# --- writing ------------------------------------------------------------------------------------------


def test_a_writer_that_is_interrupted_all_the_time(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may write less than it was given."""
    real = os.pwritev
    calls = []

    def little(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return real(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "pwritev", little)
    places = write(file, MESSAGE, MESSAGE)
    assert len(calls) > 20
    for step, place in enumerate(places):
        assert same(place.read(key_of(step)), MESSAGE)


def test_many_records_take_few_calls(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwritev, []
    monkeypatch.setattr(os, "pwritev", lambda *args: calls.append(0) or real(*args))  # type: ignore[func-returns-value]
    write(file, *[describe(torch.ones(100)) for _ in range(340)])
    assert len(calls) == 1


def test_a_disk_that_takes_nothing(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *args: 0)
    with pytest.raises(OSError, match=re.escape(str(file.path))) as caught:
        write(file, MESSAGE)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_that_cannot_be_begun_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *args: 0)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="nothing was written"):
            SpillFile(tmp_path, "w0")
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_without_a_name_is_not_written_to(file: SpillFile) -> None:
    file.path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(file.path))):
        write(file, MESSAGE)


def test_a_name_that_is_no_file_name(tmp_path: Path) -> None:
    file = SpillFile(tmp_path / "log", "host/3 gpu:1")
    assert re.fullmatch(rf"host_3_gpu_1-{os.getpid()}-\d+\.log", file.path.name)
    file.remove()


def test_new_files_and_those_that_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "FILE", 1000)
    files = SpillFiles(tmp_path, "w0")
    places = [write(files, describe(torch.ones(100)))[0] for _ in range(6)]  # 0.5 kB each
    assert len({place.file for place in places}) == 3
    places[2].file.live = 1
    files.tidy()
    assert list(tmp_path.iterdir()) == [places[2].file.path]
    files.remove()
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):  # after a full one, and after one with room left
        [place] = write(files, MESSAGE)
        assert list(tmp_path.iterdir()) == [place.file.path]
        assert same(place.read(key_of(0)), MESSAGE)
        files.remove()


def test_files_grow_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor, and a process has about a thousand."""
    monkeypatch.setattr(spill, "FILE", 1000)
    monkeypatch.setattr(spill, "SHARE", 8)
    files = SpillFiles(tmp_path, "w0")
    for _ in range(2000):
        write(files, ("x" * 948, []))
    assert len(list(tmp_path.iterdir())) < 50  # and 1000 without that
    files.remove()


# --- litter ------------------------------------------------------------------------------------------


def litter(folder: Path, work: Callable[[SpillFile], None] = lambda file: None) -> Path:
    """A file of a process that was killed."""

    def live_and_die() -> None:
        file = SpillFile(folder, "w0")
        write(file, MESSAGE)
        work(file)
        say(str(file.path))
        os.kill(os.getpid(), signal.SIGKILL)

    return Path(in_child(live_and_die, killed=True))


def test_files_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path, file: SpillFile) -> None:
    dead = litter(tmp_path)
    other = tmp_path / "notes-1-2.log"
    other.write_text("something else")
    assert dead.exists()
    assert clean(tmp_path) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([other, file.path])


def test_nobody_cleans_away_the_file_of_another_living_process(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, "w0")
    in_child(lambda: say(str(clean(tmp_path))))
    assert file.path.exists()
    file.remove()


def test_a_number_that_another_process_had(tmp_path: Path) -> None:
    """In a container, processes get the same numbers again and again."""
    dead = litter(tmp_path)
    first, second = SpillFile(tmp_path, "w0"), SpillFile(tmp_path, "w0")
    number = int(second.path.stem.rsplit("-", 1)[1]) + 1
    taken = tmp_path / f"w0-{os.getpid()}-{number}.log"
    dead.rename(taken)
    third = SpillFile(tmp_path, "w0")
    assert third.path.stem.endswith(f"-{number + 1}")
    assert clean(tmp_path) == [taken]
    for file in (first, second, third):
        assert file.path.exists()
        file.remove()


def test_the_file_of_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell from here whether it lives."""
    dead = litter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        assert clean(tmp_path) == []
    assert clean(tmp_path) == [dead]


def test_a_file_that_is_just_being_begun(tmp_path: Path) -> None:
    """It has its name, but neither its lock nor its host yet."""
    new = tmp_path / "w0-1-0.log"
    for content in (b"", spill.MAGIC[:3], spill.MAGIC, spill.MAGIC + b"\xff\xff\xff\xff"):
        new.write_bytes(content)
        assert clean(tmp_path) == []


def test_a_name_that_a_living_process_has_got_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking at the litter and removing it, somebody else removed it and a new process took the name."""
    dead = litter(tmp_path)
    real = spill.fcntl.flock

    def late(fd: int, how: int) -> None:
        content = dead.read_bytes()
        dead.unlink()
        dead.write_bytes(content)
        real(fd, how)

    monkeypatch.setattr(spill.fcntl, "flock", late)
    assert clean(tmp_path) == []
    assert dead.exists()


def test_a_new_log_removes_what_dead_ones_left(tmp_path: Path) -> None:
    dead = litter(tmp_path)
    files = SpillFiles(tmp_path, "w0")
    assert dead.exists()
    write(files, MESSAGE)
    assert not dead.exists()
    files.remove()


# --- the document ------------------------------------------------------------------------------------


def documented_reader() -> Callable[[Path], Iterator[tuple[list[int], Any, list[Tensor]]]]:
    """The reader that stands in the document."""
    [block] = re.findall(r"```python\n(import json.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names["records_in"]  # type: ignore[no-any-return]


def test_the_document_tells_how_to_read_a_file(file: SpillFile) -> None:
    values = [value for name, value in VALUES.items() if name not in ("conjugated", "expanded", "a part of another")]
    messages = [describe(value) for value in values]
    keys = [key_of(n, n + 1, n + 2, Direction(n % 3)) for n in range(len(values))]
    file.write([Unspilled(key=key, number=n, message=m) for n, (key, m) in enumerate(zip(keys, messages, strict=True))])
    found = list(documented_reader()(file.path))
    assert len(found) == len(values)
    for (said, value, tensors), key, message in zip(found, keys, messages, strict=True):
        assert said == [key.direction, key.step, key.boundary, key.micro_batch]
        assert json.dumps(value) == json.dumps(json.loads(message[0])[0])
        assert same((message[0], tensors), message)


def test_the_documented_reader_notices_changed_bits(file: SpillFile) -> None:
    places = write(file, MESSAGE, MESSAGE)
    content = file.path.read_bytes()
    for position in range(places[0].offset, places[1].offset, 3):
        file.path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(AssertionError):
            list(documented_reader()(file.path))


def rows(heading: str) -> list[list[str]]:
    """The table below a line of the document."""
    lines = DOCUMENT.read_text().split(heading)[1].splitlines()
    table = [line for line in lines[1:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_documented_bytes_are_those_of_the_code(file: SpillFile) -> None:
    """The table of a record, followed by hand."""
    [place] = file.write([Unspilled(key=key_of(5, 6, 7, Direction.TIE), number=8, message=MESSAGE)])
    content = file.path.read_bytes()[place.offset :]
    expected = [int.from_bytes(spill.MARK, "little"), 2, 5, 6, 7, 8, len(MESSAGE[0]), 2, 16 + 3]
    fixed = [row for row in rows("if that is more. A record:") if row[0].isdigit()][:9]
    at = 0
    for (length, span, _), value in zip(fixed, expected, strict=True):
        assert span == f"{at} to {at + int(length) - 1}"
        assert int.from_bytes(content[at : at + int(length)], "little") == value
        at += int(length)
    assert at == spill.HEAD.size == 48
    assert content[48 : 48 + len(MESSAGE[0])] == MESSAGE[0].encode()
