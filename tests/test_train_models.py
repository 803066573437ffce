"""`penstock train --model`: named sizes from scratch; folders, GGUF files and runs fine-tuned; adapters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import model_cases as cases
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from test_gguf import finish, renamed, writer
from test_lora import Packed
from test_train import TEXT, Silent, measured, resume
from typer.testing import CliRunner, Result

import penstock as ps
from penstock import cli
from penstock.cli import training
from penstock.data import load_tokenizer
from penstock.errors import CheckpointError, PenstockError, SettingError
from penstock.measuring import ceilings
from penstock.models.registry import configured, family_of
from penstock.models.settings import Settings
from penstock.models.sizes import SIZES
from penstock.train import Config, TextTrainer, load_last
from penstock.train import checkpoint as checkpoints
from penstock.train.building import settled

TREE: dict[str, dict[str, Any]] = {
    "model": {"context": 16},
    "data": {"batch": 4, "tokenizer": "bpe", "vocabulary": 280},
    "optimizer": {"learning_rate": 0.01, "warmup": 2},
    "run": {"steps": 12, "evaluate_every": 4, "evaluate_batches": 1},
}
TINY = [name for name in SIZES if name.endswith("-tiny")]
FEW = ["llama-tiny"]  # in the quick suite
# Of the models as they were published: https://huggingface.co has them in the metadata of their weights.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama2-7b": 6_738_415_616,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "gemma2-2b": 2_614_341_888,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
}


@pytest.fixture(autouse=True)
def _own_cache_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)  # which takes its time
    default = ps.default_device()
    ps.use("host")  # which compiles nothing
    yield
    ps.use(default)


@pytest.fixture
def default_device() -> None:
    ps.use(ps.devices()[0])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "text.txt").write_text(TEXT)
    return Config().changed(TREE).changed({"data": {"path": str(tmp_path / "text.txt")}})


@pytest.fixture
def base(tmp_path: Path) -> Callable[[str], Path]:
    """A model with its tokenizer: a folder, a GGUF file, or a run."""

    def made(kind: str) -> Path:
        ps.random.manual_seed(7)
        sizes = {"vocab_size": 280, "max_position_embeddings": 32}
        model = ps.models.build(cases.CONFIGS["qwen2" if kind in ("gguf", "packed") else "llama"] | sizes)
        ps.data.train_bpe(TEXT, 280).save(tmp_path / "tokenizer.json")
        if kind in ("gguf", "packed"):
            file = writer(tmp_path / "model.gguf", dict(model.config))
            for name, tensor, _ in model.file_weights():
                array, q8_0 = tensor.numpy(), gguf.GGMLQuantizationType.Q8_0
                if kind == "packed" and "proj.weight" in name and array.shape[-1] % 32 == 0:
                    file.add_tensor(renamed(name), gguf.quantize(array, q8_0), raw_dtype=q8_0)
                else:
                    file.add_tensor(renamed(name), array)
            finish(file)
            return tmp_path / "model.gguf"
        model.tokenizer = ps.models.TextTokenizer(
            tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), {"eos_token": "e"}
        )
        model.generation_config = {"top_k": 3}
        model.save(tmp_path / "folder")
        return tmp_path / "folder"

    return made


def train(config: Config, run: Path) -> list[float]:
    view = Silent()
    assert TextTrainer(config, run, view).fit()
    return view.losses


def of(config: Config, base: Path, rank: int = 0, **model: Any) -> Config:
    """A configuration that fine-tunes a model."""
    return config.changed({"model": {"name": str(base), **model}, "lora": {"rank": rank}})


def check_resumes(run: Path) -> None:
    """From the checkpoint before the last, to the same bits."""
    before, state = measured(run), load_last(run)[0]
    checkpoints.checkpoint_files(run)[-1].unlink()
    assert resume(run).fit()
    assert measured(run) == before
    again = load_last(run)[0]
    for part in ("model", "optimizer"):
        first, second = getattr(state, part), getattr(again, part)
        assert first.keys() == second.keys()
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)


# From scratch


def test_named_sizes_have_the_parameters_of_the_published_models() -> None:
    assert set(SIZES) == {*PUBLISHED, *TINY}
    for name, count in PUBLISHED.items():
        settings = Settings(SIZES[name], name)
        model = configured(family_of(settings), settings, "host")
        assert sum(tensor.size for tensor in model.parameters()) == count, name


@pytest.mark.slow(*(name for name in TINY if name not in FEW))
@pytest.mark.parametrize("name", TINY)
def test_every_family_learns_and_resumes(name: str, config: Config, tmp_path: Path) -> None:
    losses = train(config.changed({"model": {"name": name}}), tmp_path / "run")
    assert losses[0] == pytest.approx(np.log(280), abs=0.5)
    assert np.mean(losses[-2:]) < 0.8 * losses[0]
    check_resumes(tmp_path / "run")
    model = ps.models.load(tmp_path / "run")
    assert model.vocab_size == 280
    assert model.context == 16
    model.save(tmp_path / "saved")
    text = model.generate("the quick", 5, temperature=0).text
    assert ps.models.load(tmp_path / "saved").generate("the quick", 5, temperature=0).text == text


@pytest.mark.slow
@pytest.mark.usefixtures("default_device")
def test_a_named_size_in_half_precision(config: Config, tmp_path: Path) -> None:
    half = config.changed({"model": {"name": "qwen3-tiny", "precision": "bfloat16"}})
    losses = train(half, tmp_path / "run")
    assert losses[-1] < losses[0]
    check_resumes(tmp_path / "run")


# Fine-tuned


@pytest.mark.slow("folder whole", "gguf adapters", "packed adapters", "run whole", "run adapters")
@pytest.mark.parametrize(
    "what",
    [
        *("folder whole", "folder adapters", "gguf whole", "gguf adapters", "packed adapters"),
        *("run whole", "run adapters"),
    ],
)
def test_a_model_is_fine_tuned(
    what: str, base: Callable[[str], Path], config: Config, tmp_path: Path
) -> None:
    kind, how = what.split()
    rank = 2 if how == "adapters" else 0
    path = base(kind)
    if kind == "run":
        path = tmp_path / "first"
        train(of(config, tmp_path / "folder"), path)
    run = tmp_path / "run"
    view = Silent()
    trainer = TextTrainer(of(config, path, rank, context=0), run, view)
    assert trainer.config.model.context == 32, "that of the model"
    assert trainer.fit()
    assert np.mean(view.losses[-2:]) < (0.99 if rank else 0.9) * view.losses[0]
    assert any("of which" in note for note in view.notes) == bool(rank)
    packed = [layer for layer in trainer.model.modules() if isinstance(layer, ps.nn.QuantizedLinear)]
    assert bool(packed) == (kind == "packed"), "what is packed in a file stays so under adapters"
    if not rank:  # the run has all that it needs
        for part in (path, tmp_path / "folder", tmp_path / "tokenizer.json"):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
    check_resumes(run)
    written = trainer.model.generate("the ", 6, temperature=0)
    assert ps.models.load(run).generate("the ", 6, temperature=0).ids == written.ids


def test_checkpoints_of_adapters_have_nothing_else(
    base: Callable[[str], Path], config: Config, tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", base("folder")
    before = load_file(folder / "model.safetensors")
    train(of(config, folder, 2).changed({"lora": {"targets": "q_proj, down_proj", "dropout": 0.1}}), run)
    state, _ = load_last(run)
    assert len(state.model) == 8
    assert all("lora_" in name for name in state.model)
    assert sum(name.startswith("mean.") for name in state.optimizer) == 8
    model = ps.models.load(run)
    for name, tensor, _ in ps.models.load(folder).file_weights():
        np.testing.assert_array_equal(tensor.numpy(), before[name])
    # The run's folder is one of adapters, too.
    other = ps.models.load(folder, adapter=run)
    ids = ps.asarray([[3, 1, 4, 1, 5]])
    np.testing.assert_array_equal(model.eval()(ids).numpy(), other.eval()(ids).numpy())
    assert json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    assert model.generation_config == {"top_k": 3}
    check_resumes(run)
    again = resume(run)
    assert again.best_checkpoint is not None
    best = checkpoints.load(again.best_checkpoint)
    assert again.load_best() == best.step
    for name, array in best.model.items():
        np.testing.assert_array_equal(again.model.get_parameter(name).numpy(), array)


def test_a_run_without_a_step_leaves_nothing(
    base: Callable[[str], Path], config: Config, tmp_path: Path
) -> None:
    TextTrainer(of(config, base("folder"), 2), tmp_path / "run", Silent())._let_go()
    assert not (tmp_path / "run").exists()


def test_the_model_of_adapters_has_to_be_there_as_it_was(
    base: Callable[[str], Path], config: Config, tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", base("folder")
    train(of(config, folder, 2), run)
    moved = folder.rename(tmp_path / "moved")
    for attempt in (lambda: resume(run), lambda: ps.models.load(run)):
        with pytest.raises(
            CheckpointError, match=rf"adapters of the model {folder}.* it is not there.*--model"
        ):
            attempt()
    checkpoint, _ = load_last(run)
    again = of(checkpoint.config, moved, 2).changed({"run": {"steps": 13}})
    assert TextTrainer(again, run, Silent(), checkpoint).fit()
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    for attempt in (lambda: resume(run), lambda: ps.models.load(run)):
        with pytest.raises(CheckpointError, match="are not those that the run began with"):
            attempt()


def test_a_run_goes_on_with_its_own_model(
    base: Callable[[str], Path], config: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(of(config, base("folder")).changed({"run": {"steps": 4}}), run)
    checkpoint, _ = load_last(run)
    other = checkpoint.config.changed({"model": {"name": "llama-tiny"}})
    with pytest.raises(SettingError, match=r"goes on with its model, .*folder; .* llama-tiny is a new one"):
        TextTrainer(other, run, Silent(), checkpoint)
    longer = checkpoint.config.changed({"model": {"context": 33}})
    with pytest.raises(SettingError, match="context is at most 32"):
        TextTrainer(longer, run, Silent(), checkpoint)
    with pytest.raises(SettingError, match=r"settings under \[lora\] cannot change"):
        TextTrainer(of(checkpoint.config, tmp_path / "folder", 2), run, Silent(), checkpoint)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(
    base: Callable[[str], Path], config: Config, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(of(config, base("folder"), 2), whole)
    step = int.from_bytes(os.urandom(1)) % 6 + 5
    script = f"""
        import os, signal
        from pathlib import Path
        from penstock.train import Config, TextTrainer
        from test_train import Silent

        class Killer(Silent):
            def show(self, metrics):
                if metrics.step == {step}:
                    os.kill(os.getpid(), signal.SIGKILL)

        config = Config().with_file(Path({str(whole / "config.toml")!r}))
        TextTrainer(config, Path({str(killed)!r}), Killer()).fit()
    """
    place = Path(__file__).parent
    code = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PENSTOCK_DEVICE": "host"}
    done = subprocess.run(code, cwd=place, env=environment, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert resume(killed).fit()
    assert measured(killed) == measured(whole), f"killed at step {step}"


@pytest.mark.slow
@pytest.mark.usefixtures("default_device")
def test_adapters_in_half_precision(base: Callable[[str], Path], config: Config, tmp_path: Path) -> None:
    losses = train(of(config, base("folder"), 4, precision="float16"), tmp_path / "run")
    assert losses[-1] < losses[0]
    check_resumes(tmp_path / "run")
    assert str(ps.models.load(tmp_path / "run").head_weight.dtype) == "float16"


@pytest.mark.slow
@pytest.mark.usefixtures("default_device")
def test_a_budget_does_not_change_the_bits(
    base: Callable[[str], Path], config: Config, tmp_path: Path
) -> None:
    config = of(config, base("folder"), 2)
    train(config, tmp_path / "whole")
    device = ps.default_device()
    peak = device.memory_stats().peak_bytes
    device.limit_bytes = peak * 9 // 10
    try:
        train(config, tmp_path / "within")
    finally:
        device.limit_bytes = None
    assert measured(tmp_path / "within") == measured(tmp_path / "whole")


# Tokenizers


@pytest.mark.parametrize("kind", ["unigram", "words"])
def test_any_tokenizer_of_a_model_encodes_the_text(
    kind: str, base: Callable[[str], Path], config: Config, tmp_path: Path
) -> None:
    if kind == "unigram":
        library = tokenizers.SentencePieceUnigramTokenizer()
        library.train_from_iterator([TEXT], vocab_size=60, show_progress=False, unk_token="<unk>")
    else:
        library = tokenizers.BertWordPieceTokenizer()
        library.train_from_iterator([TEXT], vocab_size=70, show_progress=False)
    folder = base("folder")
    library.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder / "tokenizer.json")
    words = "the quick brown fox jumps over the lazy dog"
    assert loaded.encode(words).tolist() == library.encode(words, add_special_tokens=False).ids
    assert loaded.decode(loaded.encode(words)) == words
    stream = loaded.stream()
    assert "".join([*(stream.push([number]) for number in loaded.encode(words)), stream.finish()]) == words
    assert load_tokenizer(folder / "tokenizer.json").to_json() == loaded.to_json()
    train(of(config, folder).changed({"run": {"steps": 4}}), tmp_path / "run")
    assert len(ps.models.load(tmp_path / "run").generate("the quick", 3, temperature=0).ids) == 3


# Settings


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"name": "llama-9b"}}, "there is no model llama-9b; .* one of gpt2-tiny, gpt2"),
        ({"model": {"name": "gpt2", "width": 256}}, r"model.width is for a GPT of one's own, .* gpt2"),
        ({"model": {"name": "llama-1b", "dropout": 0.1}}, "dropout is for a GPT, and llama-1b has none"),
        ({"model": {"name": "llama-1b"}, "lora": {"rank": 8}}, "the named size llama-1b begins with random"),
        ({"lora": {"rank": 8}}, "LoRA adapters need a model that was trained before"),
        ({"model": {"name": "BASE", "context": 33}}, "context is at most 32"),
        ({"model": {"name": "BASE", "dropout": 0.5}}, "that of adapters is lora.dropout"),
        ({"model": {"name": "BASE"}, "data": {"tokenizer": "bytes"}}, "data.tokenizer is for training from"),
        ({"model": {"name": "BASE"}, "lora": {"targets": "q_proj"}}, "lora.targets is for adapters"),
        ({"lora": {"rank": -1}}, "lora.rank is 0 or more"),
        ({"lora": {"alpha": 0.0}}, "lora.alpha is more than 0"),
        ({"lora": {"dropout": 1.0}}, "lora.dropout is from 0"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_named(
    tree: dict[str, dict[str, Any]], message: str, base: Callable[[str], Path]
) -> None:
    folder = str(base("folder"))
    tree = {
        section: {key: folder if value == "BASE" else value for key, value in values.items()}
        for section, values in tree.items()
    }
    with pytest.raises(SettingError, match=message):
        settled(Config().changed(tree))


def test_what_cannot_be_fine_tuned_is_named(
    base: Callable[[str], Path], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base("folder")
    with pytest.raises(SettingError, match=r"lora.targets: no layer is called 'wq'; there are mlp.down_proj"):
        TextTrainer(of(config, folder, 2).changed({"lora": {"targets": "wq"}}), tmp_path / "run", Silent())
    packed = ps.models.load(folder)
    packed.layers[0].mlp.up_proj = Packed(32, 40)
    with monkeypatch.context() as patched:
        patched.setattr(ps.models, "load", lambda *args, **options: packed)
        with pytest.raises(SettingError, match=r"layers.0.mlp.up_proj is quantized; --lora 8"):
            TextTrainer(of(config, folder), tmp_path / "run", Silent())
        train(of(config, folder, 2), tmp_path / "packed")
    ps.data.train_bpe(TEXT, 300).save(folder / "tokenizer.json")
    with pytest.raises(SettingError, match="has 300 tokens, and the model only 280"):
        TextTrainer(of(config, folder), tmp_path / "run", Silent())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SettingError, match=r"has no tokenizer.json, which fine-tuning needs"):
        TextTrainer(of(config, folder), tmp_path / "run", Silent())
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(config: Config, tmp_path: Path) -> None:
    large = config.changed({"model": {"name": "llama-8b"}, "data": {"batch": 1 << 20}})
    with pytest.raises(
        SettingError, match=r"llama-8b of 6,\d+,\d+,\d+ parameters and batches .* takes at least"
    ):
        TextTrainer(large, tmp_path / "run", Silent())


# The command line


def penstock(*arguments: str) -> Result:
    """Run a command in this process; Penstock's errors are raised, as `main` finds them."""
    result = CliRunner().invoke(cli.app, list(arguments))
    if isinstance(result.exception, PenstockError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_the_command_fine_tunes_with_adapters(
    base: Callable[[str], Path], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "_SAMPLE", 3)
    base("folder")
    Path("folder/checkpoints").mkdir()  # which may be anybody's
    Path("c.toml").write_text(config.toml())
    words = ["--config", "c.toml", "--model", "folder", "--lora", "2", "--set", "lora.alpha=8"]
    result = penstock("train", *words, "--steps", "3", "--out", "run", "--device", "host")
    assert "parameters, of which" in result.stdout
    written = Config().with_file(Path("run/config.toml"))
    assert (written.model.name, written.lora.rank, written.lora.alpha) == (str(tmp_path / "folder"), 2, 8.0)
    assert "all 3 steps are done" in penstock("train", "--resume", "run").stdout
    assert penstock("generate", "run", "--prompt", "the", "--tokens", "3").stdout.startswith("the")


@pytest.mark.slow
def test_the_commands_plan_and_eval(
    base: Callable[[str], Path], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(of(config, base("folder"), 2), tmp_path / "run")
    assert "perplexity" in penstock("eval", "run", "--data", "text.txt").stdout
    words = ["--config", "run/config.toml", "--device", "host", "--json"]
    planned = json.loads(penstock("plan", *words).stdout)
    assert planned["context"] == 16
    assert planned["fits"]


def test_named_sizes_are_listed() -> None:
    listed = penstock("config", "--model", "qwen3-0.6b").stdout
    assert 'name = "qwen3-0.6b"' in listed
    for name in SIZES:
        assert name in listed
