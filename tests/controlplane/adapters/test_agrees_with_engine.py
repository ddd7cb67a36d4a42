"""What is accepted at upload loads: both sides ask one contract, each with limits of its own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.adapters.base_shape import BaseShape
from contract.adapters.peft_config import MAX_RANK
from contract.adapters.problems import AdapterProblems
from contract.adapters.upload_check import CheckedAdapter, check_adapter
from engine.adapters.config import parse_config
from engine.adapters.plan import AdapterPlan, parse_header, plan_adapter
from engine.errors import AdapterMismatch
from engine.model.config import ModelConfig
from tests.contract.test_upload_check import GOOD_FIELDS
from tests.controlplane.adapters import files
from tests.controlplane.conftest import TINY_CONFIG

MODEL = ModelConfig.from_fields(
    {**TINY_CONFIG, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}, 2
)


def check(config: bytes, tensors: bytes, base: BaseShape = files.BASE) -> CheckedAdapter:
    return check_adapter(
        config=config,
        start=tensors,
        file_bytes=len(tensors),
        base=base,
        max_rank=MAX_RANK,
    )


def plan(config: bytes, tensors: bytes, model: ModelConfig = MODEL) -> AdapterPlan:
    header = parse_header(tensors, len(tensors))
    shapes = {name: tensor.shape for name, tensor in header.items()}
    return plan_adapter(parse_config(config), shapes, model)


def is_accepted_at_upload(config: bytes, tensors: bytes, base: BaseShape = files.BASE) -> bool:
    try:
        check(config, tensors, base)
    except AdapterProblems:
        return False
    return True


def is_accepted_by_the_engine(config: bytes, tensors: bytes, model: ModelConfig = MODEL) -> bool:
    try:
        plan(config, tensors, model)
    except AdapterMismatch:
        return False
    return True


def assert_agree(config: bytes, tensors: bytes) -> None:
    """If the upload check passes, so does the engine's, with the same effect."""
    try:
        checked = check(config, tensors)
    except AdapterProblems:
        return
    planned = plan(config, tensors)
    assert {target.rank for target in planned.all_targets} == checked.fitted.ranks
    names = {name for target in planned.all_targets for name in target.names}
    for rows in filter(None, (planned.new_embedding, planned.new_head)):
        names |= {rows.name} | ({rows.twin} if rows.twin else set())
    left = set(planned.copies) | checked.fitted.unread
    assert names | left == {tensor.name for tensor in checked.tensors}


@pytest.mark.parametrize("fields", GOOD_FIELDS.values(), ids=GOOD_FIELDS)
def test_good_configs_load(fields: dict[str, Any]) -> None:
    config, tensors = files.config_bytes(**fields), files.pack(files.tensors())
    check(config, tensors)
    assert_agree(config, tensors)


ENDS = (*files.TARGETS, "embed_tokens", "lm_head")
P = "base_model.model."
Q = f"{P}model.layers.0.self_attn.q_proj"
KINDS: dict[str, tuple[dict[str, Any], files.Tensors]] = {
    "plain": ({}, files.tensors()),
    "ends": ({"target_modules": list(ENDS)}, files.tensors(targets=ENDS)),
    "dora": (
        {"use_dora": True, "target_modules": list(ENDS)},
        files.tensors(targets=ENDS, dora=True),
    ),
    "bias": (
        {"lora_bias": True, "target_modules": [*files.TARGETS, "lm_head"]},
        files.tensors(targets=(*files.TARGETS, "lm_head"), bias=True),
    ),
}
COPY = ("F32", (64, 16), bytes(4 * 64 * 16))
EMBEDDING, HEAD = f"{P}model.embed_tokens", f"{P}lm_head"


def new_tokens(module: str, count: int) -> files.Tensors:
    name = f"{module}.token_adapter.trainable_tokens_delta"
    return {name: ("F32", (count, 16), bytes(4 * count * 16))}


