"""The kept figures: as JSON below benchmarks/results, and the page that shows them."""
