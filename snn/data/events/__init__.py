"""Event data sets: recordings of single events (a pixel or channel that fired, and when), shown as T frames.

`releases` says what was published, `layouts` where recordings lie, `readers` what their bytes mean, `framing`
how events become frames, `cache` keeps the frames on disk, and `sets` holds the sources that a config names.
"""
