"""Foreign pickles: tensors found where they lie, and nothing run that a file wants run."""

from __future__ import annotations

import argparse
import builtins
import enum
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint.formats import rebuild
from holdfast.checkpoint.formats.files import files_of, pointer_of
from holdfast.checkpoint.formats.pickled import Foreign, load
from holdfast.checkpoint.pieces import Catalogue, DataFile, Stored, entry_of
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.errors import CheckpointError
from tests.checkpoint.formats.helpers import raw


def tensor(folder: Path, stored: Stored) -> torch.Tensor:
    size = (folder / stored.file).stat().st_size
    files = {stored.file: DataFile(bytes=size)}
    return read_tensor(Catalogue(format="", root=folder, tensors={"t": entry_of(stored)}, files=files), "t")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return raw(a) == raw(b)


def saveable(dtype: Any) -> bool:
    try:
        torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except (RuntimeError, NotImplementedError, KeyError, TypeError):
        return False
    return True


KINDS = {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and "q" not in str(kind)}
DTYPES = sorted({kind for kind in KINDS - {torch.complex32} if saveable(kind)}, key=str)


@pytest.mark.parametrize("new", [True, False])
def test_finds_every_tensor_where_torch_wrote_it(tmp_path: Path, new: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "plain": base,
        "transposed": base.T,
        "part": base[1:3, ::2],
        "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "complex": torch.tensor([1 + 2j]),
        "uint16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "expanded": torch.tensor([5.0]).expand(4),
    }
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    found = load(tmp_path / "a.pt", root=tmp_path)
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert same(tensor(tmp_path, found[name]), value), name
    assert found["plain"].offset == found["transposed"].offset, "views share one storage"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_knows_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(32, dtype=torch.uint8).fmod(2).view(dtype)
    torch.save(value, tmp_path / "a.pt")
    assert same(tensor(tmp_path, load(tmp_path / "a.pt", root=tmp_path)), value)


class Kind(enum.IntEnum):
    TWO = 2


class Scaler:
    def __init__(self) -> None:
        self.scale = 8.0


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Objects whose classes are in a package of DeepSpeed's name while they are saved."""
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.loss"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for kind in (Scaler, Kind):
        setattr(sys.modules["deepspeed.runtime.loss"], kind.__name__, kind)
        monkeypatch.setattr(kind, "__module__", "deepspeed.runtime.loss")
    return {"scaler": Scaler(), "stage": Kind.TWO}


def test_objects_of_frameworks_become_records(tmp_path: Path, framework: dict[str, Any]) -> None:
    torch.save({**framework, "args": argparse.Namespace(lr=0.1), "path": Path("x/y")}, tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", root=tmp_path)
    assert found["scaler"] == Foreign(module="deepspeed.runtime.loss", name="Scaler", state={"scale": 8.0})
    assert found["scaler"].fields["scale"] == 8.0
    assert (found["stage"].name, found["stage"].args) == ("Kind", (2,))
    assert found["args"].fields == {"lr": 0.1}
    assert found["path"].args == ("x", "y")


def test_members_of_enums_pickled_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"cbuiltins\ngetattr\n(cmegatron.core.enums\nModelType\nS'bert'\ntR.")
    found = load(tmp_path / "a.pkl", root=tmp_path)
    assert found == Foreign(module="megatron.core.enums", name="ModelType", args=("bert",))


def test_plain_values_and_numpy(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2).state_dict()
    assert isinstance(model, OrderedDict)
    saved = {
        "text": "a", "bytes": b"\xff\x00", "set": {1, 2}, "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
        "device": torch.device("cpu"), "number": np.float64(2.5), "default": defaultdict(list, a=[1]),
        "nested": [(1, None), {"x": True}], "rng": ("MT19937", np.arange(6, dtype=np.uint32).reshape(2, 3)),
    }  # fmt: skip
    torch.save({**saved, "model": model}, tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", root=tmp_path)
    assert type(found["model"]) is dict
    assert list(found.pop("model")) == ["weight", "bias"]
    (kind, state), (_, was) = found.pop("rng"), saved.pop("rng")
    assert (kind, state.dtype, state.tolist()) == ("MT19937", was.dtype, was.tolist())
    assert found == saved
    assert type(found["size"]) is tuple


def test_reads_a_stream_inside_another_file(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.arange(5)}, stream)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "many.bin").write_bytes(b"x" * 777 + stream.getvalue() + b"PK\x03\x04 something else")
    found = load(tmp_path / "sub" / "many.bin", root=tmp_path, offset=777, length=len(stream.getvalue()))
    assert found["w"].file == "sub/many.bin"
    assert same(tensor(tmp_path, found["w"]), torch.arange(5))


