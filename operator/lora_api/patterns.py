"""Regular expressions of the types in words, for messages and for the reference page."""

from __future__ import annotations

PATTERN_WORDS: dict[str, str] = {
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": "lower-case letters, digits, '-' and '.', with a letter or digit at both ends",
    r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$": "a path such as team-a/mascot: letters, digits, '.', '_' and '-', parted by '/'",
    r"(^$)|(^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$)": "empty, or a path such as runs/a: letters, digits, '.', '_' and '-', parted by '/'",
    r"^[0-9]+(\.[0-9]+)?m?$": 'a quantity of CPU such as "4" or "500m"',
    r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$": "a quantity of memory such as 32Gi",
    r"^[0-9]+(Ki|Mi|Gi)$": "a quantity of memory such as 1Gi",
    r"^https?://[^/\s]+$": "a URL without a path, such as https://minio.storage.svc:9000",
    r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$": "a bucket name: 3 to 63 lower-case letters, digits, '-' and '.'",
}
"""Every pattern of the types; a test holds it against the CRDs."""

CUSTOM_ARCH = "x-[a-z0-9]([a-z0-9_.-]*[a-z0-9])?"
"""Names of model families that other packages add, whole; in the part of the syntax that Python and CEL share."""
