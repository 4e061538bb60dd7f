"""Reads the state of a run from its bucket, for ``python -m diloco.inspect``; without torch or a
database.

Three steps are separate: reading (:mod:`~diloco.inspection.reading`), findings
(:mod:`~diloco.inspection.findings`, pure) and rendering (:mod:`~diloco.inspection.rendering`,
pure). They exchange a :class:`~diloco.inspection.picture.Picture`. Nothing is written to the
bucket.
"""
