"""Generation by transformers and llama.cpp with the weights of ours, for `generate.py --peers`.

Beside packed integers of ours are llama.cpp's Q8_0 and Q4_0, which also round the same weights in groups of
32; transformers has no such on a CPU. bfloat16 and float16 are so on all sides.
All sides run in turn on the cores of the process, with a prompt and then greedy tokens, one sequence at a
time. Each is given by its best round, and by its seconds of processors. On a busy machine both measure the
machine, as threads of peers spin while they wait for each other: `taskset -c 0` leaves a single thread.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import penstock as ps
from measuring import Report, installed
from penstock.models import LanguageModel
from penstock.models.gguf import LAYER_NAMES, TOP_NAMES

torch, transformers, llama_cpp, gguf = map(installed, ("torch", "transformers", "llama_cpp", "gguf"))
Tokens = Callable[[list[int], int], Iterator[int]]  # of a prompt, and how many
KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}  # in gguf


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def ours(model: LanguageModel) -> Tokens:
    def tokens(ids: list[int], count: int) -> Iterator[int]:
        return (piece.id for piece in model.stream([ids], count, temperature=0, stop_tokens=()))

    return tokens


def of_transformers(folder: Path, dtype: str) -> Tokens:
    torch.set_num_threads(_cores())
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def tokens(ids: list[int], count: int) -> Iterator[int]:
        given, cache = torch.tensor([ids]), None
        with torch.inference_mode():
            for _ in range(count):
                result = network(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                given, cache = result.logits[:, -1].argmax(-1, keepdim=True), result.past_key_values
                yield int(given)

    return tokens


def of_llama_cpp(path: Path, context: int) -> Tokens:
    cores = _cores()
    network = llama_cpp.Llama(
        str(path), n_ctx=context, n_batch=512, n_threads=cores, n_threads_batch=cores, verbose=False
    )

    def tokens(ids: list[int], count: int) -> Iterator[int]:
        network.reset()
        given = ids
        for _ in range(count):
            network.eval(given)
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(network.ctx, -1), (network.n_vocab(),)
            )
            given = [int(logits.argmax())]
            yield given[0]

    return tokens


def write_gguf(model: LanguageModel, path: Path, kind: str) -> None:
    """The weights of a Llama as llama.cpp has them: queries and keys in pairs, and no vocabulary.

    Matrices are of a kind of ggml, and vectors are F32.
    """
    config, stored = model.config, gguf.GGMLQuantizationType[kind]
    made = gguf.GGUFWriter(path, "llama")
    made.add_block_count(config["num_hidden_layers"])
    made.add_context_length(config["max_position_embeddings"])
    made.add_embedding_length(config["hidden_size"])
    made.add_feed_forward_length(config["intermediate_size"])
    made.add_head_count(config["num_attention_heads"])
    made.add_head_count_kv(config["num_key_value_heads"])
    made.add_layer_norm_rms_eps(config["rms_norm_eps"])
    made.add_rope_freq_base(config["rope_theta"])
    made.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    made.add_tokenizer_model("no_vocab")
    made.add_vocab_size(config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    top = {theirs: name for name, theirs in TOP_NAMES.items()}
    layers = {theirs: name for name, theirs in LAYER_NAMES.items()}
    for name, tensor, _ in model.file_weights():
        array, (place, part) = tensor.numpy().astype(np.float32), name.rsplit(".", 1)
        if count := heads.get(place.rpartition(".")[2]):
            rows = array.shape[0]
            array = array.reshape(count, 2, rows // count // 2, -1).swapaxes(1, 2).reshape(array.shape)
        given = top.get(place)
        if given is None:
            _, _, number, layer = place.split(".", 3)
            given = f"blk.{number}.{layers[layer]}"
        if array.ndim == 1:
            made.add_tensor(f"{given}.{part}", array)
        else:
            made.add_tensor(f"{given}.{part}", gguf.quantize(array, stored), raw_dtype=stored)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def timed(tokens: Tokens, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """The tokens, and for the prompt and each token after it: seconds, and seconds of processors."""
    start, busy, marks, made = time.perf_counter(), time.process_time(), [], []
    for token in tokens(ids, count):
        made.append(token)
        marks.append((time.perf_counter(), time.process_time()))
    return made, [
        marks[0][0] - start,
        (marks[-1][0] - marks[0][0]) / (count - 1),
        marks[0][1] - busy,
        (marks[-1][1] - marks[0][1]) / (count - 1),
    ]


def compare(
    model: LanguageModel, quantized: str, prompt: int, count: int, rounds: int, report: Report
) -> None:
    """All sides that are installed, in turn; `quantized`: "int8", "int4" or empty."""
    ids = np.random.default_rng(0).integers(0, model.vocab_size, prompt).tolist()
    dtype = str(model.head_weight.dtype)
    with TemporaryDirectory() as temporary:
        folder, peers = Path(temporary), dict[str, Tokens]()
        if transformers is not None and torch is not None and not quantized:
            model.save(folder / "model")
            peers["transformers"] = of_transformers(folder / "model", dtype)
        if llama_cpp is not None:
            kind = KINDS[quantized or dtype]
            write_gguf(model, folder / "model.gguf", kind)
            peers[f"llama.cpp {kind}"] = of_llama_cpp(folder / "model.gguf", prompt + count)
        if quantized:
            ps.quantize(model, quantized)
        sides = {"penstock": ours(model), **peers}
        made = {name: timed(side, ids, count)[0] for name, side in sides.items()}  # builds programs
        runs: dict[str, list[list[float]]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                runs[name].append(timed(side, ids, count)[1])
    best = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()}
    middle = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()
    }
    title = quantized or dtype
    for at, what in enumerate((f"{title}: prompt of {prompt}", f"{title}: token after it")):
        for name, seconds in best.items():
            same = next(
                (
                    k
                    for k, pair in enumerate(zip(made["penstock"], made[name], strict=True))
                    if len({*pair}) > 1
                ),
                count,
            )
            busy = seconds[at + 2], seconds[at + 2] / best["penstock"][at + 2]
            detail = (
                f"{seconds[at] * 1e3:.1f} ms, median {middle[name][at] * 1e3:.1f}; processors "
                f"{busy[0] * 1e3:.1f} ms, {busy[1]:.2f}x; {same} of {count} tokens are ours; {_cores()} cores"
            )
            ratio = seconds[at] / best["penstock"][at]
            goal = "" if name == "penstock" else ">= 1"
            report.add(f"{what}, {name}: time / ours", ratio, "x", goal, ratio >= 1 if goal else None, detail)
