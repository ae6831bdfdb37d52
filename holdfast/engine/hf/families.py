"""The models of transformers that can be cut into layers, and the reasons why others cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """The classes of one kind of model: the backbone, and models that put a head on it."""

    name: str
    module: str  # where transformers has the classes
    backbone: str
    heads: tuple[str, ...]
    inputs: tuple[str, ...]  # names of inputs that the first layer understands, in the order of a tuple
    no_cut: dict[str, str]  # classes of the family that cannot be cut → why

    @property
    def classes(self) -> tuple[str, ...]:
        return (self.backbone, *self.heads, *self.no_cut)


GPT2 = Family(
    name="GPT-2",
    module="transformers.models.gpt2.modeling_gpt2",
    backbone="GPT2Model",
    heads=(
        "GPT2LMHeadModel",
        "GPT2ForSequenceClassification",
        "GPT2ForTokenClassification",
        "GPT2ForQuestionAnswering",
    ),
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    no_cut={"GPT2DoubleHeadsModel": "its second head needs mc_token_ids as an input"},
)
LLAMA = Family(
    name="Llama",
    module="transformers.models.llama.modeling_llama",
    backbone="LlamaModel",
    heads=(
        "LlamaForCausalLM",
        "LlamaForSequenceClassification",
        "LlamaForTokenClassification",
        "LlamaForQuestionAnswering",
    ),
    inputs=("input_ids", "attention_mask"),
    no_cut={},
)
BERT = Family(
    name="BERT",
    module="transformers.models.bert.modeling_bert",
    backbone="BertModel",
    heads=(
        "BertForMaskedLM",
        "BertLMHeadModel",
        "BertForPreTraining",
        "BertForNextSentencePrediction",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
    ),
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    no_cut={"BertForMultipleChoice": "it folds the choices into the batch"},
)
FAMILIES = (GPT2, LLAMA, BERT)


def what_can_be_cut() -> str:
    """Return the families that can be cut, for messages.

    >>> what_can_be_cut()
    'the GPT-2, Llama and BERT classes'
    """
    *first, last = (family.name for family in FAMILIES)
    return f"the {', '.join(first)} and {last} classes"


@dataclass(frozen=True, kw_only=True)
class Known:
    """A model that can be cut, and where its backbone is."""

    family: Family
    backbone: nn.Module
    name: str | None  # of the backbone in the model; None: the model is the backbone


def recognise(model: nn.Module) -> Known | str:
    """Return what the model is; or, as a text, why it cannot be cut."""
    family, known = _class_of(model)
    if family is None or known is None:
        decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        return FLAGS["is_encoder_decoder"] if decoder else f"of transformers, only {what_can_be_cut()} can"
    if known.__name__ in family.no_cut:
        return family.no_cut[known.__name__]
    name, backbone = None, model
    if known.__name__ != family.backbone:
        named = {n: child for n, child in model.named_children() if _is_backbone(child, family)}
        if len(named) != 1:
            return f"it has {len(named)} parts that are a {family.backbone}"
        [(name, backbone)] = named.items()
    for part in (model, backbone):
        theirs = _class_of(part)[1]
        if theirs is None or type(part).forward is not theirs.forward or "forward" in part.__dict__:
            return f"the forward of its {type(part).__name__} is not that of transformers"
    return _unusual(model, backbone) or Known(family=family, backbone=backbone, name=name)


def _class_of(module: nn.Module) -> tuple[Family, type[nn.Module]] | tuple[None, None]:
    """Return a model's family, and the class of that family that the model's class is, or is derived from."""
    for each in type(module).__mro__:
        for family in FAMILIES:
            if each.__module__ == family.module and each.__name__ in family.classes:
                return family, each
    return None, None


def _is_backbone(module: nn.Module, family: Family) -> bool:
    known = _class_of(module)[1]
    return known is not None and known.__name__ == family.backbone


def _unusual(model: nn.Module, backbone: nn.Module) -> str | None:
    """Return why this model cannot be cut although its class can be; None if it can."""
    config: Any = backbone.config
    for flag, why in FLAGS.items():
        if getattr(config, flag, None):
            return f"config.{flag} is set: {why}"
    if getattr(config, "is_causal", None) is not None:
        return "config.is_causal is set: attention would not be as the class has it"
    if getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        return "it is quantised, and so cannot be trained as it is"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "transformers has put it on several devices (device_map) already"
    rotary = getattr(getattr(backbone, "rotary_emb", None), "rope_type", "default")
    if rotary in ("dynamic", "longrope"):
        return f"its rotary embedding ({rotary}) changes with the longest text that it has seen"
    for part in (model, backbone):
        if any(getattr(part, hooks) for hooks in HOOKS):
            return f"its {type(part).__name__} has hooks, and layers do not call it as a whole"
    return None


# Settings of a model's config that keep it from being cut, and why.
FLAGS = {
    "is_encoder_decoder": "layers of a decoder also need what the encoder gives",
    "add_cross_attention": "its blocks also need what an encoder gives",
    "output_attentions": "layers hand on hidden states, not attentions",
    "output_hidden_states": "layers hand on one hidden state, not all of them",
}
# Attributes of a module that have its hooks. Hooks of the whole model would not be called.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
