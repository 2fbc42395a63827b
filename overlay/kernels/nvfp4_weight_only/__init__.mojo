# SPDX-License-Identifier: Apache-2.0
"""`nvfp4.weight_only_matmul`: linear layers with weights in NVFP4.

One module an idea: `codes` (the numbers), `copies` (into shared memory), a
kernel each for `one_row`, `few_rows` and `many_rows` of activations, for
`any_shape`, and for the `cpu`; `op` (which of them).
"""

from .op import WeightOnlyMatmul
