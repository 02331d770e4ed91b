"""The README.md of an exported checkpoint: what was measured, and how to check it."""

from fixbin_jax.checkpoint import Record
from fixbin_jax.config import ComputeConfig, ModelConfig
from fixbin_jax.data.tokenizers import Tokenizer
from fixbin_jax.model import Structure
from fixbin_jax.sharding import single_device

_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("."{trust})
model = AutoModelForCausalLM.from_pretrained("."{trust}).eval()
inputs = tokenizer("Once", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]))
```"""


def model_card(record: Record, tokenizer: Tokenizer, format: str, dtype: str) -> str:
    """Markdown with the front matter that the Hugging Face hub reads."""
    config, model = record.config, record.config.model
    total, at_input = Structure(model, ComputeConfig(), single_device()).count()
    tokens = record.step * config.train.batch_size * model.context_length
    trained = (
        f"{record.step:,} steps of {config.train.batch_size} x {model.context_length} tokens, "
        f"{tokens:,} in all, of {config.data.sources}; seed {config.train.seed}"
        if record.data is not None
        else "elsewhere; imported"
    )
    trust = ", trust_remote_code=True" if format == "fixbin" else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- fixbin-jax
---

# {"GPT-NeoX" if format == "gpt_neox" else "Fixbin"} checkpoint, {model.input.interface} input

| | |
|---|---|
| parameters | {total:,}, {at_input:,} of them at the input |
| layers, width, heads | {model.num_layers}, {model.width}, {model.num_heads} |
| context | {model.context_length} |
| vocabulary | {model.vocab_size:,} ids, {tokenizer.vocab_size:,} of them the tokenizer's |
| stored as | {dtype} |
| trained | {trained} |

## Input

{_input(model, format)}

## Use

{_LOAD.format(trust=trust)}

The idea: A. Bochkov 2026, [arXiv 2605.09751](https://arxiv.org/abs/2605.09751).
"""


def _input(model: ModelConfig, format: str) -> str:
    code = model.code
    if code is None:
        return f"A trained table, {model.vocab_size:,} x {model.width}."
    zero = (
        f" Ids {', '.join(map(str, code.zero_ids))} have the code of all zeros."
        if code.zero_ids
        else ""
    )
    what = (
        "the id's bits, least significant first"
        if model.input.interface == "binary"
        else f"A c + b over GF(2), c being the id's bits; b = {code.shift}, rows of A as integers "
        f"{list(code.row_masks)}"
    )
    told = (
        f"Nothing is trained: an id's code is {what}, {code.code_width} bits, lifted to the width "
        f"by {code.lift}.{zero}"
    )
    if format == "gpt_neox":
        return told + (
            " This format has a table at the input, so the codes are written out as its rows. They "
            "are constants: keep `gpt_neox.embed_in.weight` frozen if you train further."
        )
    if model.input.interface == "binary":
        return told + " `input.embedding.weight` holds the codes, frozen."
    return told + " No table is stored; `input.matrix` is A and `input.shift` is b."
