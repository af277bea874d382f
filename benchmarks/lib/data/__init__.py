"""What policies and predictions are judged on: published, generated and recorded."""
