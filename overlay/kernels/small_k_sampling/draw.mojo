# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a sorted list may be drawn, and the draw.

The rule is the built-in kernel's. A token's weight is
`exp((logit - greatest logit) / temperature)`. A token may be drawn if

- fewer than k tokens are heavier,
- the tokens that are heavier have at most the share p of the whole row's
  weight (so top-p counts from the full softmax, not from that of the k), and
- its weight is not below min-p, the greatest weight being 1.

Tokens of equal weight may be drawn together or not at all, so ties at the k-th
place widen the choice. The draw is in proportion to the weights. In one point
the built-in strays from its rule and this does not: where min-p leaves weight
out, the source there (below) still draws from the range of the whole weight,
and what falls beyond the tokens left goes to the last of them.

Source: `TopKTopPSamplingFromProbKernel` in
https://github.com/modular/modular/blob/main/max/kernels/src/nn/sampling/topk_fi.mojo
"""

from std.math import exp
from std.utils.numerics import max_finite, neg_inf

from .warp_list import LIST


@always_inline
def inverse_of(temperature: Float32) -> Float32:
    """Returns 1 / temperature, with the built-in's bound for greedy rows."""
    return 1 / max(temperature, Float32(1e-6))


@always_inline
def weight(
    logit: Float32, greatest: Float32, inverse_temperature: Float32
) -> Float32:
    """Returns a token's weight, 1 for the greatest logit.

    NaN and minus infinity have no weight. Where the greatest logit is plus
    infinity, the tokens that share it are alone in having any.
    """
    # Without branches: a lane has eight of these to compute at once.
    var w = exp((logit - greatest) * inverse_temperature)
    w = logit.eq(greatest).select(Float32(1), w)
    return logit.gt(neg_inf[DType.float32]()).select(w, Float32(0))


@always_inline
def choices[
    origin: Origin, //, space: AddressSpace
](
    weights: Pointer[Float32, origin, address_space=space],
    k: Int,
    p: Float32,
    min_p: Float32,
    row_weight: Float32,
) -> Int:
    """Counts the tokens that may be drawn; they stand first in the list.

    Args:
        weights: 32 weights, descending, 0 where the list has no token.
        k: Top-k, at least 1.
        p: Top-p.
        min_p: Min-p.
        row_weight: The sum of the weights of all tokens of the row.

    Returns:
        The count. If it is 32, tokens beyond the list may be drawn as well.
    """
    # From 1 on there is no bound: sums in two orders differ by a rounding.
    var budget = max_finite[DType.float32]() if p >= 1 else p * row_weight
    var sum = Float32(0)
    var heavier = 0
    var heavier_sum = Float32(0)
    for i in range(LIST):
        var w = weights[unsafe_offset=i]
        if i > 0 and w < weights[unsafe_offset=i - 1]:
            heavier = i
            heavier_sum = sum
        if not (w > 0 and heavier < k and heavier_sum <= budget) or w < min_p:
            return i
        sum += w
    return LIST


@always_inline
def drawn[
    origin: Origin, //, space: AddressSpace
](
    weights: Pointer[Float32, origin, address_space=space],
    count: Int,
    uniform: Float32,
) -> Int:
    """Draws one of the first `count` places in proportion to their weights.

    Args:
        weights: At least `count` weights.
        count: At least 1.
        uniform: A number in [0, 1].
    """
    var sum = Float32(0)
    for i in range(count):
        sum += weights[unsafe_offset=i]
    var target = uniform * sum
    sum = 0
    for i in range(count - 1):
        sum += weights[unsafe_offset=i]
        if sum > target:
            return i
    return count - 1
