"""Examines a machine before Headway is served on it: what it has, what will be slow, what is wrong, how to mend it.

    read/…  ──►  Facts  ──►  checks/…  ──►  Findings  ──►  report
    the machine  one record  one function   what, why,     text or JSON,
                 per subject for a subject  how to mend    exit status

Only `read` looks at the machine. A fact that the system does not tell is `None`, or empty. Checks are functions of
facts alone, so that a test makes up a machine instead of having it.
"""
