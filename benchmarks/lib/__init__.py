"""What several benchmarks and tests share: reporting, options, and by folder what they run on."""
