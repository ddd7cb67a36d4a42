"""Whole training runs on a GPU: from a process's start to the adapters on the disk.

    python -m bench.training FOLDER --case files    [--runs 100] [--tiny]
    python -m bench.training FOLDER --case together [--runs 100] [--share 1.0]
    python -m bench.training FOLDER --case sequence [--runs 64] [--share 1.0] [--alone 2]
    python -m bench.training FOLDER --case one      [--share 0.125]

`files` writes what the other cases read: `base/`, random weights of Llama-3.1-8B's shape (16 GB),
and a `dataset-N.jsonl` for each run. A word is a token, so a row has exactly 256 tokens, and the
assistant writes 102 of them. `together` trains all runs by `python -m worker.train`. `sequence`
does the same, and trains with PEFT in a plain loop, one process per run: `--alone` of them are
measured, the rest is stated by multiplication. `one` is `python -m worker.train` on one run.
`--share` is the part of each run's 64k tokens that is trained: the case then also states the time
of the whole, `all_64k_s`, from the time before the first step and the measured rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.machine import commit, write_result

RESULTS = Path(__file__).parent / "results" / "training-h200.json"
TOKENS = 65_536
BATCH = 8
LENGTH, ANSWER = 256, 102
#: Tokens of a row that are no words: a mark before and one after each message.
_MARKS = ("<|user|>", "<|assistant|>", "<|end|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
_LAYERS_A_FILE = 8
Event = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocabulary: int = 128256
    layers: int = 32


#: A decoder for trying this file.
TINY = Shape(hidden=64, inner=96, heads=4, kv_heads=2, dim=16, vocabulary=160, layers=2)


def config_fields(shape: Shape) -> dict[str, Any]:
    """Return the config.json of a base of this shape."""
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


class Runs:
    """The jobs of one measurement, below FOLDER/work."""

    def __init__(self, folder: Path, num: int, share: float) -> None:
        self.base, self.num, self.share = folder / "base", num, share
        self.rows = max(BATCH, round(share * TOKENS / LENGTH))
        self.work = folder / f"work-{os.getpid()}"
        self.work.mkdir()
        self.jobs = [self._job(folder, number) for number in range(num)]

    @property
    def tokens(self) -> int:
        """Of each run."""
        return self.rows * LENGTH

    def dataset(self, number: int) -> Path:
        return self.work / f"dataset-{number}.jsonl"

    def _job(self, folder: Path, number: int) -> Path:
        with (folder / f"dataset-{number}.jsonl").open() as whole:
            self.dataset(number).write_text("".join(itertools.islice(whole, self.rows)))
        path = self.work / f"job-{number}.json"
        fields = {
            "base_model_dir": str(self.base),
            "dataset": str(self.dataset(number)),
            "output_dir": str(self.work / f"adapter-{number}"),
            "hyperparameters": {"seed": number, "batch_size": BATCH, "max_length": LENGTH},
        }
        path.write_text(json.dumps(fields))
        return path


def events_of(module: str, *arguments: str) -> Iterator[tuple[float, Event]]:
    """Run `python -m module`; yield its events, each with the seconds since its process began."""
    began = time.perf_counter()
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield time.perf_counter() - began, json.loads(line)
    if child.returncode != 0:
        sys.exit(f"{module} ended with {child.returncode}")
    yield time.perf_counter() - began, {"event": "ended"}


def run_together(runs: Runs, options: argparse.Namespace) -> Event:
    """Train all runs by `worker.train`; what took how long."""
    first: dict[str, float] = {}
    tokens: dict[str, float] = {}
    kinds: Counter[str] = Counter()
    marks: list[tuple[float, int]] = []
    given = [f"--checkpoints={runs.work / 'checkpoints'}", *map(str, runs.jobs), "--checkpoint-s"]
    step_tokens = min(BATCH, runs.rows) * LENGTH
    for second, event in events_of("worker.train", *given, str(options.checkpoint_s)):
        kind = event["event"]
        kinds[kind] += 1
        first.setdefault(kind, second)
        if kind in ("error", "later"):
            print(json.dumps(event), file=sys.stderr, flush=True)
        if kind == "done":
            shutil.rmtree(event["output"])  # 168 MB each
        if kind == "progress":
            run = event["run"]
            tokens[run] = tokens.get(run, 0) + step_tokens
            marks.append((second, step_tokens))
        last = second
    total = runs.num * runs.tokens
    assert kinds["done"] == runs.num and sum(tokens.values()) == total, (kinds, tokens)
    # Without the steps of the first quarter, in which runs begin, and of the last one.
    quarter = len(marks) // 4
    steady = marks[quarter : 3 * quarter + 1]
    rate = sum(each for _, each in steady[1:]) / (steady[-1][0] - steady[0][0])
    whole_rate = total / (marks[-1][0] - first["progress"])
    before, after = first["progress"], last - marks[-1][0]
    case = {
        "case": f"{runs.num} runs x {runs.tokens // 1024}k tokens, worker.train",
        "runs": runs.num,
        "tokens": total,
        "tok_s": round(total / last),
        "steady_tok_s": round(rate),
        "seconds": round(last, 1),
        "first_started_s": round(first["started"], 1),
        "first_step_s": round(before, 1),
        "last_step_s": round(marks[-1][0], 1),
        "ended_s": round(last, 1),
        "ten_rates": ten_rates(marks),
    }
    if runs.share < 1:
        case["all_64k_s"] = round(before + runs.num * TOKENS / whole_rate + after)
    return case


def ten_rates(marks: list[tuple[float, int]]) -> list[int]:
    """Tokens a second in each tenth of the time."""
    start, end = marks[0][0], marks[-1][0]
    width = (end - start) / 10 or 1.0
    sums = [0] * 10
    for second, tokens in marks[1:]:
        sums[min(9, int((second - start) / width))] += tokens
    return [round(each / width) for each in sums]


def read_rows(path: Path, tokenizer: Any) -> torch.Tensor:
    """[rows, LENGTH]; the last ANSWER tokens of each are the assistant's."""
    with path.open() as file:
        chats = [json.loads(line)["messages"] for line in file]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    rows = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    assert rows.shape[1] == LENGTH
    return rows


