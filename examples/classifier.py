"""Which way does a bar lie? A small image classifier on pictures that it draws itself."""

from __future__ import annotations

import numpy as np

import penstock as ps
from penstock import Device, Tensor, nn, optim

SIZE, BATCH, STEPS = 12, 64, 150


def draw(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of a horizontal, a vertical, a rising or a falling bar in noise, and which it is."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    kinds = random.integers(0, 4, count)
    places = random.integers(2, SIZE - 2, (count, 1, 1))
    distances = np.stack([rows, columns, (rows + columns) / 2, (rows - columns + SIZE) / 2])[kinds] - places
    pictures = (np.abs(distances) < 1) + random.normal(0, 0.3, distances.shape)
    return pictures.reshape(count, -1).astype(np.float32), kinds


def main(device: Device | str | None = None) -> float:
    ps.random.manual_seed(1)
    random = np.random.default_rng(1)
    model = nn.Sequential(
        nn.Linear(SIZE * SIZE, 64, device=device),
        nn.LayerNorm(64, device=device),
        nn.GELU(),
        nn.Linear(64, 4, device=device),
    )
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    @ps.jit
    def step(pictures: Tensor, kinds: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(pictures), kinds)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(STEPS):
        loss = step(*(ps.asarray(array, device=device) for array in draw(BATCH, random)))
    with ps.no_grad():
        pictures, kinds = draw(500, random)  # which it has not seen
        right = np.mean(np.argmax(model(ps.asarray(pictures, device=device)).numpy(), axis=1) == kinds)
    print(f"loss {float(loss):.2g}, {right:.1%} of new pictures right")
    return float(loss)


if __name__ == "__main__":
    main()
