"""Jobs whose steps torch's hooks on optimizers and backward see late, in part, or not at all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.fsdp import fully_shard

from benchmarks.agent.job_shapes.job import Job, adamw, average_gradients, mlp, shape
from zerotune.agent.nccl.emulated import Graph


@shape()
def compiled_step(job: Job) -> None:
    """The optimizer's step is compiled, as torchtune does."""
    model = mlp(1)
    fully_shard(model)
    optimizer = adamw(model)
    step_compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(150):
        optimizer.zero_grad()
        loss = model(job.batch(step)).pow(2).mean()
        loss.backward()
        step_compiled()
        job.say(loss.detach())


@shape()
def autograd_grad(job: Job) -> None:
    """One backward to warm up; from then on gradients come by `autograd.grad`."""
    model = mlp()
    optimizer = adamw(model)
    model(job.batch(0)).pow(2).mean().backward()
    parameters = list(model.parameters())
    for step in range(250):
        loss = model(job.batch(step)).pow(2).mean()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            parameter.grad = gradient
        optimizer.step()
        job.say(loss.detach())


class _Stepper:
    """An optimizer that does not derive from torch's, as Megatron's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad = None


@shape()
def megatron(job: Job) -> None:
    """Megatron's own backward, and an optimizer of its own: gradients scattered, parameters gathered."""
    model = mlp()
    stepper = _Stepper(model)
    n = sum(one.numel() for one in model.parameters())
    part = torch.zeros(-(-n // job.n_ranks))
    padded = torch.zeros(part.numel() * job.n_ranks)
    engine = Variable._execution_engine
    for step in range(250):
        loss = model(job.batch(step)).pow(2).mean()
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
        padded[:n] = torch.cat([one.grad.reshape(-1) for one in model.parameters() if one.grad is not None])
        dist.reduce_scatter_tensor(part, padded, op=dist.ReduceOp.AVG)
        dist.all_gather_into_tensor(padded, part)
        used = 0
        for one in model.parameters():
            one.grad = padded[used : used + one.numel()].view_as(one).clone()
            used += one.numel()
        stepper.step()
        job.say(loss.detach())


@shape()
def step_in_backward(job: Job) -> None:
    model = mlp()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)

        def update(one: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert one.grad is not None
            dist.all_reduce(one.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    for step in range(250):
        loss = model(job.batch(step)).pow(2).mean()
        loss.backward()
        job.say(loss.detach())


@shape()
def whole_step_graph(job: Job) -> None:
    """The collectives of a step are captured once and replayed; the rest of the step runs beside the graph."""
    model = mlp()
    optimizer = adamw(model)
    n = sum(one.numel() for one in model.parameters())
    gradients = torch.zeros(n)
    graph = Graph()
    for step in range(250):
        optimizer.zero_grad()
        loss = model(job.batch(step)).pow(2).mean()
        loss.backward()
        if step < 3:  # to warm up
            average_gradients(model)
            optimizer.step()
            job.say(loss.detach())
            continue
        if step == 3:
            with graph.capture():
                dist.all_reduce(gradients, op=dist.ReduceOp.AVG)
        gradients.copy_(torch.cat([one.grad.reshape(-1) for one in model.parameters() if one.grad is not None]))
        graph.replay()
        used = 0
        for one in model.parameters():
            one.grad = gradients[used : used + one.numel()].view_as(one)
            used += one.numel()
        optimizer.step()
        total = loss.detach().reshape(1).clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        job.say(loss.detach(), total)
