"""Measure what drafts give on this machine's CPU, with the demo's trained adapters.

    python -m bench.drafts [--trained FOLDER] [--prompts 8] [--repeats 5] [--out FILE]
                           [--clock wall|cpu] [--only TEXT] [--train-heads]

Every case runs the same greedy requests with drafts off and on, next to each other in each round.
Acceptance is real: the base is SmolLM2-135M-Instruct, the adapters are those that `make demo`
trains, the prompts are the demo's held-out ones. "zero" asks an untrained adapter for tokens drawn
at the highest temperature, where hardly any draft is right. Each mode keeps one engine, which has
learned from an adapter's earlier answers, as in a worker. Prints a table and one JSON line per
case, writes bench/results/drafts-cpu.json, and exits with 1 if a bar is missed. `other_answers`
counts answers that drafts changed: logits of another batch are rounded differently, which tips a
token only where two are as close as that. `--clock cpu` compares processor time, for a busy
machine: with OMP_NUM_THREADS=1 it is the time that one core works. `--train-heads` first trains the
support voice with draft heads, as the demo trains it without, into FOLDER/globex-heads; the case
"with heads" is measured where that is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from bench.cpu import BASE_MODELS
from bench.machine import environment, write_result
from bench.workload import random_prompts, save_random_adapter
from demo.ask import INVOICE_SCHEMA
from demo.data.jobs import HYPERPARAMETERS
from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from worker.base_model import packaged_model

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "drafts-cpu.json"
MAX_TOKENS = 100
#: Folder of the support voice with draft heads, among the trained adapters; number of its heads.
HEADED, NUM_HEADS = "globex-heads", 3
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one adapter.

    batch     requests at a time
    at_least  the smallest ratio of times without drafts to those with; None: only reported
    """

    name: str
    adapter: str
    batch: int
    has_schema: bool = False
    temperature: float = 0.0
    at_least: float | None = None

    @property
    def full_name(self) -> str:
        return f"{self.name}, {self.batch} at a time"


CASES = (
    Case(name="invoices, schema", adapter="acme", batch=1, has_schema=True, at_least=1.6),
    Case(name="invoices, schema", adapter="acme", batch=4, has_schema=True),
    Case(name="invoices, schema", adapter="acme", batch=16, has_schema=True),
    Case(name="invoices, free", adapter="acme", batch=1),
    Case(name="support voice", adapter="globex", batch=1),
    Case(name="support voice with heads", adapter=HEADED, batch=1, at_least=1.3),
    Case(name="zero", adapter="random", batch=1, temperature=2.0, at_least=0.98),
    Case(name="zero", adapter="random", batch=16, temperature=2.0, at_least=0.98),
)


class Mode:
    """An engine with drafts, or one without."""

    def __init__(
        self, model_dir: Path, adapters: dict[str, Path], *, speculation: bool, clock: str
    ) -> None:
        self.clock = clock
        # Without the prefix cache, so that every repeat is computed.
        config = EngineConfig(model_dir=model_dir, prefix_cache=False, speculation=speculation)
        self.engine = Engine(config)
        for name, path in adapters.items():
            self.engine.register_adapter(name, path)
        self.engine.prepare_grammars().result()

    def run(self, case: Case, prompts: list[list[int]]) -> tuple[float, int, int, dict[str, Any]]:
        """Return (seconds of decoding, tokens, accepted drafts, token ids by request)."""
        answers: dict[str, Any] = {}
        seconds, tokens, accepted = 0.0, 0, 0
        schema = json.dumps(INVOICE_SCHEMA) if case.has_schema else None
        sampling = SamplingParams(temperature=case.temperature, max_tokens=MAX_TOKENS, seed=1)
        for first in range(0, len(prompts), case.batch):
            start = CLOCKS[self.clock]()
            for i, prompt in enumerate(prompts[first : first + case.batch], first):
                part = AdapterPart(digest=case.adapter)
                self.engine.add(
                    Request(
                        request_id=str(i),
                        token_ids=prompt,
                        sampling=sampling,
                        adapters=(part,),
                        json_schema=schema,
                    )
                )
            while self.engine.has_work():
                for output in self.engine.step():
                    answers.setdefault(output.request_id, []).extend(output.token_ids)
                    if output.finish_reason is not None:
                        assert output.error is None, output.error
                        tokens += output.num_generated
                        accepted += output.num_accepted_drafts
            seconds += CLOCKS[self.clock]() - start
        return seconds, tokens, accepted, answers


