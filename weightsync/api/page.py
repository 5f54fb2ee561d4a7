"""The status page at `/`: one file that holds nothing of any fleet, and the headers that let it do what it must and no more.

Its script asks `/v1` with the token that whoever looks at it has typed, and `/metrics`. The policy names script and
style by their hashes, so nothing else in the document can run, and lets the script ask this service alone. With
`require-trusted-types-for` the browser itself refuses text made into markup.

Not covered: what the page looks like (`tests/test_page.py` looks at it in a browser).
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter, Response

PAGE = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


def _hash(tag: str) -> str:
    """A source expression for the content of the one element of this kind."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_hash('script')}",
        f"style-src {_hash('style')}",
        "connect-src 'self'",
        "img-src data:",  # an empty icon, so that browsers ask for none
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return Response(PAGE, media_type="text/html; charset=utf-8", headers=_HEADERS)
