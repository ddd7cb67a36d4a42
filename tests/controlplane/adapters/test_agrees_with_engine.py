"""What is accepted at upload loads: the engine checks by rules of its own, written apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.adapters.rejection import Rejected
from controlplane.adapters.validation import CheckedAdapter, check_adapter
from engine import adapter_config, adapter_format
from engine.config import ModelConfig
from tests.controlplane.adapters import files
from tests.controlplane.adapters.test_validation import GOOD_FIELDS
from tests.controlplane.conftest import TINY_CONFIG

MODEL = ModelConfig.from_fields(
    {**TINY_CONFIG, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}, 2
)


def check(config: bytes, tensors: bytes) -> CheckedAdapter:
    return check_adapter(
        config=config,
        start=tensors,
        file_bytes=len(tensors),
        base=files.BASE,
        max_rank=adapter_config.MAX_RANK,
    )


def plan(config: bytes, tensors: bytes) -> adapter_format.AdapterPlan:
    header = adapter_format.parse_header(tensors, len(tensors))
    return adapter_format.plan_adapter(adapter_config.parse_config(config), header, MODEL)


def assert_agree(config: bytes, tensors: bytes) -> None:
    """If the upload check passes, so does the engine's, with the same effect."""
    try:
        checked = check(config, tensors)
    except Rejected:
        return
    planned = plan(config, tensors)
    assert {target.rank for target in planned.targets} == checked.ranks
    assert len(planned.targets) * 2 == len(checked.tensors)


@pytest.mark.parametrize("fields", GOOD_FIELDS.values(), ids=GOOD_FIELDS)
def test_good_configs_load(fields: dict[str, Any]) -> None:
    config, tensors = files.config_bytes(**fields), files.pack(files.tensors())
    check(config, tensors)
    assert_agree(config, tensors)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "pattern",
    ["q_proj", "q.proj", "^q_proj", "self_attn.q_proj$", r"^model\.layers\.0\.self_attn\.q_proj$"],
)
@pytest.mark.parametrize("number", [2, 4])
def test_patterns_mean_the_same(field: str, pattern: str, number: int) -> None:
    config = files.config_bytes(**{field: {pattern: number}})
    wide, narrow = files.tensors(), files.tensors(rank=2, targets=("q_proj",))
    for tensors in (wide, {**wide, **narrow}):
        assert_agree(config, files.pack(tensors))


_value = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 300),
    st.floats(allow_nan=False),
    st.sampled_from(["", "none", "q_proj", "gaussian", "default", "LORA", "CAUSAL_LM"]),
    st.lists(st.sampled_from(["q_proj", "layers.0.mlp.down_proj", "v_proj", 0, 1]), max_size=3),
    st.dictionaries(
        st.sampled_from(["q_proj", "^v_proj", "^model.layers.0.self_attn.v_proj$", "q.proj"]),
        st.sampled_from([4, 2, 1.5, True, None, "4"]),
        max_size=2,
    ),
)
_fields = st.sampled_from(sorted(adapter_config.HONOURED | adapter_config.NEUTRAL))


@given(st.dictionaries(_fields, _value, max_size=3))
@settings(deadline=2000, max_examples=500)
def test_no_config_passes_that_would_not_load(fields: dict[str, Any]) -> None:
    tensors = files.pack(files.tensors())
    assert_agree(json.dumps(files.config(**fields)).encode(), tensors)
