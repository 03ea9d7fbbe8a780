"""Which images are most like this one? Search the features that extract_features has written, and draw them.

    python recipes/search.py features cat.jpg
    python recipes/search.py features cat.jpg k=20 out=cats.png

The image is embedded by the backbone that made the features, as those were.
"""

from nestling.ssl.command_line import read, run
from nestling.ssl.evaluation.extraction.settings import Search


def main(argv: list[str]) -> None:
    """Print a table of the nearest images and write a picture of them."""
    settings = read(
        Search, argv, program="recipes/search.py", about=__doc__ or "", positional=("index", "image")
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.evaluation.extraction.searching import FeatureFolder, drawn, picture_file, show
    from nestling.ssl.names import printable

    out = picture_file(settings.out)
    folder = FeatureFolder(settings.index, settings.pooling)
    model = folder.embedder(settings.checkpoint)
    found = folder.nearest(model.embed(settings.image, folder.pooling)[0], settings.k)
    show(found, settings.image)
    drawn(model.read(settings.image), folder.images(found, model), found).save(out)
    print(f"written to {printable(out)}")


if __name__ == "__main__":
    run(main)
