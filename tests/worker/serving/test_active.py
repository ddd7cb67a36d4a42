"""One request's events and its record, from the engine's outputs alone."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from contract.messages.protocol import DoneRecord, Sampling
from engine.errors import DeadlineExceeded, EngineError
from engine.request import FinishReason, RequestOutput, TokenLogprob
from engine.text.codec import TextCodec
from tests.chat_templates import write_tokenizer
from tests.engine.text.vocabularies import byte_level
from tests.fakes import write_fake_base
from tests.messages import make_job
from worker.serving import active_request
from worker.serving.active_request import ActiveRequest
from worker.serving.engine_commands import Prompt, read_prompts
from worker.serving.requests import Requests
from worker.serving.streams import EventUpdate


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_fake_base(tmp_path_factory.mktemp("base")))


def make_request(codec: TextCodec, *, stream: bool = True, **fields: Any) -> ActiveRequest:
    """A request with these fields of the job and of its sampling."""
    known = {field.name for field in dataclasses.fields(Sampling)}
    sampling = {name: fields.pop(name) for name in list(fields) if name in known}
    job = make_job(
        stream=stream,
        endpoint="/v1/completions",
        created_at=100.0,
        sampling=Sampling(**sampling),
        **{"text": "p", **fields},
    )
    return ActiveRequest(job, entry_id=b"1-0", lease=3, worker_id="w", codec=codec, now=100.5)


def news_of(request: ActiveRequest) -> EventUpdate:
    """The one piece of news that there is."""
    (news,) = request.take_news()
    return news


def done_of(request: ActiveRequest) -> DoneRecord:
    """The record of a request that has ended."""
    done = request.peek_news()[-1].done
    assert done is not None
    return done


def feed(request: ActiveRequest, codec: TextCodec, text: str, **fields: Any) -> None:
    """Give it `text` token by token, as steps a second apart."""
    for token_id in codec.encode(text, add_special_tokens=False):
        generated = request.generated + 1
        output = RequestOutput(
            request_id="r", token_ids=[token_id], num_prompt_tokens=7, num_generated=generated
        )
        request.feed(output, now=101.0 + generated)
    if fields:
        request.feed(
            RequestOutput(request_id="r", num_generated=request.generated + 1, **fields), 120.0
        )


def test_events_are_numbered_and_only_the_last_has_usage(codec: TextCodec) -> None:
    request = make_request(codec)
    feed(request, codec, "ab")
    first = news_of(request)
    feed(request, codec, "c", finish_reason=FinishReason.STOP)
    last = news_of(request)
    assert (first.event.seq, first.event.text, first.event.usage) == (0, "ab", None)
    assert (last.event.seq, last.event.text, last.event.finish_reason) == (1, "c", "stop")
    assert last.event.usage is not None
    assert (last.event.usage.prompt_tokens, last.event.usage.completion_tokens) == (7, 4)
    assert first.done is None
    assert last.done is not None
    assert (last.done.prompt_tokens, last.done.completion_tokens, last.done.lease) == (7, 4, 3)
    assert (last.done.endpoint, last.event.stop_string) == ("/v1/completions", None)


def test_an_answer_that_is_not_streamed_is_one_event(codec: TextCodec) -> None:
    request = make_request(codec, stream=False)
    feed(request, codec, "ab")
    assert not request.has_news
    feed(request, codec, "c", finish_reason=FinishReason.STOP)
    assert request.has_news
    assert news_of(request).event.text == "abc"


def test_a_stop_string_ends_it_while_the_engine_goes_on(codec: TextCodec) -> None:
    request = make_request(codec, stop=("END",))
    feed(request, codec, "one E")
    assert news_of(request).event.text == "one "
    feed(request, codec, "ND")
    news = news_of(request)
    assert (news.event.text, news.event.finish_reason) == ("", "stop")
    assert news.event.stop_string == "END"
    assert news.done is not None
    assert news.done.completion_tokens == request.generated  # up to the token that completed it


def test_text_held_back_for_a_stop_string_comes_with_the_end(codec: TextCodec) -> None:
    request = make_request(codec, stop=("END",))
    feed(request, codec, "the EN", finish_reason=FinishReason.LENGTH)
    news = news_of(request)
    assert (news.event.text, news.event.finish_reason) == ("the EN", "length")


def test_an_incomplete_character_comes_with_the_end(codec: TextCodec) -> None:
    request = make_request(codec)
    ids = codec.encode("a🦜", add_special_tokens=False)[:-1]
    request.feed(
        RequestOutput(request_id="r", token_ids=ids, finish_reason=FinishReason.LENGTH), 101.0
    )
    assert news_of(request).event.text == "a\ufffd"


def test_a_failure_keeps_what_was_generated(codec: TextCodec) -> None:
    request = make_request(codec)
    feed(request, codec, "ab")
    error = DeadlineExceeded("too late", param="deadline")
    request.feed(
        RequestOutput(request_id="r", error=error, finish_reason=FinishReason.ERROR), 103.0
    )
    news = news_of(request)
    assert (news.event.error_code, news.event.error_message) == ("deadline_exceeded", "too late")
    assert news.done is not None
    assert (news.done.finish_reason, news.done.error_code) == ("error", "deadline_exceeded")
    assert news.done.completion_tokens == 2


def test_only_the_first_end_counts(codec: TextCodec) -> None:
    request = make_request(codec)
    request.cancel(101.0)
    request.fail("internal", "late", now=102.0)
    assert news_of(request).event.finish_reason == "cancelled"


def test_timings_are_from_acceptance(codec: TextCodec) -> None:
    request = make_request(codec)
    request.timings.loaded = 101.0
    request.timings.started = 101.5
    feed(request, codec, "a", finish_reason=FinishReason.STOP)
    done = news_of(request).done
    assert done is not None
    assert (done.load_ms, done.queue_ms) == (500.0, 1000.0)
    assert (done.first_token_ms, done.total_ms) == (2000.0, 20000.0)


def test_logprobs_name_tokens_and_their_bytes(codec: TextCodec) -> None:
    request = make_request(codec, logprobs=1)
    (token_id,) = codec.encode("z", add_special_tokens=False)
    output = RequestOutput(
        request_id="r",
        token_ids=[token_id],
        logprobs=[TokenLogprob(token_id, -0.25, ((token_id, -0.25), (2, float("-inf"))))],
    )
    request.feed(output, 101.0)
    assert news_of(request).event.logprobs == (
        {
            "token": "z",
            "id": 92,
            "logprob": -0.25,
            "bytes": [122],
            "top_logprobs": [
                {"token": "z", "id": 92, "logprob": -0.25, "bytes": [122]},
                {"token": "<|end|>", "id": 2, "logprob": -9999.0, "bytes": []},
            ],
        },
    )


def test_details_say_what_each_token_adds_to_the_text(codec: TextCodec) -> None:
    request = make_request(codec, token_details=True, logprobs=1, stop=("END",))
    special = 2
    for token_id in [special, *codec.encode("a🦜 END", add_special_tokens=False)]:
        logprobs = [TokenLogprob(token_id, -0.5, ((token_id, -0.5),))]
        request.feed(RequestOutput(request_id="r", token_ids=[token_id], logprobs=logprobs), 101.0)
    event = news_of(request).event
    assert event.logprobs is not None
    assert [entry["id"] for entry in event.logprobs][:2] == [
        special,
        codec.encode("a", add_special_tokens=False)[0],
    ]
    assert [entry["special"] for entry in event.logprobs] == [True] + [False] * (
        len(event.logprobs) - 1
    )
    assert event.logprobs[1]["top_logprobs"][0]["id"] == event.logprobs[1]["id"]
    assert "".join(entry["text"] for entry in event.logprobs) == "a🦜 END"
    assert (event.text, event.stop_string) == ("a🦜 ", "END")


def test_choices_end_each_for_itself_and_are_billed_together(codec: TextCodec) -> None:
    request = make_request(codec, n=2, stop=("END",))
    request.in_engine = True
    letter = {
        char: codec.encode(char, add_special_tokens=False)[0] for char in ("a", "b", "E", "N", "D")
    }

    def step(index: int, char: str, generated: int, **fields: Any) -> int | None:
        output = RequestOutput(
            request_id="r",
            index=index,
            token_ids=[letter[char]],
            num_prompt_tokens=7,
            num_cached_tokens=4,
            num_generated=generated,
            **fields,
        )
        return request.feed(output, 101.0)

    assert step(0, "a", 1) is None
    assert step(1, "b", 1) is None
    first = [news.event for news in request.take_news()]
    assert [(event.index, event.seq, event.text) for event in first] == [(0, 0, "a"), (1, 1, "b")]
    step(1, "E", 2)
    step(1, "N", 3)
    assert step(1, "D", 4) == 1  # the engine is to be told
    assert not request.is_finished
    (stopped,) = request.take_news()
    assert (stopped.event.index, stopped.event.finish_reason) == (1, "stop")
    assert stopped.event.usage is None
    step(1, "a", 5)  # what the engine had under way: nobody sees it or pays for it
    step(0, "b", 2, finish_reason=FinishReason.LENGTH)
    assert request.is_finished
    assert request.runs_on
    (last,) = request.take_news()
    assert (last.event.index, last.event.seq, last.event.text) == (0, 3, "b")
    assert last.event.usage is not None
    assert last.done is not None
    for counts in (last.event.usage, last.done):
        assert (counts.prompt_tokens, counts.cached_tokens) == (7, 4)
        assert counts.completion_tokens == 6
    assert last.done.finish_reason == "length"


def test_drafts_are_counted_by_source_and_billed_only_if_right(codec: TextCodec) -> None:
    request = make_request(codec, n=2, stream=False)
    request.in_engine = True
    for index, right in enumerate(({"forced": 2, "lookup": 1}, {"forced": 1})):
        output = RequestOutput(
            request_id="r",
            index=index,
            num_prompt_tokens=7,
            num_generated=9,
            accepted_drafts=right,
            num_rejected_drafts=4,
            finish_reason=FinishReason.LENGTH,
        )
        request.feed(output, 101.0)
    usage = request.take_news()[-1].event.usage
    assert usage is not None and usage.completion_tokens == 18
    assert (usage.accepted_drafts, usage.rejected_drafts) == ({"forced": 3, "lookup": 1}, 8)
    assert done_of(request).drafts == {"forced": 3, "lookup": 1, "rejected": 8}


def test_right_drafts_behind_a_stop_string_are_not_counted(codec: TextCodec) -> None:
    request = make_request(codec, stop=("b",), stream=False)
    for text, generated in (("xy", 2), ("abcd", 6)):
        output = RequestOutput(
            request_id="r",
            token_ids=codec.encode(text, add_special_tokens=False),
            num_prompt_tokens=7,
            num_generated=generated,
            accepted_drafts={"forced": generated - 1},
        )
        request.feed(output, 101.0)
    usage = request.take_news()[-1].event.usage
    assert usage is not None and usage.completion_tokens == 4
    assert usage.accepted_drafts == {"forced": 1}


def test_each_prompt_has_its_choices(codec: TextCodec) -> None:
    request = make_request(codec, prompts=("x", "yy"), n=2, echo=True, stream=False)
    request.show_prompts([Prompt([1], "x"), Prompt([1], "yy")])
    (token_id,) = codec.encode("z", add_special_tokens=False)
    for prompt in (1, 0):
        for index in (0, 1):
            output = RequestOutput(
                request_id="r",
                index=index,
                token_ids=[token_id],
                num_prompt_tokens=prompt + 1,
                num_generated=1,
                finish_reason=FinishReason.LENGTH,
            )
            request.feed(output, 101.0, prompt=prompt)
    news = request.take_news()
    texts = [(item.event.index, item.event.text) for item in news]
    assert texts == [(0, "xz"), (1, "xz"), (2, "yyz"), (3, "yyz")]
    assert [item.done is not None for item in news] == [False, False, False, True]
    usage = news[-1].event.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 4)


def test_a_choice_that_fails_ends_the_request(codec: TextCodec) -> None:
    request = make_request(codec, n=2)
    request.in_engine = True
    error = EngineError("broken")
    request.feed(
        RequestOutput(request_id="r", index=1, error=error, finish_reason=FinishReason.ERROR), 101.0
    )
    event = news_of(request).event
    assert (event.error_code, event.usage is not None) == ("internal", True)
    assert request.runs_on  # the other choice is to be cancelled


def test_an_engine_that_waits_for_checks_of_answers_is_not_stuck(codec: TextCodec) -> None:
    """Checks of other answers may take a minute together, in which it has nothing to do."""
    request = make_request(codec, json_schema="{}")
    request.in_engine = True
    requests = Requests.__new__(Requests)
    requests._active = {"r": request}
    requests._progress_at = time.monotonic() - 100
    feed(request, codec, "1")
    assert requests.stuck_s() >= 100
    feed(request, codec, "", finish_reason=FinishReason.STOP)
    assert request.awaits_check
    assert requests.stuck_s() < 1


@pytest.mark.parametrize(
    ("problem", "param", "obeys"), [(None, None, True), ("no", None, False), ("no", "x", False)]
)
def test_the_record_says_whether_answers_obey_their_schema(
    codec: TextCodec, problem: str | None, param: str | None, obeys: bool
) -> None:
    request = make_request(codec, json_schema="{}", n=2)
    for index in range(2):
        output = RequestOutput(request_id="r", index=index, finish_reason=FinishReason.STOP)
        request.feed(output, 101.0)
    kept, broken = request.unchecked
    kept.note_check(None)
    broken.note_check(problem, param)
    request.conclude(102.0)
    assert done_of(request).obeys_schema is obeys
    assert done_of(request).finish_reason == ("error" if param else "stop")


def test_what_was_not_checked_neither_obeys_nor_breaks_a_schema(codec: TextCodec) -> None:
    free = make_request(codec)
    feed(free, codec, "a", finish_reason=FinishReason.STOP)
    cut = make_request(codec, json_schema="{}")
    feed(cut, codec, "a", finish_reason=FinishReason.LENGTH)
    assert [done_of(request).obeys_schema for request in (free, cut)] == [None, None]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_log_probabilities_that_pile_up_end_their_request(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """No message may grow without a bound: the process at its other end serves others, too."""
    monkeypatch.setattr(active_request, "MAX_LOGPROBS", 30)
    request = make_request(codec, stream=stream, n=2, logprobs=4)
    top = tuple((token_id, -1.0) for token_id in range(10, 14))

    def feed_one(index: int) -> None:
        number = request.usage.completion_tokens // 2 + 1
        logprobs = [TokenLogprob(10, -1.0, top)]
        request.feed(
            RequestOutput(
                request_id="r",
                index=index,
                token_ids=[10],
                logprobs=logprobs,
                num_generated=number,
            ),
            101.0,
        )

    for index in (0, 1) * 3:
        feed_one(index)
    assert not request.is_finished
    told = request.take_news() if stream else []
    for index in (0, 1) * 3 if stream else ():
        feed_one(index)
    assert not request.is_finished, "what was told is not waiting"
    assert len(told) == (2 if stream else 0)
    feed_one(0)
    last = news_of(request)
    assert (last.event.error_code, last.event.error_param) == ("invalid_request", "logprobs")
    assert (last.event.finish_reason, last.event.logprobs) == ("error", None)
    assert last.done is not None


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -12000.0], ids=str)
def test_every_log_probability_is_a_number_of_json(codec: TextCodec, logprob: float) -> None:
    request = make_request(codec, logprobs=1)
    logprobs = [TokenLogprob(10, logprob, ((10, logprob),))]
    request.feed(
        RequestOutput(request_id="r", token_ids=[10], logprobs=logprobs, num_generated=1), 101.0
    )
    event = news_of(request).event
    assert event.logprobs is not None
    (told,) = event.logprobs
    assert (told["logprob"], told["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    assert b"NaN" not in event.encode()


def test_each_event_says_how_far_its_choice_is(codec: TextCodec) -> None:
    request = make_request(codec, with_counts=True, prompts=("x", "y"), text=None)
    for prompt, tokens in ((0, 7), (1, 9)):
        request.feed(
            RequestOutput(request_id="r", token_ids=[5], num_prompt_tokens=tokens, num_generated=1),
            101.0,
            prompt=prompt,
        )
    told = [(news.event.index, news.event.so_far) for news in request.take_news()]
    assert [(index, so_far.prompt_tokens, so_far.completion_tokens) for index, so_far in told] == [
        (0, 7, 1),
        (1, 9, 1),
    ]


def test_token_ids_are_told_once_with_the_text_that_they_are_of(codec: TextCodec) -> None:
    """Also when a character's first bytes wait for the others while another choice has news."""
    request = make_request(codec, with_token_ids=True, n=2)
    request.show_prompt_ids([[8, 9]])
    bird = codec.encode("🦜", add_special_tokens=False)
    plain = codec.encode("a", add_special_tokens=False)
    request.feed(RequestOutput(request_id="r", index=0, token_ids=plain), 101.0)
    request.feed(RequestOutput(request_id="r", index=1, token_ids=bird[:2]), 101.0)
    first = news_of(request).event
    assert (first.token_ids, first.prompt_token_ids) == (tuple(plain), (8, 9))
    request.feed(
        RequestOutput(request_id="r", index=1, token_ids=bird[2:], finish_reason=FinishReason.STOP),
        102.0,
    )
    second = news_of(request).event
    assert (second.text, second.token_ids) == ("🦜", tuple(bird))
    assert second.prompt_token_ids is None


