"""DashEngine: the engine as a Python library, for scripts and notebooks.

    engine = DashEngine("path/to/base", DashConfig(adapter_vram_pool="2GB"))
    engine.register_adapter("finance", "path/to/peft-adapter")
    engine.generate(["…", "…"], active_adapters=["finance", {"tone": 0.3, "domain": 0.7}])

All methods may be called from any thread. The engine runs on a thread of its own; all calls share
one continuous batch, in which each prompt has its own adapters.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.dash.adapters import AdapterNames, NamedAdapter, digest_of
from engine.dash.config import DashConfig
from engine.dash.hub import BASE_FILES, NotOnHub, fetch, find_id
from engine.dash.loop import EngineLoop
from engine.dash.prompts import Prompt, PromptReader, as_prompts
from engine.dash.run import Completion, Job, Piece, Run
from engine.dash.stats import DashStats, dash_stats
from engine.engine import Engine
from engine.errors import EngineError, RequestError, UnsupportedModel
from engine.request import SamplingParams, is_finite
from engine.text.token_pieces import TokenPieces

# One prompt's adapters: none, one by name, or several by name with weights.
Adapters = str | Mapping[str, float] | None

_GREEDY = SamplingParams(temperature=0.0)


class DashEngine:
    """A base model in memory and any number of named adapters beside it.

    base       a Hugging Face model folder; a model's id on the Hub, `org/name` or
               `org/name@revision`; or a loaded AutoModelForCausalLM: its weights are used where
               they are, and it keeps working
    tokenizer  a fast one of Hugging Face; None: that of the folder, or of the folder that the model
               was loaded from; without a tokenizer, prompts are token ids
    revision   of an id: a branch, a tag or a commit; None: the id's own, or else the main branch

    Raises UnsupportedModel, which names the reason, if the decoder does not support the model, or
    if the Hub does not have it or cannot be reached.
    """

    def __init__(
        self,
        base: Any,
        config: DashConfig | None = None,
        *,
        tokenizer: Any = None,
        revision: str | None = None,
    ) -> None:
        self._config = config or DashConfig()
        is_folder = isinstance(base, str | Path)
        if revision is not None and not is_folder:
            raise ValueError("a loaded model has no revision: leave revision out")
        folder = (
            _find_folder(base, revision) if is_folder else Path(getattr(base, "name_or_path", ""))
        )
        self.tokenizer: Any = _find_tokenizer(folder) if tokenizer is None else tokenizer
        self._pieces = None if self.tokenizer is None else _pieces_of(self.tokenizer)
        self._reader = PromptReader(self.tokenizer)
        if is_folder:
            self._engine_config = self._config.engine_config(folder)
            make = partial(
                Engine, self._engine_config, tokenizer=self.tokenizer, digest_of=digest_of
            )
        else:
            # Imported late: it imports a thousand modules of transformers, which a folder does not
            # need.
            from engine.model.hf_weights import share_model

            shared = share_model(base, may_pack=self._config.pack_weights)
            self._engine_config = self._config.engine_config(folder, shared.device, shared.dtype)
            make = partial(
                Engine,
                self._engine_config,
                model=shared.config,
                weights=shared.weights,
                tokenizer=self.tokenizer,
                digest_of=digest_of,
            )
        self._loop = EngineLoop(make)
        self.model = self._loop.model
        offload_dir = self._config.offload_dir
        self._names = AdapterNames(self._loop, None if offload_dir is None else Path(offload_dir))
        self._ids = itertools.count(1)
        # Ends the threads of an engine that nobody holds any more, and all at exit.
        self._finalizer = weakref.finalize(self, _close, self._names, self._loop)

    def register_adapter(self, name: str, path: str | Path, *, revision: str | None = None) -> None:
        """Register the PEFT folder `path` as `name`, in place of a former one; return at once.

        If there is no such folder, `path` may be an id on the Hub, `org/name` or
        `org/name@revision`; `revision` is a branch, a tag or a commit.
        The adapter is checked in the background, and read into host memory if `host_cache` has
        room; requests that name it wait for the check. If it fails, they end with its error, and
        `stats` shows it. Earlier requests keep the former adapter.
        """
        self._names.register(name, path, revision)

    def unregister_adapter(self, name: str) -> None:
        """Forget the name, and the adapter if it has no other name; raises UnknownAdapter.

        Earlier requests keep it.
        """
        self._names.unregister(name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        active_adapters: Adapters | Sequence[Adapters] = None,
        *,
        max_new_tokens: int | Sequence[int] = 256,
        n: int = 1,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        json_schema: str | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continue every prompt; return the completions in the prompts' order.

        An error of one prompt or of its adapters is in its completion's `error` and does not affect
        the others. An exception, such as Ctrl-C, cancels all requests of the call.

        prompts          one or several, each of text, token ids (a list, an array, a tensor) or
                         the messages of a chat
        active_adapters  for all prompts alike, or one for each: a name, a blend, or None
        max_new_tokens   for all prompts alike, or one for each
        n                continuations of each prompt; the others are the first's `alternatives`
        sampling         greedy unless given; `max_new_tokens` takes precedence over its max_tokens
        stop             the text ends before the first of these
        json_schema      the text obeys it, as far as decoding can ensure that; `schema_error` of
                         each completion says whether it does
        progress         show a progress bar; None: if stderr is a terminal
        """
        run = self._run(
            prompts, active_adapters, max_new_tokens, sampling, n, _as_stops(stop), json_schema
        )
        is_shown = sys.stderr.isatty() if progress is None else progress
        with run, _ProgressBar(run, is_shown) as bar:
            for indices in run.changes():
                bar.update(indices)
        return run.completions

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        active_adapters: Adapters | Sequence[Adapters] = None,
        *,
        max_new_tokens: int | Sequence[int] = 256,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        json_schema: str | None = None,
    ) -> Iterator[Piece]:
        """Continue every prompt as `generate` does; yield the text piece by piece.

        Closing the iterator cancels the requests that have not ended.
        """
        run = self._run(
            prompts, active_adapters, max_new_tokens, sampling, 1, _as_stops(stop), json_schema
        )
        return _pieces(run)

    def stats(self) -> DashStats:
        """Return the state of the engine and its adapters now; prints as a summary."""
        names, config = self._names, self._engine_config
        return self._loop.call(lambda engine: dash_stats(names.all(), engine, config)).result()

    def close(self) -> None:
        """End the engine's threads; running and later calls raise RuntimeError."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self._engine_config
        adapters = len(self._names.all())
        return (
            f"DashEngine({str(config.model_dir)!r}, {config.device}, {config.dtype_name}, "
            f"{adapters} adapters)"
        )

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        active_adapters: Adapters | Sequence[Adapters],
        max_new_tokens: int | Sequence[int],
        sampling: SamplingParams | None,
        n: int,
        stop: tuple[str, ...],
        json_schema: str | None,
    ) -> Run:
        prompts = as_prompts(prompts)
        adapters = _spread(active_adapters, len(prompts))
        lengths = _spread_lengths(max_new_tokens, len(prompts))
        if n < 1:
            raise ValueError(f"n is {n}; it must be 1 or more")
        if stop or json_schema is not None:
            self._reader.need_tokenizer("stop strings and JSON schemas")
        base = sampling or _GREEDY
        samplings = {length: replace(base, max_tokens=length) for length in set(lengths)}
        jobs = []
        for prompt, own, length in zip(prompts, adapters, lengths, strict=True):
            token_ids: list[int] = []
            is_chat = False
            found: dict[NamedAdapter, float] = {}
            error: EngineError | None = None
            try:
                token_ids, is_chat = self._reader.read(prompt)
                found = self._find(own)
            except EngineError as problem:
                error = problem
            jobs.append(
                Job(
                    request_id=str(next(self._ids)),
                    token_ids=token_ids,
                    sampling=samplings[length],
                    n=n,
                    json_schema=json_schema,
                    adapters=found,
                    is_chat=is_chat,
                    error=error,
                )
            )
        return Run(self._loop, self._names, self._pieces, jobs, stop)

    def _find(self, adapters: Adapters) -> dict[NamedAdapter, float]:
        """Look up names with their weights; raises UnknownAdapter or RequestError."""
        weights = {adapters: 1.0} if isinstance(adapters, str) else adapters or {}
        if not isinstance(weights, Mapping):
            problem = f"{weights!r} is neither an adapter's name nor names with weights"
            raise RequestError(problem, param="active_adapters")
        for name, weight in weights.items():
            if not is_finite(weight):
                problem = f"the weight of {name!r} is {weight!r}, not a finite number"
                raise RequestError(problem, param="active_adapters")
        return {self._names.find(name): float(weight) for name, weight in weights.items()}


class _ProgressBar:
    """Prompts done and tokens per second, on stderr."""

    def __init__(self, run: Run, is_shown: bool) -> None:
        self._run = run
        self._bar: Any = None
        if is_shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=len(run.completions), unit="prompt", dynamic_ncols=True)
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, indices: list[int]) -> None:
        if self._bar is None:
            return
        rate = self._run.num_tokens / max(time.monotonic() - self._started, 1e-6)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(self._run.num_ended - self._bar.n)


def _pieces(run: Run) -> Iterator[Piece]:
    with run:
        yield from run.pieces()


def _close(names: AdapterNames, loop: EngineLoop) -> None:
    loop.close()
    names.close()


def _find_folder(base: str | Path, revision: str | None) -> Path:
    """Return the folder itself, or that of a model on the Hub; raises UnsupportedModel."""
    hub_id = find_id(base, revision)
    if hub_id is None:
        return Path(base)
    try:
        return fetch(hub_id, BASE_FILES)
    except NotOnHub as error:
        raise UnsupportedModel(str(error)) from error


def _find_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, or of a model's name; None if there is none."""
    if str(folder) in ("", "."):
        return None
    from transformers import AutoTokenizer  # takes a second, which `import lora_dash` need not

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError):
        return None


def _pieces_of(tokenizer: Any) -> TokenPieces:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"the tokenizer is a {type(tokenizer).__name__}, not a fast one, which a "
            "tokenizer.json describes"
        )
    return TokenPieces(tokenizer.backend_tokenizer)


def _as_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(each, str) and each for each in stops):
        raise ValueError(f"stop has to be strings of one character or more, not {stop!r}")
    return stops


def _spread(adapters: Adapters | Sequence[Adapters], count: int) -> list[Adapters]:
    if adapters is None or isinstance(adapters, str | Mapping):
        return [adapters] * count
    if len(adapters) != count:
        raise ValueError(f"{len(adapters)} active_adapters for {count} prompts")
    return list(adapters)


def _spread_lengths(lengths: int | Sequence[int], count: int) -> list[int]:
    if not isinstance(lengths, Sequence):
        return [lengths] * count
    if len(lengths) != count:
        raise ValueError(f"{len(lengths)} max_new_tokens for {count} prompts")
    return list(lengths)
