"""The index: what is written is what is read, and nothing exists before it does."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import index, open_checkpoint, save
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Piece, Ref, Stored, TensorEntry, row_major, whole
from holdfast.checkpoint.safetensors_writer import DTYPES, PAIRS, array_of, write_safetensors
from holdfast.errors import CheckpointError
from tests.checkpoint.bounded import bounded
from tests.checkpoint.cases import (
    Change,
    blocks,
    data_of,
    in_two_files,
    refusal,
    rewrite,
    rewrite_text,
    saved,
    settle,
    tree_of,
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=4) | st.integers() | st.sampled_from(["$tuple", "$tensor"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def committed(folder: Path, tree: dict[str, Any], **options: Any) -> Catalogue:
    """A checkpoint of values and one scalar, by hand."""
    identity = index.new_id()
    name = index.data_name(identity, 0)
    written = write_safetensors(folder / name, [array_of("w", torch.tensor(1.5))])
    stored = Stored(file=name, offset=written.offsets["w"], dtype=torch.float32, shape=(), strides=())
    entry = TensorEntry(shape=(), dtype=torch.float32, pieces=(Piece(box=whole(()), stored=stored),))
    catalogue = Catalogue(
        format="holdfast",
        root=folder,
        tensors={"w": entry},
        tree={"w": Ref(name="w"), **tree},
        files={name: DataFile(bytes=written.bytes, checksums=written.checksums, writer="me")},
        **options,
    )
    index.commit(catalogue, identity)
    return catalogue


@given(tree=st.dictionaries(st.text(min_size=1, max_size=4).filter(lambda key: key != "w"), values, max_size=3))
@settings(max_examples=25, deadline=None)
def test_values_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("values")
    committed(folder, tree)
    assert repr(index.open(folder).tree) == repr({"w": Ref(name="w"), **tree})


def test_everything_comes_back(tmp_path: Path) -> None:
    wrote = committed(
        tmp_path,
        {"betas": (0.9, math.inf), "dtype": torch.bfloat16},
        tied={"head": "embedding"},
        frozen=("a", "b"),
        buffers=("mean",),
        details={"ranks": 4},
    )
    found = index.open(tmp_path)
    assert (found.tensors, found.tree, found.files) == (wrote.tensors, wrote.tree, wrote.files)
    assert (found.tied, found.frozen, found.buffers) == (wrote.tied, wrote.frozen, wrote.buffers)
    assert found.details["ranks"] == 4
    assert found.details["torch"] == torch.__version__


@pytest.mark.parametrize("dtype", [*DTYPES, *PAIRS])
def test_every_dtype_that_can_be_written_can_be_opened(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path, {"w": torch.zeros(4 * dtype.itemsize, dtype=torch.uint8).view(dtype)})
    assert index.open(tmp_path).tensors["w"].dtype == dtype


def test_many_pieces_in_any_order(tmp_path: Path) -> None:
    in_two_files(tmp_path)
    catalogue = index.open(tmp_path)
    files, entry = [*catalogue.files], catalogue.tensors["w"]
    start = entry.pieces[0].stored.offset
    tiles = [(row, column) for row in range(3) for column in range(20)] * 2
    for number in range(60, 120):
        tiles[number] = (tiles[number][0] + 3, tiles[number][1])
    pieces = []
    for row, column in tiles[::-1]:
        box = Box(offset=(row, 100 * column), shape=(1, 100))
        at, strides = start + 400 * (20 * (row % 3) + column), row_major((1, 100))
        stored = Stored(file=files[row // 3], offset=at, dtype=torch.float32, shape=(1, 100), strides=strides)
        pieces.append(Piece(box=box, stored=stored))
    catalogue.tensors["w"] = TensorEntry(shape=(6, 2000), dtype=torch.float32, pieces=tuple(pieces))
    index.commit(catalogue, index.new_id())
    assert len(index.open(tmp_path).tensors["w"].pieces) == 120
    catalogue.tensors["w"] = TensorEntry(shape=(6, 2000), dtype=torch.float32, pieces=tuple(pieces[1:]))
    index.commit(catalogue, index.new_id())
    assert "no piece holds" in refusal(tmp_path)


# --- what exists ------------------------------------------------------------------------------------------


def test_recognise(tmp_path: Path) -> None:
    assert not index.recognise(tmp_path)
    assert not index.recognise(tmp_path / "none")
    (tmp_path / index.NAME).write_text('{"weight_map": {}}')
    assert not index.recognise(tmp_path)
    assert not index.recognise(tmp_path / index.NAME)
    (tmp_path / index.NAME).unlink()
    saved(tmp_path)
    assert index.recognise(tmp_path)
    (tmp_path / index.NAME).unlink()
    assert index.recognise(tmp_path)  # or its data would be taken for somebody's safetensors
    assert not index.exists(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no index\.json"):
        open_checkpoint(tmp_path)


def test_a_commit_that_fails_takes_its_data_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    before = sorted(tmp_path.iterdir())

    def fail(path: Path, text: bytes) -> None:
        path.write_bytes(text[:5])
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(index, "write_durably", fail)
    with pytest.raises(CheckpointError, match=r"\.index-"):
        save(tmp_path, tree_of(2))
    assert sorted(tmp_path.iterdir()) == before


def test_after_the_rename_nothing_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def fail_the_second_time(path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(index, "sync_folder", fail_the_second_time)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        saved(tmp_path, 1)
    assert index.open(tmp_path).tree["step"] == 1


def test_only_litter_of_ours_is_cleaned(tmp_path: Path) -> None:
    saved(tmp_path)
    other = index.new_id()
    mine = ["notes.txt", "data-mine.safetensors", "data-00-0.safetensors", ".index.json", "model.safetensors"]
    ours = [index.data_name(other, 0), index.data_name(other, 17), f".index-{other}.json", index.report_name(other, 2)]
    for name in (*mine, *ours):
        (tmp_path / name).touch()
    saved(tmp_path, 2)
    settle()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {index.NAME, *index.open(tmp_path).files, *mine}


def test_an_index_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / index.NAME).write_text('{"mine": 1}')
    with pytest.raises(CheckpointError, match=r"index\.json"):
        save(tmp_path, {"x": torch.ones(2)})
    assert (tmp_path / index.NAME).read_text() == '{"mine": 1}'
    settle()
    assert [path.name for path in tmp_path.iterdir()] == [index.NAME]


def test_a_damaged_index_of_ours_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / index.NAME).write_text("")
    save(tmp_path, {"x": 7})
    assert open_checkpoint(tmp_path).tree == {"x": 7}


def test_what_an_index_says_without_its_files(tmp_path: Path) -> None:
    saved(tmp_path)
    (data,) = data_of(tmp_path)
    data.unlink()
    assert [*index.read(tmp_path).files] == [data.name]
    assert data.name in refusal(tmp_path)


def test_the_index_is_one_json_object(tmp_path: Path) -> None:
    saved(tmp_path)
    said = json.loads((tmp_path / index.NAME).read_text())
    assert [*said] == ["xxh3", "index"]
    assert [file["name"] for file in said["index"]["files"]] == [path.name for path in data_of(tmp_path)]


def test_another_block_size_is_not_another_version(tmp_path: Path) -> None:
    with blocks():
        saved(tmp_path)
    assert "16384" in refusal(tmp_path)


# --- an index that somebody has made ------------------------------------------------------------------


def weight(said: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = said["tensors"]["model/weight"]
    return found


def twice(said: dict[str, Any]) -> None:
    said["files"].append(said["files"][0])


def overlapping(said: dict[str, Any]) -> None:
    (piece,) = weight(said)["pieces"]
    number, offset, _, (rows, columns) = piece
    weight(said)["pieces"] = [[number, offset, [0, 0], [2, columns]], [number, offset, [1, 0], [rows - 2, columns]]]


def shared_bytes(said: dict[str, Any]) -> None:
    """Two thousand rows, all of them the same bytes."""
    (number, offset, _, (_, columns)), *_ = weight(said)["pieces"]
    rows = range(2000)
    weight(said).update(shape=[2000, columns], pieces=[[number, offset, [row, 0], [1, columns]] for row in rows])


def bytes_of_another(said: dict[str, Any]) -> None:
    said["tensors"]["model/bias"]["pieces"][0][1] = weight(said)["pieces"][0][1] + 4


HOSTILE: dict[str, Change] = {
    "pieces over the same bytes": shared_bytes,
    "two tensors over the same bytes": bytes_of_another,
    "listed twice": twice,
    "the same piece twice": lambda said: weight(said)["pieces"].append(weight(said)["pieces"][0]),
    "overlapping pieces and a gap": overlapping,
    "no pieces": lambda said: weight(said)["pieces"].clear(),
    "above the folder": lambda said: said["files"][0].update(name="../secret"),
    "an absolute name": lambda said: said["files"][0].update(name="/etc/passwd"),
    "a name with an end": lambda said: said["files"][0].update(name=said["files"][0]["name"] + "\n"),
    "a name that is none": lambda said: said["files"][0].update(name=7),
    "a negative offset": lambda said: weight(said)["pieces"][0].__setitem__(1, -4096),
    "an offset beyond the file": lambda said: weight(said)["pieces"][0].__setitem__(1, 1 << 40),
    "an offset that is a fraction": lambda said: weight(said)["pieces"][0].__setitem__(1, 4096.0),
    "a file number from the end": lambda said: weight(said)["pieces"][0].__setitem__(0, -1),
    "a file number too many": lambda said: weight(said)["pieces"][0].__setitem__(0, 9),
    "a box outside": lambda said: weight(said)["pieces"][0].__setitem__(2, [1, 0]),
    "a box of another rank": lambda said: weight(said)["pieces"][0].__setitem__(2, [0]),
    "a piece that is too short": lambda said: weight(said)["pieces"][0].pop(),
    "a huge shape": lambda said: weight(said).update(shape=[1 << 40, 1 << 40]),
    "a huge empty shape": lambda said: weight(said).update(shape=[1 << 59, 1 << 59, 0], pieces=[]),
    "a shape of numbers too large": lambda said: weight(said).update(shape=[1 << 70, 0], pieces=[]),
    "a negative shape": lambda said: weight(said).update(shape=[-1, 0], pieces=[]),
    "a shape of truths": lambda said: weight(said).update(shape=[True, False], pieces=[]),
    "a dtype that is a function": lambda said: weight(said).update(dtype="load"),
    "a dtype that is no array's": lambda said: weight(said).update(dtype="quint8"),
    "a dtype that is a number": lambda said: weight(said).update(dtype=5),
    "another size": lambda said: said["files"][0].update(bytes=said["files"][0]["bytes"] + 0.0),
    "too few checksums": lambda said: said["files"][0]["blocks"].pop(),
    "checksums that are numbers": lambda said: said["files"][0].update(blocks=[0] * len(said["files"][0]["blocks"])),
    "another block size": lambda said: said.update(block=1),
    "a newer version": lambda said: said.update(version=3),
    "no version": lambda said: said.pop("version"),
    "no tensors": lambda said: said.pop("tensors"),
    "tensors that are a list": lambda said: said.update(tensors=[]),
    "a tree that is a list": lambda said: said.update(tree=[]),
    "a tree with a stranger": lambda said: said["tree"].update(x={"$tensor": "nobody"}),
    "a tree with a list for a name": lambda said: said["tree"].update(x={"$tensor": []}),
    "a tree with a broken mark": lambda said: said["tree"].update(x={"$tuple": 5}),
    "a tree with a dict for a key": lambda said: said["tree"].update(x={"$items": [[{}, 1]]}),
    "a tree with bytes that are none": lambda said: said["tree"].update(x={"$bytes": "a"}),
    "tied to nothing": lambda said: said.update(tied={"a": 5}),
    "a time that is none": lambda said: said["details"].update(saved=1e300),
    "sentences that are numbers": lambda said: said["details"].update(left_out=[1]),
    "frozen numbers": lambda said: said.update(frozen=[1]),
}


def test_empty_pieces_take_no_bytes(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(0, 3), "b": torch.ones(2, 0), "c": torch.ones(2)})
    assert len(index.open(tmp_path).tensors) == 3


def test_two_among_many_pieces_in_the_same_bytes(tmp_path: Path) -> None:
    """So many that looking at every pair would never end."""

    def entry(number: int) -> TensorEntry:
        stored = Stored(file="a", offset=400 * number, dtype=torch.float32, shape=(100,), strides=(1,))
        return TensorEntry(shape=(100,), dtype=torch.float32, pieces=(Piece(box=whole((100,)), stored=stored),))

    tensors = {f"t{number}": entry(number) for number in reversed(range(30_000))}
    index._refuse_shared_bytes(tensors)
    with pytest.raises(ValueError, match=r"t5.*again"):
        index._refuse_shared_bytes({**tensors, "again": replace_offset(entry(5), 2399)})


def replace_offset(entry: TensorEntry, offset: int) -> TensorEntry:
    (piece,) = entry.pieces
    return replace(entry, pieces=(replace(piece, stored=replace(piece.stored, offset=offset)),))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_index_is_refused_by_name(tmp_path: Path, what: str) -> None:
    saved(tmp_path)
    rewrite(tmp_path, HOSTILE[what])
    sentence = refusal(tmp_path)
    assert index.NAME in sentence or data_of(tmp_path)[0].name in sentence
    assert what != "a newer version" or "version 3" in sentence


@pytest.mark.parametrize(
    "body", [b"", b"not JSON", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version":1}', b'{"a":' * 50_000]
)
def test_an_index_that_is_no_index(tmp_path: Path, body: bytes) -> None:
    saved(tmp_path)
    rewrite_text(tmp_path, body)
    assert str(tmp_path / index.NAME) in refusal(tmp_path)


def test_an_index_of_many_pieces_takes_little_time(tmp_path: Path) -> None:
    """80 kB, in the order that leaves the most gaps: 23 seconds when each piece was taken out of what was left."""

    def cut(said: dict[str, Any]) -> None:
        number, offset, _, _ = weight(said)["pieces"][0]
        rows = [*range(0, count, 2), *range(1, count, 2)][missing:]
        weight(said).update(shape=[count], dtype="uint8", pieces=[[number, offset + row, [row], [1]] for row in rows])

    count = 5000
    for missing in (0, 1, 1000):
        save(tmp_path, {"model": {"weight": torch.ones(count, dtype=torch.uint8)}})
        rewrite(tmp_path, cut)
        assert (tmp_path / index.NAME).stat().st_size < 100_000
        said = bounded(lambda: len(index.open(tmp_path).tensors), memory=200 << 20, seconds=8)
        assert said == "1" if not missing else "no piece holds" in said or "too many places" in said, said
