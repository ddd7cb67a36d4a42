"""Check that a PEFT adapter fits a base model, at upload and again when the engine loads it.

Fails closed: every tensor of the file is consumed exactly once, every tensor that the config asks
for is there, and every shape fits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from contract.adapter_problems import AdapterProblems, Problem, shown
from contract.base_shape import EMBEDDING, HEAD, BaseShape
from contract.draft_heads import DraftHead, fit_heads, is_head_tensor, medusa_problem
from contract.peft_config import FILE as CONFIG_FILE
from contract.peft_config import SAVE_FIELD, TOKENS_FIELD, LoraConfig
from contract.safetensors_header import FILE as TENSORS_FILE

_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\."
    r"(?P<linear>(?:self_attn|mlp)\.[a-z_]+)|model\.embed_tokens|lm_head)\."
    r"(?:(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?P<leaf>\.weight|\.bias|)|(?P<rows>token_adapter\.trainable_tokens_delta)"
    r"(?:\.default)?|(?P<base>base_layer\.)?weight)",
    re.ASCII,
)
# The tensors of a module: those of LoRA; one that is there whole, and some of its rows. PEFT
# repeats the base's matrix beside an adapted embedding or head: whether the copy is the base's is
# seen where the base is.
_MAGNITUDE, _BIAS = "lora_magnitude_vector", "lora_B.bias"
_MATRIX, _ROWS, _COPY = "weight", "token_adapter.trainable_tokens_delta", "base_layer.weight"
Shape = tuple[int, ...]
_Key = tuple[str, str]  # (a module's dotted path, which of its tensors)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedMatrix:
    """The LoRA of one matrix of the base, and its tensors in the file.

    scaling    what B A x is multiplied by
    a_name     A [rank, in]
    b_name     B [out, rank]
    magnitude  [out], of DoRA; None: plain LoRA
    bias       [out], added to B A x before it is scaled; None: there is none
    """

    rank: int
    scaling: float
    a_name: str
    b_name: str
    magnitude: str | None
    bias: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedAdapter:
    """The changes of an adapter to its base: modules by dotted path, in the base's order.

    matrices      what LoRA changes
    new_rows      modules with new rows, of some tokens or all -> the tensor
    token_ids     of those with some new rows: which
    copies        tensors that repeat a matrix of the base and must equal it -> the module
    is_tied       PEFT made the head's A and B from the embedding's; they must agree
    is_head_tied  the head takes the embedding's new rows; where both are in the file they agree
    draft_heads   see `contract.draft_heads`
    """

    matrices: Mapping[str, AdaptedMatrix]
    new_rows: Mapping[str, str]
    token_ids: Mapping[str, Shape]
    copies: Mapping[str, str]
    is_tied: bool
    is_head_tied: bool
    draft_heads: tuple[DraftHead, ...] = ()

    @property
    def ranks(self) -> set[int]:
        """Return the ranks of all matrices A."""
        return {matrix.rank for matrix in self.matrices.values()}


def fit_adapter(config: LoraConfig, shapes: Mapping[str, Shape], base: BaseShape) -> FittedAdapter:
    """Return the changes of an adapter.

    shapes  tensor name -> its shape
    Raises AdapterProblems with everything that does not fit.
    """
    return _Fitting(config, shapes, base).result()


@dataclasses.dataclass(frozen=True, slots=True)
class _NewRows:
    """The new rows that a config asks for over a base.

    shapes        (module, _MATRIX or _ROWS) -> the shape of the tensor that must be there
    saved         modules that are replaced whole, and so not adapted
    unadapted     modules over which LoRA, or at least DoRA, cannot lie
    """

    shapes: Mapping[_Key, Shape]
    token_ids: Mapping[str, Shape]
    saved: frozenset[str]
    unadapted: frozenset[str]
    is_head_tied: bool


class _Fitting:
    """The fit of one adapter over one base; faults are added to `problems`."""

    def __init__(self, config: LoraConfig, shapes: Mapping[str, Shape], base: BaseShape) -> None:
        self._config, self._base = config, base
        self._shapes = {name: of for name, of in shapes.items() if not is_head_tensor(name)}
        self._draft_heads, self._problems = fit_heads(shapes, base.hidden)
        self._modules = {module: layer for module, layer, _ in base.modules()}
        self._adapted = config.over(self._modules)
        self._is_tied = config.ensure_weight_tying and base.is_tied

    def result(self) -> FittedAdapter:
        self._check_targets()
        self._check_biases()
        rows = self._new_rows()
        found = self._found()
        wanted = self._wanted(rows, found)
        size = (self._base.vocab, self._base.hidden)
        copied = {EMBEDDING, HEAD} - {module for module, _ in rows.shapes}
        copies = {(module, part): size for module in copied for part in (_COPY, _MATRIX)}
        for key, name in found.items():
            shape = wanted.get(key) or rows.shapes.get(key, copies.get(key))
            if shape is None:
                self._refuse(key, name, wanted, rows)
            elif self._shapes[name] != shape:
                message = f"its shape is {list(self._shapes[name])}; {self._needs(*key)}"
                self._complain_of(name, f"{message} {list(shape)}")
        self._check_complete(wanted, rows, found)
        if self._problems:
            raise AdapterProblems(self._problems)
        modules = dict.fromkeys(module for module, _ in wanted)
        return FittedAdapter(
            matrices={module: self._matrix(module, found) for module in modules},
            new_rows={key[0]: found[key] for key in rows.shapes},
            token_ids=rows.token_ids,
            copies={found[key]: key[0] for key in copies if key in found},
            is_tied=self._is_tied and HEAD in modules,
            is_head_tied=rows.is_head_tied,
            draft_heads=self._draft_heads,
        )

    def _complain(self, field: str, message: str) -> None:
        self._problems.append(Problem(CONFIG_FILE, field, message))

    def _complain_of(self, name: str, message: str) -> None:
        self._problems.append(Problem(TENSORS_FILE, shown(name), message))

    def _check_targets(self) -> None:
        if not self._adapted.targets:
            names = ", ".join(dict.fromkeys(module.split(".")[-1] for module in self._modules))
            message = "of what it names and exclude_modules leaves, nothing can be adapted"
            self._complain("target_modules", f"{message}; these can: {names}")

    def _check_biases(self) -> None:
        """Refuse trained biases of the base, which are not applied, unless the base has none."""
        mode = self._config.bias
        for module, layer in self._modules.items():
            is_trained = mode == "all" or (mode == "lora_only" and module in self._adapted.targets)
            if is_trained and layer is not None and module.split(".", 3)[3] in self._base.biased:
                message = f"it is {mode}, and the base's {module} has a bias: train with bias none"
                self._complain("bias", message)
                break

    def _new_rows(self) -> _NewRows:
        """Source: set_additional_trainable_modules in peft/utils/other.py."""
        base, is_head_tied = self._base, False
        saved, token_ids = self._config.saved, dict(self._config.token_ids)
        if self._is_tied and saved:  # PEFT saves both, as one
            saved, is_head_tied = frozenset((EMBEDDING, HEAD)), True
        changed, unadapted = set(token_ids), set(token_ids)
        if base.is_tied and EMBEDDING in token_ids:
            changed.add(HEAD)
            is_head_tied = token_ids.get(HEAD, token_ids[EMBEDDING]) == token_ids[EMBEDDING]
            if is_head_tied:  # the head takes the embedding's rows
                token_ids.pop(HEAD, None)
                unadapted = changed if self._config.use_dora else {EMBEDDING}
            elif self._is_tied:
                self._complain(TOKENS_FIELD, "ensure_weight_tying needs the same tokens of both")
        for module in sorted(saved & changed):
            self._complain(TOKENS_FIELD, f"modules_to_save replaces {module} whole")
        for ids in token_ids.values():
            unknown = next((token for token in ids if not 0 <= token < base.vocab), None)
            if unknown is not None:
                message = f"{shown(unknown)} is no token of the base model, which has {base.vocab}"
                self._complain(TOKENS_FIELD, message)
        shapes = {(module, _MATRIX): (base.vocab, base.hidden) for module in sorted(saved)}
        shapes |= {(module, _ROWS): (len(ids), base.hidden) for module, ids in token_ids.items()}
        return _NewRows(shapes, token_ids, saved, frozenset(unadapted), is_head_tied)

    def _found(self) -> dict[_Key, str]:
        """Return the tensors of the file that an adapter may have."""
        found: dict[_Key, str] = {}
        for name in self._shapes:
            key = _key(name)
            if key is None and (medusa := medusa_problem(name)) is not None:
                self._problems.append(medusa)
            elif key is None:
                message = "it is not a tensor of LoRA or DoRA of a module that can be adapted"
                self._complain_of(name, message)
            elif key in found:
                self._complain_of(name, f"it repeats {found[key]}, under another name")
            else:
                found[key] = name
        return found

    def _wanted(self, rows: _NewRows, found: Mapping[_Key, str]) -> dict[_Key, Shape]:
        """Return the tensors of every adapted module, and their shapes."""
        targets = self._adapted.targets
        if self._config.target_modules is None:  # what the file has is all that is said of them
            there = {module for module, part in found if part.startswith("lora_")}
            targets &= there | ({EMBEDDING} if self._is_tied and HEAD in there else set())
        elif self._is_tied and HEAD in targets - rows.saved and EMBEDDING not in targets:
            message = "it names lm_head and not embed_tokens, to which ensure_weight_tying ties it"
            self._complain("target_modules", message)
        wanted: dict[_Key, Shape] = {}
        for module, _, (width_in, width_out) in self._base.modules():
            # PEFT takes a tied head out of target_modules: it goes where the embedding goes.
            named = EMBEDDING if self._is_tied and module == HEAD else module
            if module in rows.saved or named not in targets:
                continue
            rank, (a, b) = self._adapted.rank(module), _matrices(module)
            wanted |= {(module, a): (rank, width_in), (module, b): (width_out, rank)}
            if self._config.use_dora:
                wanted[module, _MAGNITUDE] = (width_out,)
            if self._config.lora_bias:
                wanted[module, _BIAS] = (width_out,)
            if module in rows.unadapted:
                message = f"it adapts {module}, whose rows trainable_token_indices replaces"
                self._complain("target_modules", message)
        if not wanted and self._adapted.targets:
            self._complain("target_modules", "nothing is adapted: name a module to adapt")
        if (EMBEDDING, _BIAS) in wanted:
            self._complain("lora_bias", "it is not supported for embed_tokens")
        return wanted

    def _needs(self, module: str, part: str) -> str:
        if part == _ROWS:
            return "the base model and trainable_token_indices need"
        if part in (_MATRIX, _COPY):
            return "the base model needs"
        return f"the base model and rank {self._adapted.rank(module)} need"

    def _refuse(self, key: _Key, name: str, wanted: Mapping[_Key, Shape], rows: _NewRows) -> None:
        """Say why a tensor should not be there."""
        module, part = key
        layer, _, linear = module.removeprefix("model.layers.").partition(".")
        if layer.isdecimal() and int(layer) >= self._base.num_layers:
            last = self._base.num_layers - 1
            self._complain_of(name, f"it is of layer {layer}; the base model has 0 to {last}")
        elif layer.isdecimal() and linear not in self._base.linears:
            self._complain_of(name, f"the base model has no linear {shown(linear)}")
        elif part == _ROWS:
            self._complain_of(name, "trainable_token_indices does not name its module")
        elif part in (_MATRIX, _COPY) or module in rows.saved:
            self._complain_of(name, "it is of a module whose rows the adapter replaces")
        elif (module, _matrices(module)[0]) in wanted:
            field = "use_dora" if part == _MAGNITUDE else "lora_bias"
            self._complain_of(name, f"it is there although {field} is off")
        else:
            message = f"it does not name the module of {shown(name)}, or exclude_modules does"
            self._complain("target_modules", message)

    def _check_complete(
        self, wanted: Mapping[_Key, Shape], rows: _NewRows, found: Mapping[_Key, str]
    ) -> None:
        others = {key[0]: name for key, name in found.items() if key in wanted}
        for module, part in wanted:
            if (module, part) not in found:
                message = "it is missing: adapter_config.json asks for it"
                if module in others:
                    message += f", and its counterpart {others[module]} is there"
                self._complain_of(f"base_model.model.{module}.{part}", message)
        for module, part in rows.shapes:
            if (module, part) not in found:
                name = f"base_model.model.{module}.{part}"
                field = SAVE_FIELD if part == _MATRIX else TOKENS_FIELD
                message = f"it asks for {name}, which is missing in {TENSORS_FILE}"
                self._complain(field, message)

    def _matrix(self, module: str, found: Mapping[_Key, str]) -> AdaptedMatrix:
        a, b = _matrices(module)
        return AdaptedMatrix(
            rank=self._adapted.rank(module),
            scaling=self._adapted.scaling(module),
            a_name=found[module, a],
            b_name=found[module, b],
            magnitude=found.get((module, _MAGNITUDE)),
            bias=found.get((module, _BIAS)),
        )


def _matrices(module: str) -> tuple[str, str]:
    """Return PEFT's names of a module's A and B."""
    if module == EMBEDDING:
        return "lora_embedding_A", "lora_embedding_B"
    return "lora_A.weight", "lora_B.weight"


def _key(name: str) -> _Key | None:
    """Return the module and which of its tensors a name means; None if it is no adapter's."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    module, part = match["module"], match["part"]
    if part is None:
        whole = _ROWS if match["rows"] else _COPY if match["base"] else _MATRIX
        return None if match["layer"] else (module, whole)
    if part == _MAGNITUDE:  # ".weight" comes and goes with PEFT's version
        return None if match["leaf"] == ".bias" else (module, part)
    part += match["leaf"]
    known = (*_matrices(module), *([] if module == EMBEDDING else [_BIAS]))
    return (module, part) if part in known else None
