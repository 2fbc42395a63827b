# SPDX-License-Identifier: Apache-2.0
"""Bands of layers: exact where they must be, best where they can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from attnquant_common import decomposition
from attnquant_common.decomposition import (
    Bands,
    FloatArray,
    bands,
    decompose,
    decompose_band,
)
from attnquant_common.tensor import Tensor, from_float32
from hypothesis import given, settings
from hypothesis import strategies as st

ROUNDING = 1e-5
"""Of the norm: how far float32 results may be from those in exact numbers."""


def gaussian(
    layers: int, shape: tuple[int, int], seed: int = 0
) -> list[FloatArray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) for _ in range(layers)]


def norm(matrices: Sequence[FloatArray]) -> float:
    return float(np.linalg.norm(np.stack(matrices).astype(np.float64)))


def error(weights: Sequence[FloatArray], result: Bands) -> float:
    return norm([w - result.reconstruct(i) for i, w in enumerate(weights)])


@st.composite
def models(draw: st.DrawFn) -> list[FloatArray]:
    """Small random layers, of any magnitude, equal ones among them."""
    layers = draw(st.integers(1, 6))
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    magnitude = draw(st.sampled_from([1e-30, 1.0, 1e30]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    made = [
        (random.standard_normal(shape) * magnitude).astype(np.float32)
        for _ in range(draw(st.integers(1, layers)))
    ]
    return [made[i % len(made)] for i in range(layers)]


@given(st.integers(1, 200), st.data())
def test_bands_are_contiguous_and_even(
    layers: int, data: st.DataObject
) -> None:
    """Every layer is in one band, in order, and sizes differ by at most 1."""
    blocks = data.draw(st.integers(1, layers))
    found = bands(layers, blocks)
    assert [layer for band in found for layer in band] == list(range(layers))
    sizes = [len(band) for band in found]
    assert len(found) == blocks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("layers", "blocks"), [(3, 0), (3, 4), (0, 1), (3, -1)]
)
def test_bands_need_layers(layers: int, blocks: int) -> None:
    """There are at least one band and at most one a layer."""
    with pytest.raises(ValueError, match=f"{layers} layers cannot make"):
        bands(layers, blocks)


@given(st.lists(st.integers(0, 0xFFFF), min_size=4, max_size=24))
def test_a_band_of_one_layer_is_bit_exact_in_bfloat16(bits: list[int]) -> None:
    """With as many bands as layers every finite bfloat16 comes back as it was,
    signed zeros and subnormal numbers included."""
    finite = [b for b in bits if b & 0x7F80 != 0x7F80] or [0x8000]
    layers = [np.array([[b]], np.uint16) for b in finite]
    wide = [Tensor(layer, "BF16").float32() for layer in layers]
    result = decompose(wide, len(wide), 3)
    for i, layer in enumerate(layers):
        back = from_float32(result.reconstruct(i), "BF16")
        np.testing.assert_array_equal(back.data, layer)


@given(models())
def test_a_band_of_one_layer_is_bit_exact_in_float32(
    weights: list[FloatArray],
) -> None:
    """With as many bands as layers every float32 comes back as it was."""
    result = decompose(weights, len(weights), 2)
    for i, weight in enumerate(weights):
        assert result.reconstruct(i).tobytes() == weight.tobytes()


@given(models(), st.data())
@settings(deadline=None)
def test_error_never_grows_with_rank(
    weights: list[FloatArray], data: st.DataObject
) -> None:
    """A higher rank is at least as near, and the full rank is there."""
    blocks = data.draw(st.integers(1, len(weights)))
    full = min(weights[0].shape)
    size = norm(weights)
    errors = [
        error(weights, decompose(weights, blocks, rank))
        for rank in range(full + 1)
    ]
    for low, high in pairwise(errors):
        assert high <= low + ROUNDING * size
    assert errors[-1] <= ROUNDING * size


@given(models(), st.data())
def test_error_of_means_never_grows_when_bands_are_split(
    weights: list[FloatArray], data: st.DataObject
) -> None:
    """At rank 0 each layer is nearest to the mean of a part of its band."""
    size = norm(weights)
    previous = float("inf")
    # Bands of 1, 2, 4, ... layers lie within each other.
    count = 1 << (len(weights).bit_length() - 1)
    weights = weights[:count]
    for power in range(count.bit_length()):
        now = error(weights, decompose(weights, 1 << power, 0))
        assert now <= previous + ROUNDING * size
        previous = now
    assert previous == 0


def test_more_bands_can_be_worse_above_rank_0() -> None:
    """Four layers that differ from one mean by rank 1, but from the means of
    halves by rank 2: one band of rank 1 is exact, two are not."""
    x = np.diag(np.array([1, 0, 0], np.float32))
    y = np.diag(np.array([0, 1, 0], np.float32))
    weights = [x, y, -x, -y]
    assert error(weights, decompose(weights, 1, 1)) < 1e-6
    assert error(weights, decompose(weights, 2, 1)) > 0.5


@pytest.mark.parametrize("shape", [(7, 5), (64, 48), (48, 64), (512, 600)])
@pytest.mark.parametrize("rank", [1, 3])
def test_small_matrices_get_the_best_there_is(
    shape: tuple[int, int], rank: int
) -> None:
    """The error is that of the left-out singular values (Eckart and Young)."""
    weights = gaussian(3, shape)
    mean = np.mean(weights, axis=0, dtype=np.float64)
    least = 0.0
    for weight in weights:
        values = np.linalg.svd(weight - mean, compute_uv=False)
        least += float(np.sum(values[rank:] ** 2))
    found = error(weights, decompose(weights, 1, rank))
    assert found == pytest.approx(least**0.5, rel=ROUNDING)


@pytest.mark.parametrize("rank", [1, 4, 32])
@pytest.mark.parametrize("shape", [(520, 1100), (1100, 520)])
def test_large_matrices_get_nearly_the_best(
    shape: tuple[int, int], rank: int
) -> None:
    """On flat spectra, the hardest, the error is within 0.3 % of the least."""
    weights = gaussian(2, shape)
    delta = (weights[0].astype(np.float64) - weights[1]) / 2
    values = np.linalg.svd(delta, compute_uv=False)
    least = float(np.sum(2 * values[rank:] ** 2)) ** 0.5
    found = error(weights, decompose(weights, 1, rank))
    assert least * (1 - ROUNDING) <= found <= least * 1.003


def test_large_matrices_of_low_rank_are_found_whole() -> None:
    """What is of rank r up to noise is found at rank r, noise left out."""
    random = np.random.default_rng(0)
    shape, rank, noise = (520, 700), 5, 1e-4
    mean = random.standard_normal(shape, np.float32)
    rest = random.standard_normal((520, rank)) @ random.standard_normal(
        (rank, 700)
    )
    rest = (rest + noise * random.standard_normal(shape)).astype(np.float32)
    weights = [mean + rest, mean - rest]
    found = error(weights, decompose(weights, 1, rank))
    assert found / norm(weights) < noise


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    """The randomized decomposition is repeatable, and the seed decides it."""
    weights = gaussian(2, (530, 540))

    def factors(seed: int) -> list[bytes]:
        band = decompose(weights, 1, 4, seed).bands[0]
        return [part.tobytes() for part in (*band.a, *band.b)]

    assert factors(1) == factors(1)
    assert factors(1) != factors(2)


def test_a_band_alone_is_as_it_is_among_others() -> None:
    """Bands can be made one by one: neither order nor number matters."""
    weights = gaussian(4, (530, 540))
    whole = decompose(weights, 2, 4, seed=7)
    alone = decompose_band(weights[2:], 4, seed=7)
    for i in range(2):
        assert (
            alone.reconstruct(i).tobytes() == whole.reconstruct(2 + i).tobytes()
        )


def test_weights_are_asked_for_one_at_a_time() -> None:
    """A weight is made when it is needed, twice each, and not all at once."""
    asked = []

    class Lazy(Sequence[FloatArray]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> FloatArray:  # type: ignore[override]
            asked.append(index)
            return np.full((3, 3), index, np.float32)

    decompose(Lazy(), 2, 1)
    # The first of a band is looked at once more, for its shape.
    assert asked == [0, 0, 1, 0, 1, 2, 2, 3, 2, 3]


def test_the_parts_have_the_shapes_they_should() -> None:
    """A mean a band, factors a layer, no larger than the matrix allows."""
    result = decompose(gaussian(5, (7, 3)), 3, 9)
    assert result.layers == 5
    assert [band.w0.shape for band in result.bands] == [(7, 3)] * 3
    assert [band.rank for band in result.bands] == [3, 3, 0]
    assert [a.shape for b in result.bands for a in b.a] == [(3, 3)] * 4 + [
        (0, 3)
    ]
    assert [x.shape for b in result.bands for x in b.b] == [(7, 3)] * 4 + [
        (7, 0)
    ]
    for band in result.bands:
        for part in (band.w0, *band.a, *band.b):
            assert part.dtype == np.float32
            assert part.flags.c_contiguous


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (1, 1100)])
def test_one_row_or_column(shape: tuple[int, int]) -> None:
    """A matrix of one row or column is of rank 1, and so rebuilt at rank 1."""
    weights = gaussian(3, shape)
    assert error(weights, decompose(weights, 1, 1)) <= ROUNDING * norm(weights)


def test_equal_layers_are_their_mean() -> None:
    """Layers that do not differ leave nothing to the factors."""
    weights = gaussian(1, (6, 8)) * 3
    for rank in (0, 2):
        result = decompose(weights, 1, rank)
        assert error(weights, result) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_weight_that_is_no_number_is_named(value: float, blocks: int) -> None:
    """NaN or infinity in a weight is an error with the tensor's name."""
    weights = gaussian(3, (4, 4))
    weights[2][1, 3] = value
    names = ["first", "second", "third"]
    with pytest.raises(ValueError, match="third holds NaN or infinity"):
        decompose(weights, blocks, 1, names=names)


