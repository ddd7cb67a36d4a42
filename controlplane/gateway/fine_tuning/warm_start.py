"""Find the start of a run: a base model, or the tensors of an adapter's version.

The trainer makes a LoRA with a rank, an alpha and target modules, and loads the version's tensors
into it. A version whose config says more than that is refused, with the field that says it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from contract.adapters.peft_config import UPLOAD_LIMITS, LoraConfig, load_json, read_config
from contract.adapters.problems import AdapterProblems
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.adapters.resolution import check_serving, model_resolve
from controlplane.errors import InvalidRequest
from controlplane.inference import access
from controlplane.infra import storage
from controlplane.tenants.auth import Principal

_MODULE = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A base model, and the version that a run begins from; `fixed` are its hyperparameters."""

    base_model: BaseModel
    version: AdapterVersion | None = None
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the version's name in `model` of a request; empty without one."""
        return "" if self.version is None else f"{self.version.adapter.name}@{self.version.number}"


def start_of(principal: Principal, name: str) -> Start:
    """Return the start of a run from this `model` of the caller's tenant.

    Raises NotFound, PermissionDenied for a key that may not name it, InvalidRequest for a version
    that cannot be trained further.
    """
    access.check_named(principal, name)
    model = model_resolve(name)
    check_serving(model)
    if model.version is None:
        return Start(base_model=model.base_model)
    with storage.answering():
        content = storage.read_bytes(
            model.version.config_key, max_bytes=model.version.config_num_bytes
        )
    try:
        raw = load_json(content, UPLOAD_LIMITS.max_bytes)
        config = read_config(raw, UPLOAD_LIMITS)
    except AdapterProblems as error:
        raise _refused("its config cannot be read") from error
    return Start(base_model=model.base_model, version=model.version, fixed=_fixed(config))


def _fixed(config: LoraConfig) -> dict[str, Any]:
    """Return the hyperparameters that an adapter with this config has. Raises InvalidRequest."""
    lacks = {
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "bias": config.bias != "none",
        "exclude_modules": config.exclude_modules != (),
        "layers_to_transform": config.layers is not None,
        "rank_pattern": bool(config.rank_pattern),
        "alpha_pattern": bool(config.alpha_pattern),
        "modules_to_save": bool(config.saved),
        "trainable_token_indices": bool(config.token_ids),
        "target_parameters": bool(config.target_parameters),
    }
    for field, is_set in lacks.items():
        if is_set:
            raise _refused(f"the trainer does not support its {field}")
    targets = config.target_modules
    if not isinstance(targets, tuple) or not all(_MODULE.fullmatch(name) for name in targets):
        raise _refused("its target_modules are not a list of names")
    return {"rank": config.rank, "alpha": config.alpha, "target_modules": sorted(targets)}


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"A run cannot begin from this version: {why}.",
        param="model",
        code="warm_start_unsupported",
    )
