"""All ranks of a communicator adopt the same plan at the same call. See docs/design/agreement.md."""

from .agreement import Agreement, AgreementCounters

__all__ = ["Agreement", "AgreementCounters"]
