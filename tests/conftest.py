"""Settings of the whole suite: Hypothesis without deadlines (the machine may be busy) and with fixed seeds."""

from hypothesis import settings

settings.register_profile("dartrl", deadline=None, derandomize=True)
settings.load_profile("dartrl")