def train_heads(model_dir: Path, target: Path) -> None:
    """Train the support voice with draft heads, unless it is there."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    hyper = HYPERPARAMETERS["globex"] | {"draft_heads": NUM_HEADS}
    job = {
        "base_model_dir": str(model_dir),
        "dataset": str(ROOT / "demo" / "data" / "globex.jsonl"),
        "output_dir": str(target),
        "hyperparameters": hyper,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        subprocess.run([sys.executable, "-m", "worker.train", str(path)], check=True, cwd=ROOT)


def held_out(tokenizer: Any, tenant: str, count: int) -> list[list[int]]:
    """Return `count` prompts that a tenant holds out; they repeat if there are fewer."""
    name = tenant.partition("-")[0]
    lines = (ROOT / "demo" / "data" / f"{name}.heldout.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return [
        tokenizer.apply_chat_template(
            chats[i % len(chats)], add_generation_prompt=True, return_dict=False
        )
        for i in range(count)
    ]


def measure(modes: dict[bool, Mode], case: Case, prompts: list[list[int]], repeats: int) -> Any:
    """Return a case as the result file has it."""
    times: dict[bool, list[float]] = {False: [], True: []}
    per_step, num_other = 1.0, 0
    for repeat in range(repeats + 1):  # the first one warms up, and teaches what choices there are
        found = {on: mode.run(case, prompts) for on, mode in modes.items()}
        num_other = sum(answer != found[False][3][key] for key, answer in found[True][3].items())
        for on, (seconds, tokens, accepted, _) in found.items():
            if repeat:
                times[on].append(1000 * seconds / tokens)
            if on:
                per_step = tokens / (tokens - accepted)
    ratios = [off / on for off, on in zip(times[False], times[True], strict=True)]
    ratio = statistics.median(ratios)
    return {
        "case": case.full_name,
        "ms_token": round(statistics.median(times[True]), 2),
        "ms_token_off": round(statistics.median(times[False]), 2),
        "tokens_per_step": round(per_step, 2),
        "other_answers": num_other,
        "ratio": round(ratio, 3),
        "rounds": [round(value, 3) for value in ratios],
        "acceptance": "none, planted" if case.name == "zero" else "real",
        "at_least": case.at_least,
        "passed": case.at_least is None or ratio >= case.at_least,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what drafts give on a CPU.")
    parser.add_argument("--trained", type=Path, default=ROOT / ".demo" / "trained")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--clock", choices=[*CLOCKS], default="wall")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--train-heads", action="store_true", help="first, where they are not yet")
    args = parser.parse_args()
    result = environment("bench.drafts")
    result["threads"], result["clock"] = torch.get_num_threads(), args.clock
    model_dir = packaged_model(BASE_MODELS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    if args.train_heads:
        train_heads(model_dir, (args.trained / HEADED).resolve())
    lacking = set() if (args.trained / HEADED).is_dir() else {HEADED}
    cases = [case for case in CASES if args.only in case.full_name and case.adapter not in lacking]
    names = {case.adapter for case in cases} - {"random"}
    adapters = {name: args.trained / name for name in sorted(names)}
    with tempfile.TemporaryDirectory() as folder:
        plain = Mode(model_dir, adapters, speculation=False, clock=args.clock)
        modes = {
            False: plain,
            True: Mode(model_dir, adapters, speculation=True, clock=args.clock),
        }
        path = save_random_adapter(Path(folder) / "random", plain.engine.model, rank=16, seed=0)
        for mode in modes.values():
            mode.engine.register_adapter("random", path)
        result["cases"] = []
        for case in cases:
            prompts = random_prompts(args.prompts, 64, plain.engine.model.vocab_size)
            if case.adapter != "random":
                prompts = held_out(tokenizer, case.adapter, args.prompts)
            result["cases"].append(measure(modes, case, prompts, args.repeats))
            print(json.dumps(result["cases"][-1]), flush=True)
    print(f"\n{'':34}{'ms/token':>10}{'off':>8}{'tokens/step':>13}{'ratio':>8}{'bar':>7}")
    for own in result["cases"]:
        bar = "" if own["at_least"] is None else f"{own['at_least']:.2f}"
        print(
            f"{own['case']:34}{own['ms_token']:10.2f}{own['ms_token_off']:8.2f}"
            f"{own['tokens_per_step']:13.2f}{own['ratio']:8.2f}{bar:>7}"
            f"{'' if own['passed'] else '  MISSED'}"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, result)
    return 0 if all(own["passed"] for own in result["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
