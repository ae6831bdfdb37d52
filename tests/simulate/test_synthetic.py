"""Made-up traces: seeded, and as frequent as they were asked to be."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.simulate.synthetic import EXAMPLE, Synthetic


def test_seeds() -> None:
    same = Synthetic.parse("synthetic:nodes=30,mtbf=2d,joins=1h,seed=3")
    assert same.trace() == same.trace()
    assert same.trace() != Synthetic.parse("synthetic:nodes=30,mtbf=2d,joins=1h,seed=4").trace()


def test_its_name_is_how_to_make_it() -> None:
    made = Synthetic.parse(EXAMPLE).trace()
    assert made.name == EXAMPLE
    assert Synthetic.parse(made.name).trace() == made


def test_failures_come_as_often_as_asked() -> None:
    """100 nodes that fail every ten days, for a hundred days, replaced at once: a thousand losses, about."""
    made = Synthetic(nodes=100, mtbf=10 * 86400.0, joins=1.0, hours=2400).trace()
    assert 900 < made.losses < 1100
    assert 0.999 < made.node_hours / (100 * 2400) <= 1


def test_without_joins_nodes_only_get_fewer() -> None:
    counts = [count for _, _, count in Synthetic(nodes=20, mtbf=86400.0, hours=48).trace().spans()]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) > 5


def test_a_replacement_takes_its_time() -> None:
    """Half the time between failures to come back: two thirds are there."""
    made = Synthetic(nodes=50, mtbf=7200.0, joins=3600.0, hours=500).trace()
    assert 0.63 < made.node_hours / (50 * 500) < 0.70


def test_bursts_take_several_at_once() -> None:
    made = Synthetic(nodes=40, burst=4, burst_every=3600.0, joins=60.0, hours=1000).trace()
    assert {len(change.lost) for change in made.changes if change.lost} == {4}
    assert 900 < sum(1 for change in made.changes if change.lost) < 1100


def test_everything_may_be_lost() -> None:
    assert Synthetic(nodes=3, burst=9, burst_every=60.0, hours=10).trace().counts[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes=0", "0 nodes"),
        ("nodes=4001", "4001 nodes"),
        ("nodes=many", "nodes=many"),
        ("nodes=3,nodes=4", "nodes"),
        ("mtbf=6", "mtbf=6"),
        ("mtbf=0h", "mtbf is 0 s"),
        ("hours=-1", "-1 hours"),
        ("hours=nan", "nan hours"),
        ("burst=4", "burst"),
        ("burst_every=4h", "burst"),
        ("speed=4", "speed"),
        ("nodes=30,mtbf=1s,joins=1s", "20000"),
    ],
)
def test_what_cannot_be_made(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        Synthetic.parse(f"synthetic:{text}").trace()
    assert said in str(error.value)
