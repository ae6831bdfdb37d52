"""Checkpoints in object stores: in memory, and on real S3 servers on loopback."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from holdfast.checkpoint import CheckpointError, async_save, disk, index, latest, load, open_checkpoint, save, series
from holdfast.checkpoint.convert import convert
from holdfast.checkpoint.copying import copy_to_store
from holdfast.checkpoint.lease import Claim, Note
from holdfast.checkpoint.lease_on_store import chain_of
from holdfast.checkpoint.listing import find
from holdfast.checkpoint.object_store import ObjectStore
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.places import Remote, on_disk, place_of
from holdfast.checkpoint.s3_uploads import abort_uploads, unfinished
from holdfast.checkpoint.verify import open_to_verify, verify
from holdfast.errors import UsageError
from holdfast.recovery.resume import Checkpoints
from tests import warm
from tests.faults.judge import covered
from tests.faulty_proxy import Asked, FaultyProxy
from tests.s3_server import Server, environment, needs_rclone, needs_seaweed, rclone, reaching, seaweed

SAVER = Path(__file__).with_name("store_saver.py")
BIG = 5 << 20  # elements of 4 bytes: an upload of three parts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = seaweed(tmp_path_factory.mktemp("seaweed"))
    with reaching(environment(server.endpoint)):
        yield server
    server.end()


@pytest.fixture(params=["memory", pytest.param("s3", marks=needs_seaweed)])
def root(request: pytest.FixtureRequest) -> Remote:
    """A folder in a store, for one test."""
    if request.param == "s3":
        request.getfixturevalue("server")
    place = place_of(f"{request.param}://runs/{request.node.name}")
    assert isinstance(place, Remote)
    return place


def names(folder: Remote) -> list[str]:
    """The objects in and below a folder, without the numbers in their names, when removals have ended."""
    for removal in disk._discarding:
        removal.join()
    return sorted(str(place.relative_to(folder)).split("-")[0] for place, _ in folder.store.walk(folder))


def test_paths_and_urls_are_told_apart() -> None:
    assert place_of("runs/a:b") == Path("runs/a:b")
    assert place_of(Path("s3://bucket/run")) == Remote("s3", "bucket", "run"), "a Path has lost a slash"
    assert on_disk(place_of("file:///data/run")) == Path("/data/run")
    with pytest.raises(OSError, match="object store"):
        os.stat(Remote("s3", "b", "k"))
    for wrong in ("s3://", "s3:///run", "ftp://bucket/run"):
        with pytest.raises(UsageError):
            Checkpoints(folder=wrong)
    for pair in ({"local": "a"}, {"local": "a", "remote": "b"}, {"folder": "c", "local": "a", "remote": "s3://b/c"}):
        with pytest.raises(UsageError):
            Checkpoints(**pair)
    assert Checkpoints(local="a", remote="s3://b/c").root == Path("a")


def test_what_was_saved_is_loaded_and_the_bytes_are_those_of_a_folder(root: Remote, tmp_path: Path) -> None:
    place, model = root / "step-00000012", nn.Linear(700, 3000)  # 8.4 MB: several blocks, and an upload in parts
    save(str(place), {"model": model, "step": 11})
    async_save(str(place), {"model": model, "step": 12}).wait()  # replaces it
    assert names(place) == ["data", "index.json"], "what was replaced is gone"
    other = nn.Linear(700, 3000)
    assert load(str(root), {"model": other, "step": 0})["step"] == 12
    assert torch.equal(model.weight, other.weight)
    assert latest(str(root)) == place
    assert verify(open_to_verify(root)).ok
    assert [(one.path, one.newest) for one in find(root)] == [(place, True)]
    for one in place.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    assert verify(open_to_verify(tmp_path)).ok, "the same bytes are a checkpoint in a folder"


def test_a_part_is_read_without_the_rest_and_damage_is_found(root: Remote) -> None:
    save(str(root), {"a": torch.ones(3 << 20), "b": torch.ones(3 << 20)})
    (data,) = [place for place in root.iterdir() if place.name.startswith("data")]
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(bytes(content))
    opened = open_checkpoint(str(root))
    assert load(opened, {"a": torch.zeros(3 << 20)})["a"].sum() == 3 << 20
    with pytest.raises(CheckpointError, match="damaged"):
        load(opened, {"b": torch.zeros(3 << 20)})
    assert not verify(opened).ok


def test_a_series_shares_frozen_weights_is_thinned_out_and_cleaned(root: Remote) -> None:
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    for step in (1, 2, 3):
        save(str(series.folder_of(root, step)), {"model": model})
    assert series.steps_in(root) == [1, 2, 3]
    assert len([*(root / "frozen").iterdir()]) == 1
    (root / "step-00000002/index.json").unlink()  # as an interrupted deletion leaves it
    series.delete(root, 1)
    series.clean(root, before=3)
    series.clean_shared(root)
    assert names(root) == ["frozen/data", "step", "step"]
    assert load(str(root), {"model": model})


def test_conversion_from_and_to_a_store(root: Remote, tmp_path: Path) -> None:
    save(str(root / "a"), {"model": nn.Linear(5, 5), "step": 3})
    convert(open_checkpoint(str(root / "a")), tmp_path / "a.pt", "torch")
    convert(open_checkpoint(tmp_path / "a.pt"), root / "b", "holdfast")
    assert load(str(root / "b"), {"step": 0})["step"] == 3
    with pytest.raises(UsageError, match="exists"):
        convert(open_checkpoint(tmp_path / "a.pt"), root / "b", "holdfast")
    with pytest.raises(UsageError, match="torch cannot be written"):
        convert(open_checkpoint(tmp_path / "a.pt"), root / "c.pt", "torch")


def test_a_checkpoint_is_copied_as_it_is_or_not_at_all(root: Remote, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    for step in (1, 2):
        save(tmp_path / f"step-0000000{step}", {"model": model, "step": step})
        assert copy_to_store(tmp_path / f"step-0000000{step}", root / f"step-0000000{step}")
    assert copy_to_store(tmp_path / "step-00000002", root / "step-00000002") == 0, "it is there"
    assert names(root) == ["frozen/data", "step", "step", "step", "step"]
    assert load(str(root), {"model": model, "step": 0})["step"] == 2
    (data,) = (tmp_path / "step-00000001").glob("data-*")
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(CheckpointError, match="damaged"):
        copy_to_store(tmp_path / "step-00000001", root / "other/step-00000001")
    assert not index.exists(root / "other/step-00000001")


def test_of_sixteen_that_commit_at_once_one_wins(root: Remote) -> None:
    begin, won, others = threading.Barrier(16), [], []

    def commit(number: int) -> None:
        mine = Catalogue(format="holdfast", root=root, tree={"number": number})
        begin.wait()
        try:
            index.commit(mine, index.new_id())
        except CheckpointError as e:
            others.append(str(e))
        else:
            won.append(number)

    root.store.refuse_if_unfit(root)
    threads = [threading.Thread(target=commit, args=(number,)) for number in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [index.read(root).tree["number"]] == won
    assert len([text for text in others if "same moment" in text]) == 15


def test_of_sixteen_that_take_the_lease_one_has_it(root: Remote) -> None:
    begin, made = threading.Barrier(16), []

    def take(number: int) -> None:
        chain = chain_of(root)
        chain.prepare()
        note = Note(number=1, term=1, claim=Claim(worker=f"0.{number}"))
        begin.wait()
        made.append((chain.make(note), note))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    (winner,) = [note for done, note in made if done]
    assert chain_of(root).newest() == winner


@needs_seaweed
@pytest.mark.parametrize("kind", ["bucket", "secret", "rights", "none", "server"])
def test_bad_input_gets_one_sentence(server: Server, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    place = "s3://missing/run" if kind == "bucket" else "s3://runs/bad"
    wrong = {
        "bucket": {},
        "secret": {"AWS_SECRET_ACCESS_KEY": "wrong"},
        "rights": {"AWS_ACCESS_KEY_ID": "reader"},
        "none": {"AWS_ACCESS_KEY_ID": ""},
        "server": {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
    }[kind]
    with reaching(environment(server.endpoint) | wrong), pytest.raises((CheckpointError, UsageError)) as caught:
        save(place, {"w": torch.ones(1)})
    said = {
        "bucket": "there is no bucket missing",
        "secret": "SignatureDoesNotMatch",
        "rights": "AccessDenied",
        "none": "no credentials for s3://runs: set AWS_ACCESS_KEY_ID",
        "server": "the store says nothing",
    }[kind]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_seaweed
@pytest.mark.parametrize("answer", [301, 400])
def test_a_bucket_in_another_region_is_said_in_one_sentence(server: Server, answer: int) -> None:
    """What S3 answers then: to a request for another region's address, and to a signature for another region."""
    proxy = FaultyProxy(server.endpoint)
    proxy.rule = lambda asked: answer
    with reaching(environment(proxy.endpoint)), pytest.raises(CheckpointError) as caught:
        save("s3://runs/elsewhere", {"w": torch.ones(1)})
    proxy.end()
    assert "in another region than AWS_REGION, us-east-1: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.checkpoint.places.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"holdfast\[s3\]"):
        save("s3://bucket/run", {})


