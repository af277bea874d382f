import contextlib

import pytest
import torch

from zerotune.agent.steps.hooks import Region, StepHooks


class Recorder:
    def __init__(self):
        self.events = []
        self.hooks = StepHooks(self.events.append, lambda: self.events.append("boundary"))

    def __enter__(self):
        self.hooks.install()
        return self

    def __exit__(self, *_):
        self.hooks.remove()


def model_and_optimizer():
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_one_step_is_backward_forward_step_boundary_forward():
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert seen.events == [Region.backward, Region.after_backward, Region.step, "boundary", Region.forward]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_runs_forward_and_backward_where_they_belong(by_name):
    """Lightning's trainer steps so: what forward gathers is no gather of updated parameters."""
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:

        def closure():
            seen.events.append("forward of the closure")
            model(torch.ones(2, 3)).sum().backward()

        for _ in range(2):
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    step = ["forward of the closure", Region.backward, Region.after_backward, "boundary", Region.forward]
    assert seen.events == 2 * step


def test_two_optimizers_after_one_backward_make_one_boundary():
    model, first = model_and_optimizer()
    second = torch.optim.Adam(model.parameters())
    with Recorder() as seen:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            first.step()
            second.step()
    assert seen.events.count("boundary") == 3


def test_gradient_accumulation_makes_one_boundary():
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert seen.events.count("boundary") == 1


def test_reentrant_backward_does_not_end_the_region():
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                y = torch.ones(1, requires_grad=True)
                torch.autograd.backward(y * 3)
            return gradient * 2

    with Recorder() as seen:
        Inner.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen.events == [Region.backward, Region.after_backward]


def test_a_failing_backward_leaves_the_region():
    with Recorder() as seen, contextlib.suppress(RuntimeError):
        torch.ones(1).backward()
    assert seen.events == [Region.backward, Region.after_backward]


def test_remove_leaves_torch_as_found():
    before = torch.autograd.backward
    with Recorder() as seen:
        assert torch.autograd.backward is not before
    assert torch.autograd.backward is before
    model, optimizer = model_and_optimizer()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert seen.events == []


def test_the_script_may_say_itself_that_a_step_ends_and_is_heard_once():
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:
        for by_hand in (True, False):
            model(torch.ones(2, 3)).sum().backward()
            if not by_hand:
                optimizer.step()
            seen.hooks.step_ended()
            seen.hooks.step_ended()
    assert seen.events.count("boundary") == 2
    assert seen.events[-1] == Region.forward


def test_an_optimizer_inside_backward_makes_a_step_where_the_script_says_so():
    model, optimizer = model_and_optimizer()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with Recorder() as seen:
        model(torch.ones(2, 3)).sum().backward()
        assert "boundary" not in seen.events
        seen.hooks.step_ended()
    assert seen.events.count("boundary") == 1
