"""The layers that models of transformers are cut into, and what goes from one to the next.

That is the hidden states; with a mask, or where the head needs the tokens, it is a dict of these. A mask stays
the small one of the data set, of one byte a token: each block makes the large one out of it that its attention
needs, with the function of transformers that the model would have called once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError

Mask = Callable[[Tensor, Tensor | None, Tensor], Any]  # (hidden states, mask of the batch, positions)
HIDDEN = "hidden_states"


class HFEmbedding(nn.Module):
    """The first layer: from what the data set gives to hidden states."""

    def __init__(self, words: nn.Module, *, inputs: tuple[str, ...], keep_ids: bool) -> None:
        super().__init__()
        self.words = words
        self._inputs = inputs
        self._keep_ids = keep_ids

    def forward(self, given: Any) -> Any:
        inputs = read_inputs(given, self._inputs)
        ids = inputs["input_ids"]
        types = {name: inputs[name] for name in ["token_type_ids"] if name in inputs}
        beside = {name: inputs[name].to(torch.bool) for name in ["attention_mask"] if name in inputs}
        if self._keep_ids:
            beside["input_ids"] = ids
        return _closed(self.words(ids, **types), beside)


class GPT2Words(nn.Module):
    """GPT-2's embedding, which has no module of its own in transformers."""

    def __init__(self, word: nn.Module, position: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.word = word
        self.position = position
        self.dropout = dropout

    def forward(self, ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        hidden = self.word(ids) + self.position(_positions(ids))
        if token_type_ids is not None:  # GPT-2 has no embedding of their own for them
            hidden = hidden + self.word(token_type_ids)
        dropped: Tensor = self.dropout(hidden)
        return dropped


class HFBlock(nn.Module):
    """One block of attention and what follows it."""

    def __init__(self, block: nn.Module, *, mask: Mask, rotary: nn.Module | None) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary  # the same in every block: it has no weights, and is cheaper to run than to send
        self._mask = mask

    def forward(self, given: Any) -> Any:
        hidden, beside = _opened(given)
        positions = _positions(hidden)
        more: dict[str, Any] = {}
        if self.rotary is not None:
            more["position_embeddings"] = self.rotary(hidden, position_ids=positions)
        mask = self._mask(hidden, beside.get("attention_mask"), positions)
        output = self.block(hidden, attention_mask=mask, **more)
        return _closed(output[0] if isinstance(output, tuple) else output, beside)


class HFBackboneEnd(nn.Module):
    """Stands in the place of a backbone, when the blocks are done: the norm after them, and BERT's pooler."""

    def __init__(self, norm: nn.Module | None, pooler: nn.Module | None, *, output: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = norm
        self.pooler = pooler
        self._output = output

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Called by a head as it calls its backbone."""
        hidden = inputs_embeds if self.norm is None else self.norm(inputs_embeds)
        pooled = None if self.pooler is None else self.pooler(hidden)
        return self._output(last_hidden_state=hidden, pooler_output=pooled)


class HFHead(nn.Module):
    """The last layer: what the model gives, without what makes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Any) -> Any:
        hidden, beside = _opened(given)
        found = self.model(input_ids=beside.get("input_ids"), inputs_embeds=hidden, return_dict=True).to_tuple()
        return found[0] if len(found) == 1 else found


def read_inputs(given: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """What the data set gave, by name.

    >>> ids = torch.zeros(2, 3, dtype=torch.long)
    >>> sorted(read_inputs((ids, torch.ones(2, 3)), ("input_ids", "attention_mask")))
    ['attention_mask', 'input_ids']
    """
    if isinstance(given, Tensor):
        given = {"input_ids": given}
    elif isinstance(given, tuple | list) and len(given) <= len(names):
        given = dict(zip(names, given, strict=False))
    elif not isinstance(given, Mapping):
        raise UsageError(f"the model got a {type(given).__name__} as input", hint=_expected(names))
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        if name not in names:
            raise UsageError(f"the model got '{name}' as input", hint=_expected(names))
        if not isinstance(value, Tensor) or value.dim() != 2:
            seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"'{name}' is {seen}", hint="a tensor of samples by tokens")
    if "input_ids" not in found:
        raise UsageError("the model got no input_ids", hint=_expected(names))
    return found


def _expected(names: tuple[str, ...]) -> str:
    return f"the data set gives (input, target); input is input_ids, or a tuple or a dict of {', '.join(names)}"


def _opened(given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    if isinstance(given, Tensor):
        return given, {}
    return given[HIDDEN], {name: value for name, value in given.items() if name != HIDDEN}


def _closed(hidden: Tensor, beside: dict[str, Tensor]) -> Any:
    return {HIDDEN: hidden, **beside} if beside else hidden


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