def test_differences_beyond_float32_are_an_error() -> None:
    """Two weights that are as far apart as float32 goes have no delta."""
    large = np.full((2, 2), 3e38, np.float32)
    with pytest.raises(ValueError, match="weight 0 is too large"):
        decompose([large, -large, -large], 1, 1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([np.zeros((2, 2), np.float64)], "weight 0 is float64"),
        ([np.zeros(4, np.float32)], "expected a float32 matrix"),
        ([np.zeros((0, 4), np.float32)], "expected a float32 matrix"),
        (
            [np.zeros((2, 2), np.float32), np.zeros((2, 3), np.float32)],
            "weight 1 is float32 .2, 3., but weight 0 is float32 .2, 2.",
        ),
        ([], "0 layers cannot make 1 bands"),
    ],
)
def test_other_arrays_are_errors(weights: list, message: str) -> None:
    """Weights are float32 matrices of one shape."""
    with pytest.raises(ValueError, match=message):
        decompose(weights, 1, 1)


def test_numbers_out_of_range_are_errors() -> None:
    """A rank below 0 and a layer that is not there are refused."""
    weights = gaussian(2, (3, 3))
    with pytest.raises(ValueError, match="rank of 0 or more, found -1"):
        decompose(weights, 1, -1)
    result = decompose(weights, 1, 1)
    for layer in (2, -1):
        with pytest.raises(IndexError, match="there are 2 layers"):
            result.reconstruct(layer)


def test_randomized_and_exact_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the size where one gives way to the other both say the same."""
    random = np.random.default_rng(3)
    low = random.standard_normal((80, 3)) @ random.standard_normal((3, 90))
    weights = [(low * s).astype(np.float32) for s in (1, -1)]
    exact = decompose(weights, 1, 3).reconstruct(0)
    monkeypatch.setattr(decomposition, "EXACT_SIZE", 8)
    randomized = decompose(weights, 1, 3).reconstruct(0)
    assert norm([exact - randomized]) <= ROUNDING * norm([exact])
