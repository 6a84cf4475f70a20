"""A training run that is killed anywhere and continues as the same experiment, with the proof bit for bit."""
__version__ = "0.1.0"
