"""The layers that models of transformers are cut into.

What one layer hands to the next is the hidden states; if there is an attention mask, or if the head needs the tokens,
it is a dict of all of these. The mask that is handed on is the data set's, of one byte a token. Each block makes the
large mask that its attention needs out of it, with the function of transformers that the model would have called once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.words import a_kind

# Makes a block's mask out of hidden states, the mask of the batch, and positions.
Mask = Callable[[Tensor, Tensor | None, Tensor], Any]
HIDDEN = "hidden_states"  # their key in the dict that layers hand on


class HFEmbedding(nn.Module):
    """The first layer: embeds the tokens of the data set's input.

    ``words`` is the model's own embedding, ``inputs`` are the names that the input may have, in the order of a tuple;
    with ``keep_ids`` the tokens are handed on to the head.
    """

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
    """GPT-2's embedding. In transformers it is no module of its own."""

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
    """One block of the model, with the mask and the rotary embedding that it is called with."""

    def __init__(self, block: nn.Module, *, mask: Mask, rotary: nn.Module | None) -> None:
        super().__init__()
        self.block = block
        # The same module in every block. It has no weights, and computing it anew is cheaper than sending its result.
        self.rotary = rotary
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
    """The rest of a backbone after its blocks: the final norm, and BERT's pooler.

    It stands in the place of the backbone in the model, so that the model's own head can be used as it is.
    ``output`` is the class of transformers that a backbone returns.
    """

    def __init__(self, norm: nn.Module | None, pooler: nn.Module | None, *, output: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = norm
        self.pooler = pooler
        self._output = output

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Return what a backbone returns, given the last block's output as ``inputs_embeds``."""
        hidden = inputs_embeds if self.norm is None else self.norm(inputs_embeds)
        pooled = None if self.pooler is None else self.pooler(hidden)
        return self._output(last_hidden_state=hidden, pooler_output=pooled)


class HFHead(nn.Module):
    """The last layer: the model itself, whose backbone was replaced by ``HFBackboneEnd``.

    It takes the last block's output, and gives what the model gives (logits, for most): one value, or a tuple.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Any) -> Any:
        hidden, beside = _opened(given)
        found = self.model(input_ids=beside.get("input_ids"), inputs_embeds=hidden, return_dict=True).to_tuple()
        return found[0] if len(found) == 1 else found


def read_inputs(given: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the data set's input as a dict by ``names``. Raises ``UsageError`` if it is not understood.

    The input is a tensor of tokens, a tuple in the order of ``names``, or a dict.

    >>> ids = torch.zeros(2, 3, dtype=torch.long)
    >>> sorted(read_inputs((ids, torch.ones(2, 3)), ("input_ids", "attention_mask")))
    ['attention_mask', 'input_ids']
    """
    if isinstance(given, Tensor):
        given = {"input_ids": given}
    elif isinstance(given, tuple | list) and len(given) <= len(names):
        given = dict(zip(names, given, strict=False))
    elif not isinstance(given, Mapping):
        raise UsageError(f"the model got {a_kind(given)} as input", hint=_expected(names))
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
    """Take apart what the layer before handed on: hidden states, and what goes beside them."""
    if isinstance(given, Tensor):
        return given, {}
    return given[HIDDEN], {name: value for name, value in given.items() if name != HIDDEN}


def _closed(hidden: Tensor, beside: dict[str, Tensor]) -> Any:
    """Put together what is handed on to the next layer."""
    return {HIDDEN: hidden, **beside} if beside else hidden


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
