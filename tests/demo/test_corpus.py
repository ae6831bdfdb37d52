"""The demo's data set and model."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.demo.corpus import CORPUS_BYTES, read_standard_library, standard_library
from holdfast.demo.gpt import GPTConfig, gpt_layers


def test_the_text_is_python_and_the_same_every_time() -> None:
    text = read_standard_library()
    assert len(text) == CORPUS_BYTES
    assert text == read_standard_library()
    assert b"\ndef " in text


def test_targets_are_the_inputs_one_byte_on() -> None:
    training, held_out = standard_library(window=64)
    for data in (training, held_out):
        for i in (0, len(data) - 1):
            given, target = data[i]
            assert given.shape == target.shape == (64,)
            assert torch.equal(given[1:], target[:-1])
    assert len(held_out) * 10 < len(training)


def test_no_byte_sees_what_comes_after_it() -> None:
    model = nn.Sequential(*gpt_layers(GPTConfig(depth=2))).eval()
    text = torch.randint(256, (1, 32))
    changed = text.clone()
    changed[0, 20:] = 0
    assert torch.equal(model(text)[0, :20], model(changed)[0, :20])
