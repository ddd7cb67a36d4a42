"""Make the job that a worker runs from a checked body."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from contract.messages.protocol import ErrorCode, GenerateJob, Sampling, Task
from controlplane.adapters.resolution import adapter_ref
from controlplane.inference.access import Caller
from controlplane.inference.ebnf import to_lark
from controlplane.inference.json_schema import (
    SCHEMA_PARAM,
    planned,
    regex_of_choices,
    regex_of_pattern,
)
from controlplane.inference.schemas import ChatBody, CompletionBody, GenerationBody
from controlplane.inference.tools import NO_PARAMETERS, FunctionTool

#: OpenAI's default for plain completions; a chat may fill the context.
COMPLETION_MAX_TOKENS = 16
#: Seconds until a request is given up; OpenAI's clients wait as long.
DEADLINE_S = 600.0
_SAMPLING = [field.name for field in dataclasses.fields(Sampling)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Who asks, for what, and under which id: what all kinds of jobs have in common.

    endpoint  the address it was sent to, as the log shows it
    deadline  Unix seconds; past it nobody waits for the answer
    """

    caller: Caller
    request_id: str
    gateway_id: str
    endpoint: str
    is_batch: bool
    deadline: float | None

    def fields(self, body: GenerationBody) -> dict[str, Any]:
        """Return the job's fields that do not depend on its kind."""
        principal, model = self.caller.principal, self.caller.model
        now = time.time()
        parts = model.parts
        one_version = parts[0][0] if len(parts) == 1 else None
        return {
            "request_id": self.request_id,
            "tenant_id": str(principal.tenant.id),
            "api_key_id": str(principal.api_key.id) if principal.api_key else "",
            "gateway_id": self.gateway_id,
            "model": model.name,
            "base_model": model.base_model.name,
            "adapters": tuple(adapter_ref(version, weight) for version, weight in parts),
            "adapter_version_id": None if one_version is None else str(one_version.id),
            "alias_revision_id": None if model.alias is None else str(model.alias.revision_id),
            "alias_target": None if model.target is None else str(model.target),
            "n": body.n or 1,
            "endpoint": self.endpoint,
            "stream": bool(body.stream),
            "with_counts": bool(body.stream_options and body.stream_options.is_continuous),
            "with_token_ids": bool(body.return_token_ids),
            **(_grammar(body) or self._published_grammar(body)),
            "store": body.store,
            "is_batch": self.is_batch,
            "created_at": now,
            "deadline": now + DEADLINE_S if self.deadline is None else self.deadline,
        }

    def _published_grammar(self, body: GenerationBody) -> dict[str, Any]:
        """Return the alias's schema, for a body that says nothing of the answer's form."""
        defaults = self.caller.model.defaults
        if defaults is None or body.response_format is not None:
            return {}
        is_scored_only = getattr(body, "max_tokens", None) == 0
        return {} if is_scored_only else defaults.grammar


def chat_job(body: ChatBody, call: Call) -> GenerateJob:
    messages, (tools, tool_choice) = body.rendered_messages(), body.callable_tools()
    return GenerateJob(
        **call.fields(body),
        messages=messages,
        tools=tuple(tool.rendered() for tool in tools),
        tool_schemas=_tool_schemas(body, tools),
        strict_tools=tuple(tool.function.name for tool in tools if tool.function.strict),
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        sampling=_sampling(
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        template_options=_template_options(body),
    )


def _template_options(body: ChatBody) -> dict[str, Any]:
    """Return the variables for the chat template, which uses those that it knows."""
    effort = body.reasoning_effort
    options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        options["enable_thinking"] = False
    return options | (body.chat_template_kwargs or {})


def completion_job(body: CompletionBody, call: Call) -> GenerateJob:
    prompts = [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompts()]
    one = prompts[0] if len(prompts) == 1 else None
    return GenerateJob(
        **call.fields(body),
        text=one if isinstance(one, str) else None,
        token_ids=one if isinstance(one, tuple) else None,
        prompts=() if one is not None else tuple(prompts),
        echo=bool(body.echo),
        sampling=_sampling(
            body,
            max_tokens=COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
        ),
    )


def _sampling(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> Sampling:
    """Return the body's sampling; fields that it leaves out have their defaults."""
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "stop": tuple(body.stop or ())}
    return Sampling(**given)


def _grammar(body: GenerationBody) -> dict[str, Any]:
    """Return what the answer must match. Properties keep their order, which is the answer's."""
    form = body.constraint
    if form is None:
        return {}
    if form.pattern is not None:
        return {"regex": regex_of_pattern(form.pattern)}
    if form.choices is not None:
        return {"regex": regex_of_choices(form.choices)}
    if form.grammar is not None:
        return {"grammar": to_lark(form.grammar)}
    assert form.schema is not None
    made = planned(form.schema, strict=form.is_strict, param=form.field)
    return {
        "json_schema": made.schema,
        "decoding_schema": made.decoding,
        "is_strict": form.is_strict,
    }


def _tool_schemas(body: ChatBody, tools: list[FunctionTool]) -> tuple[str, ...]:
    """Return the schema of the arguments of each tool that may be called, for the decoder."""
    schemas = []
    for number, tool in enumerate(body.tools or []):
        if tool in tools:
            made = planned(
                tool.function.parameters or NO_PARAMETERS,
                strict=bool(tool.function.strict),
                param=f"tools.{number}.function.parameters",
                code="invalid_function_parameters",
            )
            schemas.append(made.decoding)
    return tuple(schemas)


#: The job's fields that constrain the answer.
_GRAMMARS = ("json_schema", "regex", "lark")
#: The job's field, which a worker names -> the client's field.
_CLIENT_PARAMS = {
    "logprobs": "top_logprobs",
    "text": "prompt",
}


def client_param(
    job: GenerateJob, param: str | None, code: str | None, body: GenerationBody
) -> str | None:
    """Return the client's name of the field that a worker refused."""
    is_of_text = param in ("text", "token_ids") or param is None
    if job.task in (Task.EMBED, Task.CLASSIFY) and is_of_text:
        return "input" if param or code == ErrorCode.CONTEXT_LENGTH_EXCEEDED else None
    if job.task == Task.DETOKENIZE and param == "token_ids":
        return "tokens"
    if param == "logprobs" and job.endpoint == "/v1/completions":
        return param
    if param == "token_ids" or (param is None and code == ErrorCode.CONTEXT_LENGTH_EXCEEDED):
        return "prompt" if job.messages is None else "messages"
    if param == "tools" or (job.tools and param == "lark"):
        return "tools"
    if param == "adapters" or code == ErrorCode.ADAPTER_INCOMPATIBLE:
        return "model" if len(job.adapters) < 2 else "adapters"
    if param in _GRAMMARS or code == ErrorCode.INVALID_RESPONSE_FORMAT:
        return body.constraint.field if body.constraint is not None else SCHEMA_PARAM
    return _CLIENT_PARAMS.get(param or "", param)
