"""What several benchmarks and tests share: reporting, data sets, simulated jobs."""
