"""All ranks of a communicator adopt the same plan at the same call. See docs/design/agreement.md."""

from zerotune.agent.agreement.agreement import Agreement, AgreementCounters

__all__ = ["Agreement", "AgreementCounters"]