SAVED = {f"{EMBEDDING}.weight": COPY, f"{HEAD}.weight": COPY}
KINDS |= {
    "tokens": (
        {"trainable_token_indices": [63, 0]},
        {**files.tensors(), **new_tokens(EMBEDDING, 2)},
    ),
    "tokens in both": (
        {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2, 3]}},
        {**files.tensors(), **new_tokens(EMBEDDING, 1), **new_tokens(HEAD, 2)},
    ),
    "saved": (
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {**files.tensors(), **SAVED},
    ),
    "saved head": (
        {"modules_to_save": ["lm_head"], "target_modules": list(ENDS)},
        {
            **files.tensors(targets=(*files.TARGETS, "embed_tokens")),
            f"{HEAD}.weight": COPY,
            f"{EMBEDDING}.base_layer.weight": COPY,
        },
    ),
}


def renamed(tensors: files.Tensors, old: str, new: str) -> files.Tensors:
    return {name.replace(old, new): value for name, value in tensors.items()}


# name -> (config fields, tensors, whether it is accepted); tied: of a base with tied embeddings
DORA, BIAS, ALL_ENDS = KINDS["dora"], KINDS["bias"], KINDS["ends"]
HEAD_LEFT_OUT = [*files.TARGETS, "embed_tokens"]
CASES: dict[str, tuple[dict[str, Any], files.Tensors, bool]] = {
    **{kind: (*case, True) for kind, case in KINDS.items()},
    "dora, older names": (
        DORA[0],
        renamed(DORA[1], "magnitude_vector", "magnitude_vector.weight"),
        True,
    ),
    "dora, with the adapter's name": (
        DORA[0],
        renamed(DORA[1], "magnitude_vector", "magnitude_vector.default.weight"),
        True,
    ),
    "dora, with the adapter's name alone": (
        DORA[0],
        renamed(DORA[1], "magnitude_vector", "magnitude_vector.default"),
        False,
    ),
    "tokens, with the adapter's name": (
        KINDS["tokens"][0],
        renamed(KINDS["tokens"][1], "tokens_delta", "tokens_delta.default"),
        False,
    ),
    "the adapter's name": ({}, renamed(files.tensors(), ".weight", ".default.weight"), True),
    "no prefix": ({}, renamed(files.tensors(), P, ""), False),
    "copies": (
        ALL_ENDS[0],
        {
            **ALL_ENDS[1],
            f"{P}model.embed_tokens.base_layer.weight": COPY,
            f"{P}lm_head.base_layer.weight": COPY,
        },
        True,
    ),
    "a copy beside plain": ({}, {**files.tensors(), f"{P}lm_head.weight": COPY}, True),
    "a layer, a full path beside": (
        {
            "target_modules": ["v_proj", "model.layers.1.self_attn.q_proj"],
            "layers_to_transform": [0],
        },
        {
            **files.tensors(targets=("v_proj",), layers=1),
            **{
                name: value
                for name, value in files.tensors(targets=("q_proj",)).items()
                if "layers.1" in name
            },
        },
        True,
    ),
    "tied": (
        {"ensure_weight_tying": True, "target_modules": HEAD_LEFT_OUT},
        ALL_ENDS[1],
        True,
    ),
    "tied, head not saved": (
        {"ensure_weight_tying": True, "target_modules": HEAD_LEFT_OUT},
        files.tensors(targets=(*files.TARGETS, "embed_tokens")),
        False,
    ),
    "tied, embedding not saved": (
        {"ensure_weight_tying": True, "target_modules": [*files.TARGETS, "lm_head"]},
        files.tensors(targets=(*files.TARGETS, "lm_head")),
        False,
    ),
    "tied, head named without the embedding": (
        {"ensure_weight_tying": True, "target_modules": [*files.TARGETS, "lm_head"]},
        files.tensors(),
        False,
    ),
    "head not named": ({"target_modules": HEAD_LEFT_OUT}, ALL_ENDS[1], False),
    "a copy of another shape": (
        {},
        {**files.tensors(), f"{P}lm_head.weight": ("F32", (1, 16), bytes(64))},
        False,
    ),
    "a copy of a linear": (
        {},
        {**files.tensors(), f"{Q}.base_layer.weight": ("F32", (16, 16), bytes(1024))},
        False,
    ),
    "twice under two names": (
        {},
        {**files.tensors(), **renamed(files.tensors(), ".weight", ".default.weight")},
        False,
    ),
    "magnitudes without dora": ({"target_modules": list(ENDS)}, DORA[1], False),
    "dora without magnitudes": (DORA[0], ALL_ENDS[1], False),
    "biases, switched off": ({"target_modules": BIAS[0]["target_modules"]}, BIAS[1], False),
    "biases, none there": (
        BIAS[0],
        files.tensors(targets=(*files.TARGETS, "lm_head")),
        False,
    ),
    "biases of the embedding": (
        {"lora_bias": True, "target_modules": list(ENDS)},
        files.tensors(targets=ENDS, bias=True),
        False,
    ),
    "dora and biases": (
        {**DORA[0], "lora_bias": True},
        files.tensors(targets=ENDS, dora=True, bias=True),
        False,
    ),
    "embedding as a linear": (
        ALL_ENDS[0],
        renamed(ALL_ENDS[1], "lora_embedding_A", "lora_A.weight"),
        False,
    ),
    "a module missing": ({"target_modules": list(ENDS)}, files.tensors(), False),
    "a layer missing": ({}, files.tensors(layers=1), False),
    "a token beyond the base's": (
        {"trainable_token_indices": [64]},
        {**files.tensors(), **new_tokens(EMBEDDING, 1)},
        False,
    ),
    "a token twice": (
        {"trainable_token_indices": [3, 3]},
        {**files.tensors(), **new_tokens(EMBEDDING, 2)},
        False,
    ),
    "a token that is none": (
        {"trainable_token_indices": [True]},
        {**files.tensors(), **new_tokens(EMBEDDING, 1)},
        False,
    ),
    "tokens of a linear": ({"trainable_token_indices": {"q_proj": [1]}}, files.tensors(), False),
    "tokens by two names": (
        {"trainable_token_indices": {"embed_tokens": [1], "model.embed_tokens": [1]}},
        {**files.tensors(), **new_tokens(EMBEDDING, 1)},
        False,
    ),
    "tokens, not saved": ({"trainable_token_indices": [1]}, files.tensors(), False),
    "tokens, not asked for": ({}, {**files.tensors(), **new_tokens(HEAD, 1)}, False),
    "fewer rows than tokens": (
        {"trainable_token_indices": [1, 2]},
        {**files.tensors(), **new_tokens(EMBEDDING, 1)},
        False,
    ),
    "tokens of an adapted embedding": (
        {"trainable_token_indices": [1], "target_modules": list(ENDS)},
        {**files.tensors(targets=ENDS), **new_tokens(EMBEDDING, 1)},
        False,
    ),
    "tokens of a saved embedding": (
        {"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]},
        {**files.tensors(), f"{EMBEDDING}.weight": COPY, **new_tokens(EMBEDDING, 1)},
        False,
    ),
    "tokens beside a copy of the base's": (
        {"trainable_token_indices": [1]},
        {
            **files.tensors(),
            **new_tokens(EMBEDDING, 1),
            f"{EMBEDDING}.token_adapter.base_layer.weight": COPY,
        },
        True,
    ),
    "tied tokens, repeated for the head": (
        {"ensure_weight_tying": None, "trainable_token_indices": [1]},
        {
            **files.tensors(),
            **new_tokens(EMBEDDING, 1),
            **new_tokens(HEAD, 1),
            f"{EMBEDDING}.token_adapter.base_layer.weight": COPY,
            f"{HEAD}.token_adapter.base_layer.weight": COPY,
        },
        True,
    ),
    "saved, with all that PEFT repeats": (
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {
            **files.tensors(),
            **SAVED,
            **{f"{m}.original_module.weight": COPY for m in (EMBEDDING, HEAD)},
            **{f"{m}.modules_to_save.weight": COPY for m in (EMBEDDING, HEAD)},
        },
        True,
    ),
    "an original of what is not saved": (
        {},
        {**files.tensors(), f"{HEAD}.original_module.weight": COPY},
        False,
    ),
    "saved, twice over another name": (
        {"modules_to_save": ["lm_head"]},
        {**files.tensors(), f"{HEAD}.modules_to_save.weight": COPY},
        False,
    ),
    "saved and adapted": (
        {"modules_to_save": ["lm_head"], "target_modules": list(ENDS)},
        {**files.tensors(targets=ENDS), f"{HEAD}.weight": COPY},
        False,
    ),
    "saved alone": (
        {"modules_to_save": ["lm_head"], "target_modules": ["lm_head"]},
        {f"{HEAD}.weight": COPY},
        False,
    ),
    "saved, a norm": ({"modules_to_save": ["norm"]}, files.tensors(), False),
    "saved, but not there": ({"modules_to_save": ["lm_head"]}, files.tensors(), False),
    "saved under a copy's name": (
        {"modules_to_save": ["lm_head"]},
        {**files.tensors(), f"{HEAD}.base_layer.weight": COPY},
        False,
    ),
    "tied tokens": (
        {"ensure_weight_tying": True, "trainable_token_indices": [1]},
        {**files.tensors(), **new_tokens(EMBEDDING, 1)},
        True,
    ),
    "tied tokens, the same of both": (
        {
            "ensure_weight_tying": True,
            "trainable_token_indices": {"embed_tokens": [1], "lm_head": [1]},
        },
        {**files.tensors(), **new_tokens(EMBEDDING, 1)},
        True,
    ),
    "tied tokens that differ": (
        {
            "ensure_weight_tying": True,
            "trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]},
        },
        {**files.tensors(), **new_tokens(EMBEDDING, 1), **new_tokens(HEAD, 1)},
        False,
    ),
    "tied tokens of a saved head": (
        {
            "ensure_weight_tying": None,
            "trainable_token_indices": [1],
            "modules_to_save": ["lm_head"],
        },
        {**files.tensors(), **new_tokens(EMBEDDING, 1), f"{HEAD}.weight": COPY},
        False,
    ),
    "tied tokens under a head's LoRA": (
        {
            "ensure_weight_tying": None,
            "trainable_token_indices": [1],
            "target_modules": [*files.TARGETS, "lm_head"],
        },
        {**files.tensors(targets=(*files.TARGETS, "lm_head")), **new_tokens(EMBEDDING, 1)},
        True,
    ),
    "tied tokens under a head's DoRA": (
        {
            "ensure_weight_tying": None,
            "trainable_token_indices": [1],
            "use_dora": True,
            "target_modules": [*files.TARGETS, "lm_head"],
        },
        {
            **files.tensors(targets=(*files.TARGETS, "lm_head"), dora=True),
            **new_tokens(EMBEDDING, 1),
        },
        False,
    ),
    "tied and saved": (
        {"ensure_weight_tying": True, "modules_to_save": ["model.embed_tokens"]},
        {**files.tensors(), **SAVED},
        True,
    ),
    "tied and saved, one left out": (
        {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]},
        {**files.tensors(), f"{EMBEDDING}.weight": COPY},
        False,
    ),
    "excluded, but there": ({"exclude_modules": ["v_proj"]}, files.tensors(), False),
}


