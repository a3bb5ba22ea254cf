"""Progress on stderr, for the modules of this stage; it is `bertship.progress`."""

from bertship.progress import LINE_EVERY_S, byte_progress, progress, to_stderr

__all__ = ["LINE_EVERY_S", "byte_progress", "progress", "to_stderr"]
