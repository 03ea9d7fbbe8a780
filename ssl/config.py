"""The schema: every key of a run with its type, default, legal range and meaning.

A recipe's YAML holds only what differs from these defaults. Reading, checking and printing
are in `command_line.py`; here is nothing but the keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = 0  # what `auto` stands for until the number is found


def key(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    ordered: bool = False,
    length: int | None = None,
    words: Mapping[str, int] | None = None,
) -> Any:
    """A dataclass field that carries its one line of meaning and its legal values.

    `low` and `high` are inclusive and hold for each element of a list; `ordered` asks a
    pair (from, to) to have from <= to; other lists of a fixed `length` name it. `words` stand for
    numbers that can't be given otherwise.
    """
    length = 2 if ordered else length
    legal = {"low": low, "high": high, "choices": choices, "ordered": ordered, "length": length}
    metadata = {"meaning": meaning, **legal, "words": words or {}}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Data:
    """Where images come from and how they are read."""

    train: str = key(
        "photo-tiles",
        "photo-tiles, torchvision:NAME, or a folder, list (.txt .csv .parquet), .tar, .npy or .npz of images",
    )
    val: str | None = key(
        None, "labelled images that k-NN queries, likewise; null: hold out part of data.train"
    )
    holdout: float = key(
        0.1,
        "share of data.train kept for k-NN, at most 5000, if data.val is null and labels exist",
        low=0,
        high=0.9,
    )
    root: str | None = key(
        None, "where the files of torchvision:NAME lie; null: the folder torchvision in data.cache"
    )
    cache: str | None = key(
        None, "folder that remembers what a scan found; null: nestling in the user's cache folder"
    )
    mode: str = key(
        "rgb",
        "rgb and gray convert every image; unchanged keeps its channels, which must be data.in_chans",
        choices=("rgb", "gray", "unchanged"),
    )
    in_chans: int | None = key(
        None, "channels of every image, view and patch; null: 3 for rgb, 1 for gray", low=1
    )
    mean: list[float] | None = key(None, "per channel, of pixels in [0, 1]; null: ImageNet's", low=0, high=1)
    std: list[float] | None = key(None, "per channel, of pixels in [0, 1]; null: ImageNet's", low=1e-6)
    orientation: bool = key(True, "turn images upright as their EXIF orientation says")
    background: list[int] = key(
        [255, 255, 255], "red, green, blue beneath transparent pixels", low=0, high=255, length=3
    )
    window: list[float] | None = key(
        None,
        "values that become black and white in images of more than 8 bits; null: the range of their type",
        ordered=True,
    )
    scaled_decode: bool = key(
        True, "decode a JPEG at 1/2, 1/4 or 1/8 for training, where each of its views shrinks it further"
    )
    max_pixels: int = key(178_956_970, "an image of more counts as unreadable; Pillow's own limit", low=1)
    min_size: int = key(0, "images whose shorter side is below are left out; in pixels", low=0)
    on_error: str = key(
        "skip", "unreadable images: replace each by another one, or stop", choices=("skip", "raise")
    )
    max_bad_share: float = key(0.1, "unreadable share of the images at which a run stops", low=0, high=0.5)
    epoch_images: int | None = key(
        None, "images that make an epoch, drawn on from one pass to the next; null: all, once", low=1
    )
    shuffle_shards: int = key(
        16, "tar shards mixed at once, so that reading stays nearly sequential; 0: all of them", low=0
    )
    num_workers: int | None = key(
        None,
        "loader processes per training process; null: usable CPUs shared out, at most 8; 0 on CPU",
        low=0,
    )
    start_method: str | None = key(
        None,
        "how loader processes start; null: the platform's own, forkserver with several processes on CPUs",
        choices=("fork", "spawn", "forkserver"),
    )


@dataclass
class Backbone:
    """The network that is pretrained."""

    name: str = key(
        "xcit_small_12_p16", "a registered backbone, timm:NAME, torchvision:NAME or my.module.Class"
    )
    drop_path: float = key(0.05, "probability of dropping a residual branch, student only", low=0, high=0.99)
    options: dict[str, Any] = key(
        {}, "other constructor options of the family, as in backbone.options.depth=4"
    )
    freeze_epochs: float | None = key(
        None,
        "epochs at the start that train the head alone; null: with init_from 1, at most a tenth; else 0",
        low=0,
    )


@dataclass
class Views:
    """Multi-crop (Caron et al., 2020): sizes in pixels; a list is drawn from anew at each step.

    Pairs of probabilities are for the first and the second global view (DINO, section 4).
    """

    global_size: list[int] = key([224], "sides of the two global crops; several: drawn anew each step", low=1)
    global_scale: list[float] = key(
        [0.4, 1.0], "share of the image's area, from and to", low=1e-6, high=1, ordered=True
    )
    num_local: int = key(8, "local crops per image", low=0)
    local_size: list[int] = key([96], "sides of the local crops; several: drawn anew each step", low=1)
    local_scale: list[float] = key(
        [0.05, 0.4], "share of the image's area, from and to", low=1e-6, high=1, ordered=True
    )
    ratio: list[float] = key(
        [0.75, 4 / 3],
        "width / height of a crop before resizing, from and to",
        low=0.01,
        high=100,
        ordered=True,
    )
    flip: float = key(0.5, "probability of a horizontal flip", low=0, high=1)
    jitter: float = key(0.8, "probability of colour jitter", low=0, high=1)
    brightness: float = key(0.4, "jitter: factor in [1 - x, 1 + x]", low=0, high=1)
    contrast: float = key(0.4, "jitter: factor in [1 - x, 1 + x]", low=0, high=1)
    saturation: float = key(0.2, "jitter: factor in [1 - x, 1 + x]", low=0, high=1)
    hue: float = key(0.1, "jitter: shift in [-x, x] turns of the colour circle", low=0, high=0.5)
    grayscale: float = key(0.2, "probability of dropping the colour", low=0, high=1)
    global_blur: list[float] = key(
        [1.0, 0.1], "probability of Gaussian blur, one per global view", low=0, high=1, length=2
    )
    local_blur: float = key(0.5, "probability of Gaussian blur of a local view", low=0, high=1)
    blur_sigma: list[float] = key(
        [0.1, 2.0], "standard deviation of the blur in pixels, from and to", low=1e-3, ordered=True
    )
    global_solarize: list[float] = key(
        [0.0, 0.2], "probability of solarizing, one per global view", low=0, high=1, length=2
    )
    solarize_threshold: int = key(128, "pixels of at least this value are inverted", low=0, high=256)
    color_on: str = key(
        "auto",
        "who colours and blurs: loader processes, or the device that trains; auto: a GPU where there is one",
        choices=("auto", "loader", "device"),
    )


@dataclass
class Head:
    """Projection head (DINO, appendix C) over the class token."""

    num_prototypes: int = key(65536, "K, the number of outputs", low=2)
    hidden_dim: int = key(2048, "width of the hidden layers", low=1)
    bottleneck_dim: int = key(256, "width before the last layer", low=1)
    num_layers: int = key(3, "linear layers before the last one", low=1)
    batch_norm: bool = key(False, "batch norm after each hidden layer")
    norm_last_layer: bool = key(True, "keep the prototypes at unit norm (steadier, slightly worse)")
    freeze_epochs: float = key(1, "epochs during which the last layer stays as it is", low=0)
    temperature: float = key(0.1, "of the student's softmax", low=1e-3)


@dataclass
class Teacher:
    """The moving average of the student, and how its targets are sharpened and centered."""

    momentum: float = key(0.996, "of the moving average, at the start", low=0, high=1)
    momentum_end: float = key(1.0, "the same at the end (cosine)", low=0, high=1)
    temperature_start: float = key(0.04, "of the teacher's softmax, at the start", low=1e-3)
    temperature: float = key(0.04, "the same after the warm-up (linear)", low=1e-3)
    temperature_warmup_epochs: float = key(0, "length of that warm-up", low=0)
    center_momentum: float = key(0.9, "of the running mean of teacher logits", low=0, high=1)


@dataclass
class Optim:
    """Optimizer and its schedules, all functions of the step."""

    name: str = key("adamw", "optimizer", choices=("adamw", "sgd", "lars"))
    lr: float = key(5e-4, "base learning rate, for a global batch of 256 unless lr_scaling is none", low=0)
    lr_scaling: str = key(
        "linear",
        "peak = lr * (global batch / 256), its root, or lr itself",
        choices=("linear", "sqrt", "none"),
    )
    lr_end: float = key(1e-6, "learning rate at the end (cosine), not scaled", low=0)
    warmup_epochs: float = key(10, "linear warm-up of the learning rate", low=0)
    weight_decay: float = key(0.04, "at the start; spares norms, biases, tokens and the like", low=0)
    weight_decay_end: float = key(0.4, "at the end (cosine)", low=0)
    betas: list[float] = key([0.9, 0.999], "of AdamW", low=0, high=0.999999, length=2)
    momentum: float = key(0.9, "of SGD and LARS", low=0, high=0.999999)
    clip_mode: str = key(
        "per_parameter",
        "per_parameter as DINO does, or global_norm",
        choices=("per_parameter", "global_norm", "none"),
    )
    clip: float = key(3.0, "largest gradient norm", low=1e-9)


@dataclass
class Train:
    """The loop."""

    epochs: int = key(100, "passes over the images", low=1)
    batch_size: int = key(
        64,
        "images per process and micro-batch; auto: the most that fit into memory, found by trying",
        low=1,
        words={"auto": AUTO},
    )
    accumulation: int = key(
        1, "micro-batches per step; global batch = batch_size * accumulation * processes", low=1
    )
    activation_checkpointing: bool = key(
        False, "compute activations twice instead of keeping them: less memory, the same gradients"
    )
    compile: str = key(
        "none",
        "blocks: torch.compile for each block of the backbone; takes minutes at the start, meant for GPUs",
        choices=("none", "blocks"),
    )
    sharding: str = key(
        "none",
        "full: each of several processes keeps its part of weights, gradients and moments (FSDP2)",
        choices=("none", "full"),
    )
    precision: str = key(
        "auto", "auto: bf16 where the device multiplies it natively", choices=("auto", "fp32", "bf16", "fp16")
    )
    checkpoint_every: float = key(1, "epochs between checkpoints; the end is always one", low=0.001)
    keep_last: int = key(2, "newest checkpoints kept, besides the best", low=1)
    keep_every: int = key(0, "epochs between checkpoints that are kept for good; 0: none", low=0)
    max_hours: float | None = key(
        None, "hours after which a run stops, saved, with exit code 75; null: no limit", low=0
    )
    on_nan: str = key(
        "stop",
        "a step whose loss or gradient is NaN or infinite ends the run, or is left out",
        choices=("stop", "skip"),
    )
    on_full_disk: str = key(
        "stop", "when a checkpoint finds no room: end the run, or wait for room", choices=("stop", "wait")
    )


@dataclass
class Knn:
    """Online k-NN, and the defaults of recipes/eval_knn.py."""

    every: float = key(1, "epochs between evaluations; 0: never", low=0)
    k: list[int] = key(
        [20, 10, 100, 200],
        "neighbours that vote, the first for the best checkpoint; all from one search",
        low=1,
    )
    temperature: float = key(0.07, "votes weigh exp(similarity / temperature)", low=1e-3)
    pooling: list[str] = key(
        ["cls"], "image vectors judged; the first decides best", choices=("cls", "mean_patch")
    )
    size: int | None = key(None, "side of the test image; null: the largest global size", low=1)
    crop_ratio: float = key(0.875, "that side over the resized short side, as 224 / 256", low=0.1, high=1)
    batch_size: int = key(128, "images per process", low=1)
    max_train: int = key(100_000, "training images that vote online, evenly chosen; eval_knn uses all", low=1)
    max_val: int = key(10_000, "images judged online, evenly chosen; eval_knn uses all", low=1)
    backend: str = key(
        "auto",
        "who searches, with the same results; auto: faiss, or torch where it is missing",
        choices=("auto", "faiss", "torch"),
    )
    unlabelled: bool | None = key(
        None,
        "also RankMe, a-ReQ, uniformity, alignment, k-NN overlap of features; null: where there is no k-NN",
    )


@dataclass
class Log:
    """What a run says."""

    every: int = key(10, "steps between lines of log.jsonl; the first and the last of an epoch always", low=1)
    progress: str = key(
        "auto", "bar on a terminal, plain lines elsewhere", choices=("auto", "bar", "plain", "none")
    )
    trackers: list[str] = key([], "trackers of accelerate: tensorboard, wandb, …")


@dataclass
class Config:
    """One pretraining run."""

    out: str = key("runs/pretrain", "run directory: config, log, checkpoints, picture")
    seed: int = key(0, "of every random choice", low=0, high=2**31 - 1)
    init_from: str | None = key(
        None, "weights to start a new run from: a file or run in any known layout; the head starts fresh"
    )
    allow_partial: list[str] = key(
        [], "with init_from: patterns of keys that may be missing or differ, such as register_tokens"
    )
    resume: str = key("never", "auto continues the run in out where there is one", choices=("never", "auto"))
    overwrite: bool = key(False, "delete the run in out first")
    expect_world_size: int | None = key(
        None, "processes that must have been started, all machines together; null: any number", low=1
    )
    terms: dict[str, float] = key({"dino": 1.0}, "weight of each term of the loss", low=0)
    data: Data = field(default_factory=Data)
    backbone: Backbone = field(default_factory=Backbone)
    views: Views = field(default_factory=Views)
    head: Head = field(default_factory=Head)
    teacher: Teacher = field(default_factory=Teacher)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    knn: Knn = field(default_factory=Knn)
    log: Log = field(default_factory=Log)
