"""Files for measuring whole training runs: a base of random weights, its tokenizer, datasets.

    python -m bench.training_files FOLDER [--runs N] [--tokens N] [--tiny]

FOLDER gets `base/`, which has Llama-3.1-8B's shape and 16 GB, and `dataset-N.jsonl` of each run. A
word is a token, so that rows have exactly 256 tokens, of which the assistant writes 102.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.training_stack import TINY, Shape

LENGTH, ANSWER = 256, 102
#: Tokens of a row that are no words: a mark before and one after each message.
_MARKS = ("<|user|>", "<|assistant|>", "<|end|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
_LAYERS_A_FILE = 8


def config_fields(shape: Shape) -> dict[str, Any]:
    """What config.json says of a base of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.dim,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 2,
    }


def make_base(folder: Path, shape: Shape) -> None:
    """Write a base of random weights, as Hugging Face lays it out."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_fields(shape)))
    _make_tokenizer(folder, shape.vocabulary)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def drawn(*size: int, deviation: float) -> torch.Tensor:
        made = torch.empty(size, dtype=torch.bfloat16, device=device)
        return made.normal_(0, deviation).cpu()

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    ends = {
        "model.embed_tokens.weight": drawn(shape.vocabulary, shape.hidden, deviation=1.0),
        "lm_head.weight": drawn(shape.vocabulary, shape.hidden, deviation=0.02),
        "model.norm.weight": ones,
    }
    parts = [ends]
    q, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
    linears = {
        "self_attn.q_proj": (q, shape.hidden), "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden), "self_attn.o_proj": (shape.hidden, q),
        "mlp.gate_proj": (shape.inner, shape.hidden), "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner),
    }  # fmt: skip
    for layer in range(shape.layers):
        if layer % _LAYERS_A_FILE == 0:
            parts.append({})
        prefix = f"model.layers.{layer}"
        for name, (out, width) in linears.items():
            parts[-1][f"{prefix}.{name}.weight"] = drawn(out, width, deviation=width**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            parts[-1][f"{prefix}.{name}.weight"] = ones.clone()
    places, total = {}, 0
    for number, tensors in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _make_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_MARKS, *(f"w{number}" for number in range(size - len(_MARKS)))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", unk_token="w0"
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def make_dataset(path: Path, rows: int, vocabulary: int, seed: int) -> None:
    """Write rows of LENGTH tokens, ANSWER of them the assistant's, its end mark included."""
    draw = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(vocabulary - len(_MARKS))}" for _ in range(count))

    with path.open("w") as file:
        for _ in range(rows):
            asked = {"role": "user", "content": words(LENGTH - ANSWER - 3)}
            answer = {"role": "assistant", "content": words(ANSWER - 1)}
            file.write(json.dumps({"messages": [asked, answer]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=65_536, help="of a run")
    parser.add_argument("--tiny", action="store_true", help="a decoder for trying this file")
    options = parser.parse_args()
    shape = TINY if options.tiny else Shape()
    began = time.perf_counter()
    make_base(options.folder / "base", shape)
    base_s = time.perf_counter() - began
    for run in range(options.runs):
        path = options.folder / f"dataset-{run}.jsonl"
        make_dataset(path, options.tokens // LENGTH, shape.vocabulary, run)
    took = {"base_s": round(base_s, 1), "all_s": round(time.perf_counter() - began, 1)}
    print(json.dumps(took))


if __name__ == "__main__":
    main()
