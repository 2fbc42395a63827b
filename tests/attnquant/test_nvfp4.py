# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 quantizer.

Its numpy form is held to NVIDIA's ModelOpt and to the definition of the
format, its kernel to the numpy form, in an environment that has MAX 26.7
(``MAXPATCH_TEST_PYTHON`` names one).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from attnquant_common import nvfp4
from attnquant_common.tensor import Tensor, from_float32
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attnquant.nvfp4_cases import cases, float32, tiny
from tests.conftest import Check

if TYPE_CHECKING:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

CHECK = "check_nvfp4_quantize"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NAN = 0x7F

Floats = npt.NDArray[np.float32]
Quantize = Callable[..., tuple[npt.NDArray[Any], ...]]


def gaussian(n: int, k: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, k), np.float32)


def block_errors(w: Floats, quantized: nvfp4.Quantized) -> npt.NDArray[Any]:
    """Squared error of each block, exactly."""
    codes = np.stack([quantized.weight & 15, quantized.weight >> 4], -1)
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7].astype(np.float64)
    scale = nvfp4._E4M3[quantized.weight_scale] * quantized.weight_scale_2
    shape = (*scale.shape, 16)
    exact = values.reshape(shape) * scale[..., None].astype(np.float64)
    return ((w.reshape(shape) - exact) ** 2).sum(-1)


@pytest.fixture(scope="module")
def modelopt_tensor() -> type[NVFP4QTensor]:
    """ModelOpt's class of an NVFP4 tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports', not ours
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import (
            NVFP4QTensor,
        )
    return NVFP4QTensor


@pytest.fixture(scope="module")
def modelopt(modelopt_tensor: type[NVFP4QTensor]) -> Quantize:
    """ModelOpt's quantizer: (tensor, weight_scale_2) to bytes and scale."""
    import torch

    def quantize(
        tensor: torch.Tensor, scale_2: float | None
    ) -> tuple[npt.NDArray[Any], ...]:
        given = None if scale_2 is None else torch.tensor(scale_2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            packed, scale, found = modelopt_tensor.quantize(
                tensor.clone(), 16, weights_scaling_factor_2=given
            )
        return (
            packed._quantized_data.numpy(),
            scale.view(torch.uint8).numpy(),
            found.float().numpy(),
        )

    return quantize


@pytest.mark.full
@pytest.mark.parametrize("scale_2", [None, 1e-3, 7.0])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_rtn_is_modelopts(
    modelopt: Quantize, dtype: str, scale_2: float | None
) -> None:
    """Codes, scales and scale of scales are ModelOpt's, to the bit."""
    import torch

    for name, bits in cases():
        if dtype == "BF16":
            ours = Tensor(bits, dtype)
            theirs = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        else:
            values = float32(bits)
            if abs(values).max() < 1e38:
                values = values * np.float32(1.1)  # more bits than bfloat16's
            ours, theirs = Tensor(values, dtype), torch.from_numpy(values)
        found = nvfp4.quantize_numpy(ours, weight_scale_2=scale_2)
        codes, scales, factor = modelopt(theirs, scale_2)
        assert found.weight_scale_2 == factor, name
        np.testing.assert_array_equal(found.weight_scale, scales, name)
        np.testing.assert_array_equal(found.weight, codes, name)


def test_rtn_by_hand() -> None:
    """A block of known codes: values, ties to even, signs, and the order."""
    w = np.zeros((1, 32), np.float32)
    w[0, :8] = [6, -6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5]
    w[0, 8:16] = [5, -5, -0.1, -0.0, 0.5, 1, 1.5, 3]
    w[0, 31] = 6 * 448  # so that the first block's scale is 1
    found = nvfp4.quantize_numpy(w)
    assert found.weight_scale_2 == 1
    assert found.weight_scale.tolist() == [[0x38, 0x7E]]
    codes = [7, 15, 0, 2, 2, 4, 4, 6, 6, 14, 8, 0, 1, 2, 3, 5] + [0] * 15 + [7]
    packed = [a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)]
    assert found.weight.tolist() == [packed]


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=16,
        max_size=16,
    ),
    st.sampled_from(["rtn", "sweep"]),
)
@settings(max_examples=300, deadline=None)
def test_every_code_is_a_nearest(values: list[float], scales: str) -> None:
    """Under the scale that a block got, no other code is nearer."""
    w = np.array([values], np.float32)
    found = nvfp4.quantize_numpy(w, scales=scales)
    assert 1 <= found.weight_scale[0, 0] < NAN
    scale = np.float64(nvfp4._E4M3[found.weight_scale[0, 0]])
    # In float32, as the format's definition has it.
    step = np.float32(scale) * found.weight_scale_2
    levels = np.concatenate([E2M1, -E2M1]).astype(np.float64) * np.float64(step)
    errors = abs(w.astype(np.float64).T - levels)
    codes = np.stack([found.weight & 15, found.weight >> 4], -1).ravel()
    chosen = errors[np.arange(16), codes]
    slack = np.abs(w[0].astype(np.float64)) * 2.0**-22 + 1e-44
    assert (chosen <= errors.min(axis=1) + slack).all()


