# SPDX-License-Identifier: Apache-2.0
"""Runs the overlay's selection and draw on a CPU, a whole list in one vector.

Reads cases from the file that is named, three lines each:

    k temperature p min_p
    the logits' bits, as unsigned integers
    uniform numbers

and answers each with three lines: the list's tokens, how many may be drawn and
the row's weight, and the place that each uniform number draws.
"""

from std.memory import bitcast
from std.sys import argv
from std.utils.static_tuple import StaticTuple

from small_k_sampling.draw import choices, drawn, inverse_of, weight
from small_k_sampling.warp_list import (
    LIST,
    NO_TOKEN,
    key_of,
    logit_of,
    merged,
    sort_lists,
    token_of,
)

comptime Keys = SIMD[DType.uint64, LIST]


def best_of(logits: List[Float32]) -> Keys:
    """The 32 best of all tokens, by the kernels' networks."""
    var best = Keys(NO_TOKEN)
    for first in range(0, len(logits), LIST):
        var keys = Keys(NO_TOKEN)
        for lane in range(min(LIST, len(logits) - first)):
            keys[lane] = key_of(logits[first + lane], UInt32(first + lane))
        var lists = StaticTuple[Keys, 1](keys)
        sort_lists(lists)
        best = merged(best, lists[0])
    return best


def main() raises:
    var lines = open(argv()[1], "r").read().splitlines()
    for line in range(0, len(lines), 3):
        var words = lines[line].split()
        var k = Int(words[0])
        var inverse_temperature = inverse_of(Float32(Float64(words[1])))
        var p = Float32(Float64(words[2]))
        var min_p = Float32(Float64(words[3]))
        var logits = List[Float32]()
        for word in lines[line + 1].split():
            logits.append(bitcast[DType.float32](UInt32(Int(word))))

        var best = best_of(logits)
        var greatest = logit_of(best[0])
        var weights = List[Float32]()
        var tokens = String()
        for place in range(LIST):
            weights.append(weight(
                    logit_of(best[place]), greatest, inverse_temperature
                ))
            if best[place] != NO_TOKEN:
                tokens += String(token_of(best[place])) + " "
        var row_weight = Float32(0)
        for logit in logits:
            row_weight += weight(logit, greatest, inverse_temperature)
        var count = choices(weights.unsafe_ptr(), k, p, min_p, row_weight)
        print(tokens)
        print(count, row_weight)

        var places = String()
        for word in lines[line + 2].split():
            if count > 0:
                places += (
                    String(
                        drawn(
                            weights.unsafe_ptr(),
                            count,
                            Float32(Float64(word)),
                        )
                    )
                    + " "
                )
        print(places)
