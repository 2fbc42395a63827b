# SPDX-License-Identifier: Apache-2.0
"""Kernel overlay: token sampling that does not wait for the device."""

from .fused_token_sampling import FusedTokenSampling
