"""Who gets in where something can be disturbed."""

from __future__ import annotations

import pytest

from holdfast.watch.doors import Doorman, refusal_of_host, refusal_of_origin

OWN = {"host": "127.0.0.1:8642", "origin": "http://127.0.0.1:8642", "content-type": "application/json"}


def test_a_code_opens_once_and_a_wrong_one_delays_the_next_guess() -> None:
    now = [0.0]
    doorman = Doorman(clock=lambda: now[0])
    code = doorman.new_code()
    assert doorman.enter("wrong") is None
    assert doorman.enter(code) is None  # too soon after a guess
    now[0] += Doorman.WAIT_SECONDS
    secret = doorman.enter(code)
    assert secret is not None
    assert doorman.enter(code) is None
    assert doorman.enter("") is None
    assert doorman.knows(f"Bearer {secret}")
    assert not any(doorman.knows(shown) for shown in ("", secret, f"Basic {secret}", "Bearer ", f"Bearer {code}"))


@pytest.mark.parametrize(
    "changed",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"content-type": "text/plain"},
    ],
)
def test_a_request_of_another_page_is_refused(changed: dict[str, str]) -> None:
    assert not refusal_of_origin(OWN)
    assert refusal_of_origin({**OWN, **changed})
    without = {name: value for name, value in OWN.items() if name not in changed}
    assert refusal_of_origin(without) or "sec-fetch-site" in changed


def test_on_loopback_only_its_own_names_are_answered() -> None:
    for name in ("localhost", "127.0.0.1:1", "[::1]:8642", "LOCALHOST:1"):
        assert not refusal_of_host(name, bound="127.0.0.1")
    for name in ("", "evil.example", "127.0.0.1.evil.example", "[::2]:1"):
        assert refusal_of_host(name, bound="127.0.0.1")
