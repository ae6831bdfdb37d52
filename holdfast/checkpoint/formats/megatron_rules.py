"""The built-in rules for how Megatron cuts a GPT among tensor-parallel ranks.

Query, key and value of a group of heads lie together in one fused tensor, and a rank has whole groups, so that
tensor is cut along its first dimension like any other. A gated MLP (SwiGLU) is fused too, but each rank has its part
of both halves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from holdfast.checkpoint.pieces import Shape
from holdfast.checkpoint.rules import Pattern, Replicate, Rule, Rules, Shard

_LAYER = r"model/(?:.*\.)?layers\.\d+\."
_ATTENTION = r"(?:self_attention|cross_attention|attention|inter_attention)\."
_EMBEDDING = r"model/(?:.*\.)?embedding\.word_embeddings\.weight"
_FUSED = ("linear_qkv", "query_key_value")
_COLUMN = (
    rf"{_LAYER}{_ATTENTION}(?:linear_q|linear_kv|query|key_value)\.(?:weight|bias)",
    r"model/(?:.*\.)?output_layer\.(?:weight|bias)",
)
_ROW = (
    rf"{_LAYER}{_ATTENTION}(?:linear_proj|dense)\.weight",
    rf"{_LAYER}mlp\.(?:.*\.)?(?:linear_fc2|dense_4h_to_h)\.weight\d*",
)
_SAME = (
    rf"{_LAYER}{_ATTENTION}(?:linear_proj|dense)\.bias",
    rf"{_LAYER}mlp\.(?:.*\.)?(?:linear_fc2|dense_4h_to_h)\.bias\d*",
    rf"{_LAYER}(?:.*\.)?\w*(?:layernorm|_norm)\.(?:weight|bias)",
    rf"{_LAYER}.*\.layer_norm_(?:weight|bias)",
    rf"{_LAYER}mlp\.router\.(?:weight|bias|expert_bias)",
    rf"{_LAYER}mlp\.shared_experts\.gate_weight",
    r"model/(?:.*\.)?final_(?:layernorm|norm)\.(?:weight|bias)",
    r"model/(?:.*\.)?embedding\.(?:position_embeddings|tokentype_embeddings)\.weight",
)
_FC1 = re.compile(rf"{_LAYER}mlp\.(?:.*\.)?(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*")


def built_in(shapes: Mapping[str, Shape], *, version: float) -> Rules:
    """Rules for the names Megatron gives; ``shapes`` are those on one rank, ``version`` is checkpoint_version.

    >>> first, second = (f"model/decoder.layers.0.mlp.linear_fc{i}.weight" for i in (1, 2))
    >>> rules = Rules([]).over(built_in({first: (12, 4), second: (4, 6)}, version=3.0))
    >>> rules.targets([first])[first].rule.pattern.parts
    2
    """
    return Rules(_rules(shapes, version))


def _rules(shapes: Mapping[str, Shape], version: float) -> Iterator[Rule]:
    # With expert parallelism, what is not an expert is on every rank; tied embeddings are on two stages.
    yield Rule(match=_EMBEDDING, pattern=Shard(dim=0), copies=("pp", "ep"))
    yield _one(_COLUMN, Shard(dim=0))
    yield _one(_ROW, Shard(dim=1))
    yield _one(_SAME, Replicate())
    # Before version 1, a rank had all its queries, then its keys, then its values.
    fused = Shard(dim=0, parts=3) if version < 1 else Shard(dim=0)
    yield _one([rf"{_LAYER}{_ATTENTION}(?:{'|'.join(_FUSED)})\.(?:weight|bias)"], fused)
    gated = {name: is_gated(name, shapes) for name in shapes if _FC1.fullmatch(name)}
    for halves, pattern in ((True, Shard(dim=0, parts=2)), (False, Shard(dim=0))):
        names = [re.escape(name) for name, found in gated.items() if found is halves]
        if names:
            yield _one(names, pattern)


def _one(matches: Iterable[str], pattern: Pattern) -> Rule:
    copies = () if isinstance(pattern, Replicate) else ("ep",)
    return Rule(match="|".join(f"(?:{match})" for match in matches), pattern=pattern, copies=copies)


def is_gated(name: str, shapes: Mapping[str, Shape]) -> bool | None:
    """Whether an MLP is gated: its first matrix is twice as large as its second takes. None if that cannot be told."""
    second = name.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")
    shape = shapes.get(re.sub(r"bias(\d*)$", r"weight\1", second), ())
    if len(shape) != 2 or not shape[1] or not shapes[name]:
        return None
    return {shape[1]: False, 2 * shape[1]: True}.get(shapes[name][0])
