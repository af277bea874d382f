"""All ranks adopt the same plan at the same boundary. See docs/design/agreement.md."""

from zerotune.agent.agreement.agreement import Agreement, pacing_for
from zerotune.agent.agreement.protocol import Pacing

__all__ = ["Agreement", "Pacing", "pacing_for"]
