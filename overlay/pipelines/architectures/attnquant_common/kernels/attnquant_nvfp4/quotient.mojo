# SPDX-License-Identifier: Apache-2.0
"""Division by a number that divides many, rounded as IEEE 754 has it.

Source: P. Markstein, "Computation of elementary functions on the IBM RISC
System/6000 processor", IBM Journal of Research and Development, 1990,
https://doi.org/10.1147/rd.341.0111
"""


@fieldwise_init
struct Divisor[width: SIMDLength, by_reciprocal: Bool](
    TrivialRegisterPassable
):
    """A divisor, and its reciprocal if that is how to divide by it.

    By the reciprocal, a quotient takes five multiplications and additions
    instead of a division. It is the same number if the divisor's magnitude is
    from 2^-60 to 2^60 and the quotient's magnitude from 2^-30 to 2^30; smaller
    quotients may be off in their last places, but are zero, or not, alike.
    """

    var value: SIMD[DType.float32, Self.width]
    var reciprocal: SIMD[DType.float32, Self.width]

    @always_inline
    def __init__(out self, value: SIMD[DType.float32, Self.width]):
        self.value = value
        comptime if Self.by_reciprocal:
            self.reciprocal = 1 / value
        else:
            self.reciprocal = 0

    @always_inline
    def divide(
        self, dividend: SIMD[DType.float32, Self.width]
    ) -> SIMD[DType.float32, Self.width]:
        """Returns dividend / value, rounded to nearest, ties to even."""
        comptime if not Self.by_reciprocal:
            return dividend / self.value
        # The product may be two last places off. The first correction leaves
        # less than one, from where the second rounds rightly.
        var quotient = dividend * self.reciprocal
        comptime for _ in range(2):
            var rest = (-quotient).fma(self.value, dividend)
            quotient = rest.fma(self.reciprocal, quotient)
        return quotient
