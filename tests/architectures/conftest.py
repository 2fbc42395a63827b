# SPDX-License-Identifier: Apache-2.0
"""Makes the overlay's modules importable that need no MAX."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "overlay" / "pipelines" / "architectures"))