@pytest.mark.parametrize(("fields", "tensors", "wanted"), CASES.values(), ids=CASES)
def test_both_decide_alike(fields: dict[str, Any], tensors: files.Tensors, wanted: bool) -> None:
    is_tied = "ensure_weight_tying" in fields
    base = dataclasses.replace(files.BASE, is_tied=is_tied)
    model = dataclasses.replace(MODEL, tie_embeddings=is_tied)
    config, content = files.config_bytes(**fields), files.pack(tensors)
    assert is_accepted_at_upload(config, content, base) == wanted
    assert is_accepted_by_the_engine(config, content, model) == wanted


# What only a local engine takes: it trusts who runs it a little more than a platform its tenants.
LOCAL_ONLY: dict[str, dict[str, Any]] = {
    "targets not said": {"target_modules": None},
    "a target of no such base": {"target_modules": [*files.TARGETS, "c_attn"]},
    "alpha without effect": {"lora_alpha": 0},
}


@pytest.mark.parametrize("fields", LOCAL_ONLY.values(), ids=LOCAL_ONLY)
def test_the_upload_is_stricter_in_these(fields: dict[str, Any]) -> None:
    config, tensors = files.config_bytes(**fields), files.pack(files.tensors())
    assert not is_accepted_at_upload(config, tensors)
    assert is_accepted_by_the_engine(config, tensors)


