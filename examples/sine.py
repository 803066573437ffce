"""A sine wave, learned from samples."""

from __future__ import annotations

import numpy as np

import penstock as ps
from penstock import Device, Tensor, nn, optim

STEPS = 200


def main(device: Device | str | None = None) -> float:
    ps.random.manual_seed(1)
    angles = np.linspace(-np.pi, np.pi, 256, dtype=np.float32).reshape(-1, 1)
    x, y = ps.asarray(angles, device=device), ps.asarray(np.sin(angles), device=device)
    model = nn.Sequential(
        nn.Linear(1, 64, device=device),
        nn.Tanh(),
        nn.Linear(64, 64, device=device),
        nn.Tanh(),
        nn.Linear(64, 1, device=device),
    )
    optimizer = optim.Adam(model.parameters())
    schedule = optim.cosine(rate=0.03, steps=STEPS, warmup=10)

    @ps.jit
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for number in range(STEPS):
        optimizer.lr = schedule(number)  # a tensor inside the step, which stays captured
        loss = step(x, y)
    with ps.no_grad():
        worst = float(ps.max(ps.abs(model(x) - y)))
    print(f"loss {float(loss):.2g}, at most {worst:.3f} beside the sine")
    return float(loss)


if __name__ == "__main__":
    main()
