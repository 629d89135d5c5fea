"""Whole training steps on one device: where their time goes, and what compression adds to computing."""
