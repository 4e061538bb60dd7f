"""A run as its bucket shows it, for ``python -m diloco.inspect``; without torch and any database.

Reading (:mod:`~diloco.inspection.reading`), judging (:mod:`~diloco.inspection.findings`, pure) and
showing (:mod:`~diloco.inspection.rendering`, pure) are apart; what passes between them is a
:class:`~diloco.inspection.picture.Picture`. Nothing is written, nothing is decided.
"""
