# SPDX-License-Identifier: Apache-2.0
"""Gemma 4, with its projections decomposed or quantized at load."""

from .arch import (
    ARCHITECTURES,
    attnquant_gemma4_arch,
    attnquant_unified_mtp_gemma4_arch,
)

__all__ = [
    "ARCHITECTURES",
    "attnquant_gemma4_arch",
    "attnquant_unified_mtp_gemma4_arch",
]
