"""Writes a checkpoint as a Hugging Face folder.

python -m convert.to_hf --checkpoint=runs/a --output=out [--format=gpt_neox] [--dtype=bfloat16]
"""

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from convert import arrange, assemble, card, layouts, tokenizer_files
from convert.layouts import Layout
from convert.safetensors_file import SafetensorsWriter, TensorSpec
from fixbin_jax import checkpoint, cli, gf2
from fixbin_jax.codes import Code, code_table, id_bits
from fixbin_jax.config import DTYPES, ModelConfig
from fixbin_jax.data.tokenizers import Tokenizer
from fixbin_jax.errors import UserError

FORMATS = ("fixbin", "gpt_neox")

# A parameter of ours by its dotted name.
ReadParameter = Callable[[str], np.ndarray]


def export(
    path: str, output: Path, *, format: str, dtype: str = "float32", max_shard_bytes: int
) -> Path:
    """Writes the newest step of a run folder, or a step folder, as a Hugging Face folder.

    One parameter is held at a time. The folder appears whole, by one rename, or not at all.

    Args:
      path: run folder or step folder.
      output: the folder to make.
      format: "fixbin", with our own modelling file, or "gpt_neox", which transformers and other
        engines run by themselves.
      dtype: of the stored weights.
      max_shard_bytes: most bytes of tensors in one file.

    Returns:
      The step folder that was written.

    Raises:
      UserError: nothing to read, the output exists, or the format cannot express the model.
    """
    if output.exists():
        raise UserError(f"--output: {output} exists; name a folder that does not")

    def read(folder: Path) -> tuple[checkpoint.Record, Tokenizer]:
        return checkpoint.read_record(folder), checkpoint.read_tokenizer(folder)

    found = checkpoint.open_newest(path, read)
    if found is None:
        raise UserError(f"--checkpoint: {path} holds no complete step")
    folder, (record, tokenizer) = found
    model = record.config.model
    layout = _layout(model, format)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_weights(
            partial,
            layout,
            model,
            lambda name: checkpoint.read_parameter(folder, name),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        settings = _settings(model, tokenizer, format, dtype)
        _write_json(partial / "config.json", settings)
        _write_json(partial / "generation_config.json", _generation(model, tokenizer))
        if format == "fixbin":
            source = Path(__file__).with_name("hf") / "modeling_fixbin.py"
            shutil.copyfile(source, partial / source.name)
        tokenizer_files.write(tokenizer, partial, model.context_length)
        (partial / "README.md").write_text(card.model_card(record, tokenizer, format, dtype))
        os.rename(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _layout(model: ModelConfig, format: str) -> Layout:
    if format == "fixbin":
        return layouts.fixbin(model.input.interface, model.gelu)
    if model.head_bias:
        raise UserError(
            "--format=gpt_neox: the model has a head bias (config.model.head_bias), which GPT-NeoX "
            "has no place for; --format=fixbin has"
        )
    return layouts.gpt_neox(model.gelu)


def write_weights(
    folder: Path,
    layout: Layout,
    model: ModelConfig,
    read_parameter: ReadParameter,
    *,
    dtype: str,
    max_shard_bytes: int,
) -> None:
    """Writes a model's tensors into a folder, in a layout.

    Biases that the layout has and the model has not are written as the zeros they amount to.

    Args:
      folder: exists.
      layout: names and conventions.
      model: the config of the parameters.
      read_parameter: a parameter of ours by its dotted name, float32.
      dtype: "float32" or "bfloat16".
      max_shard_bytes: most bytes of tensors in one file.
    """
    shapes = assemble.parameter_shapes(model)
    whole = assemble.with_zero_biases(shapes, layout, model)
    specs = [
        TensorSpec(name, dtype, shape)
        for name, shape in assemble.expected_tensors(layout, whole, model)
    ]
    inputs = _input_tensors(layout, model, dtype)
    with SafetensorsWriter(folder, [spec for spec, _ in inputs] + specs, max_shard_bytes) as writer:
        for spec, make in inputs:
            writer.write(spec.name, read_parameter("input.table") if make is None else make())
        for row in layout.tensors:
            if not all(name in whole for name in row.parameters):
                continue
            arrays = [
                read_parameter(name) if name in shapes else np.zeros(whole[name], np.float32)
                for name in row.parameters
            ]
            for name, parts in assemble.layers_of(row, arrays, model.num_layers):
                if layout.rope == "interleaved":
                    parts = [
                        arrange.pairs_of_halves(part, model.num_heads)
                        if arrange.is_rotated(parameter)
                        else part
                        for parameter, part in zip(row.parameters, parts, strict=True)
                    ]
                writer.write(name, arrange.join(row, parts, model.num_heads))


def _input_tensors(
    layout: Layout, model: ModelConfig, dtype: str
) -> list[tuple[TensorSpec, Callable[[], np.ndarray] | None]]:
    """Spec of each tensor of the input interface, and what makes it; None is our own table."""
    source, code = layout.input, model.code
    shape = (model.vocab_size, model.width)
    if code is None:
        return [(TensorSpec(source.tensors[0], dtype, shape), None)]
    if source.kind == "affine":
        columns = id_bits(model.vocab_size)
        matrix = gf2.to_array(code.row_masks, columns)
        shift = gf2.to_array([code.shift], code.code_width)[0]
        return [
            (TensorSpec(name, "uint8", array.shape), functools.partial(array.astype, np.uint8))
            for name, array in zip(source.tensors, (matrix, shift), strict=True)
        ]
    width = model.width if source.kind == "table" else code.code_width

    def table(code: Code = code) -> np.ndarray:
        return code_table(code, np.arange(model.vocab_size), width).astype(np.float32)

    return [(TensorSpec(source.tensors[0], dtype, (model.vocab_size, width)), table)]


def _settings(model: ModelConfig, tokenizer: Tokenizer, format: str, dtype: str) -> dict[str, Any]:
    """config.json, in the keys that transformers 4 and 5 read."""
    code = model.code
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.hidden_width,
        "max_position_embeddings": model.context_length,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[model.gelu],
        "initializer_range": model.init_std,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.end_of_text_id,
        "pad_token_id": tokenizer.pad_id,
        "dtype": dtype,
        "torch_dtype": dtype,
        "linear_bias": model.linear_bias,
        "norm_bias": model.norm_bias,
        "input_interface": model.input.interface,
        "code_width": code.code_width if code else None,
        "lift": model.input.lift,
        "zero_ids": list(code.zero_ids) if code else [],
    }
    # GPT-NeoX ignores the last six: there they are what an audit and an import read.
    if format == "gpt_neox":
        return common | {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "use_parallel_residual": False,
            "attention_bias": True,
            "rotary_pct": 1.0,
            "rotary_emb_base": model.rope_theta,
            "rope_theta": model.rope_theta,
            "rope_parameters": rope | {"partial_rotary_factor": 1.0},
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }
    return common | {
        "architectures": ["FixbinForCausalLM"],
        "model_type": "fixbin",
        "auto_map": {
            "AutoConfig": "modeling_fixbin.FixbinConfig",
            "AutoModelForCausalLM": "modeling_fixbin.FixbinForCausalLM",
        },
        "rope_theta": model.rope_theta,
        "rope_parameters": rope,
        "head_bias": model.head_bias,
    }


def _generation(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """generation_config.json; ids that the tokenizer does not have are never chosen."""
    found: dict[str, Any] = {"eos_token_id": tokenizer.end_of_text_id}
    if tokenizer.pad_id is not None:
        found["pad_token_id"] = tokenizer.pad_id
    if surplus := list(range(tokenizer.vocab_size, model.vocab_size)):
        found["suppress_tokens"] = surplus
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def define_flags(fv: flags.FlagValues) -> None:
    """Registers the command's flags."""
    flags.DEFINE_string(
        "checkpoint", None, "Run folder, or one step folder.", required=True, flag_values=fv
    )
    flags.DEFINE_string("output", None, "Folder to make.", required=True, flag_values=fv)
    flags.DEFINE_enum(
        "format",
        "fixbin",
        FORMATS,
        "fixbin brings its own modelling file; gpt_neox runs wherever GPT-NeoX does.",
        flag_values=fv,
    )
    flags.DEFINE_enum("dtype", "float32", DTYPES, "Of the stored weights.", flag_values=fv)
    flags.DEFINE_integer(
        "max_shard_bytes", 5 * 10**9, "Most bytes of tensors in one file.", 1, flag_values=fv
    )


def main(fv: flags.FlagValues) -> None:
    """Runs the command."""
    output = Path(fv.output).expanduser()
    folder = export(
        fv.checkpoint,
        output,
        format=fv.format,
        dtype=fv.dtype,
        max_shard_bytes=fv.max_shard_bytes,
    )
    print(f"{folder} -> {output} ({fv.format}, {fv.dtype})")


if __name__ == "__main__":
    cli.run(main, define_flags)
