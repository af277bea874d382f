import contextlib

import pytest
import torch
from torch.autograd import Variable

from zerotune.agent.nccl.emulated import Graph
from zerotune.agent.settings import ENV_FABRIC
from zerotune.agent.steps.hooks import Region, StepHooks


class Recorder:
    def __init__(self):
        self.events = []
        self.captures = []
        self.replays = []
        self.hooks = StepHooks(
            self.events.append, lambda: self.events.append("boundary"), self.replays.append, self.capture
        )

    def capture(self, graph, is_capturing):
        self.captures.append((graph, is_capturing))

    def __enter__(self):
        self.hooks.install()
        return self

    def __exit__(self, *_):
        self.hooks.remove()


def engine():
    """Autograd's, which Megatron calls by this name."""
    return vars(Variable)["_execution_engine"]


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
    before = engine()
    with Recorder() as seen:
        assert engine() is not before
    assert engine() is before
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


def test_an_optimizer_inside_backward_makes_one_step_at_the_end_of_backward():
    """`_apply_optimizer_in_backward` and torchtune step so, one optimizer for each parameter."""
    model, optimizer = model_and_optimizer()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with Recorder() as seen:
        model(torch.ones(2, 3)).sum().backward()
        seen.hooks.step_ended()
    assert seen.events[:4] == [Region.backward, Region.after_backward, "boundary", Region.forward]
    assert seen.events.count("boundary") == 1


def step_by_grad(model, optimizer):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(torch.ones(2, 3)).sum(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def test_gradients_of_autograd_grad_make_steps_after_a_single_backward():
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:
        model(torch.ones(2, 3)).sum().backward()
        for _ in range(5):
            step_by_grad(model, optimizer)
    assert seen.events.count("boundary") == 5


def test_a_gradient_penalty_is_part_of_its_step():
    """WGAN-GP: `autograd.grad` in the critic's forward, then its backward; the generator steps every fifth time."""
    critic, critic_optimizer = model_and_optimizer()
    generator, generator_optimizer = model_and_optimizer()
    with Recorder() as seen:
        for step in range(10):
            sample = torch.ones(2, 3, requires_grad=True)
            (slope,) = torch.autograd.grad(critic(sample).sum(), sample, create_graph=True)
            (critic(sample).sum() + slope.square().sum()).backward()
            critic_optimizer.step()
            if step % 5 == 4:
                generator(torch.ones(2, 3)).sum().backward()
                generator_optimizer.step()
    assert seen.events.count("boundary") == 12


def test_megatrons_own_backward_is_one():
    """It calls autograd's engine itself."""
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:
        output = model(torch.ones(2, 3))
        engine().run_backward(
            (output,), (torch.ones_like(output),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        optimizer.step()
        optimizer.step()
    assert seen.events[:3] == [Region.backward, Region.after_backward, Region.step]
    assert seen.events.count("boundary") == 1


def test_one_optimizer_that_steps_for_each_part_of_the_parameters_makes_one_boundary():
    """DeepSpeed's stage 3 gives its inner optimizer one sub-group after the other."""
    model, optimizer = model_and_optimizer()
    (group,) = optimizer.param_groups
    with Recorder() as seen:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            for parameter in model.parameters():
                group["params"] = [parameter]
                optimizer.step()
    assert seen.events.count("boundary") == 3


def test_fp16_overflow_moves_the_boundary_to_the_next_step():
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:
        for step in range(4):
            model(torch.ones(2, 3)).sum().backward()
            if step != 1:  # the scaler does not call `step`
                optimizer.step()
    assert seen.events.count("boundary") == 3


def test_a_compiled_step_is_seen_when_the_next_gradients_are_computed(capfd):
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
            step()
        seen.hooks.step_ended()
    assert seen.events.count("boundary") == 4
    assert "hooks.py" not in capfd.readouterr().err


@pytest.mark.parametrize("holds_step", [False, True])
def test_replays_of_a_graph_are_steps_once_an_optimizer_steps(monkeypatch, holds_step):
    """As far as torch's CUDA graphs are concerned: `capture_begin`, `capture_end` and `replay` are theirs."""
    monkeypatch.setenv(ENV_FABRIC, "ethernet_boxes")
    model, optimizer = model_and_optimizer()
    with Recorder() as seen:
        graph = Graph()
        with graph.capture():
            model(torch.ones(2, 3)).sum().backward()
            if holds_step:
                optimizer.step()
        assert "boundary" not in seen.events
        for _ in range(5):
            graph.replay()
            if not holds_step:
                optimizer.step()
    assert seen.captures == [(graph, True), (graph, False)]
    assert seen.replays == [graph] * 5
    assert seen.events.count("boundary") == 5
    graph.replay()
    assert seen.events.count("boundary") == 5