@needs_rclone
def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    ignoring = rclone(tmp_path)
    try:
        with reaching(environment(ignoring.endpoint)), pytest.raises(CheckpointError, match="ignores conditions"):
            save("s3://runs/a", {"w": torch.ones(1)})
    finally:
        ignoring.end()


@needs_seaweed
def test_a_store_is_not_refused_because_its_probe_was_taken_for_litter(server: Server) -> None:
    """Another worker, which begins to save, removes what killed saves have left, between the two requests."""
    root, proxy = Remote("s3", "runs", "probes"), FaultyProxy(server.endpoint)
    probes: list[str] = []

    def rule(asked: Asked) -> None:
        if asked.method == "PUT" and ".probe-" in asked.path:
            probes.append(asked.path)
            if len(probes) == 2:
                assert probes[0] == probes[1], "the second request for the same object"
                Remote("s3", *asked.path.strip("/").split("/", 1)).unlink()

    proxy.rule = rule
    root.store.children(root)  # its client is that of the server from here on, and the other one that of the proxy
    with patch.dict(os.environ, environment(proxy.endpoint)):
        ObjectStore("s3", "runs").refuse_if_unfit(root)
    proxy.end()
    assert len(probes) == 4
    assert names(root) == []


@needs_seaweed
@pytest.mark.parametrize("stride", [4, covered("every fourth request does", 1)])
def test_a_save_that_is_killed_at_any_request_leaves_the_old_or_the_new_one(
    server: Server, tmp_path: Path, stride: int
) -> None:
    place = Remote("s3", "runs", f"killed-{stride}/step-00000001")
    proxy = FaultyProxy(server.endpoint)
    around = environment(proxy.endpoint) | {"PLACE": str(place), "SIZE": str(BIG)}
    save(str(place), {"w": torch.full((BIG,), -1.0), "value": -1.0})
    last, old = 0, -1.0
    while True:  # at the first request of the save, at a later one, …, until it is through
        saver = warm.Script(str(SAVER), folder=tmp_path, **around, VALUE=str(float(last)))

        def rule(asked: Asked, first: int = len(proxy.asked), last: int = last, pid: int = saver.pid) -> str | None:
            if asked.number - first != last:
                return None
            os.kill(pid, signal.SIGKILL)
            return "close" if last % 8 else None  # the request is lost, or is carried out

        proxy.rule = rule
        code = saver.wait()
        found = load(str(place), {"w": torch.zeros(BIG), "value": 0.0})
        assert found["value"] in (old, float(last)), f"killed at request {last}"
        assert (found["w"] == found["value"]).all(), "a mixture"
        if code == 0:
            break
        assert code == -signal.SIGKILL, saver.stderr
        old = found["value"]
        last += stride
    proxy.end()
    assert last > 8, "the save has more requests than that"
    save(str(place), {"value": 1.0})
    assert names(place) == ["data", "index.json"], "litter"
    assert unfinished(place.parent) == [], "uploads that nobody will finish"


