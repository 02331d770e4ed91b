"""Which layout a Hugging Face folder has: by name, by a file, or worked out and proved."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.assemble import without_zero_biases
from convert.discover import propose
from convert.layouts import Layout, named_layout, read_layout
from convert.oracle import torch_oracle
from convert.settle import settle
from convert.weights import WeightFiles
from fixbin_jax.errors import UserError

NAMED = ("fixbin", "gpt_neox")


def read_settings(source: Path) -> dict[str, Any]:
    """The parsed config.json of a folder.

    Raises:
      UserError: there is none, or it is not a JSON object.
    """
    path = source / "config.json"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: found {type(found).__name__}, expected an object")
    return found


def find_layout(
    name: str,
    source: Path,
    files: WeightFiles,
    settings: Mapping[str, Any],
    *,
    trust_remote_code: bool,
) -> Layout:
    """The layout that --layout asks for; with `auto`, what was decided and why is printed.

    Raises:
      UserError: see `named_layout`, `read_layout`, `propose`, `settle` and `torch_oracle`; open
        conventions without leave to run the checkpoint's own code.
    """
    if name == "auto" and settings.get("model_type") in NAMED:
        name = settings["model_type"]
        print(f"layout      {name}, by config.json's model_type")
    if name in NAMED:
        return without_zero_biases(named_layout(name, settings), files, settings)
    if name != "auto":
        return read_layout(Path(name).expanduser())
    proposal = propose(files, settings)
    for fact in proposal.facts:
        print(f"found       {fact}")
    for convention in proposal.open:
        print(f"open        {convention.name}: {' or '.join(convention.options)}")
    if not proposal.open:
        return proposal.layout
    if not trust_remote_code:
        told = ", ".join(convention.name for convention in proposal.open)
        raise UserError(
            f"--layout=auto: the weights do not tell {told}; with --trust_remote_code the "
            f"checkpoint's own model is run to settle it, which executes the code in {source}"
        )
    print(f"oracle      the checkpoint's own model; this runs the code in {source}")
    oracle = torch_oracle(source, files, trust_remote_code=True)
    settled = settle(proposal, files, settings, oracle)
    for name_of, option in settled.choices.items():
        print(f"settled     {name_of}: {option}")
    nearest = settled.next_difference
    print(
        f"proof       1 of {settled.tried} combinations gives its logits, at every position within "
        f"{settled.difference:.2g}"
        + (f"; the nearest other is {nearest:.2g} off" if nearest else "")
    )
    return settled.layout
