"""Random configs through PEFT's own rules, the upload check and the engine: all three agree."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.adapters.base_shape import BaseShape
from contract.adapters.peft_config import MAX_PATTERNS, MAX_RANK
from contract.adapters.peft_fields import HONOURED, NEUTRAL
from contract.adapters.problems import AdapterProblems
from contract.adapters.upload_check import CheckedAdapter, check_adapter
from controlplane.adapters.rejection import Rejected
from engine.adapters import plan
from engine.adapters.config import parse_config
from engine.errors import AdapterMismatch
from engine.model.config import ModelConfig
from tests.controlplane.adapters import files
from tests.controlplane.conftest import TINY_CONFIG

Shapes = dict[str, tuple[int, ...]]
ENGINE_FIELDS = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "all biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": None},
    "mistral": {"model_type": "mistral"},
    "seed_oss": {"model_type": "seed_oss", "head_dim": None},
}
#: In these the upload is stricter, and in nothing else; docs/memory.md names them.
STRICTER = (
    "target_modules", "exclude_modules", "layers_to_transform",
    "lora_alpha", "alpha_pattern",
)  # fmt: skip


def header_of(shapes: Shapes) -> tuple[bytes, int]:
    """A tensors file's beginning, and the length that the whole file would have."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    start = files.pack_text(json.dumps(entries).encode(), b"")
    return start, len(start) + end


def upload(config: bytes, shapes: Shapes, base: dict[str, Any]) -> CheckedAdapter | Rejected:
    start, file_bytes = header_of(shapes)
    shape = BaseShape.from_config({**TINY_CONFIG, **BASES["llama"], **base})
    try:
        return check_adapter(
            config=config, start=start, file_bytes=file_bytes, base=shape, max_rank=MAX_RANK
        )
    except AdapterProblems as problems:
        rejected = Rejected.of(problems)
        assert all(reason.message for reason in rejected.reasons)
        return rejected


def engine(
    config: bytes, shapes: Shapes, base: dict[str, Any]
) -> plan.AdapterPlan | AdapterMismatch:
    fields = {**TINY_CONFIG, **ENGINE_FIELDS, **base}
    model = ModelConfig.from_fields(fields, 2)
    start, file_bytes = header_of(shapes)
    try:
        header = plan.parse_header(start, file_bytes)
        named = {name: tensor.shape for name, tensor in header.items()}
        return plan.plan_adapter(parse_config(config), named, model)
    except AdapterMismatch as mismatch:
        assert mismatch.message
        return mismatch


def assert_agree(config: bytes, shapes: Shapes, base: dict[str, Any]) -> bool:
    """Whether both accept it."""
    uploaded, planned = upload(config, shapes, base), engine(config, shapes, base)
    if isinstance(uploaded, CheckedAdapter):
        assert isinstance(planned, plan.AdapterPlan), planned
        assert {target.rank for target in planned.all_targets} == uploaded.fitted.ranks
        return True
    if isinstance(planned, plan.AdapterPlan):
        assert any(reason.field in STRICTER for reason in uploaded.reasons), uploaded
    return False


