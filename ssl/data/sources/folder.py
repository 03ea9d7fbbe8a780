"""A folder of images, in any nesting."""

import os

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.files import FileSource
from nestling.ssl.data.sources.index import keep, kept, key_of, mark_used, own_folders
from nestling.ssl.data.sources.scan import is_current, scan
from nestling.ssl.data.sources.walk import ScanError
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

LOOKED_FOR = ".avif .bmp .gif .jfif .jp2 .jpeg .jpg .pbm .pgm .png .pnm .ppm .tga .tif .tiff .webp"
EXTENSIONS = frozenset(LOOKED_FOR.split())
ARRAY = ".npy"  # an image only where channels are unchanged: elsewhere it is more likely labels


class Folder(FileSource):
    """All images below a folder, in any nesting, in an order that the file system can't change.

    Hidden entries, `__MACOSX` and the folders of runs are left out. Links are followed; a folder or
    file that several links lead to counts once, so that loops end; hard links are images of their
    own. Labels exist where every image lies below one of at least two first-level subfolders: those
    are the classes. What is found is kept in the cache and holds until a folder changes.

    Raises:
        UserError: there is no such folder, it can't be read, no image is in it, or it is a run's.
    """

    def __init__(
        self, root: str, decoder: Decoder = Decoder(), key: str = "data.train", cache: str | None = None
    ) -> None:
        shown = f"{key}={printable(root)}"
        if not os.path.isdir(root):
            found = "a file" if os.path.exists(root) else "nothing"
            raise UserError(f"{shown} is not a folder: found {found} there; name a folder of images")
        extensions = EXTENSIONS | {ARRAY} if decoder.mode == "unchanged" else EXTENSIONS
        place = os.path.abspath(root)
        try:
            index = _index(place, extensions, cache)
        except ScanError as problem:
            raise UserError(f"{shown}{problem}") from problem
        super().__init__(str(root), place, decoder, index)


def _index(root: str, extensions: frozenset[str], cache: str | None) -> Remembered:
    """From the cache where nothing has changed since, else from a scan."""
    name = key_of(root, *sorted(extensions))
    for index in kept(cache, name):
        if is_current(index, root):
            mark_used(index)
            return index
    return keep(scan(root, extensions, own_folders(cache)), cache, name)
