"""The one writer: what is queued, when it is committed, and how much is kept."""
