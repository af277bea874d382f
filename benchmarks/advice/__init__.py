"""What `zerotune advise` says, beside the ZeRO paper and published runs."""
