# SPDX-License-Identifier: Apache-2.0
"""What the device that a graph is made for can do."""

from __future__ import annotations

from max.driver import accelerator_api, accelerator_architecture_name

_BLOCK_SCALED = ("sm_10", "sm_12")


def target(device_type: str) -> str:
    """Returns what code for a device is made for.

    That is an NVIDIA GPU's architecture, such as ``sm_90a``; ``hip`` or
    ``metal``; or ``cpu``.

    Args:
        device_type: ``cpu`` or ``gpu``, as a ``DeviceSpec`` has it.
    """
    if device_type != "gpu":
        return "cpu"
    api = accelerator_api()
    return accelerator_architecture_name() if api == "cuda" else api


def multiplies_nvfp4(device_type: str) -> bool:
    """Says whether MAX multiplies by NVFP4 weights on a device.

    Its matmul of block-scaled operands is for NVIDIA's Blackwell GPUs.

    Args:
        device_type: ``cpu`` or ``gpu``, as a ``DeviceSpec`` has it.
    """
    return device_type == "gpu" and accelerator_architecture_name().startswith(
        _BLOCK_SCALED
    )
