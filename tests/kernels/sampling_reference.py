# SPDX-License-Identifier: Apache-2.0
"""Which tokens a sampler may draw, in numpy and float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDING = 1e-4
"""Relative. A sampler computes in float32, and a token at the edge of top_p
or min_p may fall on either side."""


def candidates(
    logits: npt.NDArray[np.floating],
    k: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> npt.NDArray[np.intp]:
    """Returns the tokens that may be drawn, the likeliest first.

    These are the k largest logits, then those of at least min_p times the
    largest probability, then the fewest that hold top_p of what is left.

    Args:
        logits: A row of logits, ``[vocabulary]``.
        k: How many of the largest take part.
        temperature: What the logits are divided by.
        top_p: Share of the probability that takes part.
        min_p: Least probability that takes part, in terms of the largest.
    """
    # A token that ties with the k-th may stand in for it.
    last = max(len(logits) - k, 0)
    bound = np.partition(logits, last)[last]
    [tokens] = np.nonzero(logits >= bound)
    tokens = tokens[np.argsort(-logits[tokens], kind="stable")]
    scaled = logits[tokens].astype(np.float64) / temperature
    weights = np.exp(scaled - scaled[0])
    kept = weights >= min_p * (1 - ROUNDING)
    tokens, weights = tokens[kept], weights[kept]
    before = np.cumsum(weights) - weights
    inside = before < top_p * (1 + ROUNDING) * weights.sum()
    return tokens[inside]