def pefts_shapes(config: dict[str, Any], base: dict[str, Any]) -> Shapes:
    """The tensors that PEFT would save for a config, by its own rules."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    peft = LoraConfig(**{name: value for name, value in config.items() if name != "peft_type"})
    shape, found = BaseShape.from_config({**TINY_CONFIG, **base}), {}
    for module, _, (width_in, width_out) in shape.modules():
        if not check_target_module_exists(peft, module):
            continue
        rank = peft.rank_pattern.get(get_pattern_key(peft.rank_pattern, module), peft.r)
        a, b = "lora_A.weight", "lora_B.weight"
        if module == "model.embed_tokens":
            a, b = "lora_embedding_A", "lora_embedding_B"
        found[f"base_model.model.{module}.{a}"] = (rank, width_in)
        found[f"base_model.model.{module}.{b}"] = (width_out, rank)
        if peft.use_dora:
            found[f"base_model.model.{module}.lora_magnitude_vector"] = (width_out,)
        if peft.lora_bias:
            found[f"base_model.model.{module}.lora_B.bias"] = (width_out,)
    return found


# Expressions that Python's `re` ends too.
_expressions = st.sampled_from([
    r".*\.[qv]_proj", r".*_proj", r".*", r"model\.layers\.\d+\.mlp\.(up|down)_proj",
    r".*layers\.[1-9]\..*", r"(?!.*mlp).*_proj", r".*(?<=self_attn\.)\w_proj|lm_head", "lm_head",
    r"model\.layers\.0\..+", r".*embed.*|.*\.(k|o)_proj", "q_proj",
])  # fmt: skip
_names = st.sampled_from([
    *files.BASE.linears, "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "lm_head",
    "embed_tokens", "down_proj", "model.layers.0.self_attn.q_proj", "layers.1.mlp.up_proj",
])  # fmt: skip
_modules = st.one_of(_expressions, st.lists(_names, min_size=1, max_size=5, unique=True))
_keys = st.one_of(_names, _expressions, st.sampled_from([r"^.*\.1\..*", "q_proj|v_proj", "q.proj"]))
_good_fields: dict[str, st.SearchStrategy[Any]] = {
    "task_type": st.sampled_from(["CAUSAL_LM", None]),
    "r": st.sampled_from([1, 4, 8, MAX_RANK]),
    "lora_alpha": st.sampled_from([1, 0.5, 16]),
    "exclude_modules": st.one_of(st.none(), _modules),
    "rank_pattern": st.dictionaries(_keys, st.sampled_from([1, 2, 9, MAX_RANK]), max_size=4),
    "alpha_pattern": st.dictionaries(_keys, st.sampled_from([1, 2.5, 64]), max_size=4),
    "use_rslora": st.booleans(),
    "use_dora": st.booleans(),
    "bias": st.sampled_from(["none", "all", "lora_only"]),
    "corda_config": st.sampled_from([None, {}, {"corda_method": "kpm"}]),
    "layers_to_transform": st.sampled_from([None, 0, 1, [], [1], [0, 1]]),
    "lora_bias": st.booleans(),
    "fan_in_fan_out": st.booleans(),
    "auto_mapping": st.sampled_from([None, {"parent_library": "no.such"}]),
}
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([10**400, -(10**30), 1e300, -0.0, 2**53, MAX_RANK + 1]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["LORA", "LOHA", "PROMPT_TUNING", "all", "(a|aa)*x", "[", "all-linear", "\\"]),
)
_nested = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
_any_value = st.one_of(
    _nested,
    _modules,
    st.dictionaries(st.one_of(_keys, st.text(max_size=8)), _scalars, max_size=4),
    st.integers(1, 200).map(lambda depth: json.loads("[" * depth + "]" * depth)),
    st.just({str(n): 4 for n in range(MAX_PATTERNS + 1)}),
)
_any_field = st.one_of(st.sampled_from(sorted(HONOURED | NEUTRAL)), st.text(max_size=6))


@st.composite
def _good(draw: st.DrawFn) -> dict[str, Any]:
    """A config that PEFT's LoraConfig takes."""
    chosen = draw(st.sets(st.sampled_from(sorted(_good_fields)), max_size=6))
    config = {"peft_type": "LORA", "target_modules": draw(_modules)}
    config |= {field: draw(_good_fields[field]) for field in sorted(chosen)}
    if isinstance(config["target_modules"], str):
        config.pop("layers_to_transform", None)
    if config.get("use_dora"):
        config.pop("lora_bias", None)
    return config


def _play_good(config: dict[str, Any], base: str) -> None:
    fields = BASES[base]
    shapes = pefts_shapes(config, fields)
    embeds = any("embed" in name for name in shapes)
    is_accepted = assert_agree(json.dumps(config).encode(), shapes, fields)
    biased = config.get("bias", "none") != "none" and base not in ("llama", "tied", "mistral")
    if shapes and not biased and not (embeds and config.get("lora_bias")):
        unknown = "q_proj" == config["target_modules"]
        assert is_accepted or unknown, upload(json.dumps(config).encode(), shapes, fields)


def _play_any(good: dict[str, Any], noise: dict[str, Any], drop: set[str], base: str) -> None:
    try:
        shapes = pefts_shapes(good, BASES[base])
    except ValueError:
        shapes = {}
    config = {field: value for field, value in {**good, **noise}.items() if field not in drop}
    assert_agree(json.dumps(config).encode(), shapes, BASES[base])


