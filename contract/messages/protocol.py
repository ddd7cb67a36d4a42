"""Messages, stream names and error codes between processes. Standard library only.

Control plane and workers share this package and nothing else. Every message is a frozen dataclass,
on the wire a JSON object: see `encode` and `decode`, which ignores unknown fields.

Redis keys, all of one worker pool `{p}` (the braces keep a pool on one cluster slot):

    key                     type    written by      what
    job:{p}:<request id>    hash    gateway         where a request stands, see below; expires
    q:{p}:<base model>…     …       gateway         what waits: `contract.queue.fair_queue`
    in:{p}:<worker>         stream  worker          what it pulled and has not ended; group "w"
    ctl:{p}:<worker>        stream  gateway, ops    ControlMessage: see `Control`
    out:<gateway>           stream  worker          packed TokenEvents, one entry per flush
    done:{p}                stream  worker          DoneRecord; group "acct", drained to Postgres
    wk:{p}                  zset    worker          worker id -> time of its last heartbeat
    wk:{p}:<worker>         hash    worker          Heartbeat; `boot`, the run that has this id
    dlq:{p}                 stream  all             unreadable entries, and requests given up
    gw                      zset    gateway         gateway id -> time of its last heartbeat

Fields of the job hash, all changed by scripts that check the lease first:

    state       "queued", "running" or "done"
    worker      in whose inbox it lies; none while it is queued
    lease       fencing token: +1 at each dispatch; events under an older one are refused
    attempt     dispatches that were not handed back; bounded by MAX_ATTEMPTS
    alone       "1" while it runs apart, because an earlier attempt of it was lost
    boot        the run of the worker process that holds the lease
    seq         TokenEvents published under the current lease
    emitted, prompt_tokens, cached_tokens   the tokens in those events
    cancel      "1" once the request is cancelled

Times in the zsets are Redis's own clock, so hosts need not agree on theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterable
from typing import Any, Self

from contract.messages.message import AdapterRef as AdapterRef
from contract.messages.message import Message as Message
from contract.messages.message import fields_of
from contract.messages.sampling import Sampling as Sampling
from contract.messages.worker_messages import PROTOCOL_VERSION as PROTOCOL_VERSION
from contract.messages.worker_messages import Control as Control
from contract.messages.worker_messages import ControlMessage as ControlMessage
from contract.messages.worker_messages import Heartbeat as Heartbeat
from contract.messages.worker_messages import Tier as Tier

INBOX_GROUP = "w"
ACCOUNTANT_GROUP = "acct"
GATEWAYS_KEY = "gw"
#: The only field of every stream entry: the encoded message, or the packed list of messages.
PAYLOAD_FIELD = b"m"

HEARTBEAT_INTERVAL_S = 2.0
#: Seconds without a heartbeat after which a worker or gateway is dead.
HEARTBEAT_TIMEOUT_S = 10.0
#: A process that could not reach Redis for longer than this starts to measure others' silence
#: again.
MAX_UNWATCHED_S = 5.0
#: Seconds of silence in which a worker may be restarting: its requests wait for it.
WORKER_GRACE_S = 60.0
WORKER_TTL_S = 120
#: Dispatches of one request after which it is given up as the cause of the crashes.
MAX_ATTEMPTS = 2
JOB_TTL_S = 24 * 3600
#: Seconds for which the hash of a finished job is kept, so that late events of it are refused.
DONE_JOB_TTL_S = 600
OUT_STREAM_MAX_LEN = 20_000
OUT_STREAM_TTL_S = 600
CONTROL_STREAM_MAX_LEN = 4_000  # more than a worker has requests that can be cancelled
DEAD_LETTER_MAX_LEN = 10_000

#: Marks around each call of a tool in a model's text; between them is {"name": …, "arguments": …}.
CALL_BEGIN, CALL_END = "<tool_call>\n", "\n</tool_call>"


def job_key(pool: str, request_id: str) -> str:
    return f"job:{{{pool}}}:{request_id}"


def inbox_key(pool: str, worker_id: str) -> str:
    return f"in:{{{pool}}}:{worker_id}"


def control_key(pool: str, worker_id: str) -> str:
    return f"ctl:{{{pool}}}:{worker_id}"


def out_key(gateway_id: str) -> str:
    return f"out:{gateway_id}"


def done_key(pool: str) -> str:
    return f"done:{{{pool}}}"


def dead_letter_key(pool: str) -> str:
    return f"dlq:{{{pool}}}"


def workers_key(pool: str) -> str:
    return f"wk:{{{pool}}}"


def worker_key(pool: str, worker_id: str) -> str:
    return f"wk:{{{pool}}}:{worker_id}"


class ErrorCode(enum.StrEnum):
    """Why a request failed; `controlplane.errors` maps each to an HTTP answer."""

    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_PROMPT = "invalid_prompt"
    INVALID_RESPONSE_FORMAT = "invalid_response_format"
    INVALID_REQUEST = "invalid_request"
    ADAPTER_INCOMPATIBLE = "adapter_incompatible"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    WORKER_LOST = "worker_lost"
    GIVEN_UP = "request_given_up"  # it crashed its workers MAX_ATTEMPTS times
    ADAPTER_QUARANTINED = "adapter_quarantined"
    GRAMMAR_QUOTA = "grammar_quota_exceeded"  # the tenant's new schemas take too much time
    GRAMMAR_FAILED = "grammar_failed"  # an accepted grammar could not be followed to an end
    ANSWER_INVALID = "answer_invalid"  # the answer breaks its strict schema
    INTERNAL = "internal"


class Task(enum.StrEnum):
    """The kind of a job."""

    GENERATE = "generate"
    TOKENIZE = "tokenize"  # its prompt's tokens
    DETOKENIZE = "detokenize"  # the text of `token_ids`
    EMBED = "embed"  # a vector of each prompt
    CLASSIFY = "classify"  # the probabilities of the adapter's labels, for each prompt


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob(Message):
    """One request for tokens. Exactly one of `messages`, `text`, `token_ids`, `prompts` is set.

    At most one of `json_schema`, `regex` and `grammar` is set. With `tools` the worker makes a
    grammar of the calls, and `json_schema` holds for an answer without calls.
    """

    request_id: str
    tenant_id: str
    api_key_id: str  # empty: a person asked, in the console
    gateway_id: str
    model: str  # the name the client used
    base_model: str
    task: str = Task.GENERATE  # the others generate nothing
    # False: tokenize the text as it is, without special tokens around it
    special_tokens: bool = True
    generation_prompt: bool = True  # False: a chat does not end with the start of an answer
    adapters: tuple[AdapterRef, ...] = ()  # empty: the base model alone
    adapter_version_id: str | None = None
    alias_revision_id: str | None = None  # set if its model is an alias
    alias_target: str | None = None  # "primary" or "canary": which of the alias's answers
    messages: tuple[dict[str, Any], ...] | None = None  # chat: rendered by the chat template
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompts: tuple[Any, ...] = ()  # several, each as text or as a list of token ids
    dimensions: int | None = None  # the first ones of each vector that are wanted; None: all
    n: int = 1  # continuations of each prompt; number i of prompt p is choice p * n + i
    truncate: int | None = None  # cut a prompt as text to its last tokens, at most this number
    template_options: dict[str, Any] = dataclasses.field(default_factory=dict)  # for the template
    room: int | None = None  # chat: drop the oldest messages until this number of tokens is free
    echo: bool = False  # each choice's text begins with its prompt's
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    json_schema: str | None = None  # the answer must obey it; canonical JSON text
    decoding_schema: str | None = None  # for the decoder: the part of it that it can enforce
    is_strict: bool = False  # True: an answer that breaks `json_schema` is a failure
    regex: str | None = None  # the whole answer must match it
    grammar: str | None = None  # the whole answer must match it; in llguidance's Lark
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's tool objects, for the chat template
    tool_schemas: tuple[str, ...] = ()  # the schema of each tool's arguments, for the decoder
    # names of tools: a call of them that breaks its schema is a failure
    strict_tools: tuple[str, ...] = ()
    tool_choice: str | None = None  # "auto", "required", or the one function's name after "="
    parallel_tool_calls: bool = True
    stream: bool = False
    endpoint: str = ""  # the address of the request, for the log: "/v1/chat/completions"
    client_request_id: str | None = None  # the client's own id of the request, for the log
    # with logprobs: TokenEvent.logprobs have more fields for each token
    token_details: bool = False
    with_counts: bool = False  # streams only: each event has `TokenEvent.so_far`
    with_end: bool = False  # logprobs have the token that ended an answer, too
    with_token_ids: bool = False  # events have the ids of the prompt and of their tokens
    store: bool | None = None  # True: its texts may be logged; None: the tenant's setting decides
    is_batch: bool = False  # served after interactive requests
    created_at: float = 0.0  # Unix seconds
    deadline: float | None = None  # Unix seconds; after it the request is given up

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        fields = dict(fields)
        fields["adapters"] = tuple(AdapterRef.from_dict(ref) for ref in fields.get("adapters", ()))
        fields["sampling"] = Sampling.from_dict(fields.get("sampling") or {})
        return super(GenerateJob, cls).from_dict(fields)

    @property
    def thinks(self) -> bool:
        """Return whether the model may write a thought first; the client's own grammar is whole."""
        return self.messages is not None and self.regex is None and self.grammar is None

    @property
    def num_choices(self) -> int:
        """Return the number of answers."""
        return self.n * (len(self.prompts) or 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage(Message):
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    completion_tokens: int = 0
    thought_tokens: int = 0  # those of thoughts among them, with the marks around these
    accepted_drafts: dict[str, int] | None = None  # by source; None: none
    rejected_drafts: int = 0  # they were wrong, and are not billed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent(Message):
    """One event of one choice. `seq` counts 0, 1, 2 … per (request, lease) without gaps.

    The last event of a choice has `finish_reason`; the last of the request has `usage`, summed over
    the choices, or, when it failed, the reason "error" with `error_code` and `error_message`.
    """

    request_id: str
    lease: int
    seq: int
    index: int = 0  # number of the choice
    text: str = ""
    thought: str = ""  # what a chat's model wrote between its marks of a thought; no part of `text`
    #: One object per token: {"token", "logprob", "bytes", "top_logprobs": [the same …]}; behind a
    #: raw prompt also "id", with `GenerateJob.token_details` "id", "special" and "text", what it
    #: adds to the answer. An echoed prompt's come first (None of its first token), with "span": its
    #: characters [from, to].
    logprobs: tuple[dict[str, Any], ...] | None = None
    #: With `Sampling.prompt_logprobs`, once for each choice: as `logprobs`, with "id" and "rank".
    prompt_logprobs: tuple[dict[str, Any], ...] | None = None
    # tokens of the answer if `with_token_ids`, or the answer of tokenizing
    token_ids: tuple[int, ...] | None = None
    token_strs: tuple[str, ...] | None = None  # for tokenizing: their texts in the vocabulary
    prompt_token_ids: tuple[int, ...] | None = None  # with the first event of a prompt
    vector: str | None = None  # a prompt's, as `contract.messages.pooling.pack` writes it
    # `with_counts`: the choice's own prompt and tokens so far
    so_far: Usage | None = None
    #: In a request's first event and beside `usage`: how long it waited for its turn.
    queue_ms: float | None = None
    tier: str | None = None  # in the first event: where its slowest adapter was found, a Tier
    load_ms: float | None = None  # beside `usage`: how long it waited for its adapters
    #: Beside `usage` of a probe: what its adapters take of the device, and the engine's last loads.
    adapter_bytes: int | None = None
    adapter_load_ms: float | None = None
    finish_reason: str | None = None
    stop_string: str | None = None  # with the reason "stop": the one that was met, if one was
    schema_error: str | None = None  # how the finished answer breaks its schema
    error_code: str | None = None
    error_message: str | None = None
    error_param: str | None = None
    usage: Usage | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        for name in ("usage", "so_far"):
            if fields.get(name) is not None:
                fields = {**fields, name: Usage.from_dict(fields[name])}
        return super(TokenEvent, cls).from_dict(fields)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DoneRecord(Message):
    """The only terminal record of a request, from which it is billed."""

    request_id: str
    tenant_id: str
    api_key_id: str
    worker_id: str
    lease: int
    model: str
    base_model: str
    adapter_version_id: str | None
    digests: tuple[str, ...]
    finish_reason: str
    error_code: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    created_at: float  # Unix seconds, the gateway's
    queue_ms: float  # from acceptance to admission by the engine
    load_ms: float  # wait for the adapter
    first_token_ms: float | None  # from acceptance to the first token
    total_ms: float  # from acceptance to the end
    stream: bool = False
    endpoint: str = ""
    is_batch: bool = False
    weights: tuple[float, ...] = ()  # one for each digest
    # settings that differ from the defaults, without texts of the client
    sampling: dict[str, Any] | None = None
    # number of workers that took it; above one, earlier workers were lost
    attempts: int | None = None
    alias_revision_id: str | None = None
    alias_target: str | None = None
    tier: str | None = None  # where its slowest adapter was found, a Tier; None: it has none
    # True if its answers obey their schema; None: none was checked
    obeys_schema: bool | None = None
    drafts: dict[str, int] | None = None  # accepted ones by source, and "rejected"; None: no drafts

    @classmethod
    def of(cls, job: GenerateJob, **fields: Any) -> DoneRecord:
        """Make a record with the job's fields, without the client's texts."""
        said = {n: getattr(job, n) for n in fields_of(GenerateJob) if n in fields_of(cls)} | fields
        sampling = job.sampling.to_dict()
        said["sampling"] = {k: sampling[k] for k in sampling if k not in ("stop", "logit_bias")}
        said["digests"] = tuple(ref.digest for ref in job.adapters)
        return cls(weights=tuple(ref.weight for ref in job.adapters), **said)


def unpack_events(payload: bytes) -> list[TokenEvent]:
    """Return the events of one stream entry; `worker.serving.streams` packs them inside Redis.

    An entry has many events, since entries cost a gateway most. An unreadable event is skipped.
    """
    events = []
    for fields in json.loads(payload):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            events.append(TokenEvent.from_dict(fields))
    return events


def canonical_json(value: Any) -> str:
    """Return a JSON value in its only canonical form, for digests and cache keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def adapter_digest(config: dict[str, Any], tensors: Iterable[bytes], base_revision: str) -> str:
    """Return an adapter's identity: hex sha256 over its config, tensor file and base revision.

    config         adapter_config.json as parsed
    tensors        the bytes of adapter_model.safetensors, in pieces
    base_revision  the revision of the base model it was checked against
    """
    tensors_hash = hashlib.sha256()
    for piece in tensors:
        tensors_hash.update(piece)
    return adapter_digest_of(config, tensors_hash.hexdigest(), base_revision)


def adapter_digest_of(config: dict[str, Any], tensors_sha256: str, base_revision: str) -> str:
    """Return `adapter_digest` from the hex sha256 of the tensors file."""
    identity = {"base_revision": base_revision, "config": config, "tensors_sha256": tensors_sha256}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()
