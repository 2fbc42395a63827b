# SPDX-License-Identifier: Apache-2.0
"""Layers' weights as few shared matrices and a low-rank rest for each layer.

The layers of one projection are grouped into bands of neighbours. Within a
band, ``W_l = W0 + B_l A_l``: ``W0`` is the mean of the band's weights and
``B_l A_l`` the best approximation of rank r of what the layer differs by. A
layer that is a band of its own keeps its weight bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

EXACT_SIZE = 512
"""Up to this many rows or columns, the decomposition is LAPACK's."""

OVERSAMPLING = 16
"""How many directions a randomized decomposition looks at beyond the rank."""

POWER_ITERATIONS = 8
"""With these, the error on a Gaussian matrix, whose singular values hardly
fall off and so are the hardest to tell apart, is 0.3 % above the least."""


@dataclass(frozen=True)
class Band:
    """Neighbouring layers' weights of one projection."""

    w0: FloatArray
    """The mean, float32 [N, K]; read-only if it is the one layer's weight."""

    a: tuple[FloatArray, ...]
    """Of each layer the right factor, float32 [r, K]."""

    b: tuple[FloatArray, ...]
    """Of each layer the left factor, float32 [N, r]."""

    @property
    def rank(self) -> int:
        """The rank of the factors, 0 if the band is one layer."""
        return len(self.a[0])

    def reconstruct(self, layer: int) -> FloatArray:
        """Returns a weight, float32 [N, K], by the layer's place in the band.

        Of a band of one layer this is ``w0`` itself, not a copy.
        """
        if self.a[layer].shape[0] == 0:
            return self.w0
        weight = self.b[layer] @ self.a[layer]
        weight += self.w0
        return weight


@dataclass(frozen=True)
class Bands:
    """All layers' weights of one projection."""

    bands: tuple[Band, ...]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return sum(len(band.a) for band in self.bands)

    def reconstruct(self, layer: int) -> FloatArray:
        """Returns a layer's weight, float32 [N, K].

        Raises:
            IndexError: If there is no such layer.
        """
        if layer >= 0:
            for band in self.bands:
                if layer < len(band.a):
                    return band.reconstruct(layer)
                layer -= len(band.a)
        raise IndexError(f"there are {self.layers} layers")


def bands(layers: int, blocks: int) -> list[range]:
    """Returns the layers of each band.

    Bands are contiguous and their sizes differ by one at most; the larger
    ones come first.

    Args:
        layers: How many layers there are.
        blocks: How many bands to make.

    Raises:
        ValueError: If there are not 1 to ``layers`` bands.
    """
    if not 1 <= blocks <= layers:
        raise ValueError(f"{layers} layers cannot make {blocks} bands")
    size, larger = divmod(layers, blocks)
    starts = [i * size + min(i, larger) for i in range(blocks + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def decompose(
    weights: Sequence[FloatArray],
    blocks: int,
    rank: int,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> Bands:
    """Decomposes the layers' weights of one projection.

    Args:
        weights: Of each layer, in order, float32 [N, K]. Each is read twice
            and only one at a time, so they may be made when asked for.
        blocks: The number of bands.
        rank: The rank of each layer's difference from its band; the lesser of
            N and K if it is above.
        seed: For the randomized decomposition of large matrices.
        names: The weights' names, for errors.

    Raises:
        ValueError: If a weight holds NaN or infinity, is not float32, or has
            not the shape of the first; or a number is out of range.
    """
    names = names or [f"weight {layer}" for layer in range(len(weights))]
    return Bands(
        tuple(
            decompose_band(
                _Slice(weights, layers),
                rank,
                seed,
                [names[layer] for layer in layers],
            )
            for layers in bands(len(weights), blocks)
        )
    )


def decompose_band(
    weights: Sequence[FloatArray],
    rank: int,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> Band:
    """Decomposes the weights of one band.

    Arguments and errors are those of :func:`decompose`.
    """
    if rank < 0:
        raise ValueError(f"expected a rank of 0 or more, found {rank}")
    names = names or [f"weight {layer}" for layer in range(len(weights))]
    w0 = _mean(weights, names)
    rows, columns = w0.shape
    rank = min(rank, rows, columns) if len(weights) > 1 else 0
    factors = []
    for layer in range(len(weights)):
        if rank == 0:
            b = np.zeros((rows, 0), np.float32)
            a = np.zeros((0, columns), np.float32)
        else:
            # The band's own numbering: a band gives the same factors alone.
            random = np.random.default_rng([seed, layer])
            with np.errstate(over="ignore", invalid="ignore"):
                delta = weights[layer] - w0
                b, a = _low_rank(delta, rank, random)
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise ValueError(
                    f"{names[layer]} is too large to decompose in float32"
                )
        factors.append((a, b))
    a_all, b_all = zip(*factors, strict=True)
    return Band(w0, a_all, b_all)


@dataclass(frozen=True)
class _Slice(Sequence[FloatArray]):
    """Some of the weights, not yet read."""

    weights: Sequence[FloatArray]
    layers: range

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> FloatArray:  # type: ignore[override]
        return self.weights[self.layers[index]]


def _mean(weights: Sequence[FloatArray], names: Sequence[str]) -> FloatArray:
    """Returns the mean in float32, or the only weight itself."""
    first = weights[0]
    if first.ndim != 2 or first.dtype != np.float32 or not first.size:
        raise ValueError(
            f"{names[0]} is {first.dtype} {list(first.shape)}; "
            "expected a float32 matrix"
        )
    # A float32 sum would lose bits, and could overflow.
    total = np.zeros(first.shape if len(weights) > 1 else 0, np.float64)
    for index, name in enumerate(names):
        weight = weights[index]
        if weight.dtype != np.float32 or weight.shape != first.shape:
            raise ValueError(
                f"{name} is {weight.dtype} {list(weight.shape)}, but "
                f"{names[0]} is float32 {list(first.shape)}"
            )
        if not np.isfinite(weight).all():
            raise ValueError(f"{name} holds NaN or infinity")
        if len(weights) == 1:
            return weight
        total += weight
    total /= len(weights)
    return total.astype(np.float32)


def _low_rank(
    matrix: FloatArray, rank: int, random: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Returns b [N, r] and a [r, K] of the best ``b @ a``, or nearly.

    Small matrices get the truncated singular value decomposition, which is
    best (Eckart and Young, 1936). Larger ones get the randomized one: Halko,
    Martinsson and Tropp, https://arxiv.org/abs/0909.4061, algorithm 4.4 for
    the range and 5.1 for the factors.
    """
    width = rank + OVERSAMPLING
    if min(matrix.shape) <= max(EXACT_SIZE, width):
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
    else:
        sketch = random.standard_normal((matrix.shape[1], width), np.float32)
        basis, _ = np.linalg.qr(matrix @ sketch)
        for _ in range(POWER_ITERATIONS):
            across, _ = np.linalg.qr(matrix.T @ basis)
            basis, _ = np.linalg.qr(matrix @ across)
        small, values, right = np.linalg.svd(
            basis.T @ matrix, full_matrices=False
        )
        left = basis @ small[:, :rank]
    b = np.ascontiguousarray(left[:, :rank] * values[:rank])
    return b, np.ascontiguousarray(right[:rank])
