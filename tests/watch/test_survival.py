"""What can be lost, from who holds what."""

from __future__ import annotations

from holdfast.watch.survival import Place, survival


def test_copies_decide_and_hosts_are_counted_for_themselves() -> None:
    places = {f"0.{n}": Place(host="a", first=0, stop=3) for n in range(3)}
    found = survival(places, checkpoint=4)
    assert (found.workers, found.hosts) == (2, 0)
    assert found.alone_hosts == (("a", "0-2"),)
    assert "Any 2 workers" in found.words[0]
    assert "host a" in found.words[1]
    assert "step 4" in found.words[1]


def test_a_single_copy_is_named_with_its_layers_and_what_its_loss_means() -> None:
    places = {"0.0": Place(host="a", first=0, stop=4), "1.0": Place(host="b", first=0, stop=2)}
    found = survival(places, log=True)
    assert found.alone == (("0.0", "2, 3"),)
    assert "worker 0.0 (layers 2, 3)" in found.words[0]
    assert "log" in found.words[0]
    assert "the run ends" in found.words[0]


def test_without_any_copy_there_is_nothing_to_say() -> None:
    assert survival({}).words == ("Nobody holds the model yet.",)
