"""Chooses which environment variables of NCCL and its network plugins a job tries next, and keeps proven ones.

Each start of a job tries one change, and jobs are compared by their step times. This package starts no job, reads no
clock and stores nothing: the history of jobs comes in, the next job's change goes out.
"""
