# SPDX-License-Identifier: Apache-2.0
"""Rebuilds decomposed weights for MAX 26.7, on CPUs and GPUs.

One module an idea: `cpu` and `gpu` (a kernel for each), `by_matmul` (MAX's
matmul instead), `op` (the op).
"""

from .op import Rebuild