@pytest.mark.parametrize("seed", range(3))
def test_sweep_is_better(seed: int) -> None:
    """On Gaussian weights it has at most 0.75 times the squared error."""
    w = gaussian(256, 1024, seed)
    rtn, sweep = (
        block_errors(w, nvfp4.quantize_numpy(w, scales=scales))
        for scales in ("rtn", "sweep")
    )
    assert sweep.sum() <= 0.75 * rtn.sum()


def test_sweep_makes_no_block_worse() -> None:
    """Whatever the weights, no block's exact squared error grows."""
    for name, bits in [*cases(), *tiny()]:
        w = float32(bits)
        for scale_2 in (None, 1e-3, 7.0):
            rtn, sweep = (
                nvfp4.quantize_numpy(w, scales=scales, weight_scale_2=scale_2)
                for scales in ("rtn", "sweep")
            )
            assert rtn.weight_scale_2 == sweep.weight_scale_2
            assert (block_errors(w, sweep) <= block_errors(w, rtn)).all(), name


def test_sweep_finds_the_best_of_its_scales() -> None:
    """The error is the least over ten neighbours, tried one by one."""
    w = gaussian(16, 256)
    rtn = nvfp4.quantize_numpy(w)
    swept = block_errors(w, nvfp4.quantize_numpy(w, scales="sweep"))
    best = np.full(rtn.weight_scale.shape, np.inf)
    for step in range(-2, 8):
        byte = rtn.weight_scale.astype(int) + step
        scale = nvfp4._E4M3[np.clip(byte, 1, NAN - 1)] * rtn.weight_scale_2
        distance = abs(
            abs(w.reshape(*scale.shape, 16, 1).astype(np.float64))
            - scale[..., None, None].astype(np.float64) * E2M1
        )
        best = np.minimum(best, (distance.min(-1) ** 2).sum(-1))
    np.testing.assert_allclose(swept, best, rtol=1e-5)


@pytest.mark.parametrize("scales", ["rtn", "sweep"])
def test_zero_blocks(scales: nvfp4.Scales) -> None:
    """A zero block has the scale 1 and codes 0; so has an all-zero matrix."""
    for value in (0.0, -0.0):
        w = gaussian(4, 64)
        w[:, 16:32] = value
        found = nvfp4.quantize_numpy(w, scales=scales)
        assert (found.weight_scale[:, 1] == 0x38).all()
        assert not found.weight[:, 8:16].any()
        zeros = nvfp4.quantize_numpy(np.full((4, 64), value, np.float32))
        assert (zeros.weight_scale == 0x38).all()
        assert not zeros.weight.any()
        assert zeros.weight_scale_2 > 0
        assert np.isfinite(1 / zeros.weight_scale_2)
        assert not nvfp4.dequantize(zeros).any()


def test_tiny_weights_are_numbers() -> None:
    """Where ModelOpt's scale would be subnormal, nothing is zero or NaN."""
    for name, bits in tiny():
        w = float32(bits)
        found = nvfp4.quantize_numpy(w)
        assert found.weight_scale_2 >= np.finfo(np.float32).smallest_normal
        assert ((found.weight_scale > 0) & (found.weight_scale < NAN)).all()
        assert (abs(nvfp4.dequantize(found) - w) <= abs(w).max() / 4).all(), (
            name
        )


@pytest.mark.parametrize("scales", ["rtn", "sweep"])
def test_dequantize(scales: nvfp4.Scales) -> None:
    """What comes back is the code's value times its scales, in float32."""
    w = gaussian(8, 96)
    found = nvfp4.quantize_numpy(w, scales=scales)
    back = nvfp4.dequantize(found)
    assert back.dtype == np.float32
    errors = ((w - back).reshape(8, 6, 16).astype(np.float64) ** 2).sum(-1)
    np.testing.assert_allclose(errors, block_errors(w, found), rtol=1e-5)


@pytest.mark.parametrize(
    ("scales", "error"), [("rtn", 0.095), ("sweep", 0.081)]
)
def test_error_on_gaussian_weights(scales: str, error: float) -> None:
    """What docs/attnquant.md says it costs, relative in Frobenius norm."""
    w = gaussian(512, 1024)
    lost = w - nvfp4.dequantize(nvfp4.quantize_numpy(w, scales=scales))
    found = np.linalg.norm(lost) / np.linalg.norm(w)
    assert found == pytest.approx(error, abs=0.001)


