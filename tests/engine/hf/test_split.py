"""Models of transformers, cut into layers: what they give and what they learn is what the model does, bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.engine.hf.families import FAMILIES
from holdfast.engine.layers_of import layers_of
from holdfast.engine.model import LayeredModel
from tests.engine.hf.models import (
    BATCH,
    BLOCKS,
    TIME,
    backward,
    build,
    gradients,
    one_after_the_other,
    padded,
    same,
    tensors,
    texts,
    transformers,
    whole,
)

CLASSES = [name for family in FAMILIES for name in (family.backbone, *family.heads)]
MAIN = ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"]
MASKS = ["no mask", "ones", "right", "left"]


def compare(model: nn.Module, given: dict[str, Tensor], **autocast: Any) -> None:
    """Outputs and gradients of the model, and of its layers, with the same random numbers."""
    found = []
    for run in (whole, lambda model, given: one_after_the_other(layers_of(model).layers, given)):
        model.zero_grad()
        torch.manual_seed(4)
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
            output = run(model, given)
        backward(output)
        found.append((tensors(output), gradients(model)))
    (outputs, learned), (ours, we_learned) = found
    assert len(ours) == len(outputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, outputs, strict=True))
    assert same(we_learned, learned)
    assert any(gradient is not None and gradient.any() for gradient in learned.values()), "the control"


def is_covered(name: str, mask: str, attention: str) -> bool:
    """All combinations for one class of each family; for the others, padding on either side with another attention."""
    pair = (MASKS.index(mask) + ["sdpa", "eager"].index(attention)) % 2
    return name in MAIN or (mask in ("right", "left") and pair == 0)


@pytest.mark.parametrize(
    ("name", "mask", "attention"),
    [
        pytest.param(
            *case, marks=[] if is_covered(*case) else pytest.mark.thorough("one class of each family has all masks")
        )
        for case in product(CLASSES, MASKS, ["sdpa", "eager"])
    ],
)
def test_layers_compute_what_the_model_does(name: str, mask: str, attention: str) -> None:
    compare(build(name, attn_implementation=attention), padded(mask))


@pytest.mark.parametrize("name", MAIN)
def test_the_comparison_sees_a_mask_that_is_lost(name: str) -> None:
    """The control: were the mask not handed on, the outputs would be others."""
    model, given = build(name).eval(), padded("left")
    without = one_after_the_other(layers_of(model).layers, given["input_ids"])
    assert not torch.equal(without, whole(model, given))


@pytest.mark.parametrize("name", CLASSES)
def test_names_stay_and_every_weight_is_in_a_layer(name: str) -> None:
    model = build(name)
    names, parameters = list(model.state_dict()), {id(p) for p in model.parameters()}
    cut = layers_of(model)
    assert cut.module is model
    assert list(cut.module.state_dict()) == names
    assert {id(p) for layer in cut.layers for p in layer.parameters()} == parameters
    assert len(cut.layers) == BLOCKS + 2


@pytest.mark.parametrize("name", MAIN)
def test_only_hidden_states_and_the_small_mask_are_handed_on(name: str) -> None:
    layers, width = layers_of(build(name)).layers, 24
    given: Any = padded("right")
    for layer in layers[:-1]:
        given = layer(given)
        assert {key: value.nbytes for key, value in given.items()} == {
            "hidden_states": BATCH * TIME * width * 4,
            "attention_mask": BATCH * TIME,
        }
    assert isinstance(layers[0](texts()), Tensor), "without a mask, hidden states are all there is"


@pytest.mark.parametrize("name", [*MAIN, "GPT2ForSequenceClassification", "BertForSequenceClassification"])
def test_stages_cut_anywhere_learn_the_same(name: str) -> None:
    """Each layer gets copies of what the one before gave, and hands back gradients: as workers do."""
    model, given = build(name), padded("right")
    torch.manual_seed(4)
    backward(whole(model, given))
    wanted = gradients(model)

    model = LayeredModel(layers_of(build(name)), seed=0, device=torch.device("cpu"))
    torch.manual_seed(4)
    backward(apart(model.layers, given))
    for alias, weight in model.aliases:
        weight.grad = (0 if weight.grad is None else weight.grad) + alias.grad
    learned = {key: p.grad for key, p in model.module.named_parameters() if key in wanted}
    assert same(learned, wanted)
    assert len(model.aliases) == (name in ("GPT2LMHeadModel", "BertForMaskedLM")), "tied in the model, tied in layers"


def apart(layers: list[nn.Module], given: Any) -> Any:
    """The output of layers between which a gradient passes only by hand."""
    for layer in layers[:-1]:
        given = layer(given)
        parts = {"": given} if isinstance(given, Tensor) else given
        copies = {key: Hand.apply(value) if value.requires_grad else value.clone() for key, value in parts.items()}
        given = copies[""] if isinstance(given, Tensor) else copies
    return layers[-1](given)


class Hand(torch.autograd.Function):
    """Copies on the way there, and on the way back."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MAIN)
