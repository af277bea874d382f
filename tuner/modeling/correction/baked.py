"""A fitted correction as plain arrays, which the daemon evaluates without scikit-learn.

The trainer evaluates the model once over the grid (communicator, collective, cell, channel count, size class), and the
daemon looks keys up. Predictions from the points would take it a hundred times as long: 70 ms instead of 0.3 ms for 55
candidates at 30 sizes and 500 points. The bytes are a numpy archive that is read with pickle refused.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ....agent.nccl.catalog import CHANNEL_LADDER
from ....store.records import SIZE_CLASSES_PER_OCTAVE, Candidate, Collective, CommunicatorClass
from ..features import DEFAULT_CELL, N_SIZE_CLASSES, Floats, Ints, cell_of

BAKED_VERSION: Final = 3
MOST_CHANNELS: Final = CHANNEL_LADDER[-1]
"""Also stands for a channel count that NCCL chooses."""
UNKNOWN_STD: Final = 0.5
"""Standard deviation (log) of NCCL's cost as a prediction without a correction."""
FOREIGN_STD: Final = 0.08
"""Added per square root of an octave of ranks or nodes between the asked communicator and the nearest in the grid."""
FEW_NODES_STD: Final = 0.25
"""Added if NCCL's cost model has different bandwidths for the two: they differ between one, two and more nodes."""
DISBELIEF: Final = 1.0 / 1.645
"""Doubt (log) per unit of a jump or of idle channels in NCCL's cost that no measured point shows. The 90 % interval
then just includes a machine that has neither.
"""
_JUMPS: Final = ((1, 2.0), (2, 1.0))
"""(n_nodes, octaves): NCCL's cost model changes bandwidths above n_nodes; that counts as this distance."""
FAR_STD: Final = 0.05
"""Added per octave beyond the sizes of the grid."""
_MAX_BLOB_BYTES = 256 << 20


class Correction(Protocol):
    """Shift of the log of NCCL's cost, and its standard deviation."""

    def predict(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        size_classes: Ints,
    ) -> tuple[Floats, Floats]:
        """Shift of the log of NCCL's cost, and its standard deviation (log), each [n_size_classes, n_candidates]."""
        ...

    def nearest(self, communicator: CommunicatorClass) -> CommunicatorClass:
        """The communicator in the grid whose correction is used for `communicator`."""
        ...