_parts = st.sampled_from([
    "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_A.bias", "lora_embedding_A",
    "lora_embedding_B", "lora_magnitude_vector", "lora_magnitude_vector.weight", "weight",
    "base_layer.weight", "lora_C.weight", "token_adapter.trainable_tokens_delta",
    "original_module.weight", "modules_to_save.weight", "token_adapter.base_layer.weight",
])  # fmt: skip
_modules = st.sampled_from([
    "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens",
    "lm_head", "model.layers.2.mlp.down_proj", "model.layers.0.mlp.q_proj", "model.norm",
])  # fmt: skip
_shapes = st.sampled_from(
    [(4, 16), (16, 4), (16,), (64,), (64, 16), (4, 64), (64, 4), (32, 4), (2, 16)]
)


@st.composite
def _spoiled(draw: st.DrawFn) -> tuple[dict[str, Any], files.Tensors]:
    """An adapter of any kind, changed in a few places."""
    fields, tensors = draw(st.sampled_from(list(KINDS.values())))
    fields, tensors = dict(fields), dict(tensors)
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.integers(0, 4)):
            case 0 if tensors:
                del tensors[draw(st.sampled_from(sorted(tensors)))]
            case 1:
                shape = draw(_shapes)
                name = f"{draw(st.sampled_from(['', P]))}{draw(_modules)}.{draw(_parts)}"
                tensors[name] = ("F32", shape, bytes(4 * math.prod(shape)))
            case 2:
                switch = st.sampled_from(["use_dora", "lora_bias", "ensure_weight_tying"])
                fields[draw(switch)] = draw(st.sampled_from([True, False, None]))
            case 3:
                names = st.sampled_from(["embed_tokens", "lm_head", "model.embed_tokens"])
                tokens = st.lists(st.integers(-1, 64), max_size=3)
                value = st.lists(names, max_size=2)
                if draw(st.booleans()):
                    fields["modules_to_save"] = draw(value)
                else:
                    either = st.one_of(tokens, st.dictionaries(names, tokens, max_size=2))
                    fields["trainable_token_indices"] = draw(either)
            case _:
                names = st.sampled_from([*ENDS, "up_proj", "self_attn.q_proj"])
                fields["target_modules"] = draw(st.lists(names, min_size=1, unique=True))
    return fields, tensors


@given(_spoiled())
@settings(deadline=2000, max_examples=400)
def test_both_decide_alike_of_anything(case: tuple[dict[str, Any], files.Tensors]) -> None:
    fields, tensors = case
    config, content = files.config_bytes(**fields), files.pack(tensors)
    for is_tied in (False, True):
        base = dataclasses.replace(files.BASE, is_tied=is_tied)
        model = dataclasses.replace(MODEL, tie_embeddings=is_tied)
        accepted = is_accepted_by_the_engine(config, content, model)
        assert is_accepted_at_upload(config, content, base) == accepted
    assert_agree(config, content)
