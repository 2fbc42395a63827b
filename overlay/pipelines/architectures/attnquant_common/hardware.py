# SPDX-License-Identifier: Apache-2.0
"""What the device that a graph is made for can do."""

from __future__ import annotations

from max.driver import accelerator_architecture_name

_BLOCK_SCALED = ("sm_10", "sm_12")


def multiplies_nvfp4(device_type: str) -> bool:
    """Says whether MAX multiplies by NVFP4 weights on a device.

    Its matmul of block-scaled operands is for NVIDIA's Blackwell GPUs.

    Args:
        device_type: ``cpu`` or ``gpu``, as a ``DeviceSpec`` has it.
    """
    return device_type == "gpu" and accelerator_architecture_name().startswith(
        _BLOCK_SCALED
    )
