"""Small training jobs in the shape of public reports; `python -m benchmarks never_in_the_way` runs them."""