@pytest.mark.full
def test_dequantize_is_modelopts(modelopt_tensor: type[NVFP4QTensor]) -> None:
    """Every code under every scale has ModelOpt's value."""
    import torch

    scale = np.arange(NAN, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(0, 256, 32, dtype=np.uint8) | 5, (NAN, 1))
    for scale_2 in (np.float32(0.1), np.float32(1e-4)):
        ours = nvfp4.dequantize(nvfp4.Quantized(codes, scale, scale_2))
        theirs = modelopt_tensor(
            torch.Size((NAN, 16)), torch.float32, torch.from_numpy(codes)
        ).dequantize(
            scale=torch.from_numpy(scale).view(torch.float8_e4m3fn),
            double_scale=torch.tensor(scale_2),
            block_sizes={-1: 16},
        )
        np.testing.assert_array_equal(ours, theirs.numpy())


def test_group_shares_a_scale() -> None:
    """The greatest weight of a group decides, and the others lose nothing."""
    q, k, v = (gaussian(32, 256, seed) * 10.0**-seed for seed in range(3))
    shared = nvfp4.group_scale_2([q, k, from_float32(v, "BF16")])
    assert shared == np.float32(abs(q).max()) / np.float32(6 * 448)
    for w in (k, v):
        alone = nvfp4.quantize_numpy(w)
        grouped = nvfp4.quantize_numpy(w, weight_scale_2=shared)
        assert grouped.weight_scale_2 == shared
        ratio = block_errors(w, grouped).sum() / block_errors(w, alone).sum()
        assert ratio < 1.02


def test_same_from_every_type() -> None:
    """F16, BF16 and F32 tensors of the same values give the same bytes."""
    w = np.round(gaussian(8, 64) * 8) / 8
    found = [
        nvfp4.quantize(from_float32(w, dtype))
        for dtype in ("F32", "F16", "BF16")
    ]
    found += [nvfp4.quantize(w), nvfp4.quantize(np.asfortranarray(w))]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].weight, other.weight)
        np.testing.assert_array_equal(found[0].weight_scale, other.weight_scale)
        assert found[0].weight_scale_2 == other.weight_scale_2


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("call", ["quantize", "grouped", "group", "bf16"])
def test_not_finite_is_an_error(value: float, call: str) -> None:
    """NaN or infinity is an error that names tensor, count and place."""
    w = gaussian(8, 64)
    w[5, 17] = value
    error = r"layers\.3\.q_proj: 1 of 512 .* \[5, 17\]"
    with pytest.raises(ValueError, match=error):
        if call == "quantize":
            nvfp4.quantize(w, name="layers.3.q_proj")
        elif call == "grouped":
            nvfp4.quantize(w, weight_scale_2=1.0, name="layers.3.q_proj")
        elif call == "bf16":
            nvfp4.quantize(from_float32(w, "BF16"), name="layers.3.q_proj")
        else:
            names = ["layers.3.v_proj", "layers.3.q_proj"]
            nvfp4.group_scale_2([gaussian(8, 64), w], names=names)


@pytest.mark.parametrize("shape", [(4, 24), (4, 0), (0, 16), (16,), (2, 2, 16)])
def test_what_is_no_matrix_is_an_error(shape: tuple[int, ...]) -> None:
    """K not divisible by 16 and other ranks are errors, not padded."""
    with pytest.raises(ValueError, match="q_proj: NVFP4 needs"):
        nvfp4.quantize(np.ones(shape, np.float32), name="q_proj")


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e-39, np.inf, np.nan])
def test_scale_out_of_range_is_an_error(factor: float) -> None:
    """A scale of scales is a normal number above 0."""
    with pytest.raises(ValueError, match="q_proj: weight_scale_2"):
        nvfp4.quantize(gaussian(2, 16), weight_scale_2=factor, name="q_proj")


def test_other_settings_are_errors() -> None:
    """Another way to find scales, and raw bits for weights, are errors."""
    with pytest.raises(ValueError, match="rtn or sweep"):
        nvfp4.quantize(gaussian(2, 16), scales="mse")
    with pytest.raises(ValueError, match="found uint16"):
        nvfp4.quantize(np.zeros((2, 16), np.uint16))


def test_kernel_is_numpys(run_check: Check) -> None:
    """On a CPU the kernel's bytes, and its errors, are numpy's.

    The kernels come as a patched MAX precompiles them.
    """
    done = run_check("26.7.0", CHECK, "--cpu", MAX_KERNEL_OVERLAYS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["equal"]["compared"] > 200
    assert not found["failures"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_compiles_for_gpus(run_check: Check, architecture: str) -> None:
    """The kernels compile for Hopper and Blackwell, without them."""
    done = run_check("26.7.0", CHECK, "--compile", architecture)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_cheap(package_path: Path) -> None:
    """The package itself imports neither numpy nor MAX."""
    code = (
        "import sys, attnquant_common; "
        "print([m for m in ('numpy', 'max') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(package_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
