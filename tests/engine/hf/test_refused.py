"""What of transformers cannot be cut is refused, in words that say why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.layers_of import layers_of
from holdfast.errors import UsageError
from tests.engine.hf.models import build, gpt2_config, one_after_the_other, texts, transformers


def t5() -> nn.Module:
    sizes = {"vocab_size": 37, "d_model": 24, "d_kv": 6, "d_ff": 20, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def other_family() -> nn.Module:
    return transformers.GPTNeoXModel(
        transformers.GPTNeoXConfig(vocab_size=37, hidden_size=24, num_hidden_layers=1, num_attention_heads=4)
    )


def own_forward() -> nn.Module:
    class Mine(transformers.GPT2LMHeadModel):
        def forward(self, *arguments: Any, **more: Any) -> Any:
            return super().forward(*arguments, **more)

    return Mine(gpt2_config())


def changed(name: str, change: Callable[[Any], object], **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build(name, **more)
        change(model)
        return model

    return make


def nothing(_: Any) -> None: ...


CASES = {
    "encoder": t5,
    "GPT-2, Llama and BERT": other_family,
    "forward of its Mine": own_forward,
    "mc_token_ids": changed("GPT2DoubleHeadsModel", nothing),
    "choices": changed("BertForMultipleChoice", nothing),
    "add_cross_attention": changed("GPT2LMHeadModel", nothing, add_cross_attention=True),
    "output_attentions": changed("BertForMaskedLM", nothing, output_attentions=True, attn_implementation="eager"),
    "output_hidden_states": changed("LlamaModel", nothing, output_hidden_states=True),
    "is_causal": changed("LlamaModel", lambda model: setattr(model.config, "is_causal", False)),
    "quantised": changed("LlamaModel", lambda model: setattr(model.config, "quantization_config", {"bits": 4})),
    "device_map": changed("LlamaModel", lambda model: setattr(model, "hf_device_map", {"a": 0, "b": 1})),
    "dynamic": changed(
        "LlamaModel", nothing, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "forward of its GPT2Model": changed("GPT2LMHeadModel", lambda model: setattr(model.transformer, "forward", print)),
    "hooks": changed("BertForMaskedLM", lambda model: model.bert.register_forward_hook(print)),
    "extra.weight, extra.bias": changed("GPT2Model", lambda model: model.add_module("extra", nn.Linear(1, 1))),
    "2 parts": changed("GPT2LMHeadModel", lambda model: setattr(model, "other", build("GPT2Model"))),
}


@pytest.mark.parametrize("reason", CASES)
def test_a_model_that_cannot_be_cut_is_refused(reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        layers_of(CASES[reason]())
    assert reason in str(caught.value)


def test_a_transformers_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("GPT2Model")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")  # it puts others in its own place
    with pytest.raises(UsageError, match=r"4\.57\.6.*5\.0"):
        layers_of(model)


IDS = texts()
INPUTS = {
    "'labels'": {"input_ids": IDS, "labels": IDS},
    "'position_ids'": {"input_ids": IDS, "position_ids": IDS},
    "'token_type_ids'": {"input_ids": IDS, "token_type_ids": IDS},  # Llama has none
    "no input_ids": {"attention_mask": IDS},
    "(3, 1, 10, 10)": (IDS, torch.ones(3, 1, 10, 10)),
    "(10,)": IDS[0],
    "list": {"input_ids": IDS.tolist()},
    "str": "text",
    "tuple": (IDS, IDS, IDS),
}


@pytest.mark.parametrize("reason", INPUTS)
def test_an_input_that_is_not_understood_is_refused(reason: str) -> None:
    layers = layers_of(build("LlamaForCausalLM")).layers
    with pytest.raises(UsageError) as caught:
        one_after_the_other(layers, INPUTS[reason])
    assert reason in str(caught.value)
