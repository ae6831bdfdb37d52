"""Runs real transformers: saves small models, and loads what we made of them.

Started by the tests with the interpreter of ``make test-formats``, as ``make_transformers.py save|load folder``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

TOKENS = torch.arange(12).view(2, 6)


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    llama = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return {
        "gpt2-tied": GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=24, n_layer=2, n_head=4, n_positions=16)),
        "llama-bf16": LlamaForCausalLM(LlamaConfig(**llama, **heads)).to(torch.bfloat16),
    }


def save(folder: Path) -> None:
    for name, model in models().items():
        torch.save({"model": model.state_dict()}, folder / f"{name}.pt")
        model.save_pretrained(folder / f"{name}-theirs", max_shard_size="8KB")
        model.config.save_pretrained(folder / f"{name}-config")
        torch.save(model.eval()(TOKENS).logits, folder / f"{name}-logits.pt")


def load(folder: Path) -> None:
    for path in sorted(folder.glob("*-ours*")):
        name = path.name.split("-ours")[0]
        model, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype="auto")
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            assert not found.get(problem), f"{path.name}: {problem} {found[problem]}"
        wanted = torch.load(folder / f"{name}.pt")["model"]
        state = model.state_dict()
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            assert state[key].dtype == value.dtype, f"{path.name}: {key} {state[key].dtype}"
            assert torch.equal(state[key].view(torch.uint8), value.view(torch.uint8)), f"{path.name}: {key}"
        assert torch.equal(model.eval()(TOKENS).logits, torch.load(folder / f"{name}-logits.pt")), path.name
        if "tied" in name:
            assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        print("loaded", path.name)


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
