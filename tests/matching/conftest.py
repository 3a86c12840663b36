"""Settings of the property tests here: the first call of a compiled function may take seconds."""

from hypothesis import settings

settings.register_profile("compiled", deadline=None)
settings.load_profile("compiled")
