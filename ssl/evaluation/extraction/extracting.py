"""An extraction from beginning to end, on any number of processes, from wherever it was stopped."""

import contextlib
import logging
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import FILE as UNREADABLE
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import EvalBatch, EvalLoader
from nestling.ssl.data.workers import deaths_explained, default_workers
from nestling.ssl.distributed import everyones, failing_together, is_main, patiently
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.extraction import formats, parts, plan
from nestling.ssl.evaluation.extraction.formats import Column
from nestling.ssl.evaluation.extraction.forward import DTYPES, Forward, refuse_not_finite
from nestling.ssl.evaluation.extraction.images import label_of, opened
from nestling.ssl.evaluation.extraction.parts import Parts
from nestling.ssl.evaluation.extraction.progress import ExtractionProgress
from nestling.ssl.evaluation.extraction.settings import ExtractFeatures
from nestling.ssl.evaluation.settings import override
from nestling.ssl.names import printable
from nestling.ssl.run import disk, log
from nestling.ssl.run.directory import environment, installed, write_json
from nestling.ssl.run.loading import check_size
from nestling.ssl.trained import Trained
from nestling.ssl.views.evaluation import Centre

logger = logging.getLogger("nestling")


class Extraction:
    """Takes features of every image of a source into the folder `settings.out`.

    Row i of every file belongs to line i of rows.jsonl. Every process computes and saves its parts; the main
    one then writes the files.

    Raises:
        UserError: alike on all processes: a setting that can't be, images or a folder that can't be used, too
            many unreadable images, features that are not finite.
    """

    def __init__(self, trained: Trained, settings: ExtractFeatures, accelerator: Accelerator) -> None:
        self.trained, self.settings, self.out = trained, settings, Path(settings.out).expanduser()
        self.config = trained.config
        override(self.config, "data", settings.data)
        self.size = settings.size or trained.size
        self.crop_ratio = settings.crop_ratio or self.config.knn.crop_ratio
        formats.refuse_formats(settings.formats, settings.pooling)
        check_size(trained.backbone, self.size, "size")
        self.forward = Forward(
            *(trained, settings.pooling, self.size, settings.dtype, settings.precision, accelerator.device)
        )
        self.row_bytes = sum(map(math.prod, self.forward.shapes.values())) * DTYPES[settings.dtype].itemsize
        if settings.split == "train":
            trained.refuse_nowhere()
        self.source = opened(self.config, settings.split)
        self.place = (accelerator.process_index, accelerator.num_processes)
        self.ledger = Ledger(self.config.data.max_bad_share, len(self.source))

    def run(self) -> None:
        """All of it; returns at once where it is done already."""
        done = self._claimed()
        if done is None:
            logger.info(f"{printable(self.out)} holds these features already")
            return
        missing = everyones([done.missing()] if is_main() else [])[0]
        self._compute(done, missing)
        with failing_together(), patiently():
            if is_main():
                self._finish(done)

    def _claimed(self) -> Parts | None:
        """The parts there are and will be, None where the files are written already."""
        settings, told = self.settings, list[int | None]()
        size = parts.part_size(
            settings.part, len(self.source), self.row_bytes, settings.batch_size, self.place[1]
        )
        with failing_together():
            if is_main():
                wanted = plan.plan_of(self.trained, settings, self.source, self.size, self.crop_ratio)
                told = [plan.claim(self.out, wanted, size, settings)]
                if told[0] is not None:
                    self._refuse_small_disk(Parts(self.out, len(self.source), told[0]))
        size_there = everyones(told)[0]
        return None if size_there is None else Parts(self.out, len(self.source), size_there)

    def _refuse_small_disk(self, done: Parts) -> None:
        """The parts stay until the files that are made of them are whole."""
        left = sum(len(done.images(number)) for number in done.missing())
        files = sum(
            self._column(name, len(self.source), done).num_bytes(kind) for name, kind in self._files()
        )
        needed, free = left * self.row_bytes + files, disk.free_bytes(self.out)
        if free < needed:
            raise UserError(
                f"out={printable(self.out)}: the disk has {disk.size(free)} free and the extraction takes "
                f"{disk.size(needed)} until it is done; make room, or choose fewer formats or dtype=float16"
            )

    def _files(self) -> list[tuple[str, str]]:
        """Pooling and format of each file."""
        wanted = dict.fromkeys(self.settings.formats)
        return [
            (name, kind) for name in self.forward.poolings for kind in wanted if formats.holds(kind, name)
        ]

    def _compute(self, done: Parts, missing: Sequence[int]) -> None:
        """This process's share of the parts that are missing."""
        process, num_processes = self.place
        mine = missing[process::num_processes]
        order = [image for number in mine for image in done.images(number)]
        data = self.config.data
        workers = default_workers() if data.num_workers is None else data.num_workers
        loader = EvalLoader(
            self.source,
            data,
            Centre((self.size, self.size), self.crop_ratio),
            self.settings.batch_size,
            num_workers=workers,
            ledger=self.ledger,
            order=order,
        )
        before = len(self.source) - sum(len(done.images(number)) for number in missing)
        mode = self.settings.progress if is_main() else "none"
        with (
            failing_together(),
            deaths_explained(),
            contextlib.closing(iter(loader)) as batches,  # type: ignore[type-var]
            ExtractionProgress(mode, len(self.source), before, num_processes) as progress,
        ):
            for number in mine:
                self._compute_part(done, number, batches, progress)

    def _compute_part(
        self, done: Parts, number: int, batches: Iterator[EvalBatch], progress: ExtractionProgress
    ) -> None:
        images = done.images(number)
        indices, failures = np.empty(0, np.int64), list[Failure]()
        rows: dict[str, list[np.ndarray]] = {
            name: [np.empty((0, *shape), np.dtype(self.settings.dtype))]
            for name, shape in self.forward.shapes.items()
        }
        for _ in range(0, len(images), self.settings.batch_size):
            batch = next(batches)
            failures += batch.failures
            if len(batch.indices):
                computed = self.forward(batch.images)
                refuse_not_finite(computed, [self.source.path(image) for image in batch.indices.tolist()])
                indices = np.append(indices, batch.indices.numpy())
                for name, part in computed.items():
                    rows[name].append(part)
            progress.add(len(batch.indices) + len(batch.failures))
        seen = sorted([*indices.tolist(), *(failure.image for failure in failures)])
        assert seen == list(images), "each image must be seen exactly once"
        done.write(number, indices, {name: np.concatenate(pieces) for name, pieces in rows.items()}, failures)

    def _finish(self, done: Parts) -> None:
        """Write the files from the parts, then say what they hold, then delete the parts."""
        lost = done.missing()
        if lost:
            raise UserError(
                f"{printable(done.file(lost[0]))} is gone, though a process wrote it; all machines must "
                "write to one shared folder. The same command goes on"
            )
        failures = [failure for number in done.numbers for failure in done.failures(number)]
        for failure in failures:
            logger.warning(f"left out {failure}")
        self.ledger.refuse_above(len(failures))
        rows = len(self.source) - len(failures)
        if not rows:
            raise UserError(
                f"none of the {len(self.source)} images of {printable(self.source.name)} can be read"
            )
        self._write_lines(done, failures)
        names = [plan.ROWS, *([UNREADABLE] if failures else [])]
        for pooling, file_format in self._files():
            column = self._column(pooling, rows, done)
            names.append(formats.file_name(pooling, file_format))
            room = " and as much memory" if file_format == "faiss" else ""
            logger.info(f"writing {names[-1]}: {disk.size(column.num_bytes(file_format))}{room}")
            formats.write(file_format, column, self.out / names[-1])
        write_json(self.out / plan.FEATURES, self._said(done, names, rows, failures))
        shutil.rmtree(self.out / parts.FOLDER)
        logger.info(
            f"written to {printable(self.out)}: {rows} rows, "
            f"{len(failures)} of {len(self.source)} images left out"
        )

    def _write_lines(self, done: Parts, failures: Sequence[Failure]) -> None:
        """Of every row the image, and of every image without a row the reason."""
        with disk.replaced(self.out / plan.ROWS) as draft, draft.open("w", encoding="utf-8") as file:
            for number in done.numbers:
                for image in done.indices(number).tolist():
                    label = label_of(self.source, image)
                    file.write(log.line({"index": image, "path": self.source.path(image), "label": label}))
        if failures:
            with disk.replaced(self.out / UNREADABLE) as draft, draft.open("w", encoding="utf-8") as file:
                for failure in failures:
                    file.write(
                        log.line({"index": failure.image, "path": failure.path, "reason": failure.reason})
                    )

    def _column(self, pooling: str, rows: int, done: Parts) -> Column:
        return Column(
            pooling,
            (rows, *self.forward.shapes[pooling]),
            np.dtype(self.settings.dtype),
            lambda: done.rows(pooling),
            self.source.path,
            lambda image: label_of(self.source, image),
            {"pooling": pooling, **self._provenance()},
        )

    def _provenance(self) -> dict[str, Any]:
        trained = self.trained
        return {
            "nestling": installed("nestling"),
            "checkpoint": str((trained.checkpoint or trained.file).absolute()),
            **trained.facts(),
            "size": self.size,
            "crop_ratio": self.crop_ratio,
            "precision": self.settings.precision,
            "mean": self.forward.mean,
            "std": self.forward.std,
            "source": self.source.name,
        }

    def _said(
        self, done: Parts, names: Sequence[str], rows: int, failures: Sequence[Failure]
    ) -> dict[str, Any]:
        wanted = plan.plan_of(self.trained, self.settings, self.source, self.size, self.crop_ratio)
        return {
            **self._provenance(),
            "rows": rows,
            "left_out": len(failures),
            "files": list(names),
            "shapes": {name: [rows, *shape] for name, shape in self.forward.shapes.items()},
            "formats": sorted(set(self.settings.formats)),
            "class_names": self.source.class_names,
            "plan": wanted,
            "settings": asdict(self.settings),
            "command": sys.argv,
            "environment": environment(),
        }
