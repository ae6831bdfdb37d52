"""A run on several machines with TLS: real agents, workers and a coordinator."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.measuring import free_port
from tests.certificates import standard
from tests.faults.test_hosts import STEPS, hurry, start_agent, wait_for_step
from tests.harness import collect


def test_two_agents_with_tls_and_others_that_do_not_fit(tmp_path: Path, undisturbed: Any) -> None:
    """The second host is killed; meanwhile agents with wrong certificates, or none, are sent away in a sentence.

    Tensors are encrypted too. A machine that would send them in the clear is told so, and nobody else notices it.
    """
    certificates = standard(tmp_path / "certificates")
    options = ("-n", "2", "--nnodes", "1:3", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    first = start_agent(tmp_path, "first", *options, *certificates.options("head", "ca"), "--tls-tensors")
    wait_for_step(tmp_path, 1, 2)
    second = start_agent(tmp_path, "second", *options, *certificates.options("other", "ca"), "--tls-tensors")
    wait_for_step(tmp_path, 1, 4)
    clear = start_agent(tmp_path, "clear", *options, *certificates.options("other", "ca"))
    wrong = {
        "stranger": certificates.options("stranger", "ca"),
        "expired": certificates.options("expired", "ca"),
        "distrustful": certificates.options("other", "their-ca"),
        "plain": [],
    }
    agents = {name: start_agent(tmp_path, name, *options, *more) for name, more in wrong.items()}
    codes = {name: agent.wait(60) for name, agent in agents.items()}
    assert clear.wait(60) == 3
    assert "--tls-tensors is not given against given" in clear.stdout
    assert not collect(tmp_path).of("broken"), "it was not let into a generation in which it could reach nobody"
    second.kill()
    second.wait()
    hurry(tmp_path)
    assert first.wait(60) == 0
    result = collect(tmp_path)
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses
    assert codes == dict.fromkeys(wrong, 2)
    said = {name: agent.stderr for name, agent in agents.items()}
    for name, text in said.items():
        assert text.startswith("holdfast: "), name
        assert text.count("\n") == 1, name
    assert "it does not accept this machine's certificate: unknown ca" in said["stranger"]
    assert "it does not accept this machine's certificate: certificate expired" in said["expired"]
    assert "its certificate is not accepted" in said["distrustful"]
    assert "it wants TLS" in said["plain"]
    assert "--tls-cert" in said["plain"]


@pytest.mark.thorough("tests/cluster/test_tls.py has every pair of a server and a client")
def test_an_agent_with_tls_at_a_coordinator_without(tmp_path: Path) -> None:
    certificates = standard(tmp_path / "certificates")
    options = ("-n", "1", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    first = start_agent(tmp_path, "first", *options)
    wait_for_step(tmp_path, 1, 1)
    second = start_agent(tmp_path, "second", *options, *certificates.options("other", "ca"))
    assert second.wait(60) == 2
    assert "it has no TLS" in second.stderr
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 128 + signal.SIGTERM
