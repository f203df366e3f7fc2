"""The version, alone in a file that imports nothing, so that setup.cfg can read it without torch."""

__version__ = "0.1.0.dev0"
