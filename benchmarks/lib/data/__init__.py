"""The published, generated and recorded data that policies and predictions are judged on."""
