"""One script per claim, by area: `python -m benchmarks` lists them, `python -m benchmarks NAME [OPTIONS]` runs one."""