def test_token_ids_that_pile_up_end_their_request(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.serving.active_request.MAX_LOGPROBS", 3)
    request = make_request(codec, with_token_ids=True, stream=False)
    request.feed(RequestOutput(request_id="r", token_ids=[5] * 4), 101.0)
    event = news_of(request).event
    assert (event.error_code, event.error_param) == ("invalid_request", "return_token_ids")


# --- thoughts


@pytest.fixture(scope="module")
def thinker() -> TextCodec:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    codec = TextCodec.of(tokenizer, template, {"eos_token": "</s>"})
    codec.context_length = 100
    return codec


def ids_of(codec: TextCodec, text: str) -> list[int]:
    return codec.encode(text, add_special_tokens=False)


def make_chat(codec: TextCodec, prompt: str = "Why?", **fields: Any) -> ActiveRequest:
    messages = ({"role": "user", "content": prompt},)
    request = make_request(codec, text=None, messages=messages, **fields)
    request.show_prompts(read_prompts(request.job, codec))
    return request


@pytest.mark.parametrize("text", ["<think>\nAs it \n\nis.\n</think>\n\nIt is.", "It is."])
def test_a_thought_is_told_apart_from_the_answer(thinker: TextCodec, text: str) -> None:
    told = []
    for stream in (True, False):
        request = make_chat(thinker, stream=stream, logprobs=0 if not stream else None)
        events = []
        for piece in re.split("(?<= )", text[:-3]):
            feed(request, thinker, piece)
            events += [update.event for update in request.take_news()]
        feed(request, thinker, text[-3:], finish_reason=FinishReason.STOP)
        events += [update.event for update in request.take_news()]
        thought, answer = (
            "".join(getattr(e, name) for e in events) for name in ("thought", "text")
        )
        told.append((thought, answer))
    assert told == [("As it \n\nis." if "<" in text else "", "It is.")] * 2
    usage = events[-1].usage
    assert usage is not None
    ids = thinker.encode(text, add_special_tokens=False)
    end = ids.index(ids_of(thinker, "</think>")[0]) + 1 if "<" in text else 0
    assert usage.thought_tokens == end


def test_a_template_may_begin_the_thought(thinker: TextCodec) -> None:
    request = make_chat(thinker, "Why?<think>\n")
    feed(request, thinker, "Hm.</think>So.", finish_reason=FinishReason.STOP)
    event = news_of(request).event
    assert (event.thought, event.text) == ("Hm.", "So.")


def test_a_thought_without_an_end_is_no_answer(thinker: TextCodec) -> None:
    request = make_chat(thinker, stop=("stop",))
    feed(request, thinker, "<think>I stop not", finish_reason=FinishReason.LENGTH)
    event = news_of(request).event
    assert (event.thought, event.text, event.finish_reason) == ("I stop not", "", "length")


def test_marks_inside_an_answer_are_text(thinker: TextCodec) -> None:
    request = make_chat(thinker)
    feed(request, thinker, "Write <think>x</think>.", finish_reason=FinishReason.STOP)
    assert news_of(request).event.text == "Write <think>x</think>."
    request = make_request(thinker)  # a raw prompt's text is all of it
    feed(request, thinker, "<think>x</think>y", finish_reason=FinishReason.STOP)
    assert news_of(request).event.text == "<think>x</think>y"


def test_an_answer_bound_by_a_grammar_follows_no_thought(thinker: TextCodec) -> None:
    request = make_chat(thinker, "Why?<think>\n", regex="a")
    [prompt] = read_prompts(request.job, thinker)
    assert thinker.decode(prompt.token_ids) == "Why?<think>\n\n</think>\n\n"
    feed(request, thinker, "a", finish_reason=FinishReason.STOP)
    assert news_of(request).event.text == "a"


def test_gemma_4_has_marks_of_its_own(tmp_path: Path) -> None:
    special = ("<|channel>", "<channel|>")
    codec = TextCodec(write_tokenizer(tmp_path, "chatml", special=special))
    for text, thought, answer in (
        ("<|channel>thought\nIs it?<channel|>It is.", "Is it?", "It is."),
        ("<|channel>thought\n<channel|>\nIt is.", "", "It is."),
        ("It is.", "", "It is."),
    ):
        request = make_chat(codec)
        ids = ids_of(codec, text)
        feed(request, codec, text, finish_reason=FinishReason.STOP)
        event = news_of(request).event
        assert (event.thought, event.text) == (thought, answer)
        assert event.usage is not None
        end = ids_of(codec, "<channel|>")[0]
        assert event.usage.thought_tokens == (ids.index(end) + 1 if end in ids else 0)


# --- gpt-oss


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
TOOLS: dict[str, Any] = {
    "tools": ({"type": "function", "function": {"name": "f", "parameters": {}}},),
    "tool_schemas": ("{}",),
}


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_tokenizer(tmp_path_factory.mktemp("base"), "harmony"))


