"""Small models of transformers, with every kind of dropout on, and ways to compare them with their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

NEEDED = "transformers is not installed here: pip install transformers"
transformers = pytest.importorskip("transformers", reason=NEEDED)
transformers.logging.set_verbosity_error()

WORDS, TIME, BATCH, BLOCKS, PAD = 37, 10, 3, 3, 0
SIZES = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3}


def gpt2_config(**more: Any) -> Any:
    sizes = {"n_embd": 24, "n_layer": BLOCKS, "n_head": 4, "n_positions": 16}
    return transformers.GPT2Config(**{**SIZES, **sizes, **more})


def llama_config(**more: Any) -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": BLOCKS, "max_position_embeddings": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    return transformers.LlamaConfig(**{**SIZES, **sizes, **heads, **more})


def bert_config(**more: Any) -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": BLOCKS, "max_position_embeddings": 16}
    if more.get("num_labels") is None:
        more["num_labels"] = 2  # what its head for questions has to have
    return transformers.BertConfig(**{**SIZES, **sizes, "num_attention_heads": 4, **more})


def build(name: str, **more: Any) -> nn.Module:
    """A model by the name of its class, always with the same weights."""
    config = {"G": gpt2_config, "L": llama_config, "B": bert_config}[name[0]](**more)
    torch.manual_seed(1)
    return getattr(transformers, name)(config).train()


def texts() -> Tensor:
    """Tokens of which none is padding."""
    return torch.randint(3, WORDS, (BATCH, TIME), generator=torch.Generator().manual_seed(2))


def padded(kind: str) -> dict[str, Tensor]:
    """The texts as a data set gives them: without a mask, with one of ones, or padded on one side."""
    ids, mask = texts(), torch.ones(BATCH, TIME, dtype=torch.long)
    if kind == "no mask":
        return {"input_ids": ids}
    for row, length in enumerate([TIME, 6, 3] if kind in ("right", "left") else []):
        mask[row, length:] = 0
    mask = mask.flip(1) if kind == "left" else mask
    return {"input_ids": ids.where(mask > 0, PAD), "attention_mask": mask}


def whole(model: nn.Module, given: dict[str, Tensor]) -> Any:
    """What the model itself gives. A cache, which is for generation, would copy keys and values: in another layout
    attention has other last bits, on some processors."""
    model.config.use_cache = False  # type: ignore[union-attr]  # BERT's forward does not always take it
    found = model(**given)
    values = tuple(found.to_tuple())
    return values[0] if len(values) == 1 else values


def one_after_the_other(layers: Iterable[Callable[[Any], Any]], given: Any) -> Any:
    for layer in layers:
        given = layer(given)
    return given


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def backward(output: Any) -> None:
    """Gradients of something that depends on every number of the output, in another way on each."""
    dice = torch.Generator().manual_seed(3)
    parts = [(t * torch.randn(t.shape, generator=dice).to(t.dtype)).sum() for t in tensors(output)]
    torch.stack(parts).sum().backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def same(first: dict[str, Tensor | None], second: dict[str, Tensor | None]) -> bool:
    """Bit for bit."""
    if first.keys() != second.keys():
        return False
    pairs = [(first[name], second[name]) for name in first]
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
