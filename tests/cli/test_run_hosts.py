"""``--hosts``: which of an agent's workers are lost together."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.run import parse_hosts
from holdfast.errors import UsageError
from tests.harness import TRAIN
from tests.warm import Command


def test_hosts_are_dealt_out_in_order() -> None:
    assert parse_hosts("a:1, b:2", 3) == ("a", "b", "b")
    assert parse_hosts("a:1,b:1,a:1", 3) == ("a", "b", "a")
    assert parse_hosts("rack-7.west_2", 2) == ("rack-7.west_2",) * 2
    assert parse_hosts("", 3) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:3,b", "at 'b'"),
        ("a:0", "at 'a:0'"),
        ("a:2,", "at ''"),
        (":2", "at ':2'"),
        ("1:2", "at '1:2'"),
        ("ä:2", "at 'ä:2'"),
        ("a:1,b:2", "-n 3"),
        ("a:999999999999", "at 'a:999999999999'"),
    ],
)
def test_what_is_not_understood_is_told(text: str, said: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_hosts(text, 2)
    assert said in str(e.value)


def test_a_wrong_count_ends_with_code_2(tmp_path: Path) -> None:
    done = Command("run", "--hosts", "a:3,b:3", str(TRAIN), folder=tmp_path)
    assert done.wait(60) == 2
    assert "-n 6" in done.stderr, "what it would take"
    assert "Traceback" not in done.stderr