# --- what must be refused -------------------------------------------------------------------------


class Evil:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def refused(path: Path, match: str | None = None, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        load(path, root=path.parent, **options)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (subprocess.check_output, "subprocess.check_output"),
        (builtins.eval, "builtins.eval"),
        (builtins.exec, "builtins.exec"),
        (builtins.__import__, "builtins.__import__"),
        (torch.load, "torch.serialization.load"),
        (torch.hub.load, "torch.hub.load"),
        (torch.storage._load_from_bytes, "torch.storage._load_from_bytes"),
        (pickle.loads, "pickle.loads"),
        (type(os.environ), "os._Environ"),
    ],
)
def test_a_payload_is_refused_by_name_and_never_runs(tmp_path: Path, new: bool, function: Any, name: str) -> None:
    marker = tmp_path / "marker"
    argument = f"touch {marker}" if name.startswith(("posix", "subprocess")) else f"open({str(marker)!r}, 'w')"
    torch.save(
        {"w": torch.ones(2), "x": Evil(function, argument)}, tmp_path / "a.pt", _use_new_zipfile_serialization=new
    )
    refused(tmp_path / "a.pt", name)
    assert not marker.exists()


def test_the_payload_is_a_real_one(tmp_path: Path) -> None:
    """The control: what an ordinary load would have done."""
    torch.save(Evil(os.system, f"touch {tmp_path / 'marker'}"), tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "marker").exists()


def test_allow_makes_a_record_and_runs_nothing(tmp_path: Path) -> None:
    torch.save(Evil(os.system, f"touch {tmp_path / 'marker'}"), tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", root=tmp_path, allow={("posix", "system")})
    assert (found.module, found.name) == ("posix", "system")
    assert not (tmp_path / "marker").exists()


def test_attributes_of_allowed_classes_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.")
    refused(tmp_path / "a.pkl", "OrderedDict.__init__")
    (tmp_path / "b.pkl").write_bytes(b"cbuiltins\ngetattr\n(ccollections\nOrderedDict\nS'__init__'\ntR.")
    refused(tmp_path / "b.pkl", "getattr")


def write_archive(path: Path, code: bytes, records: dict[str, bytes], compress: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr("a/data.pkl", code)
        archive.writestr("a/byteorder", b"little")
        archive.writestr("a/version", b"3\n")
        for name, data in records.items():
            archive.writestr(f"a/data/{name}", data)


class Storage:
    def __init__(self, kind: str, key: str, count: int) -> None:
        self.pid = ("storage", getattr(torch, kind), key, "cpu", count)


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Storage) else None


def pickled_tensor(*, offset: Any = 0, size: Any = (4,), stride: Any = (1,), count: int = 4, key: str = "0") -> bytes:
    stream = io.BytesIO()
    args = (Storage("FloatStorage", key, count), offset, size, stride, False, OrderedDict())
    Pickler(stream, protocol=2).dump({"w": Evil(torch._utils._rebuild_tensor_v2, *args)})
    return stream.getvalue()


def test_the_handmade_archive_is_a_good_one(tmp_path: Path) -> None:
    """The control of the tests below."""
    write_archive(tmp_path / "a.pt", pickled_tensor(), {"0": np.arange(4, dtype=np.float32).tobytes()})
    assert same(tensor(tmp_path, load(tmp_path / "a.pt", root=tmp_path)["w"]), torch.arange(4.0))
    assert same(torch.load(tmp_path / "a.pt")["w"], torch.arange(4.0))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"size": (5,)}, "beyond storage 0"),
        ({"offset": 1}, "beyond storage 0"),
        ({"stride": (2,)}, "beyond storage 0"),
        ({"size": (1 << 40, 1 << 20), "stride": (1 << 20, 1)}, "beyond storage 0"),
        ({"offset": -1}, "lies at -1"),
        ({"offset": "0"}, "lies at '0'"),
        ({"size": (-4,)}, "sizes or strides"),
        ({"stride": (-1,)}, "sizes or strides"),
        ({"size": (True,)}, "sizes or strides"),
        ({"size": (4, 1)}, "strides"),
        ({"size": (1 << 40,), "stride": (0,)}, "repeats storage 0"),
        ({"count": 5}, "storage 0 has 16 bytes and should have 20"),
        ({"count": -1}, "storage"),
        ({"key": "1"}, "no record data/1"),
        ({"key": "../../secret"}, "no record data/../../secret"),
        ({"size": (0, 1 << 59, 4), "stride": (1, 1, 1)}, "which no tensor can have"),
        ({"size": (1 << 70, 0), "stride": (1, 1)}, "sizes or strides"),
        ({"size": (1,) * 70, "stride": (1,) * 70}, "which no tensor can have"),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    write_archive(tmp_path / "a.pt", pickled_tensor(**change), {"0": bytes(16)})
    refused(tmp_path / "a.pt", match)