_bases = st.sampled_from(sorted(BASES))
_noise = st.dictionaries(_any_field, _any_value, max_size=2)
_dropped = st.sets(st.sampled_from(["r", "lora_alpha", "peft_type", "target_modules"]), max_size=1)
_quick = settings(deadline=None, max_examples=250, suppress_health_check=list(HealthCheck))
_slow = settings(_quick, max_examples=20_000)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_both_sides_see_the_same_base(base: dict[str, Any]) -> None:
    """The upload reads config.json, the engine what it has made of it."""
    fields = {**TINY_CONFIG, **base}
    model = ModelConfig.from_fields({**fields, **ENGINE_FIELDS}, 2)
    assert plan.base_shape(model) == BaseShape.from_config(fields)


@given(_good(), _bases)
@_quick
def test_what_peft_takes_is_taken(config: dict[str, Any], base: str) -> None:
    pytest.importorskip("peft")
    _play_good(config, base)


@given(_good(), _noise, _dropped, _bases)
@_quick
def test_both_decide_alike(
    good: dict[str, Any], noise: dict[str, Any], drop: set[str], base: str
) -> None:
    pytest.importorskip("peft")
    _play_any(good, noise, drop, base)


@pytest.mark.long
@pytest.mark.timeout(1800)
@given(_good(), _noise, _dropped, _bases)
@_slow
def test_both_decide_alike_for_long(
    good: dict[str, Any], noise: dict[str, Any], drop: set[str], base: str
) -> None:
    pytest.importorskip("peft")
    _play_good(good, base)
    _play_any(good, noise, drop, base)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("count", [MAX_PATTERNS, MAX_PATTERNS + 1])
def test_as_many_patterns_are_taken_here_as_there(field: str, count: int) -> None:
    """An adapter that passes the upload and is then refused by every worker helps nobody."""
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], field: {}}
    shapes = pefts_shapes(config, {})
    config[field] = {f"m{n}": 4 for n in range(count)}
    text = json.dumps(config).encode()
    assert assert_agree(text, shapes, {}) == (count <= MAX_PATTERNS)
    if count > MAX_PATTERNS:
        refused, mismatch = upload(text, shapes, {}), engine(text, shapes, {})
        assert isinstance(refused, Rejected) and isinstance(mismatch, AdapterMismatch)
        assert [reason.field for reason in refused.reasons] == [mismatch.param] == [field]
        assert str(MAX_PATTERNS) in str(refused) and str(MAX_PATTERNS) in mismatch.message


def test_no_base_admits_a_rank_that_the_engine_refuses() -> None:
    """An operator may write any max_rank into a base model's row."""
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": MAX_RANK + 1}
    start, file_bytes = header_of(pefts_shapes(config, {}))
    with pytest.raises(AdapterProblems) as raised:
        check_adapter(
            config=json.dumps(config).encode(),
            start=start,
            file_bytes=file_bytes,
            base=files.BASE,
            max_rank=10 * MAX_RANK,
        )
    assert {problem.field for problem in raised.value.problems} == {"r"}


def test_patterns_that_take_too_long_are_refused_alike() -> None:
    slow = "((.a|.)*x|.){60}z"
    config = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    shapes = pefts_shapes(config, {})
    for field in ("rank_pattern", "alpha_pattern"):
        text = json.dumps({**config, field: {f"{slow}{n}": 4 for n in range(2000)}}).encode()
        uploaded, planned = upload(text, shapes, {}), engine(text, shapes, {})
        assert isinstance(uploaded, Rejected) and isinstance(planned, AdapterMismatch)
        assert [reason.field for reason in uploaded.reasons] == [planned.param] == [field]


@pytest.mark.parametrize("method", ["LOHA", "LOKR", "ADALORA", "PROMPT_TUNING", "IA3", "VERA"])
def test_another_method_is_told_of_its_method(method: str) -> None:
    """Not of a field that it has and LoRA has not."""
    peft = pytest.importorskip("peft")
    config_class = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[method]
    extra = {"total_step": 10} if method == "ADALORA" else {}
    config = config_class(task_type="CAUSAL_LM", **extra).to_dict()
    text = json.dumps(config, default=list).encode()
    uploaded, planned = upload(text, {}, {}), engine(text, {"x": (1,)}, {})
    assert isinstance(uploaded, Rejected) and isinstance(planned, AdapterMismatch)
    reasons = [reason for reason in uploaded.reasons if reason.field != "adapter_model.safetensors"]
    assert [reason.field for reason in reasons] == [planned.param] == ["peft_type"]
    assert method in reasons[0].message and method in planned.message
