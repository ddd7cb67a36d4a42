"""A pattern means what Python's `re` says, and never takes its time."""

from __future__ import annotations

import re
import string
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.adapters.module_patterns import (
    MAX_KEY_CHARS,
    MAX_PATTERN_CHARS,
    BadPattern,
    ModuleNames,
    read_key,
    read_pattern,
)
from contract.adapters.peft_config import MAX_PATTERNS

LINEARS = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


def of_layers(count: int) -> list[str]:
    inner = [f"model.layers.{layer}.{linear}" for layer in range(count) for linear in LINEARS]
    return ["model.embed_tokens", *inner, "lm_head"]


NAMES = of_layers(12)
# Expressions that trainers write; the last two are what tools for fine-tuning put together.
USED = [
    r".*",
    r".*_proj",
    r".*\.(q|v)_proj",
    r"model\.layers\.\d+\.mlp\.(up|down)_proj",
    r"model\.layers\.[0-3]\.self_attn\.[qk]_proj",
    r"model\.layers\.([02468]|1[01])\..*",
    r"(?!.*mlp).*proj",
    r"(?:(?!layers\.1\.).)*_proj",
    r".*(?<=self_attn\.)q_proj",
    r"model.layers.[^.]+.\w+.[a-z]{1,2}_proj|lm_head",
    r"^model\.layers\.1{2}\..*$",
    r"\Amodel\.\bembed_tokens\b\Z",
    r".*\D\.\w+?\.\S*?o_pro[^a-i]",
    r"^(?!.*lm_head).*(?:gate_proj|v_proj|o_proj).*",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp|ffn)\.(?:(?:k_proj|down_proj)))",
]


@pytest.mark.parametrize("text", USED)
def test_expressions_mean_what_they_mean_to_python(text: str) -> None:
    wanted = {name for name in NAMES if re.fullmatch(text, name)}
    assert ModuleNames(NAMES).whole(read_pattern(text)) == wanted
    assert wanted


@pytest.mark.parametrize(
    "text", ["q_proj", r"layers\.\d\.mlp.*", "q_proj|v_proj", "^q_proj", r"[^v]_proj$", *USED[:8]]
)
def test_keys_mean_what_they_mean_to_peft(text: str) -> None:
    peft = pytest.importorskip("peft.utils.other")
    wanted = {name: 1 for name in NAMES if peft.get_pattern_key([text], name) == text}
    assert ModuleNames(NAMES).first([(read_key(text), 1)]) == wanted


def test_the_first_key_that_matches_counts() -> None:
    keys = [(read_key("layers.1.self_attn.q_proj"), 1), (read_key("[qk]_proj"), 2)]
    values = ModuleNames(NAMES).first(keys)
    assert values["model.layers.1.self_attn.q_proj"] == 1
    assert values["model.layers.2.self_attn.q_proj"] == 2
    assert "model.layers.2.self_attn.v_proj" not in values


SHORT = ["ab", "a.b", "aab", "b", "abc.a1", "lm_head", "a.1.q_p"]
_atoms = st.sampled_from([
    "a", "b", "q", "1", "_", ".", r"\.", r"\d", r"\w", r"\W", r"\S", "[ab]", "[^a]", "[a-c.]",
    r"[^\d.]", r"\b", r"\B", "^", "$", "",
])  # fmt: skip
_counts = st.sampled_from("* + ? *? +? ?? {2} {1,2} {0,3}? {2,} {,2}".split())


def _deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, _counts).map(lambda pair: f"({pair[0]}){pair[1]}"),
        st.tuples(st.sampled_from(["?=", "?!", "?<=", "?<!"]), inner).map(
            lambda pair: f"({pair[0]}{pair[1]})"
        ),
    )


@given(st.recursive(_atoms, _deeper, max_leaves=8))
@settings(deadline=None, max_examples=400)
def test_any_expression_means_what_it_means_to_python(text: str) -> None:
    """Short names and small expressions, which Python ends too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole, key = re.compile(text), re.compile(rf"(.*\.)?({text})$")
        except re.error:
            with pytest.raises(BadPattern):
                read_pattern(text)
            return
    names = ModuleNames(SHORT)
    assert names.whole(read_pattern(text)) == {name for name in SHORT if whole.fullmatch(name)}
    assert names.first([(read_key(text), 1)]) == {name: 1 for name in SHORT if key.match(name)}


EVIL = [
    "(a|aa)+$x",
    "(.*)*(.*)*(.*)*x",
    "((.*)*)*x",
    "((((.*)*)*)*)*x",
    "(.|.)" * 40 + "x",
    "(.?){60}x",
    "(.{0,30}){0,30}x",
    "((.?){1000}){1000}",
    "(?=(.*.*)*x).*",
    "(?:(?!(.*)*x).)*",
    "a?" * 100,
]


@pytest.mark.parametrize("text", EVIL)
def test_no_expression_takes_long(text: str) -> None:
    """Among them some that keep Python's `re` busy for years."""
    names = ModuleNames(of_layers(100))
    began = time.process_time()
    try:
        for _ in range(3):
            names.whole(read_pattern(text))
            names.first([(read_key(text), 1)])
    except BadPattern as error:
        assert "steps" in str(error)
    assert time.process_time() - began < 10


def test_all_patterns_of_an_adapter_share_their_steps() -> None:
    names = ModuleNames(of_layers(100))
    evil = read_key(f"({'|'.join(string.ascii_letters)}|.)*x")
    with pytest.raises(BadPattern, match="steps"):
        names.first([(evil, 1)] * MAX_PATTERNS)


def test_a_full_name_for_every_matrix_passes() -> None:
    """What AdaLoRA-like methods and EVA write: a key for each of 128 layers' matrices."""
    every = of_layers(128)
    keys = [(read_key(name), rank) for rank, name in enumerate(every)]
    assert ModuleNames(every).first(keys) == {name: rank for rank, name in enumerate(every)}


@pytest.mark.parametrize(
    "text",
    [
        "(", "a)", "*", "a{3,2}", "(?P<x>a)(?P=x)", r"(a)\1", "(?i)a", "(?i:a)", "a*+", "(?>a)",
        "(?(1)a|b)", r"\q", "(?<=a*)b", "(" * 100 + ")" * 100, "(" * 1000 + ")" * 1000,
        "x" * (MAX_PATTERN_CHARS + 1), "a{99999999999999999999}", "\\", "[", "[z-a]",
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(text: str) -> None:
    with pytest.raises(BadPattern) as raised:
        read_pattern(text)
    assert str(raised.value)
    with pytest.raises(BadPattern):
        read_key(text)


def test_keys_are_short() -> None:
    read_key("x" * MAX_KEY_CHARS)
    with pytest.raises(BadPattern):
        read_key("x" * (MAX_KEY_CHARS + 1))


def test_no_names() -> None:
    assert ModuleNames([]).whole(read_pattern(".*")) == frozenset()
    assert ModuleNames([]).first([(read_key(".*"), 1)]) == {}


def test_it_needs_the_standard_library_alone() -> None:
    root = Path(__file__).parents[2]
    names = "contract.adapters.fit"
    code = f"import sys; import {names}; print(*sys.modules)"
    listed = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert "contract.adapters.module_patterns" in listed.stdout.split()
