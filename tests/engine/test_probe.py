"""The probe: fixed bits, and nothing else is changed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from holdfast.engine import probe
from holdfast.engine.probe import CASES, KNOWN, probe_passes, probe_update

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _computed_anew() -> None:
    probe._computed.cache_clear()


def test_the_probe_is_repeatable_and_each_dtype_has_its_own() -> None:
    first = [probe_passes(CPU, [dtype]) for dtype in KNOWN]
    probe._computed.cache_clear()
    assert [probe_passes(CPU, [dtype]) for dtype in KNOWN] == first
    assert len(set(first)) == len(KNOWN)
    assert probe_passes(CPU, [torch.float64, torch.float32]) == probe_passes(CPU, {torch.float32, torch.float64})


def test_no_generator_and_no_setting_is_touched() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    settings = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = probe_passes(CPU, KNOWN), probe_update(CPU, KNOWN, clipped=True)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()) == settings
    probe._computed.cache_clear()
    assert inside == (probe_passes(CPU, KNOWN), probe_update(CPU, KNOWN, clipped=True)), "the caller's modes count not"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_another_bit_of_any_operator_is_another_result(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Every case counts, in each dtype: none is passed over because this processor lacks it."""
    before = [probe_passes(CPU, [dtype]) for dtype in KNOWN]
    operator, shapes = CASES[number]
    changed = (lambda *inputs: _another_bit(operator(*inputs)), shapes)
    monkeypatch.setattr(probe, "CASES", (*CASES[:number], changed, *CASES[number + 1 :]))
    probe._computed.cache_clear()
    after = [probe_passes(CPU, [dtype]) for dtype in KNOWN]
    assert not [dtype for dtype, one, other in zip(KNOWN, before, after, strict=True) if one == other]


def _another_bit(output: torch.Tensor) -> torch.Tensor:
    """The output with one of its numbers replaced by the next larger one."""
    changed = output.detach().clone().reshape(-1)
    changed[-1] = torch.nextafter(changed[-1], torch.tensor(torch.inf, dtype=output.dtype))
    return output + (changed.reshape(output.shape) - output.detach())


def test_a_norm_counts_where_gradients_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [probe_update(CPU, [torch.float32], clipped=clipped) for clipped in (False, True)]
    real = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x: _another_bit(real(x)))
    probe._computed.cache_clear()
    after = [probe_update(CPU, [torch.float32], clipped=clipped) for clipped in (False, True)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]
