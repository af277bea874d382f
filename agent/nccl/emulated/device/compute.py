"""Estimates the virtual time of computation from the modules that run.

Hooks on every leaf module's forward pass add the time of its arithmetic or its memory traffic on the fabric's GPU. A
hook on the output's gradient adds twice as much in the backward pass. A hook after each optimizer step adds the time of
reading and writing parameters, gradients and state. The hooks look at shapes only: neither values nor the autograd
graph change.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...fabric_file import Compute
from . import clock

OPTIMIZER_PASSES: Final = 7
"""Adam reads parameter, gradient and two states, and writes all but the gradient."""
ELEMENTWISE_PASSES: Final = 3


class ComputeModel:
    """Turns module calls into virtual time."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def install(self) -> tuple[RemovableHandle, ...]:
        """Register the hooks for the whole process; the handles remove them."""
        return (
            register_module_forward_hook(self._after_forward),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def forward_us(self, module: torch.nn.Module, output: torch.Tensor) -> float:
        """Time of a leaf module that returned `output`, without a collective."""
        elements = output.numel()
        weight = getattr(module, "weight", None)
        compute = self._compute
        if isinstance(weight, torch.Tensor) and weight.dim() > 1 and not isinstance(module, torch.nn.Embedding):
            # 2 operations per weight and output row; convolutions have a row per output pixel.
            rows = elements // max(weight.shape[0], 1)
            return compute.launch_us + compute.matmul_us(2.0 * weight.numel() * rows)
        return compute.launch_us + compute.stream_us(float(ELEMENTWISE_PASSES * elements * output.element_size()))

    def _after_forward(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if module._modules or not isinstance(output, torch.Tensor):
            return
        current = clock.current()
        if torch._C._current_graph_task_id() == -1:
            current.wait_for_futures()
        cost_us = self.forward_us(module, output)
        current.advance(cost_us)
        if output.requires_grad and torch.is_grad_enabled():
            output.register_hook(functools.partial(_backward, 2.0 * cost_us))  # type: ignore[no-untyped-call]

    def _before_step(self, *_arguments: Any) -> None:
        clock.current().wait_for_futures()

    def _after_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        n_bytes = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = getattr(parameter, "_local_tensor", parameter)
                    n_bytes += local.numel() * local.element_size()
        if n_bytes:
            compute = self._compute
            clock.current().advance(compute.launch_us + compute.stream_us(float(OPTIMIZER_PASSES * n_bytes)))


def _backward(cost_us: float, _gradient: torch.Tensor) -> None:
    clock.current().advance(cost_us)
