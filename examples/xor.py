"""Exclusive or: the smallest network that has to learn something that is not linear."""

from __future__ import annotations

import numpy as np

import penstock as ps
from penstock import Device, Tensor, nn, optim


class Xor:
    """The network, its four samples, and one step of training."""

    def __init__(self, device: Device | str | None = None) -> None:
        ps.random.manual_seed(1)
        self.inputs = ps.asarray(np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32), device=device)
        self.wanted = ps.asarray(np.array([[0], [1], [1], [0]], np.float32), device=device)
        self.model = nn.Sequential(nn.Linear(2, 8, device=device), nn.Tanh(), nn.Linear(8, 1, device=device))
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.05)
        self.step = ps.jit(self.one_step)

    def one_step(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.model(inputs), wanted)
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, steps: int) -> float:
        """The loss of the last of that many steps."""
        for _ in range(steps):
            loss = self.step(self.inputs, self.wanted)
        return float(loss)


def main(device: Device | str | None = None) -> float:
    network = Xor(device)
    loss = network.train(300)
    with ps.no_grad():
        found = network.model(network.inputs).numpy()
    for (a, b), result in zip(network.inputs.tolist(), found, strict=True):
        print(f"{a:.0f} xor {b:.0f} = {result[0]:.3f}")
    print(f"loss {loss:.2g}")
    return loss


if __name__ == "__main__":
    main()
