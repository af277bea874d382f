"""What the policy can be run without: each mechanism by name, and how it is taken out from outside.

No switch of these is in the policy itself, so that nothing is left behind when a mechanism goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from zerotune.tuner.learning.policy import acquisition, choice, observations, step_guard, surrogate, variants
from zerotune.tuner.learning.policy.acquisition import TrialVerdict
from zerotune.tuner.learning.policy.observations import HORIZON_STEPS, CallEvidence
from zerotune.tuner.learning.policy.risk import RollbackLatency
from zerotune.tuner.learning.policy.step_effects import Cooldown
from zerotune.tuner.learning.policy.step_guard import StepFeedback, StepGuard
from zerotune.tuner.learning.policy.surrogate import Kernel

_judge = acquisition.judge


def _without_leads(*arguments: Any, **named: Any) -> Any:
    """What is probably faster ends like what is not."""
    verdict, gain, half = _judge(*arguments, **named)
    return (TrialVerdict.not_better if verdict is TrialVerdict.tie else verdict), gain, half


def _with_all_groups_first(self: variants.Variants, name: str, value: Any) -> None:
    """A round begins with all keys together, whatever was found of their groups."""
    if name == "_open":
        value = sorted(value, key=lambda one: (one[0], not one[1]))
    object.__setattr__(self, name, set() if name == "_slower" else value)


MECHANISMS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "channel_fill": ((surrogate, "KERNEL", Kernel(fill=0.0)),),
    "across_collectives": ((surrogate, "KERNEL", Kernel(across_collectives=0.0)),),
    "all_settings_alike": ((surrogate, "KERNEL", Kernel(by_cell=0.8, by_others=0.0)),),
    "clipping": ((observations, "CLIP", math.inf),),
    "neighbours": ((CallEvidence, "nearby", CallEvidence.contrast),),
    "twins": ((choice, "UNLUCKY_Z", -math.inf),),
    "variants": ((StepFeedback, "consider_variants", lambda *_: None),),
    "step_guard": ((StepGuard, "step", lambda *_, **__: None),),
    "cooldown_but_200_steps": ((Cooldown, "first_steps", 2 * HORIZON_STEPS),),
    "withdrawn_at_level_0.1": ((step_guard, "FALSE_PROMOTION", 0.1),),
    "adopted_at_level_0.1": ((variants, "level_of", lambda _: 0.1),),
    "leads": (("zerotune.tuner.learning.policy.choice", "judge", _without_leads),),
    "groups_first": ((variants.Variants, "__setattr__", _with_all_groups_first),),
    "pause_of_8_steps": ((variants, "TRIAL_STEPS", 20),),
    "first_looks": ((RollbackLatency, "needs_looks", False),),
    "looks_at_8_keys_but_4": ((choice, "MAX_NEW_TRIALS", 4),),
    "variants_only_where_calls_hide": ((variants, "ALL_EXPOSED", 1.0),),
    "kernel_structure": ((surrogate, "KERNEL", Kernel(by_cell=0.0, by_others=0.0, own=1.0)),),
}
"""By name: (object or module, attribute, what stands in for it)."""


@contextmanager
def without(*names: str) -> Iterator[None]:
    """The policy, with these mechanisms taken out.

    Args:
        names: of MECHANISMS.

    Yields:
        Nothing; what is made inside is without them.
    """
    with ExitStack() as patches:
        for name in names:
            for owner, attribute, replacement in MECHANISMS[name]:
                if isinstance(owner, str):
                    patches.enter_context(patch(f"{owner}.{attribute}", replacement))
                else:
                    patches.enter_context(patch.object(owner, attribute, replacement))
        yield
