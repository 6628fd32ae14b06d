"""The commands that look into a running group: `python -m torchrpc top`, `stack`, `why` and `rrefs`."""
