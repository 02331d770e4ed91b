"""Brings a Hugging Face folder in as a run folder.

python -m convert.from_hf --source=DIR --output=runs/b [--layout=NAME|FILE] [--trust_remote_code]
"""

import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
from absl import flags

from convert.assemble import read_model
from convert.identify import find_layout, read_settings
from convert.layouts import write_layout
from convert.weights import WeightFiles
from fixbin_jax import cli
from fixbin_jax.checkpoint import Checkpoints
from fixbin_jax.config import Config, DataConfig
from fixbin_jax.config_dict import to_mapping
from fixbin_jax.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer
from fixbin_jax.errors import UserError
from fixbin_jax.step import State


def bring_in(source: Path, output: Path, layout_name: str, *, trust_remote_code: bool) -> None:
    """Imports a folder as step 0 of a run folder, which appears whole or not at all.

    Raises:
      UserError: the output exists, or the source cannot be read as a model of ours.
    """
    if output.exists():
        raise UserError(f"--output: {output} exists; name a folder that does not")
    if not source.is_dir():
        raise UserError(f"--source: {source}: no such folder")
    files = WeightFiles.open(source)
    settings = read_settings(source)
    tokenizer = _tokenizer(source)
    layout = find_layout(layout_name, source, files, settings, trust_remote_code=trust_remote_code)
    model, params = read_model(files, layout, settings)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.vocab_size)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        config = Config(model=model, data=DataConfig(tokenizer=str(source.absolute())))
        with Checkpoints(partial, keep=1) as checkpoints:
            checkpoints.save(State(jnp.int32(0), params, None), None, config, tokenizer)
            checkpoints.wait()
        (partial / "config.json").write_text(json.dumps(to_mapping(config), indent=2) + "\n")
        write_layout(layout, partial / "layout.json")
        os.rename(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(f"layout file {output / 'layout.json'}: --layout with it needs no proof again")
    print(f"checkpoint  {output}")


def _tokenizer(source: Path) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer.model")
    if not any((source / name).is_file() for name in names):
        print(f"tokenizer   none: no {' or '.join(names)} in {source}")
        return None
    return load_tokenizer(source)


def define_flags(fv: flags.FlagValues) -> None:
    """Registers the command's flags."""
    flags.DEFINE_string("source", None, "Hugging Face folder.", required=True, flag_values=fv)
    flags.DEFINE_string("output", None, "Run folder to make.", required=True, flag_values=fv)
    flags.DEFINE_string(
        "layout",
        "auto",
        "auto, fixbin, gpt_neox, or a layout file.",
        flag_values=fv,
    )
    flags.DEFINE_boolean(
        "trust_remote_code",
        False,
        "Let auto run the Python code that the source folder brings.",
        flag_values=fv,
    )


def main(fv: flags.FlagValues) -> None:
    """Runs the command."""
    bring_in(
        Path(fv.source).expanduser(),
        Path(fv.output).expanduser(),
        fv.layout,
        trust_remote_code=fv.trust_remote_code,
    )


if __name__ == "__main__":
    cli.run(main, define_flags)
