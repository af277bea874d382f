"""The common parts of benchmarks and tests: reporting, options, and by folder the objects that they run on."""
