"""The JSON bodies of Tinker's client. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from controlplane.inference.bodies import Body, FirstFault, at_most, refused
from controlplane.inference.schemas import MAX_PROMPTS, TokenIds

SESSION = r"tks-[0-9a-f]{32}"
SessionId = Annotated[str, Field(pattern=f"^{SESSION}$")]
ModelId = Annotated[str, Field(max_length=100)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
Path = Annotated[str, Field(max_length=300)]
#: Seconds from an hour to ten years.
Lifetime = Annotated[int | None, Field(ge=3600, le=315_360_000)]
Metadata = Annotated[dict[str, Any] | None, at_most(64)]
_OTHERS = "states of another account are not loaded here"


class TinkerBody(Body):
    type: Annotated[str | None, Field(max_length=64)] = None


class CreateSession(TinkerBody):
    tags: Annotated[list[str], Field(max_length=64), FirstFault] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: Annotated[Any, refused("a key has one organization; leave it out")] = None
    display_name: Annotated[str | None, Field(max_length=512)] = None


class CreateSamplingSession(TinkerBody):
    session_id: SessionId
    sampling_session_seq_id: Number
    base_model: Annotated[str | None, Field(max_length=200)] = None
    model_path: Path | None = None


class LoraConfig(Body):
    rank: int
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(TinkerBody):
    session_id: SessionId
    model_seq_id: Number
    base_model: Annotated[str, Field(max_length=200)]
    user_metadata: Metadata = None
    lora_config: LoraConfig
    optimizer_config: OptimizerConfig | None = None


class GetInfo(TinkerBody):
    model_id: ModelId


class AdamParams(Body):
    learning_rate: Annotated[float, Field(ge=0, le=1000)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, le=1)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=1e30)] = 0.0


class OptimStep(TinkerBody):
    model_id: ModelId
    seq_id: Number
    adam_params: AdamParams
    optimizer_params: Annotated[Any, refused("send adam_params")] = None


class Save(TinkerBody):
    model_id: ModelId
    seq_id: Number
    path: Name | None = None
    ttl_seconds: Lifetime = None
    user_metadata: Metadata = None


class SaveWeights(Save):
    overwrite: bool = False


class SaveForSampler(Save):
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"


class LoadWeights(TinkerBody):
    path: Path
    optimizer: bool
    model_id: ModelId | None = None
    seq_id: Number | None = None
    session_id: SessionId | None = None
    model_seq_id: Number | None = None
    base_model: Annotated[str | None, Field(max_length=200)] = None
    user_metadata: Metadata = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Annotated[Any, refused(_OTHERS)] = None


class Chunk(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: TokenIds


class Prompt(Body):
    chunks: Annotated[list[Chunk], Field(min_length=1, max_length=1024), FirstFault]


class SamplingParams(Body):
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


_NOT_ASKED = refused("log-probabilities of the prompt's and the answer's own tokens alone")


class Sample(TinkerBody):
    sampling_session_id: Annotated[str, Field(max_length=300)]
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]
    num_samples: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int | None, Field(ge=1)] = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=0)] = 0
    target_prompt_logprobs: Annotated[Any, _NOT_ASKED] = None
    record_stability_info: Annotated[Any, refused("leave it out")] = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.prompt.chunks for token_id in chunk.tokens]


class RetrieveFuture(Body):
    request_id: Annotated[str, Field(max_length=300)]
    allow_metadata_only: bool = False
