# SPDX-License-Identifier: Apache-2.0
"""Compares the overlay ``nvfp4_weight_only`` with float64.

Needs MAX 26.7, patched or not; on a GPU also torch. From the repository's
root::

    MAX_KERNEL_OVERLAYS=0 python -m tests.kernels.check_nvfp4_weight_only \
        --output weight-only.json

Exit status 1 if what must hold does not; ``failures`` in the JSON names it.
Inputs are new in each run, drawn from the ``seed`` in the JSON: every code,
scales at both ends of e4m3, activations of six orders of magnitude. Before a
call one with NaN leaves its results where the call's will be.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from tests.kernels.command import Parser, pretend, put

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "overlay" / "kernels" / "nvfp4_weight_only"
OP = "nvfp4.weight_only_matmul"

ROWS = (*range(1, 18), 32, 64, 128, 511, 4096)
"""Of activations; beyond 64 on a GPU alone."""

GEMMAS = (
    *((1536, 1152), (1152, 1024), (13824, 1152), (1152, 6912)),
    *((4096, 2560), (2560, 2048), (20480, 2560), (2560, 10240)),
    *((8192, 3840), (3840, 4096), (30720, 3840), (3840, 15360)),
    *((8192, 5376), (5376, 4096), (43008, 5376), (5376, 21504)),
    *((16384, 5376), (5376, 8192), (18432, 5376), (5376, 16384)),
)
"""[N, K] of the fused projections of Gemma 3 and 4."""

ODD = ((1000, 1152), (999, 1408), (300, 192), (40, 1136), (129, 272), (17, 16))
"""Columns of 16 times an odd number, rows that fill no tile."""

SCALE_2 = np.float32(0.0371)
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Returns the bits of values, cut off."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def value_of_scales(scales: Bytes) -> Floats:
    """Returns the values of e4m3, by the format's definition."""
    exponent, mantissa = scales >> 3 & 15, scales & 7
    powers = 2.0 ** (np.maximum(exponent, 1).astype(float) - 7)
    return powers * (mantissa / 8 + (exponent > 0))


def value_of_weight(codes: Bytes, scales: Bytes) -> Floats:
    """Returns a weight's values without the tensor's scale.

    Args:
        codes: [N, K / 2].
        scales: [N, K / 16].
    """
    signed = np.concatenate([_VALUES, -_VALUES])
    values = np.stack([signed[codes & 15], signed[codes >> 4]], axis=-1)
    blocks = values.reshape(*scales.shape, 16)
    blocks *= value_of_scales(scales)[:, :, None]
    return blocks.reshape(len(codes), -1)


class Exact:
    """Products by one weight in float64, and what their terms add up to."""

    def __init__(self, codes: Bytes, scales: Bytes) -> None:
        """Decodes a weight.

        Args:
            codes: [N, K / 2].
            scales: [N, K / 16].
        """
        self.weight = value_of_weight(codes, scales) * float(SCALE_2)

    def __call__(self, x: npt.NDArray[np.float32]) -> tuple[Floats, Floats]:
        """Multiplies, and does so without signs.

        Args:
            x: [M, K].
        """
        wide = x.astype(float)
        return wide @ self.weight.T, abs(wide) @ abs(self.weight).T


class ExactOnGPU(Exact):
    """The same, computed by torch, since numpy would take minutes."""

    def __init__(self, codes: Bytes, scales: Bytes) -> None:
        """Decodes a weight, as :class:`Exact` does."""
        import torch

        table = torch.tensor(np.concatenate([_VALUES, -_VALUES]), device="cuda")
        byte = torch.tensor(codes, device="cuda").long()
        values = torch.stack([table[byte & 15], table[byte >> 4]], dim=-1)
        factors = torch.tensor(
            value_of_scales(scales) * float(SCALE_2), device="cuda"
        )
        blocks = values.reshape(*scales.shape, 16) * factors[:, :, None]
        self.on_gpu = blocks.reshape(len(codes), -1)

    def __call__(self, x: npt.NDArray[np.float32]) -> tuple[Floats, Floats]:
        """Multiplies, as :class:`Exact` does."""
        import torch

        wide = torch.tensor(x, device="cuda").double()
        product = wide @ self.on_gpu.T
        size = wide.abs() @ self.on_gpu.abs().T
        return product.cpu().numpy(), size.cpu().numpy()


def graph(device: DeviceRef, dtype: DType) -> Graph:
    """The op alone; all sizes are symbolic."""
    # MAX has no float8 on a CPU.
    scale = DType.uint8 if device.is_cpu() else DType.float8_e4m3fn

    def forward(
        x: TensorValue, w: TensorValue, s: TensorValue, s2: TensorValue
    ) -> TensorValue:
        return ops.custom(
            OP,
            device=device,
            values=[x, w, s, s2],
            out_types=[TensorType(dtype, [x.shape[0], w.shape[0]], device)],
        )[0].tensor

    return Graph(
        f"weight_only_{dtype.name}",
        forward=forward,
        input_types=[
            TensorType(dtype, ["m", "k"], device),
            TensorType(DType.uint8, ["n", "bytes"], device),
            TensorType(scale, ["n", "blocks"], device),
            TensorType(DType.float32, [1], device),
        ],
        custom_extensions=[OVERLAY],
    )


