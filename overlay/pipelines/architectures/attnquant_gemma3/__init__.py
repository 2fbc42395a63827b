# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 text, with its projections decomposed or quantized at load."""

from .arch import ARCHITECTURES, attnquant_gemma3_arch

__all__ = ["ARCHITECTURES", "attnquant_gemma3_arch"]