@pytest.mark.parametrize(
    ("answer", "thought", "text", "fields"),
    [
        (f"{THOUGHT}{FINAL}It is.", "Hm.", "It is.", {}),
        (f"{FINAL}It is.", "", "It is.", {}),
        (f"{THOUGHT}{THOUGHT}{FINAL}It is.", "Hm.Hm.", "It is.", {}),
        (f"{THOUGHT}{TO}" + '{"a": "b"}', "Hm.", CALL, TOOLS),
        (" to=functions.f<|channel|>commentary json<|message|>" + '{"a": "b"}', "", CALL, TOOLS),
        (f"{TO}x", "", "x", {}),
        ("<|channel|>commentary<|message|>So.<|end|><|start|>assistant" + FINAL + "It is.",
         "", "So.\n\nIt is.", {}),
        (f"{FINAL}It is. stop it", "", "It is. ", {"stop": ("stop",)}),
        ("<|channel|>analysis<|message|>I stop not", "I stop not", "", {"stop": ("stop",)}),
    ],
)  # fmt: skip
def test_the_channels_of_gpt_oss_are_told_apart(
    harmony: TextCodec, answer: str, thought: str, text: str, fields: dict[str, Any]
) -> None:
    told = []
    for stream in (True, False):
        request = make_chat(harmony, stream=stream, **fields)
        events = []
        for token_id in ids_of(harmony, answer):
            request.feed(RequestOutput(request_id="r", token_ids=[token_id]), 101.0)
            events += [update.event for update in request.take_news()]
        if not request.is_finished:
            feed(request, harmony, "", finish_reason=FinishReason.STOP)
            events += [update.event for update in request.take_news()]
        told.append(tuple("".join(getattr(e, n) for e in events) for n in ("thought", "text")))
    assert told == [(thought, text)] * 2
    if answer == f"{THOUGHT}{FINAL}It is.":
        usage = events[-1].usage
        assert usage is not None
        thought_ids = ids_of(harmony, THOUGHT.removesuffix("<|start|>assistant"))
        assert usage.thought_tokens == len(thought_ids)


def test_a_call_of_gpt_oss_that_is_cut_off_has_no_end(harmony: TextCodec) -> None:
    request = make_chat(harmony, **TOOLS)
    feed(request, harmony, f"{TO}{{", finish_reason=FinishReason.LENGTH)
    assert news_of(request).event.text == '<tool_call>\n{"name": "f", "arguments": {'


def test_a_regular_expression_binds_the_final_channel_of_gpt_oss(harmony: TextCodec) -> None:
    request = make_chat(harmony, regex="a")
    [prompt] = read_prompts(request.job, harmony)
    assert harmony.decode_whole(prompt.token_ids).endswith(f"<|start|>assistant{FINAL}")
    feed(request, harmony, "a", finish_reason=FinishReason.STOP)
    assert news_of(request).event.text == "a"
