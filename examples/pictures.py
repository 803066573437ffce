"""Pictures for the examples: digits, scikit-learn's where it is installed and else of a font, and shapes."""

import numpy as np

FONT = "75557 26227 71747 71717 55711 74717 74757 71111 75757 75717"  # rows of three pixels, in octal


def digits(count: int = 1797) -> tuple[np.ndarray, np.ndarray]:
    """Images of shape (count, 1, 8, 8) with ink from 0 to 1, and which digits they show."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return draw(count, np.random.default_rng(0))
    data = load_digits()
    return (data.images[:count, None] / 16).astype(np.float32), data.target[:count]


def draw(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Digits of a font, each at a position of its own and with its own amount of ink, in noise."""
    rows = np.array([[int(row) for row in glyph] for glyph in FONT.split()])
    pixels = rows[:, :, None] >> np.array([2, 2, 1, 1, 0, 0]) & 1
    images, labels = random.normal(0, 0.1, (count, 1, 8, 8)), random.integers(0, 10, count)
    for image, label in zip(images[:, 0], labels, strict=True):
        top, left = random.integers(0, 4), random.integers(0, 3)
        image[top : top + 5, left : left + 6] += pixels[label] * random.uniform(0.5, 1)
    return images.clip(0, 1).astype(np.float32), labels


def shapes(count: int, random: np.random.Generator, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of a disk, a ring, a square or a cross in noise, and which it is."""
    across = np.mgrid[:size, :size] - random.uniform(5, size - 6, (count, 2, 1, 1))
    near, far = np.abs(across).min(1), np.abs(across).max(1)
    distance, radius = np.hypot(across[:, 0], across[:, 1]), random.uniform(3, 5, (count, 1, 1))
    kinds, noise = random.integers(0, 4, count), random.normal(0, 0.2, distance.shape)
    drawn = [
        distance < radius,
        np.abs(distance - radius) < 1,
        far < radius * 0.9,
        (near < 1) & (far < radius),
    ]
    return (np.choose(kinds[:, None, None], drawn) + noise)[:, None].astype(np.float32), kinds
