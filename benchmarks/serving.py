"""Many clients at a server: whether each gets its own answer, how fast, and whether memory stays as it is.

    python benchmarks/serving.py --clients 64 --seconds 600             # a tiny model, on the default device
    python benchmarks/serving.py --model llama-1b --device cuda:0 --dtype bfloat16 --rounding --leaving 0

It starts `penstock serve` with random weights. Half of the requests are streams, half are greedy, and some
clients leave in the middle of streams. Every whole answer is compared with what the model generates offline
with the same seed. Then the server is killed under load, and started again at the same address.
In bfloat16 on a GPU, products round differently in batches of different sizes, so that answers may differ:
`--rounding` only counts these. At the end, all pages have to be free, and all sequences accounted for.
No phase waits for much longer than `--seconds`. With `--save`, the file has every line as soon as it is
printed, so that a run which is stopped keeps what it has measured.
"""

from __future__ import annotations

import argparse
import http.client
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any
from urllib.parse import urlsplit

import psutil
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import penstock as ps
from clients import PATIENCE, Clients, Question, Tally
from generate import SHAPES
from measuring import Report
from penstock.models import Completion, Engine, LanguageModel, TextTokenizer

QUESTIONS = 128  # distinct ones
TEMPERATURE = 0.8
WARM = 8  # answers of each client before anything is measured
TURNS = 4  # times that an engine without a server gets all questions
SETTLED = 5  # seconds without a new program before the measurement
START = 120  # seconds after which a server that is not ready is ended
GOAL = 0.9  # of the offline rate, on a GPU


