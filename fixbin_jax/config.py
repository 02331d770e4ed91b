"""Everything a run depends on: frozen dataclasses, checked on construction.

The defaults stand here and nowhere else. The forms a person edits and a file stores are in
`config_dict`.
"""

import dataclasses

from fixbin_jax.codes import LIFTS, Code, affine_code, binary_code
from fixbin_jax.errors import UserError

INTERFACES = ("learned", "binary", "affine")
GELUS = ("erf", "tanh")
DTYPES = ("float32", "bfloat16")
REMATS = ("none", "dots", "full")


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"config.{key}: {value!r} is not one of {', '.join(allowed)}")


def _at_least(key: str, value: float, least: float) -> None:
    # Not `value < least`, which lets NaN through.
    if not value >= least:
        raise UserError(f"config.{key}: {value}, expected {least} or more")


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """How an id becomes a vector of the model's width.

    Attributes:
      interface: "learned" (a trained table), "binary" (the id's own bits) or "affine" (A c + b
        over GF(2), by bit operations).
      lift: "tile" or "interleave", how a code is repeated to the width.
      zero_ids: ids whose code is all zero.
      code_width: bits of an affine code; None is ceil(log2(vocab_size)).
      affine_seed: draws A and b where row_masks is empty.
      row_masks: A as one integer a row, bit j being A[i, j]; empty to draw it.
      shift: b as an integer, bit i being b[i]; only with row_masks.
    """

    interface: str = "binary"
    lift: str = "tile"
    zero_ids: tuple[int, ...] = ()
    code_width: int | None = None
    affine_seed: int = 0
    row_masks: tuple[int, ...] = ()
    shift: int = 0

    def __post_init__(self) -> None:
        _one_of("model.input.interface", self.interface, INTERFACES)
        _one_of("model.input.lift", self.lift, LIFTS)
        if self.interface != "affine" and (self.row_masks or self.shift or self.code_width):
            raise UserError(
                "config.model.input: row_masks, shift and code_width are for interface='affine', "
                f"found interface={self.interface!r}"
            )
        if self.shift and not self.row_masks:
            raise UserError("config.model.input.shift: given without config.model.input.row_masks")
        if self.row_masks and self.code_width not in (None, len(self.row_masks)):
            raise UserError(
                f"config.model.input.code_width: {self.code_width}, but row_masks has "
                f"{len(self.row_masks)} rows"
            )

    def code(self, vocab_size: int) -> Code | None:
        """The code of every id below vocab_size; None for a learned table.

        Raises:
          UserError: naming the key that makes no code of that many ids.
        """
        try:
            return self._code(vocab_size)
        except UserError as error:
            raise UserError(f"config.model.input.{error}") from None

    def _code(self, vocab_size: int) -> Code | None:
        if self.interface == "learned":
            return None
        if self.interface == "binary":
            return binary_code(vocab_size, zero_ids=self.zero_ids, lift=self.lift)
        if self.row_masks:
            return Code(vocab_size, self.row_masks, self.shift, self.zero_ids, self.lift)
        return affine_code(
            vocab_size,
            code_width=self.code_width,
            seed=self.affine_seed,
            zero_ids=self.zero_ids,
            lift=self.lift,
        )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The function a checkpoint stands for. The defaults are the paper's reference size.

    Attributes:
      mlp_width: None is 4 x width.
      gelu: "erf" is x * Phi(x), "tanh" its approximation.
      linear_bias, norm_bias, head_bias: whether linear layers, layer norms, the head have biases.
      init_std: standard deviation of initial weights, drawn uniformly; projections back into the
        residual stream are divided by sqrt(2 x num_layers).
    """

    vocab_size: int = 65_536
    width: int = 1024
    num_layers: int = 32
    num_heads: int = 32
    mlp_width: int | None = None
    context_length: int = 1024
    input: InputConfig = InputConfig()
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    gelu: str = "erf"
    linear_bias: bool = True
    norm_bias: bool = True
    head_bias: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("width", "num_layers", "num_heads", "context_length"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        _at_least("model.vocab_size", self.vocab_size, 2)
        _at_least("model.mlp_width", self.hidden_width, 1)
        _one_of("model.gelu", self.gelu, GELUS)
        if self.width % self.num_heads:
            raise UserError(
                f"config.model.width: {self.width} is not divisible by "
                f"config.model.num_heads = {self.num_heads}"
            )
        if self.head_width % 2:
            raise UserError(
                f"config.model.num_heads: {self.num_heads} heads at width {self.width} give a head "
                f"width of {self.head_width}; rotary positions need an even one"
            )
        code = self.code
        if code is not None and code.code_width > self.width:
            raise UserError(
                f"config.model.width: {self.width} cannot hold a code of {code.code_width} bits"
            )

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Width of the MLP's hidden layer."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def code(self) -> Code | None:
        """The input code; None for a learned table."""
        return self.input.code(self.vocab_size)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read.

    Attributes:
      sources: "python-docs", paths or globs, separated by commas.
      text_field: the field of a JSONL record that holds the text.
      tokenizer: "unicode", a tokenizer.json, a SentencePiece .model, or a folder with either.
      eval_sources: held-out text, like sources; empty to hold out eval_fraction of sources.
      eval_fraction: share of the documents that is held out.
      strict: stop at the first bad record instead of skipping and reporting it.
      read_threads: threads that read ahead.
    """

    sources: str = "python-docs"
    text_field: str = "text"
    tokenizer: str = "unicode"
    eval_sources: str = ""
    eval_fraction: float = 0.05
    strict: bool = False
    read_threads: int = 2

    def __post_init__(self) -> None:
        if not self.sources.strip():
            raise UserError("config.data.sources: empty")
        if not 0 < self.eval_fraction < 1:
            raise UserError(
                f"config.data.eval_fraction: {self.eval_fraction} is not between 0 and 1"
            )
        _at_least("data.read_threads", self.read_threads, 1)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, on how much at once.

    Attributes:
      batch_size: sequences a step, over all devices and micro-batches.
      micro_batches: parts of a batch whose gradients are accumulated one after another.
      eval_interval: steps between evaluations on held-out text; 0 for only first and last.
      eval_batches: batches of batch_size an evaluation reads at most; 0 for all.
      init_from: a checkpoint whose parameters a new run starts from; empty to draw them.
    """

    num_steps: int = 1000
    batch_size: int = 32
    micro_batches: int = 1
    seed: int = 0
    eval_interval: int = 100
    eval_batches: int = 0
    init_from: str = ""

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "micro_batches"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("eval_interval", "eval_batches", "seed"):
            _at_least(f"train.{name}", getattr(self, name), 0)
        if self.seed >= 2**31:
            raise UserError(f"config.train.seed: {self.seed}, expected less than 2^31")
        if self.batch_size % self.micro_batches:
            raise UserError(
                f"config.train.batch_size: {self.batch_size} is not divisible by "
                f"config.train.micro_batches = {self.micro_batches}"
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warmup and cosine decay.

    Attributes:
      learning_rate: the peak, reached after warmup_steps.
      final_fraction: learning rate at the last step, as a share of the peak.
      weight_decay: decoupled, on matrices only.
      clip_norm: largest global norm of a gradient; 0 for no clipping.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "warmup_steps", "eps", "weight_decay", "clip_norm"):
            _at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("final_fraction", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(
                    f"config.optimizer.{name}: {getattr(self, name)} is not between 0 and 1"
                )


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the same function is computed; none of this changes what is learned but dtype.

    Attributes:
      dtype: of activations and of weights inside matrix products; parameters, optimizer state,
        softmax and loss are float32 always.
      remat: what the backward pass recomputes in a layer: "none", "dots" (all but matrix
        products), "full" (everything).
      scan_layers: one compiled layer in a loop, instead of num_layers copies.
      loss_rows: targets whose logits exist at one time on a device.
    """

    dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = True
    loss_rows: int = 1024

    def __post_init__(self) -> None:
        _one_of("compute.dtype", self.dtype, DTYPES)
        _one_of("compute.remat", self.remat, REMATS)
        _at_least("compute.loss_rows", self.loss_rows, 1)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; -1, at one axis, takes all that are left.

    Attributes:
      data: copies of the parameters, each fed its share of the batch.
      fsdp: parts of the parameters, each also fed its share of the batch.
      tensor: parts of heads, MLP and vocabulary.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved.

    Attributes:
      interval: steps between saves; the last step is always saved.
      keep: newest steps that are kept.
    """

    interval: int = 100
    keep: int = 3

    def __post_init__(self) -> None:
        _at_least("checkpoint.interval", self.interval, 1)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What is written on the way.

    Attributes:
      interval: steps between lines of metrics.
      tensorboard: also write TensorBoard events.
    """

    interval: int = 10
    tensorboard: bool = True

    def __post_init__(self) -> None:
        _at_least("log.interval", self.interval, 1)


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The text that a finished run writes.

    Attributes:
      prompt: what it begins with; empty is a document's start.
      max_new_tokens: ids to sample at most; 0 for no sample.
    """

    prompt: str = ""
    max_new_tokens: int = 200
    temperature: float = 0.8

    def __post_init__(self) -> None:
        _at_least("sample.max_new_tokens", self.max_new_tokens, 0)
        _at_least("sample.temperature", self.temperature, 0)


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute: ComputeConfig = ComputeConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    sample: SampleConfig = SampleConfig()
