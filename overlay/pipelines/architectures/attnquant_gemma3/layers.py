# SPDX-License-Identifier: Apache-2.0
"""The norms of Gemma 3, which are bfloat16 everywhere in MAX.

The patch ``gemma3-cpu-float32`` does the same in the built-in files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from max.dtype import DType
from max.pipelines.architectures.gemma3 import gemma3
from max.pipelines.architectures.gemma3.layers import attention
from max.pipelines.architectures.gemma3.layers.rms_norm import Gemma3RMSNorm

from ..attnquant_common.binding import bound


@contextmanager
def norms(dtype: DType) -> Iterator[None]:
    """Makes norms of a type, as long as it is entered."""
    if dtype == DType.bfloat16:
        yield
        return

    def norm(dim: int, _: DType, eps: float) -> Gemma3RMSNorm:
        return Gemma3RMSNorm(dim, dtype, eps)

    with (
        bound(gemma3, Gemma3RMSNorm=norm),
        bound(attention, Gemma3RMSNorm=norm),
    ):
        yield
