"""What the training of a detector lets a user set; no torch here, so that `--help` answers at once."""

from dataclasses import dataclass, field

from nestling.ssl.config import key


@dataclass
class Instances:
    """COCO-style files of instances, and the folders of their images; categories are matched by name."""

    train: str = key("???", "json of the instances to learn from")
    val: str = key("???", "json of the instances that are judged")
    train_images: str | None = key(None, "folder of the images of data.train; null: that of the json")
    val_images: str | None = key(None, "folder of the images of data.val; null: that of the json")
    num_workers: int | None = key(None, "loader processes; null: as the run had it", low=0)
    max_bad_share: float = key(0.1, "unreadable share of the images at which it stops", low=0, high=0.5)


@dataclass
class Detector:
    """Mask R-CNN (He et al., 2017) on a feature pyramid (Lin et al., 2017), as torchvision builds it."""

    drop_path: float = key(0.05, "largest rate of stochastic depth of the backbone", low=0, high=0.99)
    out_channels: int = key(256, "channels of the feature pyramid", low=1)
    min_size: list[int] = key(
        [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800],
        "shorter sides that training draws from; the last one judges",
        low=8,
    )
    max_size: int = key(1333, "largest longer side", low=8)
    rois: int = key(512, "boxes of an image that the heads learn from", low=4)
    detections: int = key(100, "boxes that are found in an image at most", low=1, high=100)
    flip: float = key(0.5, "probability of a horizontal flip in training", low=0, high=1)


@dataclass
class Optim:
    """AdamW with linear warm-up, then cosine."""

    lr: float = key(1e-4, "peak learning rate, whatever the batch", low=0)
    lr_end: float = key(0.0, "learning rate at the end", low=0)
    layer_decay: float = key(
        1.0, "factor of the learning rate from one block to the one below", low=0, high=1
    )
    weight_decay: float = key(0.05, "spares biases, norms, tokens, positions and scales", low=0)
    warmup_steps: int = key(500, "steps of the warm-up", low=0)
    clip: float | None = key(None, "largest norm of all gradients; null: not clipped", low=1e-6)


@dataclass
class Train:
    """How long, and in what portions."""

    epochs: int = key(36, "passes through the training images", low=1)
    batch_size: int = key(16, "images per step", low=1)
    precision: str = key(
        "auto",
        "of backbone and pyramid; the heads are fp32; auto: bf16 if fast",
        choices=("auto", "fp32", "bf16"),
    )


@dataclass
class FineTuneDetection:
    """The training of one detector."""

    checkpoint: str = key("???", "run directory, one of its checkpoint folders, or a weights file")
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    out: str = key("runs/detection", "folder of the detector, its log and its results")
    resume: str = key(
        "never", "never: refuse a folder that holds one; auto: go on with it", choices=("never", "auto")
    )
    seed: int = key(0, "of the heads, the order, sizes and flips", low=0)
    data: Instances = field(default_factory=Instances)
    model: Detector = field(default_factory=Detector)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
