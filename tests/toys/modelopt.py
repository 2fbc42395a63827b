# SPDX-License-Identifier: Apache-2.0
"""Quantizes a toy checkpoint to NVFP4, in the form that ModelOpt exports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attnquant_common import nvfp4

from tests.architectures.common import FUSED
from tests.toys import reference

_INPUT_SCALE = np.float32(1 / (6 * 448))
_NUMBERS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def quantize(folder: Path, *, attention: bool) -> None:
    """Rewrites a folder's `model.safetensors` and `config.json`.

    Args:
        folder: A Gemma 4 checkpoint in bfloat16, in one file.
        attention: Whether the projections of attention are quantized, too.
    """
    file = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    layers = config["text_config"]["num_hidden_layers"]
    prefix = "model.language_model.layers."
    tensors = _stored(file)
    weights = reference.read_safetensors(file)
    for layer in range(layers):
        for fused in FUSED:
            if fused[0].startswith("self_attn") and not attention:
                continue
            modules = [f"{prefix}{layer}.{name}" for name in fused]
            # Where Gemma 4's keys are values there is no v_proj.
            modules = [m for m in modules if f"{m}.weight" in weights]
            greatest = max(abs(weights[f"{m}.weight"]).max() for m in modules)
            scale_2 = nvfp4.scale_2(greatest)
            for module in modules:
                made = nvfp4.quantize_numpy(
                    weights[f"{module}.weight"], weight_scale_2=scale_2
                )
                for name, dtype, values in (
                    ("weight", "U8", made.weight),
                    ("weight_scale", "F8_E4M3", made.weight_scale),
                    ("weight_scale_2", "F32", np.float32(scale_2)),
                    ("input_scale", "F32", _INPUT_SCALE),
                ):
                    tensors[f"{module}.{name}"] = (
                        dtype,
                        list(values.shape),
                        values.tobytes(),
                    )
    _write(file, tensors)
    ignored = ["lm_head", "model.vision_tower*", "model.embed_vision*"]
    if not attention:
        ignored.append(f"{prefix}*.self_attn*")
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "config_groups": {
            "group_0": {
                "input_activations": _NUMBERS,
                "weights": _NUMBERS,
                "targets": ["Linear"],
            }
        },
        "ignore": ignored,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


_Stored = tuple[str, list[int], bytes]


def _stored(file: Path) -> dict[str, _Stored]:
    """Returns each tensor's type, shape and bytes."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            entry["shape"],
            data[start + entry["data_offsets"][0] :][
                : entry["data_offsets"][1] - entry["data_offsets"][0]
            ],
        )
        for name, entry in header.items()
    }


def _write(file: Path, tensors: Mapping[str, _Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        start, end = end, end + len(data)
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = [len(text).to_bytes(8, "little"), text]
    file.write_bytes(b"".join(content + [d for _, _, d in tensors.values()]))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description="Quantize a Gemma 4 checkpoint to NVFP4, in place."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--no-attention", action="store_true", help="leave attention as it is"
    )
    args = parser.parse_args()
    quantize(args.folder, attention=not args.no_attention)


if __name__ == "__main__":
    main()
