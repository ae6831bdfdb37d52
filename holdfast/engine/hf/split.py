"""Cuts a model of transformers into layers."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from holdfast.engine.hf.families import BERT, GPT2, LLAMA, Family, Known, recognise
from holdfast.engine.hf.layers import GPT2Words, HFBackboneEnd, HFBlock, HFEmbedding, HFHead, Mask
from holdfast.errors import UsageError


def from_transformers(model: nn.Module) -> bool:
    """Return whether the model's class is one of transformers, or derived from one. Nothing is imported for that.

    >>> from_transformers(nn.Linear(1, 1))
    False
    """
    return any(each.__module__.startswith("transformers.") for each in type(model).__mro__)


def layers_of_transformers(model: nn.Module, *, hint: str) -> list[nn.Module]:
    """Return the layers: the embedding, each block, and the final norm with the head.

    Raises ``UsageError`` with ``hint`` if the model cannot be cut.
    """
    known = recognise(model)
    if isinstance(known, str):
        raise UsageError(f"{type(model).__name__} cannot be cut into layers: {known}", hint=hint)
    _check_version()
    words, blocks, norm = _PARTS[known.family.name](known.backbone)
    mask = _mask(known.backbone, known.family)
    rotary = getattr(known.backbone, "rotary_emb", None)
    first = HFEmbedding(words, inputs=known.family.inputs, keep_ids=_reads_ids(model, known))
    return [first, *(HFBlock(block, mask=mask, rotary=rotary) for block in blocks), _head(model, known, norm)]


def _check_version() -> None:
    version = str(importlib.import_module("transformers").__version__)
    if int(version.split(".")[0]) < 5:  # masks are made in other ways there
        raise UsageError(
            f"layers_of does not know transformers {version}", hint="5.0 or newer: pip install -U transformers"
        )


Parts = tuple[nn.Module, list[nn.Module], nn.Module | None]  # embedding, blocks, final norm


def _gpt2(backbone: Any) -> Parts:
    return GPT2Words(backbone.wte, backbone.wpe, backbone.drop), list(backbone.h), backbone.ln_f


def _llama(backbone: Any) -> Parts:
    return backbone.embed_tokens, list(backbone.layers[: backbone.config.num_hidden_layers]), backbone.norm


def _bert(backbone: Any) -> Parts:
    return backbone.embeddings, list(backbone.encoder.layer), None


_PARTS: dict[str, Callable[[Any], Parts]] = {GPT2.name: _gpt2, LLAMA.name: _llama, BERT.name: _bert}


def _mask(backbone: Any, family: Family) -> Mask:
    """Return a function that makes a block's mask as the model itself would."""
    config = backbone.config
    masking = importlib.import_module("transformers.masking_utils")
    causal = family is not BERT or config.is_decoder
    make = masking.create_causal_mask if causal else masking.create_bidirectional_mask
    words = inspect.signature(make).parameters

    def mask(hidden: Any, given: Any, positions: Any) -> Any:
        offered = {"config": config, "attention_mask": given, "past_key_values": None}
        offered |= {"inputs_embeds": hidden, "input_embeds": hidden}  # other versions have another name for it
        offered |= {"cache_position": positions[0]}  # 5.0 wants it, later ones do not know it
        if family is not BERT:
            offered["position_ids"] = positions
        return make(**{name: value for name, value in offered.items() if name in words})

    return mask


def _head(model: nn.Module, known: Known, norm: nn.Module | None) -> HFHead:
    """Make the last layer: the model itself, with its backbone replaced by the rest of it after the blocks.

    So the model's own code computes the head, whichever head it has.
    """
    outputs = importlib.import_module("transformers.modeling_outputs")
    pooler = getattr(known.backbone, "pooler", None)
    end = HFBackboneEnd(norm, pooler, output=outputs.BaseModelOutputWithPoolingAndCrossAttentions)
    if known.name is None:
        return HFHead(end)
    bare = copy.copy(model)
    bare._modules = {**model._modules, known.name: end}
    return HFHead(bare)


def _reads_ids(model: nn.Module, known: Known) -> bool:
    """Return whether the head needs the tokens: one that classifies causal texts looks for the last before padding."""
    return known.family is not BERT and hasattr(model, "score")
