"""Weights of a loaded Hugging Face model: held once, and the model unharmed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from engine import UnsupportedModel
from engine.model.config import ModelConfig
from engine.model.hf_weights import share_model
from engine.model.weights import load_weights
from tests.engine.conftest import save_model


def _storages(*owners: torch.Tensor) -> int:
    """Bytes of the distinct storages behind `owners`."""
    storages = [tensor.untyped_storage() for tensor in owners]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _tensors(weights: Any) -> list[torch.Tensor]:
    layers = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    found = [weights.embedding, weights.norm, weights.lm_head, *layers]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def test_both_hold_the_same_bytes(model: Any) -> None:
    before = _storages(*model.parameters())
    shared = share_model(model)
    parameters = list(model.parameters())
    assert _storages(*parameters, *_tensors(shared.weights)) == before
    attention, layer = model.model.layers[1].self_attn, shared.weights.layers[1]
    assert attention.q_proj.weight.data_ptr() == layer.qkv.data_ptr()
    end = attention.k_proj.weight.data_ptr() + attention.k_proj.weight.nbytes
    assert attention.v_proj.weight.data_ptr() == end
    assert model.model.embed_tokens.weight.data_ptr() == shared.weights.embedding.data_ptr()


def test_the_weights_are_those_of_the_folder(model: Any, tiny_model: Path) -> None:
    shared = share_model(model)
    config = ModelConfig.from_folder(tiny_model)
    assert shared.config == config
    wanted = load_weights(tiny_model, config, "cpu", torch.float32)
    for ours, theirs in zip(_tensors(shared.weights), _tensors(wanted), strict=True):
        assert torch.equal(ours, theirs)


def test_the_model_answers_as_before_and_can_be_saved(model: Any, tmp_path: Path) -> None:
    token_ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        before = model(token_ids).logits
        share_model(model)
        assert torch.equal(model(token_ids).logits, before)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        assert torch.equal(again(token_ids).logits, before)


def test_a_second_engine_shares_the_same_matrices(model: Any) -> None:
    first, second = share_model(model), share_model(model)
    for ours, theirs in zip(_tensors(first.weights), _tensors(second.weights), strict=True):
        assert ours.data_ptr() == theirs.data_ptr() and torch.equal(ours, theirs)


def test_what_changes_in_place_changes_for_both(model: Any) -> None:
    shared = share_model(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(7.0)
    inner = model.config.intermediate_size
    assert (shared.weights.layers[0].gate_up[inner:] == 7.0).all()
    assert (shared.weights.layers[0].gate_up[:inner] != 7.0).any()


def test_the_process_grows_by_little() -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=768, intermediate_size=3072, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    num_bytes = _storages(*model.parameters())
    assert num_bytes > 280_000_000
    gc.collect()
    before = psutil.Process().memory_info().rss
    shared = share_model(model)
    # A second copy would be all of them; allocators keep some of what was freed.
    assert psutil.Process().memory_info().rss - before < num_bytes // 2
    assert shared.weights.may_pack is False


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tied", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shared = share_model(model)
    assert shared.weights.lm_head is shared.weights.embedding
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    shared = share_model(model)
    assert shared.weights.lm_head.data_ptr() == model.lm_head.weight.data_ptr()
    assert shared.weights.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_models_with_adapters_are_refused(model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedModel, match="PeftModelForCausalLM has PEFT adapters"):
        share_model(peft_model)
    share_model(peft_model.unload())


def test_other_models_are_refused_by_name(model: Any) -> None:
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    with pytest.raises(UnsupportedModel, match="gpt2"):
        share_model(other)
    with pytest.raises(UnsupportedModel, match="LlamaModel has no language head"):
        share_model(LlamaModel(model.config))
    with pytest.raises(UnsupportedModel, match="base is a Linear"):
        share_model(torch.nn.Linear(2, 2))
    model.hf_quantizer = object()
    with pytest.raises(UnsupportedModel, match="is quantised"):
        share_model(model)


def test_a_float16_model_is_copied_exactly_and_left_as_it_is(model: Any) -> None:
    model.half()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shared = share_model(model)
    assert shared.dtype == "float32"
    assert {tensor.dtype for tensor in _tensors(shared.weights)} == {torch.float32}
    same = share_model(model.float()).weights
    for ours, theirs in zip(_tensors(shared.weights), _tensors(same), strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(t.half(), before[name]) for name, t in model.state_dict().items())


def test_parameters_that_do_not_fit_are_refused_by_name(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"embed_tokens.*float64"):
        share_model(model.double())
    model.float().model.norm.to(torch.bfloat16)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is torch\.bfloat16"):
        share_model(model)
    model.float().model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1.*on meta"):
        share_model(model)