@pytest.mark.parametrize("state", [{"offset": 9999}, (None, {"offset": 9999}), ["x", 1, 2, 3, 4]])
@pytest.mark.parametrize("target", ["tensor", "function"])
def test_nothing_is_changed_after_it_was_checked(tmp_path: Path, state: Any, target: str) -> None:
    made = pickled_tensor()
    function = b"ctorch._utils\n_rebuild_tensor_v2\n"
    extra = pickle.dumps(state, 2)[2:-1]
    code = made[:-1] + b"0" + function + extra + b"b." if target == "function" else made[:-2] + extra + b"bs."
    assert target == "function" or made[-2:] == b"s."
    write_archive(tmp_path / "a.pt", code, {"0": bytes(16)})
    refused(tmp_path / "a.pt", "changes a tensor, storage or function")


@pytest.mark.parametrize("state", [{"mark": 1}, (None, {"mark": 1}), ["mark"]])
def test_nothing_that_pickles_may_name_can_be_changed(tmp_path: Path, state: Any) -> None:
    """They outlive the file: a change would be there for the next."""
    for module, name in rebuild.ALLOWED:
        code = f"c{module}\n{name}\n".encode() + pickle.dumps(state, 2)[2:-1] + b"b."
        (tmp_path / "a.pkl").write_bytes(code)
        refused(tmp_path / "a.pkl")
    assert not [key for key, value in rebuild.ALLOWED.items() if hasattr(value, "mark")]


def doubled(levels: int) -> bytes:
    """Leaves ``((…), (…))`` on the stack: a few bytes for each level, and twice as much to hash."""
    steps = ((bytes([level]), bytes([level + 1])) for level in range(levels))
    return b"K\x01\x85q\x00" + b"".join(b"0h%bh%b\x86q%b" % (old, old, new) for old, new in steps)


NESTED = {
    "a key": b"}%bK\x01s.",
    "a key among others": b"}(K\x01K\x01%bK\x01u.",
    "a key of a dict at once": b"(%bK\x01d.",
    "a member": b"\x8f(%b\x90.",
    "a member of a frozenset": b"(%b\x91.",
    "a member of an old set": b"cbuiltins\nset\n(]%batR.",
    "a key of an old OrderedDict": b"ccollections\nOrderedDict\n(](%bK\x01latR.",
    "the state of a key": b"}cdeepspeed.a\nB\n)\x81q\xf0K\x01s0h\xf0}X\x01\x00\x00\x00a%bsb0}h\xf0K\x01s.",
    "the name of a storage": b"%bQ.",
}


@pytest.mark.parametrize("place", NESTED)
def test_keys_that_take_forever_to_hash_are_refused(tmp_path: Path, place: str) -> None:
    for levels, fine in ((3, True), (60, False)):
        code = b"\x80\x04" + NESTED[place].replace(b"%b", doubled(levels))
        (tmp_path / "a.pkl").write_bytes(code)
        if fine and place != "the name of a storage":
            load(tmp_path / "a.pkl", root=tmp_path)
        else:
            refused(tmp_path / "a.pkl", "refers to" if place == "the name of a storage" else "nested without end")


def test_objects_that_are_no_values_are_named_or_refused(tmp_path: Path) -> None:
    def made(code: bytes) -> Any:
        (tmp_path / "a.pkl").write_bytes(code)
        return load(tmp_path / "a.pkl", root=tmp_path)

    with pytest.raises(CheckpointError, match=r"a\.pkl.*numpy"):
        made(b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)\x81.")
    assert made(pickle.dumps(np.dtype("float32"))) == Foreign(module="numpy", name="dtype", args=("f4",))
    assert made(b"\x80\x02cnumpy\ndtype\n.") == Foreign(module="numpy", name="dtype")
    assert made(b"\x80\x02cdeepspeed.a\nB\n.") == Foreign(module="deepspeed.a", name="B")
    assert made(b"\x80\x02]ctorch\nFloatStorage\na.") == [Foreign(module="torch", name="FloatStorage")]


def test_files_that_led_to_a_checkpoint(tmp_path: Path) -> None:
    tag = tmp_path / "run" / "tag"
    tag.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("tag")
    assert pointer_of(tag, tmp_path / "run", "latest") == ["../latest"]
    assert pointer_of(tag, tag, "latest") == []
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    assert pointer_of(tmp_path / "run" / "link", tmp_path / "run", "latest") == [str(tmp_path / "run" / "latest")]


