"""GPT-2 on one device with simulated ranks: `python -m benchmarks.gpt2`."""
