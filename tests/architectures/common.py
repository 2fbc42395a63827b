# SPDX-License-Identifier: Apache-2.0
"""What all architectures' tests ask MAX, and what they expect of NVFP4."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from attnquant_common import nvfp4

HOPPER = ("warm-cache", "--target", "cuda:sm_90a", "--devices")
BLACKWELL = ("warm-cache", "--target", "cuda:sm_100a", "--devices")
CPU = ("generate", "--quantization-encoding", "float32", "--devices", "cpu")
MTP = ("--speculative-method", "mtp", "--num-speculative-tokens", "3")

NVFP4 = {"ATTNQUANT_QUANT": "nvfp4"}
NO_ATTENTION = {**NVFP4, "ATTNQUANT_QUANT_IGNORE": "self_attn"}
BANDS = {"ATTNQUANT_BLOCKS": "2", "ATTNQUANT_RANK": "8"}
RUNTIME = {**BANDS, "ATTNQUANT_PRECOMPUTE_OUTSIDE": "0"}
BY_MATMULS = {**RUNTIME, "ATTNQUANT_GEMM": "1"}
BY_OP = {**RUNTIME, "ATTNQUANT_GEMM": "0"}

MATMUL = "mo.matmul.dynamic.block.scaled"

FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)

TOLERANCE = 2e-3
"""On float32 logits of a spread of 3.5 to 4. 2e-4 was seen, and 14 against
weights that are not quantized."""

Run = Callable[..., subprocess.CompletedProcess[str]]
Traced = Callable[..., dict[str, Any]]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Generated:
    """What MAX computed for a prompt and eight tokens after it."""

    tokens: list[int]
    """All of them."""

    logits: Float32
    """After the prompt and after each token, [9 at most, vocabulary]."""

    first: int
    """The place of the first logits' token."""

    log: str


def quantized_values(
    weights: Mapping[str, Float32],
    layers: int,
    prefix: str,
    variables: Mapping[str, str],
) -> dict[str, Float32]:
    """Returns weights with NVFP4's values for projections.

    Args:
        weights: By name.
        layers: The number of layers.
        prefix: What stands before a layer's number.
        variables: Whether they are quantized, and `self_attn` is ignored.
    """
    found = dict(weights)
    if "ATTNQUANT_QUANT" not in variables:
        return found
    ignored = variables.get("ATTNQUANT_QUANT_IGNORE", "none")

    def quantize(group: tuple[int, tuple[str, ...]]) -> None:
        layer, fused = group
        names = [f"{prefix}{layer}.{name}.weight" for name in fused]
        # Where Gemma 4's keys are values there is no v_proj.
        names = [name for name in names if name in weights]
        greatest = max(np.abs(weights[name]).max() for name in names)
        for name in names:
            found[name] = nvfp4.dequantize(
                nvfp4.quantize_numpy(
                    weights[name], weight_scale_2=nvfp4.scale_2(greatest)
                )
            )

    asked = (fused for fused in FUSED if not fused[0].startswith(ignored))
    with ThreadPoolExecutor() as pool:
        list(pool.map(quantize, itertools.product(range(layers), asked)))
    return found
