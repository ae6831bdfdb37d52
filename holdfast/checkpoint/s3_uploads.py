"""Uploads that nobody has finished: S3 keeps, and charges for, their parts until somebody says that they are litter.

A killed save cannot tell the store to forget what it had sent. obstore has no request for it, so the three that S3
needs (list uploads, abort one, and the signature, version 4) are here. Google's and Azure's forget by themselves.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from holdfast.checkpoint.places import Place, Remote

SECONDS = 10.0  # for one request
_NOTHING = hashlib.sha256(b"").hexdigest()
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """An unfinished upload: the object that it would make, its name in the store, and when it began."""

    place: Remote
    id: str
    since: float  # seconds since 1970, on the store's clock


def abort_uploads(folder: Place, which: Callable[[Upload], bool]) -> int:
    """Have the store forget the unfinished uploads below a folder that ``which`` chooses; return how many.

    A store that refuses is left alone: litter costs money, but harms no checkpoint.
    """
    if not isinstance(folder, Remote) or folder.scheme != "s3" or not os.environ.get("AWS_ACCESS_KEY_ID"):
        return 0
    try:
        chosen = [upload for upload in unfinished(folder) if which(upload)]
        for upload in chosen:
            request("DELETE", upload.place, {"uploadId": upload.id})
    except (OSError, http.client.HTTPException, ElementTree.ParseError) as e:
        logger.warning("unfinished uploads in %s cannot be removed: %s", folder, e)
        return 0
    return len(chosen)


def unfinished(folder: Remote) -> list[Upload]:
    """The unfinished uploads below a folder. Raises ``OSError``."""
    bucket = Remote(folder.scheme, folder.bucket)
    found: list[Upload] = []
    marker: dict[str, str] = {}
    while True:
        text = request("GET", bucket, {"uploads": "", "prefix": f"{folder.key}/" if folder.key else "", **marker})
        page = ElementTree.fromstring(text)
        for one in page.iterfind("{*}Upload"):
            since = datetime.fromisoformat(one.findtext("{*}Initiated", "1970-01-01T00:00:00Z")).timestamp()
            place = bucket / one.findtext("{*}Key", "")
            found.append(Upload(place=place, id=one.findtext("{*}UploadId", ""), since=since))
        if page.findtext("{*}IsTruncated") != "true":
            return found
        marker = {
            "key-marker": page.findtext("{*}NextKeyMarker", ""),
            "upload-id-marker": page.findtext("{*}NextUploadIdMarker", ""),
        }


def request(method: str, place: Remote, query: Mapping[str, str]) -> bytes:
    """Make one signed request of S3 without a body; return the answer. Raises ``OSError`` if it is no success."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    url = urlsplit(endpoint or f"https://s3.{region}.amazonaws.com")
    path = quote("/".join(filter(None, [url.path.rstrip("/"), place.bucket, place.key])), safe="/-_.~")
    path = path if path.startswith("/") else f"/{path}"
    text = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
    headers = _signed(method, url.netloc, path, text, region)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.netloc, timeout=SECONDS)
    try:
        connection.request(method, f"{path}?{text}" if text else path, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status >= 300:
        code = re.search(rb"<Code>([^<]{1,80})</Code>", content)
        raise OSError(f"the store says {answer.status} {code[1].decode() if code else answer.reason}")
    return content


def _signed(method: str, host: str, path: str, query: str, region: str) -> dict[str, str]:
    """The headers of a request, with its signature (AWS Signature Version 4)."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _NOTHING, "x-amz-date": stamp}
    if token := os.environ.get("AWS_SESSION_TOKEN"):
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    whole = "\n".join([method, path, query, *lines, "", names, _NOTHING])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(whole.encode()).hexdigest()])
    key = f"AWS4{os.environ.get('AWS_SECRET_ACCESS_KEY', '')}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    who = f"{os.environ.get('AWS_ACCESS_KEY_ID', '')}/{scope}"
    return {
        **headers,
        "authorization": f"AWS4-HMAC-SHA256 Credential={who}, SignedHeaders={names}, Signature={signature}",
    }
