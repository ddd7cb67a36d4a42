"""Makes the grammar of an answer: what binds it, and leaves room for a thought before it.

A call has the form that the model knows (`engine.text.call_formats`, gpt-oss's messages), or ours:
`CALL_BEGIN`, a JSON object with name and arguments, and `CALL_END`, which
`engine.text.chat_rendering` describes to the model. Arguments obey the function's schema.
"""

from __future__ import annotations

from collections.abc import Sequence

from contract.messages.protocol import CALL_BEGIN, CALL_END, GenerateJob
from contract.messages.tool_calls import BLANKS
from contract.schemas.patterns import not_beginning_with
from engine.grammar_text import (
    Grammar,
    GrammarKind,
    behind_thought,
    harmony,
    native_calls,
    tool_calls,
)
from engine.text.codec import TextCodec
from engine.text.harmony import Harmony
from engine.text.thoughts import ThoughtMarks


def answer_grammar(job: GenerateJob, prompt: Sequence[int], codec: TextCodec) -> Grammar | None:
    """Return what binds the answer to a prompt; None: nothing does."""
    if job.regex is not None:
        return Grammar(GrammarKind.REGEX, job.regex)
    if job.grammar is not None:
        return Grammar(GrammarKind.LARK, job.grammar)
    schema, thoughts = job.decoding_schema or job.json_schema, codec.thoughts
    functions, is_required = _callable(job)
    if schema is None and not functions:
        return None
    if isinstance(thoughts, Harmony) and job.thinks and thoughts.skipped(prompt):
        return Grammar(
            GrammarKind.LARK, harmony(functions, is_required=is_required, answer_schema=schema)
        )
    marks = thoughts if isinstance(thoughts, ThoughtMarks) and job.thinks else None
    if marks is not None and marks.is_closed(prompt):
        marks = None
    if functions:
        calls = _calls(job, codec, None if marks is None else marks.names.begin)
        grammar = Grammar(GrammarKind.LARK, calls)
    else:
        assert schema is not None
        grammar = Grammar(GrammarKind.JSON_SCHEMA, schema)
    return grammar if marks is None else behind_thought(grammar, marks.names, marks.is_open(prompt))


def _callable(job: GenerateJob) -> tuple[list[tuple[str, str]], bool]:
    """Return name and schema of the tools that may be called, and whether one must be."""
    choice = job.tool_choice or "auto"
    names = [tool["function"]["name"] for tool in job.tools]
    functions = list(zip(names, job.tool_schemas, strict=True))
    if choice.startswith("="):
        functions = [function for function in functions if function[0] == choice[1:]]
    return functions, choice != "auto"


def _calls(job: GenerateJob, codec: TextCodec, thought: str | None) -> str:
    """Return the Lark grammar of an answer that may call the job's tools.

    thought  the mark with which its other text does not begin, because a thought does
    """
    functions, is_required = _callable(job)
    form = codec.call_format
    if form is not None:
        starts = [form.begin + form.start(name) for name, _ in functions]
        return native_calls(
            functions,
            form,
            codec.added_ids,
            is_required=is_required,
            is_parallel=_may_repeat(job),
            free_text=not_beginning_with(*starts, *filter(None, (thought,)), after=BLANKS),
            answer_schema=job.decoding_schema or job.json_schema,
        )
    return tool_calls(
        functions,
        begin=CALL_BEGIN,
        end=CALL_END,
        is_required=is_required,
        tokens=codec.added_text,
        is_parallel=_may_repeat(job),
        free_text=not_beginning_with(*filter(None, (CALL_BEGIN.strip(), thought)), after=BLANKS),
        answer_schema=job.decoding_schema or job.json_schema,
    )


def _may_repeat(job: GenerateJob) -> bool:
    """Return whether an answer may have several calls."""
    return job.parallel_tool_calls and not (job.tool_choice or "").startswith("=")
