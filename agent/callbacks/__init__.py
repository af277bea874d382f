"""Reports this job's figures to trainers' logs, experiment trackers and OpenTelemetry."""