def test_lower_precision_is_the_same_too(name: str, attention: str) -> None:
    compare(build(name, attn_implementation=attention).to(torch.bfloat16), padded("right"))
    compare(build(name, attn_implementation=attention), padded("right"), autocast=True)


@pytest.mark.parametrize("name", MAIN)
def test_gradient_checkpointing_goes_on_inside_the_blocks(name: str) -> None:
    model: Any = build(name)
    model.gradient_checkpointing_enable()
    compare(model, padded("right"))
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    block = layers_of(model).layers[1]
    hidden = torch.randn(BATCH, TIME, 24, requires_grad=True)
    with hooks:
        block(hidden)
    assert all(t.shape == hidden.shape for t in kept), "a block keeps nothing but its input"


@pytest.mark.parametrize("more", [{"is_decoder": True}, {"chunk_size_feed_forward": 2}])
def test_bert_with_settings_of_its_own(more: dict[str, Any]) -> None:
    compare(build("BertForMaskedLM", **more), padded("right"))
    compare(build("BertForMaskedLM", **more), padded("no mask"))


@pytest.mark.parametrize(
    "more",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True, "attn_implementation": "eager"},
        {"tie_word_embeddings": False},
    ],
)
def test_gpt2_with_settings_of_its_own(more: dict[str, Any]) -> None:
    compare(build("GPT2LMHeadModel", **more), padded("right"))


@pytest.mark.parametrize(
    "more",
    [
        {"tie_word_embeddings": True, "attention_bias": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_llama_with_settings_of_its_own(more: dict[str, Any]) -> None:
    compare(build("LlamaForCausalLM", **more), padded("right"))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForSequenceClassification"])
def test_token_types_are_embedded(name: str) -> None:
    types = torch.arange(BATCH * TIME).view(BATCH, TIME) % 2
    compare(build(name), {**padded("right"), "token_type_ids": types})


@pytest.mark.parametrize("name", MAIN)
def test_every_form_of_input_gives_the_same(name: str) -> None:
    layers, given = layers_of(build(name).eval()).layers, padded("left")
    ids, mask = given["input_ids"], given["attention_mask"]
    wanted = one_after_the_other(layers, given)
    for form in ((ids, mask), [ids, mask], transformers.BatchEncoding(given), (ids, mask.float())):
        assert torch.equal(one_after_the_other(layers, form), wanted), type(form)
    plain = one_after_the_other(layers, ids)
    for form in ((ids,), {"input_ids": ids, "attention_mask": None}):
        assert torch.equal(one_after_the_other(layers, form), plain), type(form)


@pytest.mark.parametrize("name", MAIN)
def test_layers_follow_the_model_when_it_stops_training(name: str) -> None:
    model = build(name)
    layers = layers_of(model).layers
    assert not torch.equal(one_after_the_other(layers, texts()), one_after_the_other(layers, texts()))
    model.eval()
    assert torch.equal(one_after_the_other(layers, texts()), one_after_the_other(layers, texts()))


def test_a_class_derived_from_theirs_is_cut_if_it_computes_as_theirs() -> None:
    class Mine(transformers.GPT2LMHeadModel):
        def extra(self) -> int:
            return 1

    model = Mine(build("GPT2LMHeadModel").config)
    compare(model, padded("right"))
