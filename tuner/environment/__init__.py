"""Which environment variables of NCCL and its network plugins a job tries next, and what earlier jobs have proven.

From one start of a job to the next one change is tried, and jobs are compared by the time of their steps. Nothing here
starts a job, looks at a clock or keeps anything: the history of jobs comes in, the next job's change goes out.
"""
