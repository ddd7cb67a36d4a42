"""Configs and tensors that fit the base model, and each way of not fitting."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.adapters.base_shape import BaseShape
from contract.adapters.peft_config import UPLOAD_LIMITS
from contract.adapters.peft_fields import HONOURED, NEUTRAL
from contract.adapters.problems import AdapterProblems
from contract.adapters.upload_check import CheckedAdapter, check_adapter
from controlplane.adapters.rejection import MAX_REASONS, Rejected
from tests.controlplane.adapters import files
from tests.controlplane.conftest import TINY_CONFIG

TENSORS = files.tensors()
PREFIX = "base_model.model."
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SECOND = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def check(config: bytes, tensors: bytes, max_rank: int = 256) -> CheckedAdapter:
    return check_adapter(
        config=config,
        start=tensors,
        file_bytes=len(tensors),
        base=files.BASE,
        max_rank=max_rank,
    )


def reasons_for(config: bytes, tensors: bytes, max_rank: int = 256) -> dict[str, str]:
    with pytest.raises(AdapterProblems) as caught:
        check(config, tensors, max_rank)
    # What is stored must be storable, and short.
    rejected = Rejected.of(caught.value)
    stored = json.dumps(rejected.as_json())
    assert stored.isascii()
    assert len(stored) < 20_000
    return {reason.field: reason.message for reason in rejected.reasons}


def reshaped(name: str, shape: tuple[int, ...]) -> files.Tensors:
    count = 1
    for size in shape:
        count *= size
    return {**TENSORS, name: ("F32", shape, bytes(4 * count))}


def test_good_adapter() -> None:
    checked = check(files.config_bytes(), files.pack(TENSORS))
    assert checked.fitted.ranks == {4}
    assert checked.report() == {
        "target_modules": ["down_proj", "q_proj", "v_proj"],
        "ranks": [4],
        "alpha": 8.0,
        "use_rslora": False,
        "use_dora": False,
        "dtypes": ["F32"],
        "num_tensors": 12,
        "num_parameters": sum(len(data) // 4 for _, _, data in TENSORS.values()),
        "peft_version": "",
        "claimed_base": "",
        "draft_heads": 0,
    }


@pytest.mark.parametrize("rank", [1, 7, 256])
def test_any_rank(rank: int) -> None:
    checked = check(files.config_bytes(r=rank), files.pack(files.tensors(rank)))
    assert checked.fitted.ranks == {rank}


GOOD_FIELDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "alpha a fraction": {"lora_alpha": 0.5},
    "alpha pattern": {"alpha_pattern": {"layers.0.self_attn.q_proj": 3}},
    "anchored patterns": {"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj$": 3}},
    "training facts": {"lora_dropout": 0.1, "inference_mode": True, "peft_version": "0.21.2"},
    "fields that are off": {"use_dora": False, "modules_to_save": None, "brand_new": []},
    "rslora null": {"use_rslora": None},
    "no init": {"init_lora_weights": False},
    "gaussian init": {"init_lora_weights": "gaussian"},
    "no task": {"task_type": None},
    "dotted targets": {"target_modules": ["self_attn.q_proj", "v_proj", "mlp.down_proj"]},
    "full paths": {
        "target_modules": [
            *(f"model.layers.{n}.self_attn.{x}" for n in range(2) for x in ("q_proj", "v_proj")),
            *(f"model.layers.{n}.mlp.down_proj" for n in range(2)),
        ]
    },
    "excluded": {
        "target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"],
        "exclude_modules": ["up_proj"],
    },
    "targets a pattern": {"target_modules": r".*\.\d+\.\w+\.[qvd]\w*_proj"},
    "excluded by a pattern": {
        "target_modules": ["q_proj", "v_proj", "down_proj", "up_proj", "lm_head"],
        "exclude_modules": r".*(up_.*|head)",
    },
    "a slow pattern": {"alpha_pattern": {"(a|aa)+": 4, "(.*)*.*(.*)*x": 2}},
    "biases that the base has not": {"bias": "all"},
    "a converted adapter": {"corda_config": {"corda_method": "kpm"}},
    "of Unsloth": {
        "peft_version": "0.20.0",
        "auto_mapping": {
            "base_model_class": "LlamaForCausalLM",
            "parent_library": "transformers.models.llama.modeling_llama",
            "unsloth_fixed": True,
        },
    },
    "of ms-swift": {"swift_type": "LORA", "lora_dtype": "AUTO", "lorap_emb_lr": 1e-6},
    "of PEFT 0.3": {"enable_lora": None, "merge_weights": True},
    "notes": {"metadata": {"made": "today"}},
    "fan in fan out": {"fan_in_fan_out": True},
    "minor components": {"init_lora_weights": "mica"},
    "claims a path": {"base_model_name_or_path": "../../etc/passwd"},
}


@pytest.mark.parametrize("fields", GOOD_FIELDS.values(), ids=GOOD_FIELDS)
def test_good_configs(fields: dict[str, Any]) -> None:
    check(files.config_bytes(**fields), files.pack(TENSORS))


def test_rank_pattern() -> None:
    wide = files.tensors(rank=2, targets=("q_proj",))
    config = files.config_bytes(rank_pattern={"q_proj": 2})
    checked = check(config, files.pack({**TENSORS, **wide}))
    assert checked.report()["ranks"] == [2, 4]


def test_first_matching_pattern_counts_as_in_peft() -> None:
    config = files.config_bytes(rank_pattern={"layers.1.self_attn.q_proj": 4, "q_proj": 2})
    narrow = files.tensors(rank=2, targets=("q_proj",), layers=1)
    check(config, files.pack({**TENSORS, **narrow}))


def test_some_layers_only() -> None:
    one_layer = files.pack(files.tensors(layers=1))
    check(files.config_bytes(layers_to_transform=[0]), one_layer)
    check(files.config_bytes(layers_to_transform=0), one_layer)
    found = reasons_for(files.config_bytes(), one_layer)
    assert found == {
        "layers_to_transform": "the file has tensors of 1 layer alone: "
        'write "layers_to_transform": [0]'
    }
    config = files.config_bytes(target_modules=r".*\.(q|v|down)_proj")
    [message] = reasons_for(config, one_layer).values()
    fix = json.loads("{" + message.partition("write ")[2] + "}")
    check(files.config_bytes(**fix), one_layer)


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "rank of zero": ({"r": 0}, "r"),
    "rank too high": ({"r": 257}, "r"),
    "rank a boolean": ({"r": True}, "r"),
    "rank a string": ({"r": "4"}, "r"),
    "rank huge": ({"r": 10**4000}, "r"),
    "alpha of zero": ({"lora_alpha": 0}, "lora_alpha"),
    "alpha negative": ({"lora_alpha": -1}, "lora_alpha"),
    "alpha huge": ({"lora_alpha": 10**4000}, "lora_alpha"),
    "alpha a boolean": ({"lora_alpha": True}, "lora_alpha"),
    "dora with biases": ({"use_dora": True, "lora_bias": True}, "lora_bias"),
    "dora text": ({"use_dora": "yes"}, "use_dora"),
    "biases after gaussian": ({"lora_bias": True, "init_lora_weights": "gaussian"}, "lora_bias"),
    "biases of embeddings": (
        {"lora_bias": True, "target_modules": ["embed_tokens"]},
        "lora_bias",
    ),
    "tying a number": ({"ensure_weight_tying": 1}, "ensure_weight_tying"),
    "bias": ({"bias": "some"}, "bias"),
    "modules to save": ({"modules_to_save": ["score"]}, "modules_to_save"),
    "trained tokens": ({"trainable_token_indices": ["1"]}, "trainable_token_indices"),
    "layer replication": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    "megatron": ({"megatron_config": {"a": 1}}, "megatron_config"),
    "alora": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "target parameters": ({"target_parameters": ["x"]}, "target_parameters"),
    "old alora": ({"alora_invocation_string": "<answer>"}, "alora_invocation_string"),
    "a field of tomorrow": ({"use_brand_new": True}, "use_brand_new"),
    "other method": ({"peft_type": "IA3"}, "peft_type"),
    "no method": ({"peft_type": None}, "peft_type"),
    "method a list": ({"peft_type": ["LORA"]}, "peft_type"),
    "other task": ({"task_type": "SEQ_CLS"}, "task_type"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights"),
    "mica with dora": ({"init_lora_weights": "mica", "use_dora": True}, "init_lora_weights"),
    "loftq": ({"init_lora_weights": "loftq"}, "init_lora_weights"),
    "init a list": ({"init_lora_weights": [True]}, "init_lora_weights"),
    "init one": ({"init_lora_weights": 1}, "init_lora_weights"),
    "targets a broken pattern": ({"target_modules": ".*_proj("}, "target_modules"),
    "targets a pattern of nothing": ({"target_modules": "q_proj"}, "target_modules"),
    "targets a pattern, layers beside": (
        {"target_modules": ".*_proj", "layers_to_transform": 0},
        "layers_to_transform",
    ),
    "targets a slow pattern": ({"target_modules": ["(a+)+$"]}, "target_modules"),
    "no targets": ({"target_modules": []}, "target_modules"),
    "targets null": ({"target_modules": None}, "target_modules"),
    "targets of numbers": ({"target_modules": [1]}, "target_modules"),
    "unknown target": ({"target_modules": ["q_proj", "norm"]}, "target_modules"),
    "half a name": ({"target_modules": ["proj"]}, "target_modules"),
    "all excluded by a pattern": ({"exclude_modules": ".*"}, "target_modules"),
    "excluded by a number": ({"exclude_modules": 7}, "exclude_modules"),
    "rank pattern a list": ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
    "rank pattern with a reference": ({"rank_pattern": {"(a|aa)\\2": 4}}, "rank_pattern"),
    "a pattern with flags": ({"rank_pattern": {"(?i:Q_PROJ)": 4}}, "rank_pattern"),
    "a long pattern": ({"alpha_pattern": {"q" * 257: 4}}, "alpha_pattern"),
    "too many patterns": ({"rank_pattern": {str(n): 4 for n in range(2049)}}, "rank_pattern"),
    "rank pattern too high": ({"rank_pattern": {"q_proj": 999}}, "rank_pattern"),
    "alpha pattern text": ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
    "layers text": ({"layers_to_transform": "all"}, "layers_to_transform"),
    "layers negative": ({"layers_to_transform": [-1]}, "layers_to_transform"),
    "other layers pattern": ({"layers_pattern": "blocks"}, "layers_pattern"),
    "rslora text": ({"use_rslora": "yes"}, "use_rslora"),
    "nul in a name": ({"target_modules": ["\0"]}, "target_modules"),
}


@pytest.mark.parametrize(("fields", "field"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_bad_configs_are_refused_by_field(fields: dict[str, Any], field: str) -> None:
    assert field in reasons_for(files.config_bytes(**fields), files.pack(TENSORS))


def test_a_wrong_rank_of_a_pattern_names_the_pattern() -> None:
    content = files.config_bytes(rank_pattern={"k_proj": 4, "q_proj": 999})
    message = reasons_for(content, files.pack(TENSORS))["rank_pattern"]
    assert "q_proj" in message and "999" in message


BAD_CONFIG_FILES = {
    "empty": b"",
    "not json": b"r = 4",
    "list": b"[]",
    "not utf-8": b'{"r": "\xff"}',
    "deep": b'{"a":' + b"[" * 60_000,
    "too long": b'{"a": "' + b"x" * 65_536 + b'"}',
    "twice": b'{"r": 4, "r": 8}',
    "nan": b'{"lora_alpha": NaN}',
    "out of range": b'{"lora_alpha": 1e999}',
    "lone surrogate": rb'{"base_model_name_or_path": "\ud800"}',
}


@pytest.mark.parametrize("content", BAD_CONFIG_FILES.values(), ids=BAD_CONFIG_FILES)
def test_bad_config_files(content: bytes) -> None:
    began = time.process_time()
    assert set(reasons_for(content, files.pack(TENSORS))) == {"adapter_config.json"}
    assert time.process_time() - began < 2


def renamed(name: str) -> files.Tensors:
    """The good tensors, the first under another name."""
    return {(name if key == FIRST else key): value for key, value in TENSORS.items()}


BAD_NAMES = {
    "layer too high": FIRST.replace("layers.0", "layers.2"),
    "layer with zero": FIRST.replace("layers.0", "layers.00"),
    "other linear": FIRST.replace("q_proj", "x_proj"),
    "not a target": FIRST.replace("q_proj", "k_proj"),
    "wrong block": FIRST.replace("self_attn", "mlp"),
    "embedding": "base_model.model.model.embed_tokens.lora_embedding_A",
    "dora": FIRST.replace("lora_A.weight", "lora_magnitude_vector"),
    "bias": FIRST.replace("weight", "bias"),
    "base's own": FIRST.replace("lora_A", "base_layer"),
    "other adapter's name": FIRST.replace("lora_A.weight", "lora_A.mine.weight"),
    "newline": FIRST + "\n",
    "nul": FIRST + "\0",
    "lone surrogate": FIRST + "\ud800",
    "very long": "x" * 100_000,
    "other digits": FIRST.replace("layers.0", "layers.٠"),
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_unknown_tensors_are_refused(name: str) -> None:
    found = reasons_for(files.config_bytes(), files.pack(renamed(name)))
    assert "missing" in found[FIRST]
    assert len(found) == 2


@pytest.mark.parametrize("module", ["experts", "experts.base_layer", "experts.3.gate_proj"])
def test_a_base_without_experts_has_none_to_adapt(module: str) -> None:
    """As PEFT names them over stacked matrices, and over a linear of each expert."""
    name = FIRST.replace("self_attn.q_proj", f"mlp.{module}")
    found = reasons_for(files.config_bytes(), files.pack({**TENSORS, name: TENSORS[FIRST]}))
    assert found == {name: f"the base model has no linear mlp.{module}"}


@pytest.mark.parametrize("linear", ["gate_proj", "gate"])
def test_a_base_with_experts_has_no_linears_in_its_mlps(linear: str) -> None:
    base = BaseShape.from_config({**TINY_CONFIG, "model_type": "qwen3_moe"})
    name = FIRST.replace("self_attn.q_proj", f"mlp.{linear}")
    kept = {each: tensor for each, tensor in TENSORS.items() if "q_proj" in each}
    for targets, tensors, field in (
        (["q_proj"], {**kept, name: TENSORS[FIRST]}, name),
        (["q_proj", linear], kept, "target_modules"),
    ):
        config, start = files.config_bytes(target_modules=targets), files.pack(tensors)
        with pytest.raises(AdapterProblems) as caught:
            check_adapter(config=config, start=start, file_bytes=len(start), base=base, max_rank=64)
        assert [problem.field for problem in caught.value.problems] == [field]


@pytest.mark.parametrize("linear", ["self_attn.v_proj", "self_attn.k_proj", "per_layer_input_gate"])
def test_a_layer_that_reads_others_keys_has_no_linears_for_them(linear: str) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    shapes = {"num_hidden_layers": 4, "layer_types": types, "num_kv_shared_layers": 2}
    base = BaseShape.from_config({**TINY_CONFIG, "model_type": "gemma4_text", **shapes})
    shared, name = 3, FIRST.replace("layers.0.self_attn.q_proj", f"layers.3.{linear}")
    assert set(base.linears) - set(base.linears_of(shared)) == {
        "self_attn.k_proj",
        "self_attn.v_proj",
    }
    width = base.linears_of(1)["self_attn.o_proj"][0]
    own = {
        f"{PREFIX}model.layers.1.self_attn.o_proj.lora_A.weight": ("F32", (4, width), 16 * width),
        f"{PREFIX}model.layers.1.self_attn.o_proj.lora_B.weight": ("F32", (base.hidden, 4), 16),
    }
    kept = {n: (kind, shape, bytes(4 * shape[0] * shape[1])) for n, (kind, shape, _) in own.items()}
    start = files.pack({**kept, name: TENSORS[FIRST]})
    with pytest.raises(AdapterProblems) as caught:
        check_adapter(
            config=files.config_bytes(target_modules=["o_proj"], layers_to_transform=[1]),
            start=start,
            file_bytes=len(start),
            base=base,
            max_rank=64,
        )
    assert [problem.field for problem in caught.value.problems] == [name]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (FIRST, (4, 15)),
        (FIRST, (16, 4)),
        (FIRST, (8, 16)),
        (SECOND, (16, 5)),
        (FIRST, (64,)),
        (FIRST, (4, 16, 1)),
    ],
    ids=str,
)
def test_wrong_shapes_say_what_is_needed(name: str, shape: tuple[int, ...]) -> None:
    found = reasons_for(files.config_bytes(), files.pack(reshaped(name, shape)))
    assert set(found) == {name}
    needed = "[4, 16]" if name == FIRST else "[16, 4]"
    assert str(list(shape)) in found[name]
    assert found[name].endswith(needed)


def test_missing_half_is_named() -> None:
    found = reasons_for(
        files.config_bytes(), files.pack({k: v for k, v in TENSORS.items() if k != SECOND})
    )
    assert set(found) == {SECOND}


def test_one_sentence_says_that_the_ranks_are_others() -> None:
    found = reasons_for(files.config_bytes(r=8), files.pack(TENSORS))
    end = "upload the adapter_config.json that was saved with them"
    assert found == {"r": f"it is 8, but the tensors have rank 4: {end}"}
    config = files.config_bytes(r=8, rank_pattern={"q_proj": 2, "down_proj": 4})
    module = "model.layers.0.self_attn.q_proj"
    assert reasons_for(config, files.pack(TENSORS)) == {
        "rank_pattern": f"it is 2 for {module}, but the tensors have rank 4 "
        f"(and for 3 other modules): {end}"
    }


def test_one_sentence_for_each_kind_of_fault() -> None:
    """An adapter of all linears has hundreds of tensors."""
    wide = files.config_bytes(target_modules=["q_proj", "k_proj", "v_proj", "down_proj"])
    assert reasons_for(wide, files.pack(TENSORS)) == {
        "target_modules": "it asks for model.layers.0.self_attn.k_proj, but the file has no "
        "tensor of it: remove it; 1 other has the same fault"
    }
    few = files.config_bytes(target_modules=["q_proj"])
    [message] = reasons_for(few, files.pack(TENSORS)).values()
    assert message.endswith("7 others have the same fault")
    halves = {name: value for name, value in TENSORS.items() if "lora_A" in name}
    assert list(reasons_for(files.config_bytes(), files.pack(halves))) == [SECOND]


OTHER_NAMES = {
    "no prefix": (PREFIX, ""),
    "half a prefix": (PREFIX, "base_model."),
    "the prefix twice": (PREFIX, PREFIX * 2),
    "a compiled model": (PREFIX, f"{PREFIX}_orig_mod."),
    "a path of the inner model": (f"{PREFIX}model.", PREFIX),
    "another root": (f"{PREFIX}model.", f"{PREFIX}language_model.model."),
}


@pytest.mark.parametrize(("old", "new"), OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_names_that_peft_ignores_are_refused_once(old: str, new: str) -> None:
    tensors = {name.replace(old, new): value for name, value in TENSORS.items()}
    assert reasons_for(files.config_bytes(), files.pack(tensors)) == {
        FIRST.replace(old, new): f"PEFT does not read a tensor of this name: rename it to {FIRST}; "
        "11 others have the same fault"
    }


def test_the_first_reason_has_the_sizes_of_both_vocabularies() -> None:
    rows = ("F32", (70, 16), bytes(4 * 70 * 16))
    ends = (*files.TARGETS, "embed_tokens", "lm_head")
    a = {f"{PREFIX}model.embed_tokens.lora_embedding_A": ("F32", (4, 70), bytes(4 * 4 * 70))}
    cases: list[tuple[dict[str, Any], files.Tensors]] = [
        ({}, {f"{PREFIX}{end}.weight": rows for end in ("model.embed_tokens", "lm_head")}),
        ({"modules_to_save": ["lm_head"]}, {f"{PREFIX}lm_head.weight": rows}),
        ({"target_modules": list(ends)}, {**files.tensors(targets=ends), **a}),
    ]
    for fields, more in cases:
        tensors = files.pack({**TENSORS, **more})
        first = next(iter(reasons_for(files.config_bytes(**fields), tensors).values()))
        assert "70 tokens" in first and "64" in first, fields


MLX = {
    "fine_tune_type": "lora",
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    "num_layers": 16,
    "model": "mlx-community/Llama-3.2-1B-Instruct-4bit",
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1049\n" % (b"f" * 64)


def test_files_of_other_kinds_are_one_sentence_with_the_way_out() -> None:
    good, config = files.pack(TENSORS), files.config_bytes()
    convert = "lorikeet adapters convert"
    assert convert in reasons_for(json.dumps(MLX).encode(), good)["adapter_config.json"]
    mlx = {name.replace("lora_A.weight", "lora_a"): value for name, value in TENSORS.items()}
    assert convert in next(iter(reasons_for(config, files.pack(mlx)).values()))
    full = json.dumps({**MLX, "fine_tune_type": "full"}).encode()
    assert "whole model" in reasons_for(full, good)["fine_tune_type"]
    for content, said in ((LFS, "git lfs pull"), (b"<!DOCTYPE html><html>", "web page")):
        found = reasons_for(content, content)
        assert set(found) == {"adapter_config.json", "adapter_model.safetensors"}
        assert all(said in message for message in found.values())


def test_unknown_keys_are_one_sentence() -> None:
    found = reasons_for(files.config_bytes(new_thing=1, other_thing=[2]), files.pack(TENSORS))
    assert list(found) == ["new_thing"]
    assert "remove the key" in found["new_thing"] and found["new_thing"].endswith("1 other key")
    assert (
        "remove the key"
        in reasons_for(files.config_bytes(megatron_config={"a": 1}), files.pack(TENSORS))[
            "megatron_config"
        ]
    )


def test_advice_is_of_the_initialisation() -> None:
    said = {
        init: reasons_for(files.config_bytes(init_lora_weights=init), files.pack(TENSORS))
        for init in ("pissa_niter_16", "lora_ga", "loftq", "of_tomorrow")
    }
    advice = {init: found["init_lora_weights"] for init, found in said.items()}
    for init in ("pissa_niter_16", "lora_ga"):
        assert "path_initial_model_for_weight_conversion" in advice[init]
    assert "cannot make a plain LoRA" in advice["loftq"]
    assert "not an initialisation" in advice["of_tomorrow"]


def test_rank_limit_of_the_base_counts() -> None:
    assert "r" in reasons_for(files.config_bytes(), files.pack(TENSORS), max_rank=3)


def test_both_files_are_judged_at_once() -> None:
    found = reasons_for(files.config_bytes(bias="some", r=0), b"PK\x03\x04....")
    assert set(found) == {"bias", "r", "adapter_model.safetensors"}


def test_reasons_are_bounded() -> None:
    many = files.config_bytes(target_modules=[f"linear_{n}" for n in range(3000)])
    with pytest.raises(AdapterProblems) as caught:
        check(many, files.pack(TENSORS))
    rows = Rejected.of(caught.value).as_json()
    assert len(rows) == MAX_REASONS + 1
    assert "more" in rows[-1]["message"]


def test_largest_config_costs_little() -> None:
    names = [f"{n:x}" for n in range(9000)]
    content = files.config_bytes(target_modules=names)[: UPLOAD_LIMITS.max_bytes]
    began = time.process_time()
    reasons_for(content, files.pack(TENSORS))
    assert time.process_time() - began < 5


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
_names = st.sampled_from(sorted(HONOURED | NEUTRAL))


@given(st.dictionaries(_names | st.text(max_size=8), _json, max_size=4))
@settings(deadline=2000, max_examples=400)
def test_any_config_passes_or_is_refused(fields: dict[str, Any]) -> None:
    try:
        check(json.dumps(files.config(**fields)).encode(), files.pack(TENSORS))
    except AdapterProblems as problems:
        assert json.dumps(Rejected.of(problems).as_json()).isascii()


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_as_config(content: bytes) -> None:
    reasons_for(content, files.pack(TENSORS))


class TestBaseShape:
    def test_of_a_model_without_head_dim(self) -> None:
        config = {k: v for k, v in TINY_CONFIG.items() if k != "head_dim"}
        assert BaseShape.from_config(config) == files.BASE

    @pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers"])
    @pytest.mark.parametrize("value", [None, 0, -1, "16", True, 1.0])
    def test_bad_sizes_are_named(self, field: str, value: Any) -> None:
        with pytest.raises(ValueError, match=field):
            BaseShape.from_config({**TINY_CONFIG, field: value})


@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_what_peft_writes_passes(tmp_path: Path, rslora: bool) -> None:
    """The real library, on a real Llama of these sizes."""
    torch = pytest.importorskip("torch")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in TINY_CONFIG.items() if k != "model_type"})
    model = get_peft_model(
        LlamaForCausalLM(config),
        LoraConfig(
            task_type="CAUSAL_LM",
            r=8,
            lora_alpha=16,
            use_rslora=rslora,
            target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            rank_pattern={"layers.1.self_attn.q_proj": 2, "gate_proj": 3},
            alpha_pattern={"gate_proj": 5},
        ),
    )
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    checked = check(
        (tmp_path / "adapter_config.json").read_bytes(),
        (tmp_path / "adapter_model.safetensors").read_bytes(),
    )
    assert checked.report()["ranks"] == [2, 3, 8]
    assert checked.report()["dtypes"] == ["BF16"]
    assert checked.report()["peft_version"]


def test_pack_is_what_the_format_says() -> None:
    content = files.pack(TENSORS)
    (length,) = struct.unpack("<Q", content[:8])
    assert json.loads(content[8 : 8 + length])[FIRST]["shape"] == [4, 16]
