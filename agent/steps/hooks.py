"""Step boundaries and regions of the step, from torch's own hooks: O(1) Python per step.

A *boundary* is the end of the first optimizer step after gradients were computed: by `backward`, by `autograd.grad`, or
by a replayed graph. So several optimizers that step after one backward make one boundary. If an optimizer steps inside
backward, the boundary is the end of that backward. If a graph contains the step, the boundary is the end of a replay.

A *region* is the part of the step in which the program is:

- forward;
- backward: inside autograd's engine, except for `autograd.grad`;
- after_backward: until the optimizer's step. DeepSpeed's ZeRO-1 reduces its gradients here. With gradient accumulation
  the next forward is here, too;
- step: inside an optimizer's `step`, unless a closure computes the gradients there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from enum import IntEnum
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..settings import ENV_FABRIC


class Region(IntEnum):
    """Values for the plugin's `phase_or_region` (zerotune_plugin.h, `zt_region_code`)."""

    forward = 16
    backward = 17
    step = 18
    after_backward = 19


class StepHooks:
    """Calls `on_region` when the region changes, `on_boundary` at each step boundary, and `on_replay` with each graph.

    `on_capture` is called with a graph, and with True when its capture begins or False when it has ended. All run on
    the training thread and must not raise.
    """

    def __init__(
        self,
        on_region: Callable[[int], None],
        on_boundary: Callable[[], None],
        on_replay: Callable[[Any], None],
        on_capture: Callable[[Any, bool], None],
    ) -> None:
        self._on_region = on_region
        self._on_boundary = on_boundary
        self._on_replay = on_replay
        self._on_capture = on_capture
        self._backward_depth = 0
        self._has_stepped_inside = False
        self._had_gradients = False
        self._gradients_since_boundary = False
        self._compiled_step_ended = False
        self._captured: Any = None
        self._graphs_with_step: WeakSet[Any] = WeakSet()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Register with torch; `remove` undoes it."""
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.append(handle.remove)
        # `backward`, `autograd.grad` and Megatron's own backward all use the engine.
        self._replace(Variable, "_execution_engine", _watched_engine(self))
        for kind in _graph_kinds():
            self._watch_graphs(kind)

    def remove(self) -> None:
        """Restore torch."""
        while self._undo:
            self._undo.pop()()

    def step_ended(self) -> None:
        """The script reports that a step ends here; ignored if the end of this step was seen already."""
        self._end_compiled_step()
        self._end_step()

    # ---- gradients -------------------------------------------------------------------------------

    def _enter_backward(self) -> None:
        self._end_compiled_step()
        # Reentrant activation checkpointing calls backward inside backward.
        if self._backward_depth == 0:
            self._on_region(Region.backward)
        self._backward_depth += 1

    def _leave_backward(self) -> None:
        self._backward_depth -= 1
        if self._backward_depth:
            return
        self._note_gradients()
        self._on_region(Region.after_backward)
        if self._has_stepped_inside:
            self._has_stepped_inside = False
            self._end_step()

    def _note_gradients(self) -> None:
        self._end_compiled_step()
        self._had_gradients = self._gradients_since_boundary = True

    # ---- optimizers ------------------------------------------------------------------------------

    def _before_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        # If an optimizer steps inside backward (optimizer-in-backward), the region stays backward. With a closure
        # (Lightning's trainer always has one) forward and backward run inside the step: the region does not change.
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if self._backward_depth == 0 and not has_closure:
            self._on_region(Region.step)

    def _after_step(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            # Dynamo compiles this assignment into the step. It could not trace `on_boundary`, which is called when the
            # next gradients are computed.
            self._compiled_step_ended = True
            return
        if self._captured is not None:
            self._graphs_with_step.add(self._captured)
        elif self._backward_depth:
            self._has_stepped_inside = True
        else:
            self._end_step()

    def _end_compiled_step(self) -> None:
        if self._compiled_step_ended:
            self._compiled_step_ended = False
            self._end_step()

    def _end_step(self) -> None:
        if self._gradients_since_boundary or not self._had_gradients:
            self._gradients_since_boundary = False
            self._on_boundary()
        self._on_region(Region.forward)

    # ---- graphs ----------------------------------------------------------------------------------

    def _watch_graphs(self, kind: Any) -> None:
        begin, end, run = kind.capture_begin, kind.capture_end, kind.replay

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._on_capture(graph, True)
            begin(graph, *args, **kwargs)
            self._captured = graph

        @functools.wraps(end)
        def capture_end(graph: Any) -> None:
            self._captured = None
            try:
                end(graph)
            finally:
                self._on_capture(graph, False)

        @functools.wraps(run)
        def replay(graph: Any) -> None:
            run(graph)
            self._on_replay(graph)
            # A graph without a backward does no harm: only the next optimizer step makes a boundary.
            self._note_gradients()
            if graph in self._graphs_with_step:
                self._end_step()

        for replacement in (capture_begin, capture_end, replay):
            self._replace(kind, replacement.__name__, replacement)

    def _replace(self, owner: type, name: str, replacement: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, replacement)

        def restore() -> None:
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)

        self._undo.append(restore)


def _watched_engine(hooks: StepHooks) -> Any:
    class Engine(torch._C._ImperativeEngine):
        """Autograd's engine; torch and Dynamo check its base class."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("accumulate_grad", True):  # autograd.grad
                try:
                    return super().run_backward(*args, **kwargs)
                finally:
                    hooks._note_gradients()
            hooks._enter_backward()
            try:
                return super().run_backward(*args, **kwargs)
            finally:
                hooks._leave_backward()

    return Engine()


def _graph_kinds() -> list[type]:
    """Classes of graphs that can be replayed in this process."""
    kinds: list[type] = []
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        kinds.append(torch.cuda.CUDAGraph)
    if os.environ.get(ENV_FABRIC):
        from ..nccl.emulated import Graph

        kinds.append(Graph)
    return kinds
