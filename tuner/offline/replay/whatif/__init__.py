"""The step of a job that was not run: more ranks, other buckets, another stage."""
