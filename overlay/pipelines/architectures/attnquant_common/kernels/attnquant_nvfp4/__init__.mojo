# SPDX-License-Identifier: Apache-2.0
"""NVFP4 quantization for MAX 26.7, on CPUs and GPUs from one source.

One module an idea: `minifloat` (rounding to e2m1 and e4m3), `quotient` (exact
division, fast), `blocks` (how a block of 16 weights is quantized), `op` (the
ops, and who does which block).
"""

from .op import NVFP4Amax, NVFP4Quantize
