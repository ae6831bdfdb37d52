"""The watch: silence counts only while the watcher itself was awake, and too few hosts only after a while."""

from __future__ import annotations

import math

from holdfast.cluster.watch import Watch


def awake(watch: Watch, *, until: float) -> None:
    """Look as often as one should."""
    while watch.deadline <= until:
        assert watch.look(watch.deadline)


def test_silence_longer_than_the_timeout_counts() -> None:
    watch = Watch(timeout=5.0, patience=30.0, now=0.0)
    awake(watch, until=10.0)
    assert watch.silent({"a": 9.0, "b": 5.0, "c": 4.9}, 10.0) == ["c"]


def test_a_watcher_that_was_asleep_blames_nobody() -> None:
    """For one more timeout a lost connection is not taken for a death."""
    watch = Watch(timeout=5.0, patience=30.0, now=0.0)
    awake(watch, until=3.0)
    assert not watch.is_dazed(3.5)
    assert watch.is_dazed(6.0), "it is about to find out"
    assert not watch.look(6.0)
    assert watch.is_dazed(10.9)
    awake(watch, until=11.0)
    assert not watch.is_dazed(11.0)


def test_a_watcher_knows_since_when_it_is_awake() -> None:
    watch = Watch(timeout=5.0, patience=30.0, now=0.0)
    assert watch.awake_since(2.0) == -math.inf, "it never slept"
    assert watch.awake_since(2.1) == 2.1, "it is about to find out"
    assert not watch.look(2.5)
    awake(watch, until=10.0)
    assert watch.awake_since(10.0) == 2.5


def test_a_look_that_is_a_little_late_is_no_sleep() -> None:
    watch = Watch(timeout=5.0, patience=30.0, now=0.0)
    assert watch.look(2 * watch.interval)
    assert not watch.is_dazed(2 * watch.interval)


def test_too_few_hosts_are_waited_for() -> None:
    watch = Watch(timeout=5.0, patience=3.0, now=0.0)
    assert not watch.too_few(1, 2, 0.0)
    assert not watch.too_few(1, 2, 3.0)
    assert watch.too_few(1, 2, 3.5)


def test_a_host_that_comes_ends_the_waiting() -> None:
    watch = Watch(timeout=5.0, patience=3.0, now=0.0)
    watch.too_few(1, 2, 0.0)
    assert not watch.too_few(2, 2, 2.0)
    awake(watch, until=4.0)
    assert not watch.too_few(1, 2, 4.0), "it begins anew"
    assert not watch.too_few(1, 2, 7.0)
    assert watch.too_few(1, 2, 7.5)
