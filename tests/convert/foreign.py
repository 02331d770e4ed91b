"""Checkpoints in other people's conventions, with their logits, from the tool that writes them."""

import runpy
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "foreign.py"

needs_foreign = pytest.mark.skipif(
    not TOOL.is_file(), reason=f"{TOOL} writes the foreign checkpoints and is not here"
)


def write_foreign(folder: Path, **options: object) -> Path:
    """A folder with these options of the tool; `norm_bias=0` is --norm-bias=0."""
    argv = [str(TOOL), str(folder)]
    argv += [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    before = sys.argv
    sys.argv = argv
    try:
        runpy.run_path(str(TOOL), run_name="__main__")
    finally:
        sys.argv = before
    return folder
