# SPDX-License-Identifier: Apache-2.0
"""How long calls take a device, by its own clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from max.driver import Device, DeviceEvent


def race(
    device: Device,
    arms: Mapping[str, Callable[[], object]],
    *,
    calls: int = 1,
    runs: int = 1,
    turns: int = 9,
) -> dict[str, dict[str, Any]]:
    """Times several ways to do the same.

    They take turns, of which the first warms up.

    Args:
        device: Where the work is enqueued.
        arms: Enqueue it, by name.
        calls: The calls that one run of an arm makes.
        runs: How often an arm runs in a turn.
        turns: The turns that are kept.

    Returns:
        By name the microseconds a call: ``median``, and ``range`` from the
        least to the most of the turns.
    """
    queue = device.default_queue
    took: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, run in arms.items():
            begin = DeviceEvent(device, enable_timing=True)
            end = DeviceEvent(device, enable_timing=True)
            device.synchronize()
            queue.record_event(begin)
            for _ in range(runs):
                run()
            queue.record_event(end)
            end.synchronize()
            if turn:
                took[name].append(
                    1e3 * begin.elapsed_time(end) / (runs * calls)
                )
    return {
        name: {
            "median": statistics.median(values),
            "range": [min(values), max(values)],
        }
        for name, values in took.items()
    }
