# SPDX-License-Identifier: Apache-2.0
r"""Compares the logits of a served Gemma with transformers'.

For a GPU machine, whose Python has torch and transformers; MAX may be in
another interpreter, or on a path of its own:

    ATTNQUANT_QUANT=nvfp4 python -m tests.architectures.check_logits \
        --python ENV/bin/python --model DIR --output logits.json

MAX generates greedily, under this process's variables `ATTNQUANT*`. Then
transformers reads the same tokens twice, in float32 and in the model's type,
with the weights that MAX should have served: NVFP4's values for the
projections that are quantized, by the numpy form of the quantizer. bfloat16
rounds after every operation, so that no fixed number could tell a right
result from a wrong one; what may be is twice what transformers itself errs by
in that type. In float32 it is `TOLERANCE`.

Exit status 1 if MAX is farther off, or takes a token that transformers puts
behind another by more than that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "overlay" / "pipelines" / "architectures"))

from tests.architectures.common import (  # noqa: E402
    TOLERANCE,
    Float32,
    quantized_values,
)
from tests.toys.reference import read_safetensors  # noqa: E402

_PREFIXES = {"gemma3_text": "", "gemma4": "model.language_model."}
"""What stands before a text model's tensors in the checkpoint."""


def generate(
    arguments: argparse.Namespace, folder: Path
) -> tuple[list[int], int, Float32]:
    """Returns all tokens, the place of the first logits' one, and logits.

    The logits are [steps, vocabulary].
    """
    out = folder / "steps.npz"
    subprocess.run(
        [
            *(arguments.python, "-m", "tests.toys.probe", "steps", out),
            *("generate", "--model", arguments.model, "--top-k", "1"),
            *("--prompt", arguments.prompt, "--max-length", "1024"),
            *("--max-new-tokens", str(arguments.tokens)),
            *("--quantization-encoding", arguments.encoding),
            *("--max-batch-size", "1", "--no-enable-prefix-caching"),
            *arguments.flag,
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{arguments.path}{os.pathsep}{ROOT}",
        },
        check=True,
    )
    with np.load(out) as saved:
        steps = range(len(saved.files) // 2)
        tokens = [saved[f"tokens_{i}"] for i in steps]
        logits = np.concatenate([saved[f"logits_{i}"] for i in steps])
    return np.concatenate(tokens).tolist(), len(tokens[0]) - 1, logits


def weights(model: Path) -> dict[str, Float32]:
    """Returns the text model's weights as they are served."""
    config = json.loads((model / "config.json").read_text())
    prefix = _PREFIXES[config["model_type"]]
    found = {
        name: value
        for file in sorted(model.glob("*.safetensors"))
        for name, value in read_safetensors(file).items()
        if name.startswith(prefix)
    }
    count = config.get("text_config", config)["num_hidden_layers"]
    layers = f"{prefix or 'model.'}layers."
    return quantized_values(found, count, layers, os.environ)


def reference(model: Path) -> Any:  # noqa: ANN401
    """Returns transformers' model, with the weights as they are served."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    theirs = getattr(transformers, config.architectures[0]).from_pretrained(
        model, attn_implementation="eager"
    )
    # What is served in bfloat16 has such weights; only sums may be wider.
    served = {
        n: torch.tensor(w).to(theirs.dtype) for n, w in weights(model).items()
    }
    _, unexpected = theirs.load_state_dict(served, strict=False)
    if unexpected:
        raise RuntimeError(f"transformers has no {', '.join(unexpected)}")
    return theirs


def expected(
    theirs: Any,  # noqa: ANN401
    tokens: list[int],
    first: int,
    dtype: str,
    device: str,
) -> npt.NDArray[np.float64]:
    """Returns transformers' logits, computed in a type."""
    import torch

    theirs = theirs.to(device, getattr(torch, dtype))
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([tokens], device=device)).logits
    return logits[0, first:].double().cpu().numpy()


def compare(
    found: Float32,
    exact: npt.NDArray[np.float64],
    rounded: npt.NDArray[np.float64],
    following: list[int],
    vocabulary: int,
) -> dict[str, Any]:
    """Returns how far off MAX is, what may be, and what is wrong with it.

    Args:
        found: MAX's logits, [steps, vocabulary].
        exact: transformers' in float32.
        rounded: transformers' in the model's type.
        following: The token after each step but the last.
        vocabulary: The tokens that the tokenizer has; MAX takes no other.
    """

    def off(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return np.sqrt(np.mean((logits - exact) ** 2, axis=1))

    allowed = np.maximum(TOLERANCE, 2 * off(rounded))
    greatest = max(TOLERANCE, 2 * float(abs(rounded - exact).max()))
    failures = [
        f"step {i}: off by {got:.3g} in the root of the mean square, of "
        f"{may:.3g} allowed"
        for i, (got, may) in enumerate(zip(off(found), allowed, strict=True))
        if not got <= may
    ]
    for i, token in enumerate(following):
        behind = exact[i, :vocabulary].max() - exact[i, token]
        if not behind <= 2 * greatest:
            failures.append(f"step {i}: token {token} is {behind:.3g} behind")
    return {
        "spread": float(exact.std()),
        "off": off(found).tolist(),
        "transformers_off": off(rounded).tolist(),
        "failures": failures,
    }


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--python", type=Path, default=Path(sys.executable), help="of MAX")
    add("--path", default="", help="its PYTHONPATH")
    add("--model", type=Path, required=True, help="checkpoint folder")
    add("--encoding", choices=("bfloat16", "float32"), default="bfloat16")
    add("--device", default="cuda", help="torch's, for transformers")
    add("--prompt", default="Why is the sky blue? " * 8)
    add("--tokens", type=int, default=32, help="how many MAX generates")
    add("--flag", action="append", default=[], help="for `max generate`")
    add("--output", type=Path, help="JSON, instead of printing")
    arguments = parser.parse_args()
    if "ATTNQUANT_BLOCKS" in os.environ:
        parser.error("ATTNQUANT_BLOCKS: this knows no decomposed weights")
    with tempfile.TemporaryDirectory() as folder:
        tokens, first, found = generate(arguments, Path(folder))
    theirs = reference(arguments.model)
    # Wider first: narrowing again then gives the weights back.
    exact, rounded = (
        expected(theirs, tokens, first, dtype, arguments.device)
        for dtype in ("float32", arguments.encoding)
    )
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    result = compare(
        found, exact, rounded, tokens[first + 1 :], tokenizer.get_vocab_size()
    )
    text = json.dumps(result, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    else:
        print(text)
    print(*result["failures"], sep="\n", file=sys.stderr)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