@dataclasses.dataclass
class Check:
    """A device, and what was found that must not be."""

    device: Device
    exact: type[Exact]
    """What its products are compared with."""

    seed: int
    failures: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.session = InferenceSession(devices=[self.device])

    def model(self, dtype: DType) -> Model:
        """The op for activations of a type."""
        return self.session.load(
            graph(DeviceRef.from_device(self.device), dtype)
        )

    def buffer(self, values: npt.NDArray[Any], dtype: DType) -> Buffer:
        """Returns bits on the device, as values of a type."""
        found = Buffer.from_numpy(np.ascontiguousarray(values))
        return found.view(dtype, list(values.shape)).to(self.device)

    def weight(self, rows: int, columns: int) -> tuple[Bytes, Bytes]:
        """Draws codes and scales."""
        codes = self.rng.integers(0, 256, (rows, columns // 2), np.uint8)
        # All but NaN, which is the last.
        scales = self.rng.integers(0, 127, (rows, columns // 16), np.uint8)
        scales[::7] = self.rng.integers(0, 12, scales[::7].shape, np.uint8)
        scales[0], scales[-1] = 126, 1
        codes[rows // 2] = 0x88  # negative zeros
        return codes, scales

    def compare(
        self, dtype: DType, shapes: tuple[tuple[int, int], ...], most: int
    ) -> Iterator[dict[str, Any]]:
        """Gives, for each shape, how far off the op is, of what may be.

        Args:
            dtype: The activations' type.
            shapes: [N, K] of weights.
            most: Rows of activations, at most.
        """
        model = self.model(dtype)
        short = dtype == DType.bfloat16
        scale = DType.uint8 if self.device.is_host else DType.float8_e4m3fn
        # Half a unit in the last place, and what sums in float32 may lose.
        relative = 2.0**-7.98 if short else 2.0**-22
        for n, k in shapes:
            codes, scales = self.weight(n, k)
            exact = self.exact(codes, scales)
            fixed = [
                self.buffer(codes, DType.uint8),
                self.buffer(scales, scale),
                self.buffer(np.array([SCALE_2]), DType.float32),
            ]
            worst = 0.0
            for m in (m for m in ROWS if m <= most):
                x = self.rng.standard_normal((m, k), np.float32)
                x *= 10 ** self.rng.uniform(-3, 3, (m, k)).astype(np.float32)
                bits: npt.NDArray[Any] = x
                if short:
                    bits = bfloat16(x)
                    x = (bits.astype(np.uint32) << 16).view(np.float32)
                nan = np.full_like(bits, 0xFFFF if short else np.nan)
                model.execute(self.buffer(nan, dtype), *fixed)
                found = self._result(
                    model.execute(self.buffer(bits, dtype), *fixed)[0], short
                )
                product, size = exact(x)
                may = relative * abs(product) + 2.0**-18 * size
                off = float(
                    np.max(abs(found - product) / np.maximum(may, 1e-30))
                )
                worst = max(worst, off)
                if not off <= 1:
                    self.failures.append(
                        f"{dtype.name}, [{m}, {k}] by [{n}, {k}]: off by "
                        f"{off:.3g} times what may be"
                    )
            yield {"n": n, "k": k, "dtype": dtype.name, "worst": worst}

    def _result(self, found: Buffer, short: bool) -> Floats:
        host = found.to(CPU())
        if not short:
            return host.to_numpy().astype(float)
        bits = host.view(DType.uint16, list(found.shape)).to_numpy()
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(float)

    def refuses(self) -> None:
        """Shapes that do not belong together are an error."""
        model = self.model(DType.bfloat16)
        codes, scales = self.weight(32, 64)
        scale = DType.uint8 if self.device.is_host else DType.float8_e4m3fn
        for k, blocks in itertools.product((64, 48, 40), (4, 3)):
            if (k, blocks) == (64, 4):
                continue
            try:
                model.execute(
                    self.buffer(np.zeros((2, k), np.uint16), DType.bfloat16),
                    self.buffer(codes, DType.uint8),
                    self.buffer(scales[:, :blocks], scale),
                    self.buffer(np.array([SCALE_2]), DType.float32),
                )
            except ValueError as error:
                if OP not in str(error):
                    self.failures.append(f"k {k}, {blocks} blocks: {error}")
            else:
                self.failures.append(f"k {k}, {blocks} blocks: no error")


def main() -> int:
    """Runs the command line."""
    parser = Parser(__doc__, action="store_true")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    arguments = parser.arguments()
    if arguments.compile:
        pretend(arguments.compile)
        InferenceSession(devices=[Accelerator()]).load(
            graph(DeviceRef.GPU(), DType.bfloat16)
        )
        return 0
    if arguments.cpu:
        check = Check(CPU(), Exact, arguments.seed)
        cases = [(DType.float32, ODD, 64), (DType.bfloat16, ODD, 64)]
    else:
        check = Check(Accelerator(), ExactOnGPU, arguments.seed)
        cases = [(DType.bfloat16, ODD + GEMMAS, ROWS[-1])]
    result: dict[str, Any] = {"seed": arguments.seed, "shapes": []}
    result["failures"] = check.failures
    check.refuses()
    for case in cases:
        for found in check.compare(*case):
            result["shapes"].append(found)
            if arguments.output:
                put(result, arguments.output)
    put(result, arguments.output)
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