def test_memory_is_not_claimed_on_a_files_word(tmp_path: Path) -> None:
    (tmp_path / "memo.pkl").write_bytes(b"\x80\x02}r\xff\xff\xff\xff.")
    assert load(tmp_path / "memo.pkl", root=tmp_path) == {}, "the memo is no array of 2**32 items"
    (tmp_path / "bytes.pkl").write_bytes(b"cbuiltins\nbytes\n(L1000000000000L\ntR.")
    refused(tmp_path / "bytes.pkl", "makes bytes")
    (tmp_path / "text.pkl").write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"short.")
    refused(tmp_path / "text.pkl", "not a readable pickle")
    laughs: list[Any] = []
    for _ in range(40):
        laughs = [laughs] * 4
    (tmp_path / "laughs.pkl").write_bytes(pickle.dumps(laughs))
    refused(tmp_path / "laughs.pkl", "repeats its own parts")
    loop: list[Any] = []
    loop.append(loop)
    (tmp_path / "loop.pkl").write_bytes(pickle.dumps(loop))
    refused(tmp_path / "loop.pkl", "contains itself")
    (tmp_path / "deep.pkl").write_bytes(b"(" * 50_000 + b"l" * 50_000 + b".")
    refused(tmp_path / "deep.pkl", "nested too deeply")


def test_what_is_more_than_its_bytes_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1 + 2j]).conj()}, tmp_path / "conj.pt")
    refused(tmp_path / "conj.pt", "conj")
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    refused(tmp_path / "sparse.pt", "sparse|layout")
    torch.save({"w": np.array([object()])}, tmp_path / "objects.pt")
    refused(tmp_path / "objects.pt", "numpy array")


@pytest.mark.parametrize("new", [True, False])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, new: bool) -> None:
    torch.save({"w": torch.ones(100), "v": torch.ones(50)}, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    data = (tmp_path / "a.pt").read_bytes()
    for keep in [*range(0, len(data), 37), len(data) - 1]:
        (tmp_path / "a.pt").write_bytes(data[:keep])
        refused(tmp_path / "a.pt")


@pytest.mark.parametrize("new", [True, False])
def test_damage_anywhere_is_an_error_of_ours_or_harmless(tmp_path: Path, new: bool) -> None:
    saved = {"w": torch.ones(4), "v": np.arange(3), "n": [1, "a", b"b"], "p": torch.nn.Parameter(torch.ones(2))}
    torch.serialization.set_crc32_options(False)
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    torch.serialization.set_crc32_options(True)
    data = (tmp_path / "a.pt").read_bytes()
    draw = random.Random(0)
    for _ in range(500):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] = draw.randrange(256)
        (tmp_path / "a.pt").write_bytes(damaged)
        try:
            load(tmp_path / "a.pt", root=tmp_path)
        except CheckpointError:
            continue


def test_damage_in_the_pickle_is_noticed(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(4)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data.replace(b"weight", b"weighs", 1))
    refused(tmp_path / "a.pt", "data.pkl does not match its checksum")


def test_checksums_that_torch_left_out_are_not_missed(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(tensor(tmp_path, load(tmp_path / "a.pt", root=tmp_path)["w"]), torch.ones(4))


def test_odd_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_archive(path, pickled_tensor(), {"0": bytes(16)}, zipfile.ZIP_DEFLATED)
    refused(path, "compressed")
    write_archive(path, pickled_tensor(), {"0": bytes(16)})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a/data/0", bytes(16))
    refused(path, "two records of the same name")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello", b"")
    refused(path, "not one of torch.save")
    write_archive(path, pickled_tensor(), {"0": bytes(16)})
    path.write_bytes(path.read_bytes().replace(b"little", b"big\0\0\0"))
    refused(path, "byte")
    path.write_bytes(b"hello world, this is no pickle")
    refused(path, "not a readable pickle")
    refused(tmp_path / "missing.pt", "cannot be opened")
    refused(tmp_path)


def test_files_of_refuses_what_is_missing_or_short(tmp_path: Path) -> None:
    torch.save(torch.ones(4), tmp_path / "a.pt")
    stored = load(tmp_path / "a.pt", root=tmp_path)
    tensors = {"model/w": entry_of(stored)}
    assert files_of(tmp_path, tensors) == {"a.pt": DataFile(bytes=(tmp_path / "a.pt").stat().st_size)}
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[: stored.offset + 15])
    with pytest.raises(CheckpointError, match=r"a\.pt.*model/w"):
        files_of(tmp_path, tensors)
    (tmp_path / "a.pt").unlink()
    with pytest.raises(CheckpointError, match=r"a\.pt.*model/w"):
        files_of(tmp_path, tensors)
