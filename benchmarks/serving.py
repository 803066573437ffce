"""Many clients at a server: whether each gets its own answer, how fast, and whether memory stays as it is.

    python benchmarks/serving.py --clients 64 --seconds 600             # a tiny model, on the default device
    python benchmarks/serving.py --model llama-1b --device cuda:0 --dtype bfloat16 --rounding --leaving 0

It starts `penstock serve` with random weights. Half of the requests are streams, half are greedy, and some
clients leave in the middle of streams. Every whole answer is compared with what the model generates offline
with the same seed. Then the server is killed under load, and started again at the same address.
In bfloat16 on a GPU, products round differently in batches of different sizes, so that answers may differ:
`--rounding` only counts these. At the end, all pages have to be free, and all sequences accounted for.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import psutil
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import penstock as ps
from generate import SHAPES
from measuring import Report
from penstock.models import Completion, Engine, LanguageModel, TextTokenizer

QUESTIONS = 128  # distinct ones
TEMPERATURE = 0.8
PATIENCE = 600  # seconds without a byte after which a client gives up, as OpenAI's does
WARM = 8  # answers of each client before anything is measured
TURNS = 4  # times that an engine without a server gets all questions
SETTLED, MOST_SETTLING = 5, 30  # seconds without a new program before the measurement, and at most until it
MOST_PROBLEMS = 10  # that are told
CORES = 4  # for each process of clients, so that they are not what is measured


@dataclass(frozen=True)
class Question:
    """A request, and the answer that it should get."""

    prompt: str
    seed: int
    tokens: int
    temperature: float
    answer: str


@dataclass
class Tally:
    """What clients have seen."""

    ends: Counter[str] = field(default_factory=Counter)
    first_token: list[float] = field(default_factory=list)
    slowest: float = 0.0  # seconds of a whole answer
    problems: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take in what others have seen."""
        self.ends += other.ends
        self.first_token += other.first_token
        self.slowest = max(self.slowest, other.slowest)
        self.problems = (self.problems + other.problems)[:MOST_PROBLEMS]


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


