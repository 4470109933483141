"""DART-RL: vision-language GUI agents trained by decoupled, asynchronous reinforcement learning."""

__version__ = "0.1.0"
