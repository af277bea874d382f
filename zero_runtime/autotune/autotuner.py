"""Changes a sharded model's bucket, prefetch depth and communicator between steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from .. import collectives, phases
from ..settings import Settings
from ..stages.partitioned import PartitionedParameters
from ..stages.unit import Unit
from .agreement import Boundaries
from .choices import DEEPEST, Choices, StepSettings, ladder
from .measures import clock_of, free_bytes_of
from .variants import READY_AFTER, Variants, log_on_rank_0, why_not


class Autotuner:
    """One engine's autotuner.

    Args:
        units: their buffers are cut into chunks smaller than a bucket.
        partitioned: stage 3's parameters, which are gathered ahead; None: no parameter is.
        groups: maxima over one after another reach all ranks that train this model.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        partitioned: PartitionedParameters | None,
        settings: Settings,
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        self._units, self._partitioned, self._groups = tuple(units), partitioned, tuple(groups)
        flats = [flat for unit in units for flat in unit.flats]
        self._device = flats[0].device
        lengths = [sum(flat.whole_bytes for flat in unit.flats) for unit in units]
        begin_bytes = max(len(flat.coalesced_groups[0]) * flat.chunk_bytes for flat in flats)
        buckets = ladder(max(flat.chunk_bytes for flat in flats), max(flat.whole_bytes for flat in flats), begin_bytes)
        deepest = max(settings.prefetch, min(DEEPEST, len(units) - 1))
        depths = range(deepest + 1) if partitioned else (settings.prefetch,)
        nearest = min(buckets, key=lambda bucket: abs(math.log(bucket / begin_bytes)))
        begin = StepSettings(nearest, settings.prefetch)
        self._variants: Variants | None = None
        self._n_steps = 0
        if wanted := settings.communicator_variants:
            if why := why_not(flats[0].group):
                log_on_rank_0(logging.WARNING, "gathers stay on their process group: %s", why)
            else:
                self._variants = Variants(flats[0].group, self._device, wanted, self._greatest)
        self._adopt(begin)
        self._boundaries = Boundaries(
            Choices(buckets, tuple(depths), max(lengths), settings.n_buckets_in_flight),
            begin,
            dist.get_rank(),
            dist.get_world_size(),
            self._greatest,
            clock_of(groups[0], self._device),
            free_bytes_of(self._device),
        )
        self.propose = self._boundaries.propose

    @property
    def running(self) -> StepSettings:
        """The present step's settings."""
        return self._boundaries.search.running

    @property
    def chosen(self) -> StepSettings | None:
        """The best settings; None: the search goes on."""
        return self._boundaries.search.leader if self._boundaries.search.is_settled else None

    def step_ended(self) -> None:
        """Every rank calls this after a step's last gradient and before the next parameter is gathered."""
        if self._variants is not None:
            self._n_steps += 1
            search = self._boundaries.search
            if self._n_steps == READY_AFTER:
                search.choices = replace(search.choices, variants=self._variants.make())
                self._boundaries.begin_anew()
            elif search.is_settled:
                search.choices = replace(search.choices, variants=self._variants.keep(search.leader.variant))
        changed = self._boundaries.step_ended()
        if changed is not None:
            self._adopt(changed)
        if self._variants is not None:
            self._variants.report(self._boundaries.search.judged)

    def _adopt(self, settings: StepSettings) -> None:
        for unit in self._units:
            for flat in unit.flats:
                flat.coalesce(settings.bucket_bytes)
                if self._variants is not None:
                    flat.gather_group = self._variants.groups[settings.variant]
            unit.schedule.rebuild()
        if self._partitioned is not None:
            self._partitioned.prefetch = settings.prefetch

    def _greatest(self, numbers: Sequence[int]) -> list[int]:
        greatest = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        for group in self._groups:
            phases.announce(phases.OTHER)
            collectives.maximum(greatest, group).wait()
        found: list[int] = greatest.tolist()
        return found