def train_with_peft(base: str, dataset: str, adapter: str) -> None:
    """Train one run as quickly as PEFT's users do; print one event when the adapter is written.

    SDPA, bfloat16, logits of answer tokens alone, nothing recomputed, batches of 8 rows.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(base)
    loaded = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, attn_implementation="sdpa", device_map={"": device}
    )
    rows = read_rows(Path(dataset), tokenizer)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        loaded, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=targets)
    )
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, fused=device == "cuda")
    decoder, head = loaded.get_decoder(), loaded.get_output_embeddings()
    marks = [time.perf_counter()]
    for first in range(0, len(rows), BATCH):
        ids = rows[first : first + BATCH].to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            # The rows have one length: without a mask SDPA takes its fastest way.
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
            logits = head(hidden[:, -ANSWER - 1 : -1])
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, -ANSWER:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        marks.append(time.perf_counter())
    model.save_pretrained(adapter)
    steps = sorted(later - earlier for earlier, later in itertools.pairwise(marks))
    print(json.dumps({
        "event": "done",
        "loaded_s": round(marks[0] - began, 1),
        "first_step_s": round(marks[1] - marks[0], 2),
        "step_s": round(steps[len(steps) // 2], 3),
        "saved_s": round(time.perf_counter() - marks[-1], 1),
    }))  # fmt: skip


def run_peft(runs: Runs, number: int) -> Event:
    """One run by PEFT's plain loop, in a process of its own."""
    done: Event = {}
    adapter = str(runs.work / f"peft-{number}")
    for second, event in events_of(
        "bench.training", "--peft", str(runs.base), str(runs.dataset(number)), adapter
    ):
        if event["event"] == "done":
            done = event
        last = second
    return {**done, "seconds": last}


def run_sequence(runs: Runs, options: argparse.Namespace) -> Event:
    """All runs together, against PEFT's loop one run after the other."""
    alone = [run_peft(runs, number) for number in range(options.alone)]
    print(json.dumps(alone), flush=True)
    # The first reads the base for the first time, if nothing did.
    each = min(one["seconds"] for one in alone)
    together = run_together(runs, options)
    return {
        **together,
        "case": f"{runs.num} runs x {runs.tokens // 1024}k tokens in sequence",
        "peft_runs": alone,
        "peft_run_s": round(each, 1),
        "peft_all_s": round(each * runs.num),
        "peft_stated_by": f"{runs.num} x the fastest of {options.alone} whole runs",
        "times": round(each * runs.num / together["seconds"], 2),
    }


def run_one(runs: Runs, options: argparse.Namespace) -> Event:
    """One run by itself."""
    seen = [(second, event) for second, event in events_of("worker.train", str(runs.jobs[0]))]
    steps = [second for second, event in seen if event["event"] == "progress"]
    return {
        "case": f"1 run x {runs.tokens // 1024}k tokens, worker.train",
        "runs": 1,
        "tokens": runs.tokens,
        "tok_s": round(runs.tokens / seen[-1][0]),
        "first_step_s": round(steps[0], 1),
        "step_s": round((steps[-1] - steps[0]) / max(1, len(steps) - 1), 3),
        "seconds": round(seen[-1][0], 1),
    }


def make_files(folder: Path, num: int, *, is_tiny: bool) -> None:
    shape = TINY if is_tiny else Shape()
    make_base(folder / "base", shape)
    for run in range(num):
        make_dataset(folder / f"dataset-{run}.jsonl", TOKENS // LENGTH, shape.vocabulary, run)


CASES = {"together": run_together, "sequence": run_sequence, "one": run_one}


def add_case(path: Path, case: Event) -> None:
    """Put a case into a report, in the place of one of that name."""
    report = json.loads(path.read_text()) if path.exists() else {"cases": []}
    cases = [each for each in report["cases"] if each["case"] != case["case"]]
    report["cases"] = [*cases, {**case, "commit": commit()}]
    write_result(path, report)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--case", choices=["files", *CASES])
    parser.add_argument("--runs", type=int)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--alone", type=int, default=2)
    parser.add_argument("--checkpoint-s", type=float, default=60.0)
    parser.add_argument("--tiny", action="store_true", help="a decoder for trying this file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peft", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peft:
        train_with_peft(*options.peft)
        return
    if not (options.folder and options.case):
        parser.error("name a folder and a case")
    num = options.runs or {"sequence": 64, "one": 1}.get(options.case, 100)
    if options.case == "files":
        make_files(options.folder, num, is_tiny=options.tiny)
        return
    runs = Runs(options.folder, num, options.share)
    try:
        case = CASES[options.case](runs, options)
    finally:
        shutil.rmtree(runs.work)
    print(json.dumps(case), flush=True)
    add_case(options.out, case)


if __name__ == "__main__":
    main()
