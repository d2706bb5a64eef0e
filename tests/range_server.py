"""A server on the loopback interface that gives ranges of files, and can be told to misbehave."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Served:
    """What was asked of the server, and what it will do wrong."""

    url: str = ""
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    """Name of the file, first byte and number of bytes of each answer."""
    failures: list[str] = field(default_factory=list)
    """One for each of the next requests: "503", "404", "cut" (half of the bytes), "drop", "whole", "shifted", or ""."""
    tag: str = "first"

    def nbytes(self, suffix: str = ".safetensors") -> int:
        return sum(length for file, _, length in self.requests if file.endswith(suffix))


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Served]:
    served = Served()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            failure = served.failures.pop(0) if served.failures else ""
            path = folder / self.path.lstrip("/")
            if failure == "drop":
                self.close_connection = True
                return
            if failure.isdigit() or not path.is_file():
                self.send_response(int(failure or 404))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            start, stop = 0, len(data)
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked and failure != "whole":
                start, stop = int(asked[1]), min(len(data), int(asked[2]) + 1)
                self.send_response(206)
                shown = start + 1 if failure == "shifted" else start
                self.send_header("Content-Range", f"bytes {shown}-{stop - 1}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("ETag", served.tag)
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            if failure == "cut":
                stop = (start + stop) // 2
                self.close_connection = True
            served.requests.append((path.name, start, stop - start))
            self.wfile.write(data[start:stop])

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
