"""Predicted time of each sparse allreduce, and measurements of what the prediction needs."""
