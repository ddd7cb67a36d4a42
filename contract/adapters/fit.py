"""Check that a PEFT adapter fits a base model, at upload and again when the engine loads it.

Fails closed: every tensor of the file is consumed exactly once, every tensor that the config asks
for is there, and every shape fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from contract.adapters.base_shape import EMBEDDING, HEAD, BaseShape
from contract.adapters.classifier import Classifier, fit_classifier, is_classifier_tensor
from contract.adapters.draft_heads import DraftHead, fit_heads, is_head_tensor, medusa_problem
from contract.adapters.families import FUSED, STACKED
from contract.adapters.fit_causes import (
    Faults,
    Shape,
    layers_problem,
    rank_problem,
    vocabulary_problem,
)
from contract.adapters.peft_config import FILE as CONFIG_FILE
from contract.adapters.peft_config import (
    SAVE_FIELD,
    TOKENS_FIELD,
    AdaptedModules,
    LoraConfig,
    is_listed,
)
from contract.adapters.problems import AdapterProblems, Problem, shown
from contract.adapters.safetensors_header import FILE as TENSORS_FILE
from contract.adapters.tensor_names import (
    BESIDE_LORA,
    BESIDE_ROWS,
    BESIDE_SAVED,
    BIAS,
    MAGNITUDE,
    MATRIX,
    PREFIX,
    ROWS,
    SAVED_AGAIN,
    WHOLE,
    Key,
    key_of,
    matrices,
    name_problem,
    plain,
    spelled,
    spelling_of,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedMatrix:
    """The LoRA of one matrix of the base, and its tensors in the file.

    scaling    what B A x is multiplied by
    a_name     A [rank, in]
    b_name     B [out, rank]
    magnitude  [out], of DoRA; None: plain LoRA
    bias       [out], added to B A x before it is scaled; None: there is none
    num_stacked  X experts whose matrices these are: A [X * rank, in] has one after another, B
                 [out, rank * X] every X-th column
    """

    rank: int
    scaling: float
    a_name: str
    b_name: str
    magnitude: str | None
    bias: str | None
    num_stacked: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedAdapter:
    """The changes of an adapter to its base: modules by dotted path, in the base's order.

    matrices      what LoRA changes
    new_rows      modules with new rows, of some tokens or all -> the tensor
    token_ids     of those with some new rows: which
    copies        tensors that repeat a matrix of the base and must equal it -> the module
    unread        tensors that PEFT writes a second time, and does not read
    is_tied       PEFT made the head's A and B from the embedding's; they must agree
    is_head_tied  the head takes the embedding's new rows; where both are in the file they agree
    draft_heads   see `contract.adapters.draft_heads`
    classifier    the head, for the task SEQ_CLS
    """

    matrices: Mapping[str, AdaptedMatrix]
    new_rows: Mapping[str, str]
    token_ids: Mapping[str, Shape]
    copies: Mapping[str, str]
    unread: frozenset[str]
    is_tied: bool
    is_head_tied: bool
    draft_heads: tuple[DraftHead, ...] = ()
    classifier: Classifier | None = None

    @property
    def ranks(self) -> set[int]:
        """Return the ranks of all matrices A."""
        return {matrix.rank for matrix in self.matrices.values()}


def fit_adapter(config: LoraConfig, shapes: Mapping[str, Shape], base: BaseShape) -> FittedAdapter:
    """Return the changes of an adapter.

    shapes  tensor name -> its shape
    Raises AdapterProblems with everything that does not fit.
    """
    return _Fitting(config, shapes, base_for(config, shapes, base)).result()


def base_for(config: LoraConfig, names: Iterable[str], base: BaseShape) -> BaseShape:
    """Return the base with its matrices as the adapter names them.

    names  of the tensors in the file
    """
    keys = [key for name in names if (key := key_of(plain(name, spelling_of([name]))))]
    if base.fuses and any(map(_is_fused, keys)):
        base = base.fused()
    if base.experts is None:
        return base
    if config.target_parameters:
        return dataclasses.replace(base, expert_form="stacked")
    # PEFT stacks adapters of single experts for families that an older transformers kept so. None
    # of these has an MLP beside its experts.
    is_apart = any(map(_is_of_one_expert, keys)) and not any(
        "mlp." in each for each in base.linears
    )
    return dataclasses.replace(base, expert_form="apart") if is_apart else base


def _is_of_one_expert(key: Key) -> bool:
    return ".mlp.experts." in key[0] and not key[0].endswith(".base_layer")


def _is_stack(module: str) -> bool:
    return module.endswith(STACKED)


def _is_fused(key: Key) -> bool:
    return key[0].endswith(tuple(FUSED.values()))


@dataclasses.dataclass(frozen=True, slots=True)
class _NewRows:
    """The new rows that a config asks for over a base.

    shapes        (module, MATRIX or ROWS) -> the shape of the tensor that must be there
    saved         modules that are replaced whole, and so not adapted
    unadapted     modules over which LoRA, or at least DoRA, cannot lie
    """

    shapes: Mapping[Key, Shape]
    token_ids: Mapping[str, Shape]
    saved: frozenset[str]
    unadapted: frozenset[str]
    is_head_tied: bool


class _Fitting:
    """The fit of one adapter over one base; faults are added to `problems`."""

    def __init__(self, config: LoraConfig, shapes: Mapping[str, Shape], base: BaseShape) -> None:
        self._config, self._base = config, base
        self._shapes = {name: of for name, of in shapes.items() if not is_head_tensor(name)}
        self._faults = Faults()
        self._draft_heads, problems = fit_heads(shapes, base.hidden)
        self._faults.add(*problems)
        self._classifier: Classifier | None = None
        if config.is_classifier:
            self._classifier, problems = fit_classifier(shapes, config.labels, base.hidden)
            self._faults.add(*problems)
            own = self._shapes.items()
            self._shapes = {name: of for name, of in own if not is_classifier_tensor(name)}
        self._modules = {module: layer for module, layer, _ in base.modules()}
        self._way = spelling_of(self._shapes) if base.has_images else ""
        self._adapted = self._over(config)
        #: Where PEFT puts an expert stack's tensors -> the stack
        self._stacks = self._stacks_of(self._adapted.targets)
        self._is_tied = config.ensure_weight_tying and base.is_tied

    def _over(self, config: LoraConfig) -> AdaptedModules:
        """Return what the config adapts; its patterns see names as the file spells them."""
        ways = {spelled(module, self._way): module for module in self._modules}
        found = config.over({way: self._modules[module] for way, module in ways.items()})
        # A parameter counts by its name alone: layers and exclude_modules are of modules.
        named = frozenset(config.target_parameters)
        stacks = {way for way, module in ways.items() if _is_stack(module)}
        parameters = {way for way in stacks if is_listed(way, named)}
        for name in sorted(named):
            if any(is_listed(stack, frozenset((name,))) for stack in stacks):
                continue
            known = " and ".join(STACKED) if stacks else "none"
            message = f"{shown(name)} cannot be adapted; of the base model these can: {known}"
            self._complain("target_parameters", message)
        return dataclasses.replace(
            found,
            targets=frozenset(ways[name] for name in found.targets - stacks | parameters),
            ranks={ways[name]: rank for name, rank in found.ranks.items()},
            alphas={ways[name]: alpha for name, alpha in found.alphas.items()},
        )

    def _stacks_of(self, targets: frozenset[str]) -> dict[str, str]:
        """PEFT wraps gate and up of all experts first, and then that with down.

        Source: _inject_parameters in peft/tuners/tuners_utils.py.
        """
        found = {}
        for module in filter(_is_stack, targets):
            experts, _, name = module.rpartition(".")
            is_inner = name == "gate_up_proj" and f"{experts}.down_proj" in targets
            found[f"{experts}.base_layer" if is_inner else experts] = module
        return found

    def result(self) -> FittedAdapter:
        self._check_targets()
        self._check_experts()
        self._check_biases()
        rows = self._new_rows()
        found = self._found()
        wanted = self._wanted(rows, found)
        repeated = self._repeated(rows, wanted)
        self._check_shapes(rows, found, wanted, {**repeated, **rows.shapes, **wanted})
        self._check_complete(wanted, rows, found)
        if problems := self._faults.problems:
            raise AdapterProblems(problems)
        modules = dict.fromkeys(module for module, _ in wanted)
        again = {key: found[key] for key in repeated if key in found}
        return FittedAdapter(
            matrices={module: self._matrix(module, found) for module in modules},
            new_rows={
                **{key[0]: found[key] for key in rows.shapes},
                **{module: name for (module, part), name in again.items() if part == ROWS},
            },
            token_ids=rows.token_ids,
            copies={
                name: module
                for (module, part), name in again.items()
                if part not in (SAVED_AGAIN, ROWS)
            },
            unread=frozenset(name for (_, part), name in again.items() if part == SAVED_AGAIN),
            is_tied=self._is_tied and HEAD in modules,
            is_head_tied=rows.is_head_tied,
            draft_heads=self._draft_heads,
            classifier=self._classifier,
        )

    def _complain(self, field: str, message: str) -> None:
        self._faults.complain(field, message)

    def _complain_of(self, name: str, message: str, kind: str) -> None:
        self._faults.complain_of(name, message, kind)

    def _check_targets(self) -> None:
        if not self._adapted.targets:
            names = ", ".join(dict.fromkeys(module.split(".")[-1] for module in self._modules))
            message = "it names no module that can be adapted and that exclude_modules leaves"
            self._complain("target_modules", f"{message}; these can: {names}")

    def _check_experts(self) -> None:
        """Refuse what experts cannot have, and what versions of PEFT read in different ways."""
        config, base, adapted = self._config, self._base, self._adapted
        if base.experts is None or base.expert_form is None:
            return
        for field in ("use_dora", "lora_bias"):
            if getattr(config, field):
                self._complain(field, "it is not supported over experts: train without it")
        if base.expert_form == "stacked":
            for module, layer, (into, out) in base.modules():
                if module in adapted.targets and layer is not None and _is_stack(module):
                    if into == out:
                        message = "versions of PEFT write it in one shape, and mean two matrices"
                        self._complain("target_parameters", f"{module}: {message}: do not train it")
                        break
            return
        experts = {module for module in adapted.targets if ".mlp.experts." in module}
        if config.use_rslora:
            message = "PEFT scales experts otherwise once it has stacked them: train without it"
            self._complain("use_rslora", message)
        for field, own in (("rank_pattern", adapted.ranks), ("alpha_pattern", adapted.alphas)):
            if odd := next(iter(sorted(experts & own.keys())), None):
                message = f"PEFT leaves it out for {odd} once it has stacked experts: remove it"
                self._complain(field, message)
        gates = {module.removesuffix("gate_proj") for module in experts if "gate_proj" in module}
        ups = {module.removesuffix("up_proj") for module in experts if "up_proj" in module}
        if gates != ups:
            message = "experts have gate_proj and up_proj as one matrix: name both or neither"
            self._complain("target_modules", message)

    def _check_biases(self) -> None:
        """Refuse trained biases of the base, which are not applied, unless the base has none."""
        mode = self._config.bias
        for module, layer in self._modules.items():
            is_trained = mode == "all" or (mode == "lora_only" and module in self._adapted.targets)
            if is_trained and layer is not None and module.split(".", 3)[3] in self._base.biased:
                message = f"it is {mode}, but the base's {module} has a bias: train with bias none"
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
                self._complain(
                    TOKENS_FIELD, "ensure_weight_tying needs the same tokens in both modules"
                )
        for module in sorted(saved & changed):
            self._complain(TOKENS_FIELD, f"modules_to_save replaces {module} whole")
        for ids in token_ids.values():
            unknown = next((token for token in ids if not 0 <= token < base.vocab), None)
            if unknown is not None:
                message = (
                    f"{shown(unknown)} is not a token of the base model, which has {base.vocab}"
                )
                self._complain(TOKENS_FIELD, message)
        shapes = {(module, MATRIX): (base.vocab, base.hidden) for module in sorted(saved)}
        shapes |= {(module, ROWS): (len(ids), base.hidden) for module, ids in token_ids.items()}
        return _NewRows(shapes, token_ids, saved, frozenset(unadapted), is_head_tied)

    def _found(self) -> dict[Key, str]:
        """Return the tensors of the file that an adapter may have."""
        found: dict[Key, str] = {}
        for name in self._shapes:
            key = key_of(plain(name, self._way))
            if key is None and (medusa := medusa_problem(name)) is not None:
                self._faults.add_alike(medusa, "medusa")
            elif key is None:
                self._complain_of(name, name_problem(name), "name")
            elif (key := (self._stacks.get(key[0], key[0]), key[1])) in found:
                self._complain_of(name, f"it repeats {found[key]}, under another name", "twice")
            else:
                found[key] = name
        return found

    def _wanted(self, rows: _NewRows, found: Mapping[Key, str]) -> dict[Key, Shape]:
        """Return the tensors of every adapted module, and their shapes."""
        targets = self._adapted.targets
        # without target_modules, the tensors in the file say what is adapted
        if self._config.target_modules is None:
            there = {module for module, part in found if part.startswith("lora_")}
            targets &= there | ({EMBEDDING} if self._is_tied and HEAD in there else set())
        elif self._is_tied and HEAD in targets - rows.saved and EMBEDDING not in targets:
            message = (
                "it names lm_head, but not embed_tokens, to which ensure_weight_tying ties lm_head"
            )
            self._complain("target_modules", message)
        wanted: dict[Key, Shape] = {}
        for module, _, (width_in, width_out) in self._base.modules():
            # PEFT removes a tied head from target_modules: the head shares the embedding's adapter.
            named = EMBEDDING if self._is_tied and module == HEAD else module
            if module in rows.saved or named not in targets:
                continue
            rank, (a, b) = self._adapted.rank(module), matrices(module)
            rank *= self._base.num_stacked(module)
            wanted |= {(module, a): (rank, width_in), (module, b): (width_out, rank)}
            if self._config.use_dora:
                wanted[module, MAGNITUDE] = (width_out,)
            if self._config.lora_bias:
                wanted[module, BIAS] = (width_out,)
            if module in rows.unadapted:
                message = f"it adapts {module}, whose rows trainable_token_indices replaces"
                self._complain("target_modules", message)
        if not wanted and self._adapted.targets:
            self._complain("target_modules", "nothing is adapted: name a module to adapt")
        if (EMBEDDING, BIAS) in wanted:
            self._complain("lora_bias", "it is not supported for embed_tokens")
        return wanted

    def _repeated(self, rows: _NewRows, wanted: Mapping[Key, Shape]) -> dict[Key, Shape]:
        """Return the tensors that PEFT may repeat: the base's, saved ones, a tied head's rows.

        It writes these where it believes that the vocabulary was changed, or is told to.
        Source: get_peft_model_state_dict in peft/utils/save_and_load.py.
        """
        size: Shape = (self._base.vocab, self._base.hidden)
        unchanged = {EMBEDDING, HEAD} - {module for module, _ in rows.shapes}
        found = {(module, part): size for module in unchanged for part in (BESIDE_LORA, MATRIX)}
        found |= {(each, part): size for each in rows.saved for part in (BESIDE_SAVED, SAVED_AGAIN)}
        found |= {(module, BESIDE_ROWS): size for module in rows.token_ids}
        has_head_lora = (HEAD, matrices(HEAD)[0]) in wanted
        if rows.is_head_tied and EMBEDDING in rows.token_ids and not has_head_lora:
            found |= {(HEAD, BESIDE_ROWS): size, (HEAD, ROWS): rows.shapes[EMBEDDING, ROWS]}
        return found

    def _check_shapes(
        self,
        rows: _NewRows,
        found: Mapping[Key, str],
        wanted: Mapping[Key, Shape],
        needed: Mapping[Key, Shape],
    ) -> None:
        """Refuse tensors that should not be there, and those with a wrong shape."""
        unfit = {}
        for key, name in found.items():
            if key not in needed:
                self._refuse(key, name, wanted, rows)
            elif self._shapes[name] != needed[key]:
                unfit[key] = self._shapes[name]
        other_vocabulary, explained = vocabulary_problem(unfit, needed)
        other_rank, of_rank = rank_problem(unfit, needed, self._adapted)
        self._faults.add_first(*filter(None, (other_vocabulary, other_rank)))
        for key in [key for key in unfit if key not in explained | of_rank]:
            message = f"its shape is {list(unfit[key])}; {self._needs(*key)} {list(needed[key])}"
            self._complain_of(found[key], message, "shape")

    def _needs(self, module: str, part: str) -> str:
        if part == ROWS:
            return "the base model and trainable_token_indices need"
        if part in WHOLE:
            return "the base model needs"
        return f"the base model and rank {self._adapted.rank(module)} need"

    def _refuse(self, key: Key, name: str, wanted: Mapping[Key, Shape], rows: _NewRows) -> None:
        """Say why a tensor should not be there."""
        module, part = key
        layer, _, linear = module.removeprefix("model.layers.").partition(".")
        if layer.isdecimal() and int(layer) >= self._base.num_layers:
            last = self._base.num_layers - 1
            message = f"it is of layer {layer}; the base model has 0 to {last}"
            self._complain_of(name, message, "layer")
        elif layer.isdecimal() and linear not in self._base.linears_of(int(layer)):
            message = f"the base model has no linear {shown(linear)}"
            if linear.startswith("mlp.experts") and self._base.experts is not None:
                message = "it is of experts, whose matrices target_parameters has to name: train so"
            self._complain_of(name, message, "linear")
        elif part in (ROWS, BESIDE_ROWS):
            self._complain_of(name, f"{TOKENS_FIELD} does not name its module", part)
        elif part in (SAVED_AGAIN, BESIDE_SAVED):
            self._complain_of(name, f"{SAVE_FIELD} does not name its module", part)
        elif part in WHOLE or module in rows.saved:
            message = "it belongs to a module whose rows the adapter replaces: remove it"
            self._complain_of(name, message, "replaced")
        elif (module, matrices(module)[0]) in wanted:
            field = "use_dora" if part == MAGNITUDE else "lora_bias"
            self._complain_of(name, f"it is in the file although {field} is off", field)
        else:
            message = f"it does not name the module of {shown(name)}, or exclude_modules does"
            self._faults.add_alike(Problem(CONFIG_FILE, "target_modules", message), "target")

    def _check_complete(
        self, wanted: Mapping[Key, Shape], rows: _NewRows, found: Mapping[Key, str]
    ) -> None:
        if self._shapes and not found:
            return  # their names are wrong, so nothing more is known about them
        there = {key[0] for key in found if key in wanted}
        absent = dict.fromkeys(module for module, _ in wanted if module not in there)
        if absent and (of_layers := layers_problem(absent, there, self._adapted, self._modules)):
            self._faults.add(of_layers)
        else:
            for module in absent:
                message = f"it asks for {module}, but the file has no tensor of it: remove it"
                self._faults.add_alike(Problem(CONFIG_FILE, "target_modules", message), "absent")
        for module, part in wanted:
            if module in there and (module, part) not in found:
                message = "it is missing, and its counterpart is there: save the adapter again"
                places = {stack: place for place, stack in self._stacks.items()}
                name = f"{PREFIX}{places.get(module, module)}.{part}"
                self._complain_of(name, message, "missing")
        for module, part in rows.shapes:
            if (module, part) not in found:
                field = SAVE_FIELD if part == MATRIX else TOKENS_FIELD
                name = f"{PREFIX}{module}.{part}"
                self._complain(field, f"it asks for {name}, which is missing in {TENSORS_FILE}")

    def _matrix(self, module: str, found: Mapping[Key, str]) -> AdaptedMatrix:
        a, b = matrices(module)
        return AdaptedMatrix(
            rank=self._adapted.rank(module),
            scaling=self._adapted.scaling(module),
            a_name=found[module, a],
            b_name=found[module, b],
            magnitude=found.get((module, MAGNITUDE)),
            bias=found.get((module, BIAS)),
            num_stacked=self._base.num_stacked(module),
        )