def questions(folder: Path, chosen: argparse.Namespace, report: Report) -> list[Question]:
    """What clients ask; adds how fast the same is generated without a server."""
    model = ps.models.load(folder, device=chosen.device)
    assert isinstance(model.tokenizer, TextTokenizer)
    texts = prompts(model, chosen.prompt)
    answers = asked_offline(model, texts, chosen.tokens, chosen.slots)
    start, busy = time.perf_counter(), cpu_seconds()
    again = asked_offline(model, texts, chosen.tokens, chosen.slots)
    add_rate(report, f"offline, batches of {chosen.slots}", QUESTIONS * chosen.tokens, start, busy)
    assert chosen.rounding or [each.ids for each in again] == [each.ids for each in answers]
    draw = random.Random(1)
    lengths = [draw.randint(max(chosen.tokens // 2, 1), chosen.tokens) for _ in texts]
    asked = [
        Question(text, seed, length, temperature(seed), model.tokenizer.decode(answer.ids[:length]))
        for seed, (text, answer, length) in enumerate(zip(texts, answers, lengths, strict=True))
    ]
    ask_engine(model, asked, chosen, report)
    return asked


def ask_engine(
    model: LanguageModel, asked: list[Question], chosen: argparse.Namespace, report: Report
) -> None:
    """Add how fast an engine without a server answers, which always has further requests waiting."""
    with Engine(model, slots=chosen.slots, queue=TURNS * len(asked)) as engine:
        engine.prepare()
        first = changed = start = time.perf_counter()
        programs = 0
        while start - changed < SETTLED and start - first < MOST_SETTLING:
            start, busy = time.perf_counter(), cpu_seconds()
            requests = [
                engine.submit(each.prompt, each.tokens, temperature=each.temperature, seed=each.seed)
                for each in asked * TURNS
            ]
            tokens = sum(len(request.result().ids) for request in requests)
            if programs != engine.stats().programs:
                programs, changed = engine.stats().programs, start
        add_rate(report, "the engine without a server", tokens, start, busy)


def add_rate(report: Report, name: str, tokens: int, start: float, busy: float) -> None:
    seconds, busy = time.perf_counter() - start, cpu_seconds() - busy
    detail = f"{tokens / busy:,.0f} per second of processor time"
    report.add(f"{name}, tokens/s", tokens / seconds, "", "", None, detail)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Client(threading.Thread):
    """Asks one question after the other until it is told to stop."""

    def __init__(self, place: Place, number: int, tally: Tally) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        parts = urlsplit(place.url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port
        self._draw = random.Random(number)
        self._tally, self._place = tally, place
        self.stop = threading.Event()

    def run(self) -> None:
        connection = self._connection()
        while not self.stop.is_set():
            question = self._draw.choice(self._place.asked)
            leaves = self._draw.random() < self._place.leaving
            start = time.perf_counter()
            try:
                self._ask(connection, question, leaves)
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self._note("lost", f"after {time.perf_counter() - start:.1f} s: {error!r}")
                leaves = True
            if leaves:
                connection.close()
                connection = self._connection()
        connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE)

    def _ask(self, connection: http.client.HTTPConnection, question: Question, leaves: bool) -> None:
        streams = leaves or self._draw.random() < 0.5
        body = {
            "prompt": question.prompt,
            "seed": question.seed,
            "max_tokens": question.tokens,
            "temperature": question.temperature,
            "stream": streams,
        }
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status == 429:
            answer.read()
            self._note("refused")
            time.sleep(float(answer.headers["Retry-After"]) * self._draw.random())
        elif answer.status != 200:
            self._note("lost", f"{answer.status}: {answer.read()[:200]!r}")
        elif streams:
            self._read_stream(answer, question, start, leaves)
        else:
            choice = json.loads(answer.read())["choices"][0]
            self._tally.slowest = max(self._tally.slowest, time.perf_counter() - start)
            self._check(question, choice["text"], choice["finish_reason"])

    def _read_stream(
        self, answer: http.client.HTTPResponse, question: Question, start: float, leaves: bool
    ) -> None:
        text, reason = "", None
        for line in answer:
            if line.startswith(b":"):  # a comment: the server is alive
                continue
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                answer.read()
                self._check(question, text, reason)
                return
            if data:
                if not text:
                    self._tally.first_token.append(time.perf_counter() - start)
                choice = json.loads(data)["choices"][0]
                text, reason = text + choice["text"], choice["finish_reason"] or reason
                if leaves:
                    self._note("left")
                    return
        self._note("lost", f"a stream without its end: {text[-80:]!r}")

    def _check(self, question: Question, text: str, reason: str | None) -> None:
        if text == question.answer and reason == "length":
            self._note("equal")
        else:
            self._note("different", f"{question.prompt[:40]!r} -> {text[:60]!r} not {question.answer[:60]!r}")

    def _note(self, end: str, problem: str = "") -> None:
        with self._place.ended.get_lock():
            self._place.ended.value += 1
            self._tally.ends[end] += 1
        if problem and len(self._tally.problems) < MOST_PROBLEMS:
            self._tally.problems.append(problem)


@dataclass(frozen=True)
class Place:
    """Where clients ask, and what; the number of answers that have ended is shared by all of them."""

    url: str
    asked: list[Question]
    leaving: float
    ended: Any  # a `Value` of multiprocessing


def asking(place: Place, numbers: Sequence[int], connection: Connection) -> None:
    """A process of clients: forget the times so far when told so; at the end, give back what was seen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tally = Tally()
    clients = [Client(place, number, tally) for number in numbers]
    for client in clients:
        client.start()
    while connection.recv() == "forget":
        tally.first_token.clear()
    for client in clients:
        client.stop.set()
    for client in clients:
        client.join(PATIENCE)
    connection.send(tally)


class Clients:
    """Clients in processes of their own. They have begun when each has had some answers."""

    def __init__(self, server: Server, asked: list[Question], chosen: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        place = Place(server.url, asked, chosen.leaving, context.Value("q", 0))
        count = min(max((os.cpu_count() or 1) // CORES, 1), chosen.clients)
        self._connections: list[Connection] = []
        for number in range(count):
            ours, theirs = context.Pipe()
            numbers = range(number, chosen.clients, count)
            context.Process(target=asking, args=(place, numbers, theirs), daemon=True).start()
            theirs.close()
            self._connections.append(ours)
        while place.ended.value < WARM * chosen.clients:
            time.sleep(0.1)

    def forget(self) -> None:
        """Measure from here on."""
        for connection in self._connections:
            connection.send("forget")

    def stop(self) -> Tally:
        """What they have seen, when each has its last answer."""
        tally = Tally()
        for connection in self._connections:
            connection.send("stop")
        for connection in self._connections:
            tally.add(connection.recv())
        return tally


class Server:
    """`penstock serve`, which consists of two processes."""

    def __init__(self, folder: Path, chosen: argparse.Namespace, port: int = 0) -> None:
        words = [sys.executable, "-m", "penstock", "serve", str(folder), "--port", str(port)]
        words += ["--slots", str(chosen.slots), *(["--device", chosen.device] if chosen.device else [])]
        start = time.perf_counter()
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().rpartition(" ")[2].strip()
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


def until_settled(server: Server) -> float:
    """Wait until the server builds no more programs, or has done so for long; how long that took."""
    start = last = now = time.perf_counter()
    programs = 0.0
    while now - last < SETTLED and now - start < MOST_SETTLING:
        time.sleep(0.5)
        now = time.perf_counter()
        if (count := server.figures()["programs"]) != programs:
            programs, last = count, now
    return last - start


def load(server: Server, asked: list[Question], chosen: argparse.Namespace, report: Report) -> Tally:
    """Let clients ask for some time, and print what the server did."""
    start = time.perf_counter()
    report.add("start, until programs cover all steps", server.start_seconds, "s", "", None, "")
    clients = Clients(server, asked, chosen)
    warm = time.perf_counter() - start
    report.add(
        f"the first {WARM} answers of each client", warm, "s", "", None, "programs are built meanwhile"
    )
    settled = until_settled(server)
    report.add("and until no further programs come", settled, "s", "", None, f"for {SETTLED} s")
    before, start, busy = server.figures(), time.perf_counter(), server.cpu_seconds
    sizes = [server.resident]
    clients.forget()
    while time.perf_counter() - start < chosen.seconds:
        time.sleep(1)
        sizes.append(server.resident)
    after, seconds = server.figures(), time.perf_counter() - start
    shares = [(end - begin) / seconds for begin, end in zip(busy, server.cpu_seconds, strict=True)]
    tally = clients.stop()
    tokens = after["generated_tokens_total"] - before["generated_tokens_total"]
    waits = sorted(tally.first_token)
    part = max(len(sizes) // 10, 1)
    most = [max(each) / 2**20 for each in (sizes[:part], sizes[-part:])]
    detail = f"{seconds:.0f} s; the engine takes {shares[0]:.0%} of a core, HTTP {shares[1]:.0%}"
    report.add(f"served to {chosen.clients} clients, tokens/s", tokens / seconds, "", "", None, detail)
    detail = f"median {statistics.median(waits) * 1e3:.0f} ms"
    last = waits[int(len(waits) * 0.99)] * 1e3
    report.add("first token of a stream, 99% within", last, "ms", "", None, detail)
    report.add("slowest whole answer", tally.slowest, "s", f"< {PATIENCE}", tally.slowest < PATIENCE, "")
    ends = [size / 2**20 for size in (sizes[0], sizes[-1])]
    detail = f"first tenth: {most[0]:.1f}; {ends[0]:.1f} at the beginning, {ends[1]:.1f} at the end"
    report.add("resident in the last tenth, at most", most[1], "MiB", "flat", None, detail)
    report.add("programs at the end", after["programs"], "", "bounded", None, "")
    return tally


def killed(
    server: Server, folder: Path, asked: list[Question], chosen: argparse.Namespace, report: Report
) -> Server:
    """Kill a server under load; another one at its address, which answers as the first."""
    clients = Clients(server, asked, chosen)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(60)
    clients.stop()
    again = Server(folder, chosen, server.port)
    tally = Clients(again, asked, chosen).stop()
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
    report = Report()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / chosen.model
        write_model(folder, chosen.model, chosen.dtype)
        asked = questions(folder, chosen, report)
        server = Server(folder, chosen)
        try:
            tally = load(server, asked, chosen, report)
            accounted(server, tally, chosen, report)
            server = killed(server, folder, asked, chosen, report)
        finally:
            server.process.send_signal(signal.SIGTERM)
            status = server.process.wait(60)
    report.add("exit status after SIGTERM", status, "", "0", not status, "")
    if chosen.save:
        given = f" --model {chosen.model} --device {chosen.device or ps.default_device().name}"
        given += f" --dtype {chosen.dtype} --clients {chosen.clients} --seconds {chosen.seconds:.0f}"
        given += " --rounding" * chosen.rounding + f" --leaving {chosen.leaving:g}"
        report.save(chosen.save, "serving", ps.default_device(), {}, given)
    sys.exit(any(row["met"] is False for row in report.rows))


if __name__ == "__main__":
    main()