@needs_seaweed
def test_an_upload_that_nobody_finishes_is_removed_with_its_step_only(server: Server, tmp_path: Path) -> None:
    root, proxy = Remote("s3", "runs", "uploads"), FaultyProxy(server.endpoint)
    around = environment(proxy.endpoint) | {"PLACE": str(root / "step-00000001"), "SIZE": str(BIG), "VALUE": "1"}
    saver = warm.Script(str(SAVER), folder=tmp_path, **around)
    proxy.rule = lambda asked: os.kill(saver.pid, signal.SIGKILL) if "partNumber=2" in asked.path else None
    assert saver.wait() == -signal.SIGKILL
    proxy.end()
    assert len(unfinished(root)) == 1
    series.clean(root, before=1)
    assert len(unfinished(root)) == 1, "it is not of an earlier step"
    series.clean(root, before=2, idle=600.0)
    assert len(unfinished(root)) == 1, "somebody may be at it"
    series.clean(root, before=2)
    assert unfinished(root) == []
    assert abort_uploads(tmp_path, lambda upload: True) == 0


@needs_seaweed
@pytest.mark.parametrize("fault", [503, "close", 507, 403])
def test_faults_of_the_server(server: Server, fault: int | str) -> None:
    root, proxy = Remote("s3", "runs", f"faults-{fault}"), FaultyProxy(server.endpoint)
    with reaching(environment(proxy.endpoint)):
        save(str(root), {"w": torch.ones(BIG)})
        # The first two may pass; a full store, and credentials that are lost, do not.
        passing = fault in (503, "close")
        proxy.rule = lambda asked: fault if asked.number % (4 if passing else 1) == 0 else None
        if passing:
            save(str(root), {"w": torch.full((BIG,), 2.0)})
        else:
            with pytest.raises(CheckpointError, match="store is full" if fault == 507 else "no right to"):
                save(str(root), {"w": torch.full((BIG,), 2.0)})
        assert proxy.done, "nothing was disturbed"
    proxy.end()
    with reaching(environment(server.endpoint)):
        assert load(str(root), {"w": torch.zeros(BIG)})["w"].unique().tolist() == [2.0 if passing else 1.0]
