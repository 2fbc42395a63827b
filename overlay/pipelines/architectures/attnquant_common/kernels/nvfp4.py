# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 ops on buffers of a device."""

from __future__ import annotations

import functools

import numpy as np
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

from . import libraries


class NVFP4Kernels:
    """Quantizes matrices on a device.

    A graph is compiled, for any shape, when it is first needed.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._session = InferenceSession(devices=[device])
        self._compiled = functools.cache(self._compile)

    def amax(self, weights: Buffer) -> np.float32:
        """Returns the greatest magnitude, NaN if there is one.

        Args:
            weights: [N, K] on the device, bfloat16 or float32.
        """
        (rows,) = self._compiled("amax", weights.dtype).execute(weights)
        return np.float32(rows.to(CPU()).to_numpy().max())

    def quantize(
        self, weights: Buffer, scale_2: np.float32, *, sweep: bool
    ) -> tuple[Buffer, Buffer]:
        """Returns codes [N, K / 2] and scales [N, K / 16] on the device.

        A block that holds NaN or infinity has NaN for its scale.

        Args:
            weights: [N, K] on the device, bfloat16 or float32.
            scale_2: The scale of scales.
            sweep: Whether to try the neighbouring scales too.
        """
        scalar = Buffer.from_numpy(np.array(scale_2, np.float32))
        model = self._compiled("quantize", weights.dtype, sweep)
        codes, scales = model.execute(weights, scalar)
        return codes, scales

    def _compile(self, op: str, dtype: DType, sweep: bool = False) -> Model:
        place = DeviceRef.from_device(self.device)

        def amax(weights: TensorValue) -> TensorValue:
            (rows,) = ops.custom(
                "attnquant.nvfp4_amax",
                device=place,
                values=[weights],
                out_types=[
                    TensorType(DType.float32, [weights.shape[0]], place)
                ],
            )
            return rows.tensor

        def quantize(
            weights: TensorValue, scale_2: TensorValue
        ) -> tuple[TensorValue, ...]:
            n, k = weights.shape
            codes, scales = ops.custom(
                "attnquant.nvfp4_quantize",
                device=place,
                values=[weights, scale_2],
                out_types=[
                    TensorType(DType.uint8, [n, k // 2], place),
                    TensorType(DType.uint8, [n, k // 16], place),
                ],
                parameters={"sweep": sweep},
            )
            return codes.tensor, scales.tensor

        weights = TensorType(dtype, ["n", "k"], place)
        scale_2 = TensorType(DType.float32, [], DeviceRef.CPU())
        return self._session.load(
            Graph(
                f"attnquant_nvfp4_{op}",
                amax if op == "amax" else quantize,
                [weights] if op == "amax" else [weights, scale_2],
                custom_extensions=list(libraries()),
            )
        )


@functools.cache
def kernels_of(device: Device) -> NVFP4Kernels:
    """Returns the kernels of a device, the same at every call."""
    return NVFP4Kernels(device)
