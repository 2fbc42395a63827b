# SPDX-License-Identifier: Apache-2.0
"""`sampler.fused_token_sampling` for MAX 26.7, fast for a small top-k.

One module an idea: `warp_list` (a warp's 32 best tokens), `draw` (which of
them may be drawn, and the draw), `kernels` (two launches), `op` (the op).
"""

from .op import FusedTokenSampling
