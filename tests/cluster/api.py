"""The few API server calls the cluster tool makes itself, without starting kubectl for each."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml


class Api:
    """A JSON client of one API server, made from one of this tool's own kubeconfigs."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self.server: str = cluster["server"]
        self._token: str = config["users"][0]["user"]["token"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        # a proxy from the environment must not see, nor be asked about, a cluster on this machine
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls)
        )

    def request(
        self, method: str, path: str, body: object | None = None, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Sends one request.

        Returns:
            The status code, 0 when nothing answered, and the parsed body or its text.
        """
        request = urllib.request.Request(
            self.server + path, method=method, data=None if body is None else json.dumps(body).encode()
        )
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Content-Type", content_type)
        try:
            with self._opener.open(request, timeout=10) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())
        except OSError as error:
            return 0, str(error)

    def get(self, path: str) -> Any | None:
        """The object at a path, or None while it cannot be had."""
        code, body = self.request("GET", path)
        return body if code == 200 else None

    def is_ready(self) -> bool:
        """Whether the API server says that it is ready."""
        return self.get("/readyz") == "ok"


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
