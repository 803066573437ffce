"""`penstock train`: the trainer with a language model on text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.collectives.world import communicator, rank_0_first
from penstock.data import (
    ByteTokenizer,
    CharTokenizer,
    Prefetch,
    Text,
    TextBatches,
    Tokenizer,
    TokenStore,
    find_text,
    load_tokenizer,
    python_sources,
    train_bpe,
)
from penstock.data.tokenizer import tokenizer_from_json
from penstock.models import LanguageModel, TextTokenizer, save_lora
from penstock.models.lora import CONFIG, WEIGHTS
from penstock.models.saving import DESCRIPTION, save_description
from penstock.optim import cosine
from penstock.train.bases import (
    BASE,
    fingerprint,
    load_base,
    load_trained,
    model_of_run,
    trained_tensors,
)
from penstock.train.building import build_model, loss_of, make_optimizer, parallel, settled
from penstock.train.checkpoint import Arrays, Checkpoint
from penstock.train.config import Config
from penstock.train.folder import RunFolder
from penstock.train.sizing import check_fits
from penstock.train.trainer import Trainer
from penstock.train.view import View

TOKENIZER_FILE = "tokenizer.json"
_PROMPT = 16  # tokens of the sample's prompt


class TextTrainer(Trainer):
    """A run of a language model on text in its folder, new or from a checkpoint.

    It computes on the default device, and uses the default random generator.
    """

    model: LanguageModel
    _has_epochs = False
    _fits, _otherwise = "settings", ""
    _goes_on = "--steps with a larger number goes on"
    _base: str | None = None  # the fingerprint of the model that adapters belong to
    _own_files = (*DESCRIPTION, CONFIG, WEIGHTS)

    def __init__(
        self,
        config: Config,
        folder: Path,
        view: View,
        resumed: Checkpoint | None = None,
        numbered: bool = False,
    ) -> None:
        """Prepare everything. The folder is locked, and created if it is new, after all else has succeeded.

        It stays locked until `fit` ends; RunInUse names the process that uses it. With `numbered`, a new
        folder is created in any case, with a number after its name if that exists.
        """
        self.config, self.folder, self._view = config, folder, view
        writes = communicator().rank == 0
        self._held = RunFolder(folder) if writes and folder.is_dir() and not numbered else None
        try:
            self._build(resumed)
            if writes and self._held is None:
                self._held = RunFolder(folder, numbered)
                self.folder = self._held.path
            self.folder = Path(communicator().share(str(self.folder).encode()).decode())
            self._open(resumed)
        except BaseException:
            self._let_go()
            raise

    def _build(self, resumed: Checkpoint | None) -> None:
        """Create text, model and optimizer."""
        config = self.config = self.config if resumed else settled(self.config)
        run = config.run
        ps.random.manual_seed(run.seed)
        model = self._load_model(resumed)
        validation = self._open_text(resumed, model)
        if model is None:
            model = build_model(config, self.tokenizer.vocab_size)
            model.to(getattr(ps, config.model.precision))
            model.tokenizer = self.tokenizer
        super().__init__(
            model,
            None,
            parallel(make_optimizer(model, config), config),
            _TextData(self._store, config),
            folder=self.folder,
            steps=run.steps,
            evaluation=validation or None,
            accumulate=config.optimizer.accumulate,
            memory=config.run.memory or None,
            evaluate_every=run.evaluate_every,
            checkpoint_every=run.checkpoint_every or None,
            view=self._view,
        )
        self.batch_loss(loss_of(model))

    def _load_model(self, resumed: Checkpoint | None) -> LanguageModel | None:
        """The model that files describe; None for fresh weights, which depend on the tokenizer."""
        config = self.config
        if resumed:
            self._base = resumed.more.get(BASE)
            return model_of_run(config, self.folder, resumed)
        if not config.model.is_loaded:
            return None
        with self._view.phase(f"loading {config.model.name}"):
            self._base = fingerprint(Path(config.model.name)) if config.lora.rank else None
            return load_base(config)

    def fit(self) -> bool:
        """Train; the processes that make tokens meanwhile end with it."""
        try:
            return super().fit()
        finally:
            self._store.close()
            if self._store.replaced:
                self._view.note(f"not UTF-8, and replaced by U+FFFD: {self._store.replaced} places")

    def prompt(self) -> npt.NDArray[np.int32]:
        """The prompt of the sample: tokens that were not trained on, if there are any."""
        tokens = self._store.validation if len(self._store.validation) else self._store.train
        return tokens[: min(_PROMPT, self.model.context)].astype(np.int32)

    def _open_text(self, resumed: Checkpoint | None, model: LanguageModel | None) -> list[ps.Tensor]:
        """Open the text and its tokenizer; the batches for validation."""
        setting = self.config.data
        text = find_text(setting.path) if setting.path else python_sources()
        self._view.note(f"text: {setting.path or 'the sources of this Python'}")
        self.tokenizer: Tokenizer | TextTokenizer
        if model is not None:
            assert model.tokenizer is not None, "models without a tokenizer are refused"
            self.tokenizer = model.tokenizer
        elif resumed:
            self.tokenizer = load_tokenizer(self.folder / TOKENIZER_FILE)
        else:
            self.tokenizer = _shared_tokenizer(self.config, text, self._view)
        begun = resumed.text if resumed else None
        with rank_0_first():  # the others find its tokens in the cache
            self._store = TokenStore.open(
                text, _encoder(self.tokenizer), setting.validation, progress=self._view.phase, begun=begun
            )
        self._view.note(f"{text.summary()}\n{self._store.summary()}")
        if resumed and resumed.text != self._store.key:
            self._view.note(
                "the text is not the one that the run began with, or its files were moved or touched; "
                "where it differs, so do the batches from here on"
            )
        check_fits(self.config, self.tokenizer.vocab_size, ps.default_device(), model)
        if len(self._store.validation) > self.config.model.context:
            batches = TextBatches(self._store.validation, setting.batch, self.config.model.context, seed=0)
            return [ps.asarray(next(batches)) for _ in range(self.config.run.evaluate_batches)]
        if setting.validation:
            self._view.note("the text is too short for validation; there is none")
        return []

    # What differs from other trainers

    def _before_step(self) -> None:
        setting, steps = self.config.optimizer, self.config.run.steps
        schedule = cosine(setting.learning_rate, steps, min(setting.warmup, steps), setting.final_rate)
        self.optimizers[0].lr = schedule(self.step)

    def _speed(self, samples_per_second: float) -> dict[str, float | None]:
        return {"tokens_per_second": samples_per_second * self.config.model.context}

    def _advice(self, resumes: bool) -> str:
        how = f"penstock train {f'--resume {self.folder} ' if resumes else ''}--config FILE"
        return (
            f"A lower learning_rate (now {self.config.optimizer.learning_rate}) or a longer warmup, under "
            f"[optimizer] in a file, mostly helps: {how}"
        )

    def _state(self, score: float | None) -> dict[str, Any]:
        more = {BASE: self._base} if self.config.lora.rank else {}
        return {"position": self._feed.state()["data"]["position"], "text": self._store.key, "more": more}

    def _load_state(self, checkpoint: Checkpoint) -> None:
        position = {"position": checkpoint.position}
        self._feed.load_state({"epoch": 0, "batches": 0, "data": position, "length": None, "kind": None})

    def _settings(self) -> Config:
        return self.config

    def _model_name(self) -> str:
        return self.config.model.name or "a GPT"

    def _model_tensors(self) -> dict[str, ps.Tensor]:
        return trained_tensors(self.model)

    def _load_model_state(self, state: Arrays) -> None:
        load_trained(self.model, state)

    def _save(self, validation: float | None, score: float | None = None) -> None:
        super()._save(validation, score)
        if self.config.lora.rank:
            with self._ranks.whole("host"):
                save_lora(self.model, self.folder)  # so that the run's folder is an adapter's, too

    def _write_settings(self) -> None:
        super()._write_settings()
        if self.config.model.name:
            save_description(self.model, self.folder)
        elif isinstance(self.tokenizer, Tokenizer):
            self.tokenizer.save(self.folder / TOKENIZER_FILE)


class _TextData:
    """The batches of a text, made ahead; they have no end."""

    def __init__(self, store: TokenStore, config: Config) -> None:
        self._store, self._config = store, config
        self._position = 0  # the number of the next sample

    def __iter__(self) -> Iterator[ps.Tensor]:
        data, context, seed = self._config.data, self._config.model.context, self._config.run.seed
        batches = self._store.batches(data.batch, context, seed, self._position)
        with Prefetch(batches) as prefetch:
            for batch in prefetch:
                self._position = prefetch.state()
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = state["position"]


def _encoder(tokenizer: Tokenizer | TextTokenizer) -> Tokenizer:
    """The same tokenizer, for whole texts, which other processes may have to tokenize."""
    return tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer_from_json(tokenizer.to_json())


def _shared_tokenizer(config: Config, text: Text, view: View) -> Tokenizer:
    """A new tokenizer, which rank 0 makes for all."""
    group = communicator()
    if group.size == 1:
        return _make_tokenizer(config, text, view)
    with TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / TOKENIZER_FILE
        if group.rank == 0:
            with group.patient():
                _make_tokenizer(config, text, view).save(path)
        data = group.share(path.read_bytes() if group.rank == 0 else b"")
        path.write_bytes(data)
        return load_tokenizer(path)


def _make_tokenizer(config: Config, text: Text, view: View) -> Tokenizer:
    match config.data.tokenizer:
        case "bytes":
            return ByteTokenizer()
        case "characters":
            with view.phase("looking for characters"):
                return CharTokenizer(text)
    return train_bpe(text, config.data.vocabulary, view.phase)
