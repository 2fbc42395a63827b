# SPDX-License-Identifier: Apache-2.0
"""Matrices that a quantizer gets wrong if anything about it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]

# Where quantized values lie, and halfway between them.
_EDGES = np.array(
    [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6]
)


def bfloat16(values: npt.ArrayLike) -> Bits:
    """The bits of numbers cut to bfloat16."""
    wide = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (wide >> np.uint32(16)).astype(np.uint16)


def float32(bits: Bits) -> npt.NDArray[np.float32]:
    """The numbers of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def cases(seed: int = 0) -> Iterator[tuple[str, Bits]]:
    """Names and finite matrices of bfloat16 bits."""
    random = np.random.default_rng(seed)
    # No multiple of what a processor handles at once, and one that is.
    for n, k in ((1, 16), (3, 48), (5, 1040), (67, 272), (64, 1024)):
        yield f"Gaussian {n}x{k}", bfloat16(random.standard_normal((n, k)))
    yield "heavy tails", bfloat16(random.standard_t(3, (64, 1024)))
    outlier = random.standard_normal((32, 512))
    outlier[7, 100] = 3000
    yield "an outlier", bfloat16(outlier)
    # The block's scale is 1, so that the edges are hit exactly.
    edges = random.choice(np.concatenate([_EDGES, -_EDGES]), (64, 1024))
    edges[:, ::16] = 6
    edges[0, 0] = 6 * 448
    yield "edges", bfloat16(edges)
    scaled = edges * np.exp2(random.integers(-9, 9, (64, 64))).repeat(16, 1)
    yield "edges of scaled blocks", bfloat16(scaled)
    zeros = random.standard_normal((16, 256))
    zeros[:, 16:48] = 0
    zeros[:, 48:64] = -0.0
    zeros[3] = -0.0
    yield "zero blocks", bfloat16(zeros)
    yield "every number", _finite(np.arange(1 << 16, dtype=np.uint16))
    shuffled = random.permutation(np.arange(1 << 16, dtype=np.uint16))
    yield "every number, shuffled", _finite(shuffled)
    for name, least in (("great", 0x7000), ("middling", 0x3000)):
        magnitude = random.integers(least, least + 0x0F00, (32, 512))
        sign = random.integers(0, 2, (32, 512)) << 15
        yield f"{name} numbers", (magnitude | sign).astype(np.uint16)
    mixed = random.standard_normal((32, 512))
    mixed[:, 3::7] *= 1e-39
    mixed[:, 5::7] *= -1e-38
    yield "subnormal numbers among others", bfloat16(mixed)
    mixed[5, 200] = 2.0**40
    yield "subnormal numbers among great ones", bfloat16(mixed)
    mixed[5, 200] = 2.0**61
    yield "subnormal numbers among greater ones", bfloat16(mixed)


def tiny() -> Iterator[tuple[str, Bits]]:
    """Matrices whose ``weight_scale_2`` would be subnormal or zero."""
    random = np.random.default_rng(1)
    yield "all zero", np.zeros((3, 32), np.uint16)
    yield "all -0.0", np.full((3, 32), 0x8000, np.uint16)
    for exponent in (-34, -36, -39):
        values = random.standard_normal((16, 256)) * 10.0**exponent
        yield f"around 1e{exponent}", bfloat16(values)


def _finite(bits: Bits) -> Bits:
    bits = bits.copy()
    bits[(bits & 0x7F80) == 0x7F80] = 0
    return bits.reshape(64, 1024)
