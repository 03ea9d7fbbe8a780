"""What may be set of an extraction; nothing here imports torch, so that a typo answers at once."""

from dataclasses import dataclass, field

from nestling.ssl.config import key
from nestling.ssl.evaluation.settings import EvalData

FORMATS = ("npy", "safetensors", "parquet", "faiss")


@dataclass
class ExtractData(EvalData):
    """Which images, and how they are loaded."""

    train: str | None = key(None, "images to take features of; null: as the run had it")
    val: str | None = key(None, "those of split=val; null: as the run had it")


@dataclass
class ExtractFeatures:
    """One extraction."""

    checkpoint: str = key("???", "run directory, one of its checkpoint folders, or a weights file")
    out: str = key("???", "folder of the features: new, or of an extraction that was stopped")
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    pooling: list[str] = key(
        ["cls"], "vectors: cls, mean_patch, cls+mean_patch, last4:cls, …; patches: the whole grid"
    )
    formats: list[str] = key(["npy"], "kinds of files, one per pooling each", choices=FORMATS)
    dtype: str = key("float32", "of the numbers in npy and safetensors", choices=("float32", "float16"))
    size: int | None = key(None, "side of the image; null: as the run was judged", low=1)
    crop_ratio: float | None = key(
        None, "that side over the resized short side; null: as the run had it", low=0.1, high=1
    )
    precision: str = key("fp32", "what the network computes in", choices=("fp32", "bf16", "fp16"))
    batch_size: int = key(64, "images per process; another one may change the last digits", low=1)
    part: int | None = key(
        None, "images between savings, rounded up to whole batches; null: at most 1024", low=1
    )
    split: str = key("train", "take features of data.train or of data.val", choices=("train", "val"))
    overwrite: bool = key(False, "delete what an earlier extraction left in out")
    progress: str = key(
        "auto", "bar on a terminal, plain lines elsewhere", choices=("auto", "bar", "plain", "none")
    )
    data: ExtractData = field(default_factory=ExtractData)


@dataclass
class Search:
    """One search."""

    index: str = key("???", "folder that recipes/extract_features.py has written, or a file of it")
    image: str = key("???", "file of the image to look for")
    k: int = key(10, "images to show", low=1)
    pooling: str | None = key(None, "by which of the index's vectors; null: its first")
    checkpoint: str | None = key(None, "where the same weights lie now; null: where they were")
    out: str = key("nearest.png", "picture of the image and the nearest ones")
