"""What a fine-tuning lets a user set. Nothing here imports torch, so that `--help` answers at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nestling.ssl.config import key
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.settings import EvalData

AUGMENTATIONS = ("randaugment", "jitter", "none")


@dataclass
class Model:
    """What is trained: the backbone, and a linear classifier on one of its vectors."""

    readout: str = key(
        "cls", "vector that the classifier sees: cls, mean_patch, cls+mean_patch, last4:cls, …"
    )
    drop_path: float = key(0.1, "largest rate of stochastic depth", low=0, high=0.99)


@dataclass
class Augment:
    """How training images are varied; the defaults are DeiT's (table 9), without random erasing."""

    size: int | None = key(None, "side of the images; null: as the run had it", low=1)
    crop_ratio: float | None = key(
        None, "that side over the resized short side where it is judged; null: as the run", low=0.1, high=1
    )
    scale: list[float] = key(
        [0.08, 1.0], "share of the image's area in a crop", low=1e-4, high=1, ordered=True
    )
    ratio: list[float] = key([0.75, 4 / 3], "width over height of a crop", low=0.01, high=100, ordered=True)
    flip: float = key(0.5, "probability of a horizontal flip", low=0, high=1)
    colors: str = key("randaugment", "how crops are changed", choices=AUGMENTATIONS)
    num_ops: int = key(2, "operations of RandAugment in a row", low=1, high=10)
    magnitude: int = key(9, "strength of RandAugment, out of 31 levels", low=0, high=30)
    jitter: float = key(0.3, "strength of colors=jitter: brightness, contrast and saturation", low=0, high=1)
    erasing: float = key(0.0, "probability that a rectangle becomes the mean colour", low=0, high=1)
    mixup: float = key(0.8, "alpha of mixup; 0: none", low=0, high=100)
    cutmix: float = key(
        1.0, "alpha of CutMix; 0: none; with both, each batch takes one of them", low=0, high=100
    )
    label_smoothing: float = key(0.1, "share of the label spread over all classes", low=0, high=0.99)


@dataclass
class Optim:
    """AdamW whose learning rate falls from the head to the first layer."""

    lr: float = key(5e-4, "peak learning rate of the head for a global batch of 256", low=0)
    lr_end: float = key(1e-6, "learning rate at the end", low=0)
    layer_decay: float = key(
        0.75, "factor of the learning rate from one block to the one below", low=0, high=1
    )
    weight_decay: float = key(0.05, "spares biases, norms, tokens, positions and scales", low=0)
    warmup_epochs: float = key(5, "linear warm-up, at most all epochs long, then cosine", low=0)
    clip: float | None = key(None, "largest norm of all gradients; null: not clipped", low=1e-6)


@dataclass
class Train:
    """How long, and in what portions."""

    epochs: int = key(100, "passes through the training images", low=1)
    batch_size: int = key(64, "images per process and step", low=1)
    precision: str = key(
        "auto",
        "auto: bf16 where the device multiplies it, else fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    choose_on_train: float = key(
        0.0, "share of data.train kept out to choose the epoch by; 0: the last one counts", low=0, high=0.9
    )


@dataclass
class FineTune:
    """One fine-tuning."""

    checkpoint: str = key("???", "run directory, one of its checkpoint folders, or a weights file")
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    out: str = key("runs/finetune", "folder of the fine-tuned network, its log and its results")
    resume: str = key(
        "never", "never: refuse a folder that holds one; auto: go on with it", choices=("never", "auto")
    )
    seed: int = key(0, "of the head, the order, the crops and the mixing", low=0)
    data: EvalData = field(default_factory=EvalData)
    model: Model = field(default_factory=Model)
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)


@contextmanager
def drop_path_named(rate: float) -> Iterator[None]:
    """Say which key to set where a network has no stochastic depth, as many of other libraries."""
    try:
        yield
    except UserError as error:
        if not rate or "drop_path" not in str(error.__cause__):
            raise
        raise UserError(f"model.drop_path={rate}: {error.__cause__}; set model.drop_path=0") from error
