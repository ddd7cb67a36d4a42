"""Chat templates with the habits of the families that are served, and a tokenizer for all of them.

Each is written for tests, as short as its family's habits allow:

chatml   SmolLM2: a system's message of its own if the chat has none
llama3   trims contents, knows tools, a date; the end of a turn is not the end of a text
mistral  no generation prompt; the system's message is in the last user's; alternating roles
qwen2    tools in the system's message; results of tools one behind the other are one turn
qwen3    thoughts of earlier turns are left out, and an empty thought before the last answer
harmony  messages with channels, and thoughts under another name; an end of a call of its own
spaces   no special token at all, so that tokens reach over the end of the prompt
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>"),
    *("<|eot|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[RESULTS]"),
)
#: Tokens of harmony alone: with them, answers have channels.
HARMONY = (
    *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)

_CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou are a help<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}<|head|>system<|/head|>\n\nToday {{ strftime_now('%Y') }}\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}\n{% endfor %}{% endif %}<|eot|>"
    "{% for m in messages %}"
    "{% if m.tool_calls %}<|head|>assistant<|/head|>\n\n{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}<|eot|>"
    "{% elif m.role == 'tool' %}<|head|>ipython<|/head|>\n\n{{ m.content | tojson }}<|eot|>"
    "{% else %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
_MISTRAL = (
    "{% set ns = namespace(system='') %}{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {% if m == users[-1] %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ ns.system }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}[RESULTS] {{ m.content | tojson }}"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('a system message must be the first') }}{% endif %}{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_QWEN2 = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ m.content }}" + _CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _RESULTS + "{% elif m.role == 'user' or not loop.first %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN3 = (
    _TOOLS + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m.content else '' %}{% if m.reasoning_content is string %}"
    "{% set said, thought = m.content, m.reasoning_content %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n"
    "{% endif %}{{ said }}" + _CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _RESULTS + "{% elif m.role == 'user' or not loop.first %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HARMONY = (
    "{% if tools %}<|start|>developer<|message|># Tools\n{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}{% set call = m.tool_calls[0].function %}<|start|>assistant "
    "to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_SPACES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

#: name -> (template, begin of a text, end of a text)
TEMPLATES = {
    "chatml": (_CHATML, "<|im_start|>", "<|im_end|>"),
    "llama3": (_LLAMA3, "<|begin|>", "<|eot|>"),
    "mistral": (_MISTRAL, "<s>", "</s>"),
    "qwen2": (_QWEN2, "<|endoftext|>", "<|im_end|>"),
    "qwen3": (_QWEN3, "<|endoftext|>", "<|im_end|>"),
    "harmony": (_HARMONY, "<|endoftext|>", "<|return|>"),
    "spaces": (_SPACES, "<s>", "</s>"),
}


def write_tokenizer(
    folder: Path,
    template: str,
    *,
    context: int = 2048,
    model_type: str = "",
    source: str = "",
    special: tuple[str, ...] = (),
) -> Path:
    """Write the files of a base model that text needs.

    source   of another chat template than the named one's
    special  further special tokens
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    own, begin, end = TEMPLATES[template]
    source = source or own
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["system user assistant: hello world,  how are you? \n\n <tool_call> {} </think>"] * 3,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=[*SPECIAL, *special, *(HARMONY if template == "harmony" else ())],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if template == "qwen3":
        marks = ("<think>", "</think>")
        tokenizer.add_tokens([AddedToken(each, special=False) for each in marks])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": source, "bos_token": begin, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"max_position_embeddings": context, "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
