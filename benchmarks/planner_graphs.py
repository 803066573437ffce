"""Lifetimes to plan memory for: training steps of a GPT and of an MLP, and random graphs that branch.

A `Tape` notes which step writes a value and which steps read it; a value dies at the last of them.
"""

from __future__ import annotations

import random

from penstock.plan.arena import Value

FLOAT = 4  # bytes


class Tape:
    """Steps in the order in which they run; each writes a value."""

    def __init__(self) -> None:
        self._nbytes: list[int] = []
        self._dies: list[int] = []
        self._over: list[tuple[int, ...]] = []

    def step(self, nbytes: int, *reads: int, inplace: bool = False) -> int:
        """Write a value, in place of an input if allowed; its index, which is also the step's."""
        now = len(self._nbytes)
        for read in reads:
            self._dies[read] = now
        self._nbytes.append(nbytes)
        self._dies.append(now)
        self._over.append(reads if inplace else ())
        return now

    def values(self) -> list[Value]:
        """The values, where `over` keeps only inputs that really die at the step."""
        dies = self._dies
        return [
            Value(nbytes, born, dies[born], tuple({k: None for k in over if dies[k] == born}))
            for born, (nbytes, over) in enumerate(zip(self._nbytes, self._over, strict=True))
        ]


def gpt_values(
    layers: int, batch: int = 8, context: int = 128, width: int = 384, heads: int = 6, vocab: int = 16000
) -> list[Value]:
    """A training step of a GPT: 77 values per layer, and 25 around them."""
    tape = Tape()
    step = tape.step
    tokens = batch * context * FLOAT
    hidden, scores, logits = tokens * width, tokens * heads * context, tokens * vocab
    gradients: list[int] = []  # of the parameters; they live until the optimizer has run

    def parameter(elements: int, *reads: int) -> None:
        gradients.append(step(elements * FLOAT, *reads))

    def norm(x: int) -> tuple[int, int, int]:
        mean = step(tokens, x)
        scale = step(tokens, x, mean)
        centred = step(hidden, x, mean, scale)
        return step(hidden, centred), centred, scale

    def norm_backward(dy: int, centred: int, scale: int) -> int:
        parameter(width, dy, centred)
        parameter(width, dy)
        dcentred = step(hidden, dy, inplace=True)
        mean = step(tokens, dcentred)
        product = step(tokens, dcentred, centred)
        return step(hidden, dcentred, centred, mean, product, scale, inplace=True)

    def softmax(x: int, nbytes: int, rows: int) -> int:
        most = step(rows, x)
        powers = step(nbytes, x, most, inplace=True)
        total = step(rows, powers)
        return step(nbytes, powers, total, inplace=True)

    saved = []
    x = step(hidden)
    for _ in range(layers):
        y1, *norm1 = norm(x)
        qkv = step(3 * hidden, y1)
        q, k, v = (step(hidden, qkv) for _ in range(3))
        masked = step(scores, step(scores, q, k), inplace=True)
        attention = softmax(masked, scores, tokens * heads)
        mask = step(scores // FLOAT)
        dropped = step(scores, attention, mask)
        merged = step(hidden, step(hidden, dropped, v))
        x = step(hidden, x, step(hidden, merged), inplace=True)
        y2, *norm2 = norm(x)
        wide = step(4 * hidden, y2)
        active = step(4 * hidden, wide)
        x = step(hidden, x, step(hidden, active), inplace=True)
        saved.append((y1, norm1, q, k, v, attention, mask, dropped, merged, y2, norm2, wide, active))

    y, *final = norm(x)
    chances = softmax(step(logits, y), logits, tokens)
    step(FLOAT, chances)  # the loss
    dlogits = step(logits, chances, inplace=True)
    parameter(vocab * width, dlogits, y)
    dx = norm_backward(step(hidden, dlogits), *final)
    for y1, norm1, q, k, v, attention, mask, dropped, merged, y2, norm2, wide, active in reversed(saved):
        dactive = step(4 * hidden, dx)
        parameter(4 * width * width, dx, active)
        parameter(width, dx)
        dwide = step(4 * hidden, dactive, wide, inplace=True)
        parameter(4 * width * width, dwide, y2)
        parameter(4 * width, dwide)
        dx = step(hidden, dx, norm_backward(step(hidden, dwide), *norm2), inplace=True)
        dmerged = step(hidden, dx)
        parameter(width * width, dx, merged)
        parameter(width, dx)
        dheads = step(hidden, dmerged)
        ddropped = step(scores, dheads, v)
        dv = step(hidden, dheads, dropped)
        dattention = step(scores, ddropped, mask, inplace=True)
        dot = step(tokens * heads, dattention, attention)
        dscores = step(scores, step(scores, dattention, attention, dot, inplace=True), inplace=True)
        dq = step(hidden, dscores, k)
        dk = step(hidden, dscores, q)
        dqkv = step(3 * hidden, dq, dk, dv)
        dy1 = step(hidden, dqkv)
        parameter(3 * width * width, dqkv, y1)
        parameter(3 * width, dqkv)
        dx = step(hidden, dx, norm_backward(dy1, *norm1), inplace=True)
    parameter(vocab * width, dx)
    for gradient in gradients:
        step(0, gradient)  # the optimizer
    return tape.values()


def mlp_values(layers: int, batch: int = 64, widths: tuple[int, ...] = (784, 512, 2048, 1000)) -> list[Value]:
    """A training step of an MLP, whose layers take the widths in turn: 9 values per layer, and 3 more."""
    tape = Tape()
    step = tape.step
    wide = [widths[layer % len(widths)] for layer in range(layers + 1)]
    hidden = [batch * width * FLOAT for width in wide]
    saved = []
    x = step(hidden[0])
    for layer in range(1, layers + 1):
        biased = step(hidden[layer], step(hidden[layer], x), inplace=True)
        y = step(hidden[layer], biased, inplace=True)
        saved.append((x, y, layer))
        x = y
    loss = step(FLOAT, x)
    dy = step(hidden[-1], x, loss)
    gradients = []
    for x, y, layer in reversed(saved):
        dbiased = step(hidden[layer], dy, y, inplace=True)
        gradients.append(step(wide[layer - 1] * wide[layer] * FLOAT, dbiased, x))
        gradients.append(step(wide[layer] * FLOAT, dbiased))
        dy = step(hidden[layer - 1], dbiased)
    for gradient in gradients:
        step(0, gradient)  # the optimizer
    return tape.values()


def branching_values(seed: int, count: int) -> list[Value]:
    """A random graph: sizes from 256 bytes to 256 kB, most inputs recent, some from anywhere before."""
    choose = random.Random(seed)
    tape = Tape()
    for now in range(count):
        reads = []
        for _ in range(choose.choice((1, 1, 2, 2, 3)) if now else 0):
            recent = now - 1 - int(choose.expovariate(1 / 4))
            reads.append(choose.randrange(now) if choose.random() < 0.1 else max(recent, 0))
        tape.step(int(256 * 10 ** choose.uniform(0, 3)), *reads, inplace=choose.random() < 0.5)
    return tape.values()
