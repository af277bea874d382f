"""The predictions of `zerotune advise`, beside the ZeRO paper and published runs."""
