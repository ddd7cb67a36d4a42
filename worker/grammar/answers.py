"""Makes the grammar of an answer: what binds it, and leaves room for a thought before it.

For all models but gpt-oss it enforces the same form of a call: `CALL_BEGIN`, a JSON object with
name and arguments, which obey the function's schema, and `CALL_END`. `engine.text.chat_rendering`
describes the tools to the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from contract.messages.protocol import CALL_BEGIN, CALL_END, GenerateJob
from contract.messages.tool_calls import BLANKS
from contract.schemas.patterns import not_beginning_with
from engine.grammar_text import Grammar, GrammarKind, behind_thought, harmony, tool_calls
from engine.text.codec import TextCodec
from engine.text.harmony import Harmony
from engine.text.thoughts import BEGIN, END, ThoughtMarks


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
        calls = _calls(job, codec.added_text, None if marks is None else BEGIN)
        grammar = Grammar(GrammarKind.LARK, calls)
    else:
        assert schema is not None
        grammar = Grammar(GrammarKind.JSON_SCHEMA, schema)
    return grammar if marks is None else behind_thought(grammar, BEGIN, END, marks.is_open(prompt))


def _callable(job: GenerateJob) -> tuple[list[tuple[str, str]], bool]:
    """Return name and schema of the tools that may be called, and whether one must be."""
    choice = job.tool_choice or "auto"
    names = [tool["function"]["name"] for tool in job.tools]
    functions = list(zip(names, job.tool_schemas, strict=True))
    if choice.startswith("="):
        functions = [function for function in functions if function[0] == choice[1:]]
    return functions, choice != "auto"


def _calls(job: GenerateJob, tokens: Collection[str], thought: str | None) -> str:
    """Return the Lark grammar of an answer that may call the job's tools.

    tokens   the vocabulary's added tokens that are text
    thought  the mark with which its other text does not begin, because a thought does
    """
    functions, is_required = _callable(job)
    return tool_calls(
        functions,
        begin=CALL_BEGIN,
        end=CALL_END,
        is_required=is_required,
        tokens=tokens,
        is_parallel=job.parallel_tool_calls and not (job.tool_choice or "").startswith("="),
        free_text=not_beginning_with(*filter(None, (CALL_BEGIN.strip(), thought)), after=BLANKS),
        answer_schema=job.decoding_schema or job.json_schema,
    )