def write_model(folder: Path, shape: str, dtype: str) -> None:
    """A model with random weights, whose tokens are the words w0, w1 and so on."""
    ps.random.manual_seed(1)
    model = ps.models.build({"max_position_embeddings": 2048, **SHAPES[shape]}).to(dtype)
    words = {f"w{number}": number for number in range(model.vocab_size)}
    made = tokenizers.Tokenizer(WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = WhitespaceSplit()
    model.tokenizer = TextTokenizer(made)
    model.save(folder)


def prompts(model: LanguageModel, length: int) -> list[str]:
    """Prompts of different lengths, a third of which begin as others do."""
    draw = random.Random(0)
    beginning = [f"w{draw.randrange(model.vocab_size)}" for _ in range(length // 2)]
    result = []
    for number in range(QUESTIONS):
        words = [f"w{draw.randrange(model.vocab_size)}" for _ in range(1 + draw.randrange(length // 2))]
        result.append(" ".join((beginning if number % 3 == 0 else []) + words))
    return result


def temperature(number: int) -> float:
    """Of a question: half of them are greedy."""
    return TEMPERATURE if number % 2 else 0.0


def asked_offline(model: LanguageModel, texts: list[str], tokens: int, slots: int) -> list[Completion]:
    """What follows each prompt, in batches as large as the server's."""
    answers: list[Completion] = [Completion() for _ in texts]
    for greedy in range(2):
        own = range(greedy, len(texts), 2)
        for start in range(0, len(own), slots):
            numbers = own[start : start + slots]
            given: Any = {"temperature": temperature(numbers[0]), "seed": list(numbers)}
            made = model.generate([texts[number] for number in numbers], tokens, **given)
            for number, answer in zip(numbers, made, strict=True):
                answers[number] = answer
    return answers


def questions(folder: Path, chosen: argparse.Namespace, report: Report) -> tuple[list[Question], float]:
    """What clients ask, and how many tokens a second are generated offline; adds rates without a server."""
    model = ps.models.load(folder, device=chosen.device)
    assert isinstance(model.tokenizer, TextTokenizer)
    texts = prompts(model, chosen.prompt)
    answers = asked_offline(model, texts, chosen.tokens, chosen.slots)
    start, busy = time.perf_counter(), cpu_seconds()
    for _ in range(TURNS):
        again = asked_offline(model, texts, chosen.tokens, chosen.slots)
    tokens = TURNS * QUESTIONS * chosen.tokens
    offline = add_rate(report, f"offline, batches of {chosen.slots}", tokens, start, busy)
    assert chosen.rounding or [each.ids for each in again] == [each.ids for each in answers]
    draw = random.Random(1)
    lengths = [draw.randint(max(chosen.tokens // 2, 1), chosen.tokens) for _ in texts]
    asked = [
        Question(text, seed, length, temperature(seed), model.tokenizer.decode(answer.ids[:length]))
        for seed, (text, answer, length) in enumerate(zip(texts, answers, lengths, strict=True))
    ]
    ask_engine(model, asked, chosen, report)
    return asked, offline


def ask_engine(
    model: LanguageModel, asked: list[Question], chosen: argparse.Namespace, report: Report
) -> None:
    """Add how fast an engine without a server answers, which always has further requests waiting."""
    with Engine(model, slots=chosen.slots, queue=TURNS * len(asked)) as engine:
        engine.prepare()
        first = changed = start = time.perf_counter()
        programs = 0
        while start - changed < SETTLED and start - first < chosen.seconds:
            start, busy = time.perf_counter(), cpu_seconds()
            requests = [
                engine.submit(each.prompt, each.tokens, temperature=each.temperature, seed=each.seed)
                for each in asked * TURNS
            ]
            tokens = sum(len(request.result().ids) for request in requests)
            if programs != engine.stats().programs:
                programs, changed = engine.stats().programs, start
        add_rate(report, "the engine without a server", tokens, start, busy)


def add_rate(report: Report, name: str, tokens: int, start: float, busy: float) -> float:
    seconds, busy = time.perf_counter() - start, cpu_seconds() - busy
    detail = f"{tokens / busy:,.0f} per second of processor time"
    report.add(f"{name}, tokens/s", tokens / seconds, "", "", None, detail)
    return tokens / seconds


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Server:
    """`penstock serve`, which consists of two processes."""

    def __init__(self, folder: Path, chosen: argparse.Namespace, port: int = 0) -> None:
        words = [sys.executable, "-m", "penstock", "serve", str(folder), "--port", str(port)]
        words += ["--slots", str(chosen.slots), *(["--device", chosen.device] if chosen.device else [])]
        start = time.perf_counter()
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        limit = Timer(START, self.process.kill)
        limit.start()
        self.url = self.process.stdout.readline().rpartition(" ")[2].strip()
        limit.cancel()
        if not self.url:
            raise SystemExit(f"the server was not ready after {time.perf_counter() - start:.0f} s")
        self.start_seconds = time.perf_counter() - start
        self.port = urlsplit(self.url).port or 0
        engine = psutil.Process(self.process.pid)
        self._processes = [engine, *engine.children()]

    @property
    def resident(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)

    @property
    def cpu_seconds(self) -> list[float]:
        """Of the process of the engine, and of that of HTTP."""
        seconds = [sum(process.cpu_times()[:2]) for process in self._processes]
        return [seconds[0], sum(seconds[1:])]

    def figures(self) -> dict[str, float]:
        """The metrics that have no labels."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return {name: float(value) for name, value in re.findall(r"^penstock_(\w+) (\S+)$", text, re.M)}


def until_settled(server: Server, seconds: float) -> float:
    """Wait until the server builds no more programs, or for so many seconds; how long that took."""
    start = last = now = time.perf_counter()
    programs = 0.0
    while now - last < SETTLED and now - start < seconds:
        time.sleep(0.5)
        now = time.perf_counter()
        if (count := server.figures()["programs"]) != programs:
            programs, last = count, now
    return last - start


def load(
    server: Server, asked: list[Question], offline: float, chosen: argparse.Namespace, report: Report
) -> Tally:
    """Let clients ask for some time, and print what the server did."""
    start = time.perf_counter()
    report.add("start, until programs cover all steps", server.start_seconds, "s", "", None, "")
    clients = Clients(server.url, asked, chosen.leaving, chosen.clients)
    clients.wait(WARM, chosen.seconds)
    warm = time.perf_counter() - start
    report.add(
        f"the first {WARM} answers of each client", warm, "s", "", None, "programs are built meanwhile"
    )
    settled = until_settled(server, chosen.seconds)
    report.add("and until no further programs come", settled, "s", "", None, f"for {SETTLED} s")
    before, start, busy = server.figures(), time.perf_counter(), server.cpu_seconds
    sizes = [server.resident]
    clients.forget()
    while time.perf_counter() - start < chosen.seconds:
        time.sleep(1)
        sizes.append(server.resident)
    after, seconds = server.figures(), time.perf_counter() - start
    shares = [(end - begin) / seconds for begin, end in zip(busy, server.cpu_seconds, strict=True)]
    rate = (after["generated_tokens_total"] - before["generated_tokens_total"]) / seconds
    detail = f"{seconds:.0f} s; the engine takes {shares[0]:.0%} of a core, HTTP {shares[1]:.0%}"
    report.add(f"served to {chosen.clients} clients, tokens/s", rate, "", "", None, detail)
    met = rate / offline >= GOAL if ps.default_device().capabilities.kind == "gpu" else None
    detail = f"{rate:,.0f} of {offline:,.0f} tokens/s"
    report.add("served over offline", rate / offline, "x", f">= {GOAL} on GPUs", met, detail)
    tally = clients.stop()
    waits = sorted(tally.first_token)
    detail = f"median {statistics.median(waits) * 1e3:.0f} ms"
    last = waits[int(len(waits) * 0.99)] * 1e3
    report.add("first token of a stream, 99% within", last, "ms", "", None, detail)
    report.add("slowest whole answer", tally.slowest, "s", f"< {PATIENCE}", tally.slowest < PATIENCE, "")
    add_sizes(sizes, report)
    report.add("programs at the end", after["programs"], "", "bounded", None, "")
    return tally


def add_sizes(sizes: list[int], report: Report) -> None:
    part = max(len(sizes) // 10, 1)
    most = [max(each) / 2**20 for each in (sizes[:part], sizes[-part:])]
    ends = [size / 2**20 for size in (sizes[0], sizes[-1])]
    detail = f"first tenth: {most[0]:.1f}; {ends[0]:.1f} at the beginning, {ends[1]:.1f} at the end"
    report.add("resident in the last tenth, at most", most[1], "MiB", "flat", None, detail)


def killed(
    server: Server, folder: Path, asked: list[Question], chosen: argparse.Namespace, report: Report
) -> Server:
    """Kill a server under load; another one at its address, which answers as the first."""
    clients = Clients(server.url, asked, chosen.leaving, chosen.clients)
    clients.wait(WARM, chosen.seconds)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(60)
    clients.stop()
    again = Server(folder, chosen, server.port)
    clients = Clients(again.url, asked, chosen.leaving, chosen.clients)
    clients.wait(WARM, chosen.seconds)
    tally = clients.stop()
    wrong = tally.ends["lost"] + (0 if chosen.rounding else tally.ends["different"])
    detail = f"{tally.ends['equal']:,} equal; started in {again.start_seconds:.1f} s at the same address"
    report.add("killed and started again: answers lost or different", wrong, "", "0", not wrong, detail)
    return again


def at_rest(server: Server) -> dict[str, float]:
    """The metrics when nothing runs any more."""
    for _ in range(1200):
        figures = server.figures()
        if not figures["sequences_running"] and not figures["sequences_waiting"]:
            return figures
        time.sleep(0.1)
    raise SystemExit(f"the server does not come to rest: {figures}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="words of the longest prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of the longest answer")
    parser.add_argument("--leaving", type=float, default=0.05, help="share of clients that leave a stream")
    parser.add_argument("--save", type=Path, help="a file for the results")
    parser.add_argument("--rounding", action="store_true", help="answers may differ from the offline ones")
    return parser.parse_args()


def accounted(server: Server, tally: Tally, chosen: argparse.Namespace, report: Report) -> None:
    """Add what has to be zero at the end."""
    figures = at_rest(server)
    for name, allowed in (("lost", False), ("different", chosen.rounding)):
        count, equal = tally.ends[name], f"{tally.ends['equal']:,} equal"
        report.add(f"answers that were {name}", count, "", "0", not count or allowed, equal)
    report.add(
        "refused with 429", tally.ends["refused"], "", "", None, f"{tally.ends['left']:,} left a stream"
    )
    used = figures["pages_used"]
    report.add("pages in use at the end", used, "", "0", not used, f"of {figures['pages']:.0f}")
    ended = figures["sequences_finished_total"] + figures["sequences_cancelled_total"]
    open_ones = figures["sequences_total"] - ended
    report.add("sequences that did not end", open_ones, "", "0", not open_ones, f"of {ended:,.0f}")
    for problem in tally.problems:
        print(problem)


def main() -> None:
    chosen = options()
    if chosen.device:
        ps.use(chosen.device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the server ends, too
    given = f" --model {chosen.model} --device {chosen.device or ps.default_device().name}"
    given += f" --dtype {chosen.dtype} --clients {chosen.clients} --seconds {chosen.seconds:.0f}"
    given += " --rounding" * chosen.rounding + f" --leaving {chosen.leaving:g}"

    def save() -> None:
        if chosen.save:
            report.save(chosen.save, "serving", ps.default_device(), {}, given)

    report = Report(save)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / chosen.model
        write_model(folder, chosen.model, chosen.dtype)
        asked, offline = questions(folder, chosen, report)
        server = Server(folder, chosen)
        try:
            tally = load(server, asked, offline, chosen, report)
            accounted(server, tally, chosen, report)
            server = killed(server, folder, asked, chosen, report)
        finally:
            server.process.send_signal(signal.SIGTERM)
            status = server.process.wait(60)
    report.add("exit status after SIGTERM", status, "", "0", not status, "")
    sys.exit(any(row["met"] is False for row in report.rows))


if __name__ == "__main__":
    main()
