"""Which ZeRO configuration on which cluster: memory and step time, computed before anything runs."""
