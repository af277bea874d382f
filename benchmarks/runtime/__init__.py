"""The ZeRO runtime beside its peers."""
