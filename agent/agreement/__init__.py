"""All ranks adopt the same plan at the same boundary. See docs/agreement.md."""

from agent.agreement.agreement import Agreement, pacing_for
from agent.agreement.protocol import Pacing

__all__ = ["Agreement", "Pacing", "pacing_for"]
