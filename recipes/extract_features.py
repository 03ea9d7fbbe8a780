"""Hand features on: one row per image as .npy, safetensors, parquet or a faiss index.

    python recipes/extract_features.py runs/pretrain data.train=/images out=features
    accelerate launch recipes/extract_features.py runs/pretrain data.train=/images out=features \\
        pooling='[cls, mean_patch]' formats='[npy, faiss]'

A run directory stands for its best checkpoint, else its newest. Row i belongs to line i of rows.jsonl. The
same command goes on where it was stopped.
"""

from nestling.ssl.command_line import read, run
from nestling.ssl.evaluation.extraction.settings import ExtractFeatures


def main(argv: list[str]) -> None:
    """Extract into a folder."""
    settings = read(
        ExtractFeatures,
        argv,
        program="recipes/extract_features.py",
        about=__doc__ or "",
        positional=("checkpoint",),
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.evaluation.extraction.extracting import Extraction
    from nestling.ssl.run import processes
    from nestling.ssl.run.memory import running_out_named
    from nestling.ssl.run.progress import say_only_here
    from nestling.ssl.trained import load_trained

    trained = load_trained(settings.checkpoint, settings.network)
    accelerator = processes.join()
    say_only_here(accelerator.is_main_process)
    with running_out_named({"batch_size": settings.batch_size}):
        Extraction(trained, settings, accelerator).run()
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
