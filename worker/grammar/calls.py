"""Makes the grammar of a model's calls of tools.

It enforces the same form of a call for all models: `CALL_BEGIN`, a JSON object with name and
arguments, which obey the function's schema, and `CALL_END`. `engine.text.chat_rendering` describes
the tools to the model.
"""

from __future__ import annotations

from collections.abc import Collection

from contract.messages.protocol import CALL_BEGIN, CALL_END, GenerateJob
from contract.messages.tool_calls import BLANKS
from contract.schemas.patterns import not_beginning_with
from engine.grammar_text import tool_calls


def calls_grammar(
    job: GenerateJob, tokens: Collection[str], thought: str | None = None
) -> str | None:
    """Return the Lark grammar of an answer that may call the job's tools; None: it may not.

    tokens   the vocabulary's added tokens that are text
    thought  the mark with which its other text does not begin, because a thought does
    """
    if not job.tools:
        return None
    choice = job.tool_choice or "auto"
    names = [tool["function"]["name"] for tool in job.tools]
    functions = list(zip(names, job.tool_schemas, strict=True))
    if choice.startswith("="):
        functions = [function for function in functions if function[0] == choice[1:]]
    is_required = choice != "auto"
    return tool_calls(
        functions,
        begin=CALL_BEGIN,
        end=CALL_END,
        is_required=is_required,
        tokens=tokens,
        is_parallel=job.parallel_tool_calls and not choice.startswith("="),
        free_text=not_beginning_with(*filter(None, (CALL_BEGIN.strip(), thought)), after=BLANKS),
        answer_schema=job.decoding_schema or job.json_schema,
    )
