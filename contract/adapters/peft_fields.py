"""The effect of each key of an adapter_config.json: obeyed, neutral, or refused with a reason.

The fields are those of peft 0.21's LoraConfig, and some that it ignores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from contract.adapters.file_kinds import MLX_ADAPTER
from contract.adapters.problems import shown

HONOURED = frozenset({
    "peft_type", "task_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "use_dora", "lora_bias", "ensure_weight_tying", "modules_to_save",
    "trainable_token_indices", "target_parameters",
})  # fmt: skip
# They say how the adapter was trained, or where its base came from: `base_model_name_or_path` is
# a claim, never something to fetch. An initialisation's own stay when PEFT converts to plain LoRA.
# `auto_mapping` names a class for AutoPeftModel; of linears PEFT turns `fan_in_fan_out` off itself.
NEUTRAL = frozenset({
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "fan_in_fan_out",
})  # fmt: skip
#: What others write beside PEFT's fields, or old releases of PEFT did; PEFT ignores it.
IGNORED = frozenset({
    "metadata", "merge_weights", "swift_type", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
})  # fmt: skip
_RETRAIN = "it is not supported: train without it"
#: Other fields of LoraConfig, of this version or of forks -> why they are refused unless they are
#: off.
REFUSED = {
    "megatron_config": "it does nothing to this base model, and PEFT needs Megatron to read it: "
    "remove the key",
} | dict.fromkeys(
    ("layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config",
     "monteclora_config", "use_bdlora", "use_qalora", "velora_config", "enable_lora",
     "alora_invocation_string", "invocation_string", "use_qa_lora", "use_merged_linear"),
    _RETRAIN,
)  # fmt: skip
_UNKNOWN = (
    "PEFT 0.21 does not know it: remove the key, or, if a newer PEFT needs it, train without it"
)
# Initialisations that leave the base model unchanged. After any other, the adapter's tensors are
# not the whole change.
PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_CONVERTIBLE_INITS = ("pissa", "olora", "corda", "lora_ga")
_KNOWN = HONOURED | NEUTRAL | IGNORED | REFUSED.keys()
#: Keys that only mlx-lm's adapter_config.json has.
_MLX_KEYS = frozenset({"fine_tune_type", "lora_parameters", "lora_layers"})


def refusals(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each key with an unsupported effect, unless it is off or empty."""
    unknown = [key for key, value in raw.items() if value and key not in _KNOWN]
    for key, why in REFUSED.items():
        if raw.get(key):
            yield key, why
    if unknown:
        others = len(unknown) - 1
        many = (
            f"; the same holds for {others} other key{'s' if others > 1 else ''}" if others else ""
        )
        yield unknown[0], _UNKNOWN + many


def other_method(raw: Mapping[str, Any]) -> tuple[str, str]:
    """Return the key, or "", and the reason why a config that is not of a PEFT LoRA is refused."""
    if "peft_type" not in raw and not _MLX_KEYS.isdisjoint(raw):
        if raw.get("fine_tune_type") == "full":
            message = "mlx-lm trained the whole model, not an adapter: train lora or dora"
            return "fine_tune_type", message
        return "", MLX_ADAPTER
    found = f"it is {shown(raw['peft_type'])}" if "peft_type" in raw else "it is missing"
    return "peft_type", f"{found}; only LORA is supported: train a LoRA adapter with PEFT"


def init_problem(init: Any) -> str:
    """Return why an initialisation is refused: it changes the base model, or PEFT lacks it."""
    name = init if isinstance(init, str) else ""
    if name.startswith(_CONVERTIBLE_INITS):
        return (
            f"{shown(init)} changes the base model too: save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )
    if name == "loftq":
        return (
            "loftq quantises the base model too, and PEFT cannot make a plain LoRA of it: train "
            "with init_lora_weights true, or merge the two and serve the result as a base model"
        )
    return f"{shown(init)} is not an initialisation of PEFT 0.21: upload the config that PEFT saved"
