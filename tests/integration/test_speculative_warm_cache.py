# SPDX-License-Identifier: Apache-2.0
"""`max warm-cache` with a draft model ends as it does without one."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# All but the compiler itself: its graphs take minutes.
_UNCOMPILED = """
import sys
from unittest.mock import MagicMock
from max._entrypoints.pipelines import main
from max.engine import CompileOnlyModel, InferenceSession
from max.pipelines.lib.interfaces import pipeline_model

def initialized(session, artifacts, specs):
    return {r: CompileOnlyModel(s.name, None) for r, s in specs.items()}

pipeline_model.compile_graphs = MagicMock()
pipeline_model.init_graphs = initialized
InferenceSession.load = MagicMock()
sys.argv[0] = "max"
main()
"""


def test_what_was_compiled_with_a_drafter_is_a_success(
    patched_env: Path, settings: Mapping[str, str], tmp_path: Path
) -> None:
    """MAX asks nothing of graphs for a device that is not there."""
    for name, options in (("model", ()), ("drafter", ("--drafter",))):
        subprocess.run(
            [
                *(patched_env, "-m", "tests.toys.gemma4", tmp_path / name),
                *("--sparse", *options),
            ],
            cwd=ROOT,
            env=settings,
            check=True,
        )
    done = subprocess.run(
        [
            *(patched_env, "-c", _UNCOMPILED, "warm-cache"),
            *("--model", tmp_path / "model", "--target", "cuda:sm_90a"),
            *("--draft-model-path", tmp_path / "drafter"),
            *("--speculative-method", "mtp", "--max-length", "1024"),
        ],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
