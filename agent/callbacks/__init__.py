"""This job's figures where people look already: trainers' logs, experiment trackers, OpenTelemetry."""