class Baked:
    """A correction on its grid; implements `Correction`.

    Arrays: `communicators` [m, 2] (ranks, nodes), `collectives` [c], `cells` [k, 2], `channels` [n_counts], in order,
    `first_class`, `mean` and `std` float32 [m, c, k, n_counts, n_classes]. A cell that its communicator does not offer
    has mean 0 and std `UNKNOWN_STD`.
    """

    def __init__(
        self,
        communicators: Ints,
        collectives: Ints,
        cells: Ints,
        channels: Ints,
        first_class: int,
        mean: npt.NDArray[np.float32],
        std: npt.NDArray[np.float32],
    ) -> None:
        expected = (len(communicators), len(collectives), len(cells), len(channels))
        if mean.ndim != 5 or mean.shape != std.shape or mean.shape[:4] != expected or not mean.shape[4]:
            raise ValueError(f"grid of shape {mean.shape} does not fit {expected} and size classes")
        if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
            raise ValueError("grid holds values that are not finite, or spreads that are not positive")
        if not (len(channels) and channels[0] > 0 and (np.diff(channels) > 0).all()):
            raise ValueError("grid holds channel counts that are not in order")
        self.communicators = communicators
        self.collectives = collectives
        self.cells = cells
        self.channels = channels
        self.first_class = first_class
        self.mean = mean
        self.std = std
        self._collective = {int(value): index for index, value in enumerate(collectives)}
        self._cell = {(int(a), int(p)): index for index, (a, p) in enumerate(cells)}

    def predict(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        size_classes: Ints,
    ) -> tuple[Floats, Floats]:
        """See `Correction.predict`; 0 and `UNKNOWN_STD` if nothing is known, as of a collective that the grid lacks.

        If the grid lacks a communicator or a size class, the nearest one's correction is used, with more doubt. If it
        lacks a channel count, the nearest one's is used.
        """
        shape = (len(size_classes), len(candidates))
        shift, spread = np.zeros(shape), np.full(shape, UNKNOWN_STD)
        at_collective = self._collective.get(int(collective))
        if at_collective is None or not len(self.communicators):
            return shift, spread
        at_communicator = self._nearest(communicator)
        columns = [self._cell.get(cell_of(candidate), -1) for candidate in candidates]
        cells = np.array(columns, dtype=np.int64)
        counts = self._nearest_counts(candidates)
        classes = np.clip(size_classes - self.first_class, 0, self.mean.shape[4] - 1)
        known = np.flatnonzero(cells >= 0)
        if not len(known):
            return shift, spread
        at = at_communicator, at_collective, cells[known][None, :], counts[known][None, :], classes[:, None]
        shift[:, known], spread[:, known] = self.mean[at], self.std[at]
        outside = (size_classes - self.first_class) - classes
        spread[:, known] = np.hypot(spread[:, known], FAR_STD * np.abs(outside[:, None]) / SIZE_CLASSES_PER_OCTAVE)
        elsewhere = self._doubt_elsewhere(communicator, at_communicator)
        return shift, np.minimum(np.hypot(spread, elsewhere), np.maximum(spread, UNKNOWN_STD))

    def nearest(self, communicator: CommunicatorClass) -> CommunicatorClass:
        """See `Correction.nearest`."""
        if not len(self.communicators):
            return communicator
        n_ranks, n_nodes = self.communicators[self._nearest(communicator)].tolist()
        return CommunicatorClass(n_ranks, max(1, n_nodes))

    def to_bytes(self) -> bytes:
        """The arrays as an uncompressed numpy archive."""
        buffer = io.BytesIO()
        np.savez(
            buffer,
            version=np.array([BAKED_VERSION]),
            communicators=self.communicators,
            collectives=self.collectives,
            cells=self.cells,
            channels=self.channels,
            first_class=np.array([self.first_class]),
            mean=self.mean,
            std=self.std,
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Baked:
        """Read `to_bytes`; nothing is ever unpickled.

        Raises ValueError if the bytes are damaged, of another version, or hold impossible values.
        """
        if len(blob) > _MAX_BLOB_BYTES:
            raise ValueError(f"model of {len(blob)} bytes is over the limit of {_MAX_BLOB_BYTES}")
        try:
            with np.load(io.BytesIO(blob), allow_pickle=False) as archive:
                if sum(member.file_size for member in archive.zip.infolist()) > len(blob):
                    raise ValueError("model is packed, which ours are not")
                arrays: dict[str, npt.NDArray[Any]] = {name: archive[name] for name in archive.files}
            version, first = int(arrays["version"][0]), int(arrays["first_class"][0])
            if version != BAKED_VERSION:
                raise ValueError(f"model of version {version}, this is {BAKED_VERSION}")
            return cls(
                arrays["communicators"].astype(np.int64).reshape(-1, 2),
                arrays["collectives"].astype(np.int64).reshape(-1),
                arrays["cells"].astype(np.int64).reshape(-1, 2),
                arrays["channels"].astype(np.int64).reshape(-1),
                first,
                arrays["mean"].astype(np.float32),
                arrays["std"].astype(np.float32),
            )
        except (
            *(KeyError, IndexError, AttributeError, OSError, EOFError, TypeError, OverflowError, MemoryError),
            *(RuntimeError, zlib.error, zipfile.BadZipFile),  # raised for damaged bytes
        ) as error:
            raise ValueError(f"model cannot be read: {error}") from error

    def _nearest_counts(self, candidates: Sequence[Candidate]) -> Ints:
        """Index of the grid's channel count nearest to each candidate's, in octaves."""
        asked = np.log2([candidate.n_channels or MOST_CHANNELS for candidate in candidates])
        nearest: Ints = np.abs(np.subtract.outer(asked, np.log2(self.channels))).argmin(axis=1)
        return nearest

    def _nearest(self, communicator: CommunicatorClass) -> int:
        gaps = self._octaves_to(communicator)
        known = np.maximum(self.communicators[:, 1], 1)
        for most, octaves in _JUMPS:
            gaps = gaps + np.where((known <= most) != (communicator.n_nodes <= most), octaves, 0.0)
        return int(np.argmin(gaps))

    def _doubt_elsewhere(self, communicator: CommunicatorClass, nearest: int) -> float:
        """Increase of the standard deviation if another communicator's correction is used."""
        n_nodes = max(1, int(self.communicators[nearest, 1]))
        is_apart = any((n_nodes <= most) != (communicator.n_nodes <= most) for most, _ in _JUMPS)
        octaves = float(self._octaves_to(communicator)[nearest])
        return math.hypot(FOREIGN_STD * math.sqrt(octaves), FEW_NODES_STD if is_apart else 0.0)

    def _octaves_to(self, communicator: CommunicatorClass) -> Floats:
        """Octaves of ranks and nodes to every communicator in the grid."""
        asked = np.log2([communicator.n_ranks, max(1, communicator.n_nodes)])
        octaves: Floats = np.abs(np.log2(np.maximum(self.communicators, 1)) - asked).sum(axis=1)
        return octaves


def grid_classes(lowest_bytes_class: int, highest_bytes_class: int) -> Ints:
    """Size classes of a grid: those measured and two octaves on either side."""
    first = max(0, lowest_bytes_class - 8)
    last = min(N_SIZE_CLASSES - 1, highest_bytes_class + 8)
    return np.arange(first, last + 1, dtype=np.int64)


__all__ = ["BAKED_VERSION", "DEFAULT_CELL", "MOST_CHANNELS", "UNKNOWN_STD", "Baked", "Correction", "grid_classes"]
