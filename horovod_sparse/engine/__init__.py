"""Buckets, the thread that exchanges them, and the pipeline of one bucket."""
