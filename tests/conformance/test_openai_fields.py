"""Every field of the official client is obeyed, accepted without effect, or refused by name.

A new release of the client with a new field fails here: decide what the field means, then list it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any, TypedDict, get_type_hints

import pytest
from openai.types.batch_create_params import BatchCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Completion
from openai.types.file_create_params import FileCreateParams
from openai.types.fine_tuning.job_create_params import JobCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from openai.types.upload_complete_params import UploadCompleteParams
from openai.types.upload_create_params import UploadCreateParams

from controlplane.errors import InvalidRequest
from controlplane.gateway.batches.bodies import BatchBody
from controlplane.gateway.files.bodies import FILE_FORM, CompleteBody, UploadBody
from controlplane.gateway.fine_tuning.bodies import FineTuningJobBody
from controlplane.inference.parsing import parse_body
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.responses.translation import chat_body
from controlplane.inference.schemas import ChatBody, CompletionBody
from tests.conformance.openai_fields import Fitting, Json, Walker

TOOL = {"type": "function", "function": {"name": "x"}}
NAMED = {"type": "function", "name": "x"}
CALL = {**TOOL, "id": "x", "function": {"name": "x", "arguments": "{}"}}
CALLED = {"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"}
SAID = [{"role": "user", "content": "x"}]
STREAM = {"stream_options": {"stream": True}}
HOUR = {"seconds": 3600}
SOURCE = "def grade(sample, item):\n    return 1"
GRADER = {"type": "string_check", "input": "x", "reference": "x", "operation": "eq"}

#: Address -> the client's type, ours, and what single fields need to be accepted.
BODIES: dict[str, tuple[Any, Any, Fitting]] = {
    "chat": (
        Chat,
        ChatBody,
        Fitting(
            beside={
                **STREAM,
                "top_logprobs": {"logprobs": True},
                "tool_choice": {"tools": [TOOL]},
            },
            inside={
                "": {"messages": SAID},
                "messages[assistant]": {"content": "x"},
                "response_format[json_schema]": {"json_schema": {"name": "x", "schema": {}}},
                "response_format[json_schema].json_schema": {"schema": {}},
                "tool_choice[allowed_tools]": {"allowed_tools": {"mode": "auto", "tools": [TOOL]}},
                "tool_choice[allowed_tools].allowed_tools": {"tools": [TOOL]},
            },
            before={"tool": [{"role": "assistant", "tool_calls": [CALL]}]},
            values={"tool_choice[allowed_tools].allowed_tools.tools": [TOOL]},
        ),
    ),
    "completions": (Completion, CompletionBody, Fitting(beside=STREAM)),
    "responses": (
        ResponseCreateParamsNonStreaming,
        ResponsesBody,
        Fitting(
            beside={**STREAM, "tool_choice": {"tools": [NAMED]}},
            inside={
                "": {"model": "m", "input": "x"},
                "tool_choice[allowed_tools]": {"tools": [NAMED]},
                "input[function_call_output]": {"call_id": "x"},
            },
            before={"function_call_output": [CALLED], "reasoning": SAID},
            values={"tool_choice[allowed_tools].tools": [NAMED]},
        ),
    ),
    "batches": (
        BatchCreateParams,
        BatchBody,
        Fitting(
            inside={"output_expires_after": HOUR},
            values={"output_expires_after.seconds": 3600},
        ),
    ),
    "jobs": (
        JobCreateParams,
        FineTuningJobBody,
        Fitting(
            beside={
                "method.dpo": {"type": "dpo"},
                "method.reinforcement": {"type": "reinforcement"},
            },
            inside={
                "method.reinforcement": {"grader": GRADER},
                "method.reinforcement.grader[python]": {"source": SOURCE},
                "method.reinforcement.grader[text_similarity]": {"evaluation_metric": "bleu"},
                "method.reinforcement.grader[multi]": {
                    "graders": {"x": GRADER},
                    "calculate_output": "x",
                },
            },
            values={
                "method.reinforcement.grader[multi].graders": {"x": GRADER},
                "method.reinforcement.grader[python].source": SOURCE,
                "method.reinforcement.grader[score_model].range": [0, 1],
            },
        ),
    ),
    "uploads": (
        UploadCreateParams,
        UploadBody,
        Fitting(inside={"expires_after": HOUR}, values={"expires_after.seconds": 3600}),
    ),
    "uploads/complete": (UploadCompleteParams, CompleteBody, Fitting(values={"md5": "0" * 32})),
}

#: By address and meaning, a line for each object: `path: fields of it`. A value that is refused
#: stands behind its field; null is accepted unless it stands here.
MEANINGS = """
## chat obeyed
: frequency_penalty logit_bias logprobs max_completion_tokens max_tokens messages[assistant]
: messages[developer] messages[system] messages[tool] messages[user] model n
: parallel_tool_calls presence_penalty response_format[json_object]
: response_format[json_schema] response_format[text] seed service_tier stop stream
: stream_options temperature tool_choice tool_choice[allowed_tools] tool_choice[function]
: tools[function] top_logprobs top_p
messages[assistant]: content content[refusal] content[text] name refusal
messages[assistant]: tool_calls[function]
messages[assistant].content[refusal]: refusal
messages[assistant].content[text]: text
messages[assistant].tool_calls[function]: function id
messages[assistant].tool_calls[function].function: arguments name
messages[developer]: content content[text] name
messages[developer].content[text]: text
messages[system]: content content[text] name
messages[system].content[text]: text
messages[tool]: content content[text] tool_call_id
messages[tool].content[text]: text
messages[user]: content content[text] name
messages[user].content[text]: text
response_format[json_schema]: json_schema
response_format[json_schema].json_schema: name schema strict
stream_options: include_usage
tool_choice[allowed_tools]: allowed_tools
tool_choice[allowed_tools].allowed_tools: mode tools
tool_choice[function]: function
tool_choice[function].function: name
tools[function]: function
tools[function].function: description name parameters strict
## chat neutral
: function_call metadata modalities prompt_cache_key prompt_cache_options
: prompt_cache_retention reasoning_effort safety_identifier store user verbosity
messages[assistant].content[text]: prompt_cache_breakpoint
messages[assistant].content[text].prompt_cache_breakpoint: mode ttl
messages[developer].content[text]: prompt_cache_breakpoint
messages[developer].content[text].prompt_cache_breakpoint: mode ttl
messages[system].content[text]: prompt_cache_breakpoint
messages[system].content[text].prompt_cache_breakpoint: mode ttl
messages[tool].content[text]: prompt_cache_breakpoint
messages[tool].content[text].prompt_cache_breakpoint: mode ttl
messages[user].content[text]: prompt_cache_breakpoint
messages[user].content[text].prompt_cache_breakpoint: mode ttl
prompt_cache_options: mode ttl
response_format[json_schema].json_schema: description
stream_options: include_obfuscation
## chat refused
: audio function_call functions messages[function] modalities=audio moderation
: prediction[content] tool_choice[custom] tools[custom] web_search_options
messages[assistant]: audio content=null function_call tool_calls[custom]
messages[user]: content[file] content[image_url] content[input_audio]
## completions obeyed
: best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty
: prompt seed stop stream stream_options temperature top_p
stream_options: include_usage
## completions neutral
: user
stream_options: include_obfuscation
## completions refused
: prompt=null suffix
## responses obeyed
: include input input[function_call] input[function_call_output] input[message] instructions
: max_output_tokens model parallel_tool_calls service_tier stream stream_options temperature
: text tool_choice tool_choice[allowed_tools] tool_choice[function] tools[function]
: top_logprobs top_p truncation
input[function_call]: arguments call_id name
input[function_call_output]: call_id output output[input_text]
input[function_call_output].output[input_text]: text
input[message]: content content[input_text] content[output_text] content[refusal] role
input[message].content[input_text]: text
input[message].content[output_text]: text
input[message].content[refusal]: refusal
text: format[json_object] format[json_schema] format[text]
text.format[json_schema]: name schema strict
tool_choice[allowed_tools]: mode tools
tool_choice[function]: name
tools[function]: description name parameters strict
## responses neutral
: access_programs background image input[reasoning] max_tool_calls metadata prompt_cache_key
: prompt_cache_options prompt_cache_retention reasoning safety_identifier store user
access_programs: cyber
image: context_compression
input[function_call]: async caller[direct] id status
input[function_call_output]: caller[direct] id name status
input[function_call_output].output[input_text]: prompt_cache_breakpoint
input[function_call_output].output[input_text].prompt_cache_breakpoint: mode ttl
input[message]: id phase status
input[message].content[input_text]: prompt_cache_breakpoint
input[message].content[input_text].prompt_cache_breakpoint: mode ttl
input[message].content[output_text]: annotations[container_file_citation]
input[message].content[output_text]: annotations[file_citation] annotations[file_path]
input[message].content[output_text]: annotations[url_citation] logprobs
input[message].content[output_text].annotations[container_file_citation]: container_id
input[message].content[output_text].annotations[container_file_citation]: end_index file_id
input[message].content[output_text].annotations[container_file_citation]: filename
input[message].content[output_text].annotations[container_file_citation]: start_index
input[message].content[output_text].annotations[file_citation]: file_id filename index
input[message].content[output_text].annotations[file_path]: file_id index
input[message].content[output_text].annotations[url_citation]: end_index start_index title
input[message].content[output_text].annotations[url_citation]: url
input[message].content[output_text].logprobs: bytes logprob token top_logprobs
input[message].content[output_text].logprobs.top_logprobs: bytes logprob token
input[reasoning]: content[reasoning_text] encrypted_content id status summary[summary_text]
input[reasoning].content[reasoning_text]: text
input[reasoning].summary[summary_text]: text
prompt_cache_options: mode prewarm ttl
reasoning: context effort generate_summary mode summary
stream_options: include_obfuscation
text: verbosity
text.format[json_schema]: description
tools[function]: allowed_callers async defer_loading
## responses refused
: background=true context_management conversation input[additional_tools]
: input[apply_patch_call] input[apply_patch_call_output] input[code_interpreter_call]
: input[compaction] input[compaction_trigger] input[computer_call]
: input[computer_call_output] input[configuration_update] input[custom_tool_call]
: input[custom_tool_call_output] input[file_search_call] input[image_generation_call]
: input[item_reference] input[local_shell_call] input[local_shell_call_output]
: input[mcp_approval_request] input[mcp_approval_response] input[mcp_call]
: input[mcp_list_tools] input[program] input[program_output] input[shell_call]
: input[shell_call_output] input[tool_search_call] input[tool_search_output]
: input[web_search_call] moderation previous_response_id prompt tool_choice
: tool_choice[apply_patch] tool_choice[custom] tool_choice[mcp]
: tool_choice[programmatic_tool_calling] tool_choice[shell] tools tools[apply_patch]
: tools[code_interpreter] tools[computer] tools[computer_use_preview] tools[custom]
: tools[file_search] tools[image_generation] tools[local_shell] tools[mcp] tools[namespace]
: tools[programmatic_tool_calling] tools[shell] tools[tool_search]
access_programs: cyber=daybreak_blue cyber=daybreak_red
input[function_call]: async=true caller[program] namespace
input[function_call_output]: call_id=null caller[program] namespace output[input_file]
input[function_call_output]: output[input_image]
input[message]: content[input_file] content[input_image]
prompt_cache_options: comparison_response_id prewarm=true
tools[function]: allowed_callers=programmatic async=true defer_loading=true output_schema
## batches obeyed
: completion_window endpoint input_file_id output_expires_after
output_expires_after: anchor seconds
## batches neutral
: metadata
## batches refused
: endpoint=/v1/images/edits endpoint=/v1/images/generations
: endpoint=/v1/moderations endpoint=/v1/videos
## jobs obeyed
: hyperparameters method model seed suffix training_file validation_file
hyperparameters: batch_size learning_rate_multiplier n_epochs
method: dpo reinforcement supervised type
method.dpo: hyperparameters
method.dpo.hyperparameters: batch_size beta learning_rate_multiplier n_epochs
method.reinforcement: grader[multi] grader[python] grader[score_model] grader[string_check]
method.reinforcement: grader[text_similarity] hyperparameters
method.reinforcement.grader[multi]: calculate_output graders
method.reinforcement.grader[python]: source
method.reinforcement.grader[score_model]: input[message] model range sampling_params
method.reinforcement.grader[score_model].input[message]: content content[input_text]
method.reinforcement.grader[score_model].input[message]: content[output_text] role
method.reinforcement.grader[score_model].input[message].content[input_text]: text
method.reinforcement.grader[score_model].input[message].content[output_text]: text
method.reinforcement.grader[score_model].sampling_params: max_completions_tokens seed
method.reinforcement.grader[score_model].sampling_params: temperature top_p
method.reinforcement.grader[string_check]: input operation reference
method.reinforcement.grader[text_similarity]: evaluation_metric input reference
method.reinforcement.hyperparameters: batch_size compute_multiplier eval_interval eval_samples
method.reinforcement.hyperparameters: learning_rate_multiplier n_epochs
method.supervised: hyperparameters
method.supervised.hyperparameters: batch_size learning_rate_multiplier n_epochs
## jobs neutral
: metadata
method.reinforcement.grader[multi]: name
method.reinforcement.grader[python]: name
method.reinforcement.grader[score_model]: name
method.reinforcement.grader[string_check]: name
method.reinforcement.grader[text_similarity]: name
method.reinforcement.hyperparameters: reasoning_effort
## jobs refused
: integrations[wandb]
method.reinforcement.grader[python]: image_tag
method.reinforcement.grader[score_model].input[message].content[input_text]: prompt_cache_breakpoint
method.reinforcement.grader[score_model].input[message]: content[input_audio]
method.reinforcement.grader[score_model].input[message]: content[input_image]
method.reinforcement.grader[score_model].sampling_params: reasoning_effort=high
method.reinforcement.grader[score_model].sampling_params: reasoning_effort=low
method.reinforcement.grader[score_model].sampling_params: reasoning_effort=max
method.reinforcement.grader[score_model].sampling_params: reasoning_effort=medium
method.reinforcement.grader[score_model].sampling_params: reasoning_effort=minimal
method.reinforcement.grader[score_model].sampling_params: reasoning_effort=none
method.reinforcement.grader[score_model].sampling_params: reasoning_effort=xhigh
method.reinforcement.grader[text_similarity]: evaluation_metric=cosine
method.reinforcement.grader[text_similarity]: evaluation_metric=meteor
method.reinforcement.hyperparameters: reasoning_effort=high reasoning_effort=low
method.reinforcement.hyperparameters: reasoning_effort=medium
method: type=reinforcement
## uploads obeyed
: bytes expires_after filename mime_type purpose
expires_after: anchor seconds
## uploads/complete obeyed
: md5 part_ids
"""


def table() -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for line in MEANINGS.strip().splitlines():
        if line.startswith("##"):
            address, meaning = line.split()[1:]
            continue
        path, _, names = line.partition(":")
        found[address, meaning] |= {f"{path}.{name}".lstrip(".") for name in names.split()}
    return found


def refusal(ours: Any, body: Json) -> InvalidRequest | None:
    try:
        parsed = parse_body(ours, json.dumps(body).encode())
        if isinstance(parsed, ResponsesBody):
            chat_body(parsed)
    except InvalidRequest as error:
        return error
    return None


def outcomes(address: str, kind: Any = None) -> tuple[set[str], dict[str, InvalidRequest]]:
    """The paths that are accepted, without values, and those that are refused."""
    client, ours, fitting = BODIES[address]
    accepted, refused = set(), {}
    walker = Walker(lambda body: refusal(ours, body) is None, fitting)
    for path, body in walker.walk(kind or client):
        error = refusal(ours, body)
        if error is not None:
            refused[path] = error
        elif not path.endswith("=null"):
            accepted.add(path.partition("=")[0])
    return accepted, refused


@pytest.mark.parametrize("address", BODIES)
def test_every_field_of_the_client_is_listed_with_its_meaning(address: str) -> None:
    accepted, refused = outcomes(address)
    told = table()
    known = told[address, "obeyed"] | told[address, "neutral"]
    assert accepted - known == set(), "new in the client: what do these mean?"
    assert known - accepted == set(), "listed, but not accepted"
    assert refused.keys() - told[address, "refused"] == set(), "refused, but not listed so"
    assert told[address, "refused"] - refused.keys() == set(), "listed as refused"
    assert not told[address, "obeyed"] & told[address, "neutral"]


@pytest.mark.parametrize("address", BODIES)
def test_what_is_refused_is_named_in_a_sentence(address: str) -> None:
    for path, error in outcomes(address)[1].items():
        field = re.sub(r"\[.*?\]", "", path.partition("=")[0]).split(".")[-1]
        assert error.param is not None
        assert error.code != "unknown_parameter", path
        assert field in error.message or error.param in path, (path, error.message)
        assert len(error.message.split()) > 3 and error.message.endswith("."), error.message


def test_the_form_of_a_file_has_the_fields_of_the_client() -> None:
    ours = {name.partition("[")[0] for name in FILE_FORM["properties"]}
    assert ours == get_type_hints(FileCreateParams).keys()


def test_a_field_of_a_later_release_is_shown() -> None:
    class Later(Chat, total=False):  # type: ignore[misc]
        thinking: str
        reflection: Reflection

    accepted, refused = outcomes("chat", Later)
    told = table()
    assert accepted == told["chat", "obeyed"] | told["chat", "neutral"]
    assert refused.keys() - told["chat", "refused"] == {"thinking", "reflection"}


class Reflection(TypedDict, total=False):
    depth: int
