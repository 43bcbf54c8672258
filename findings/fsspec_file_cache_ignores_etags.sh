#!/bin/sh
# fsspec 2026.9.0: a file that is replaced on a web server, with another size and ETag,
# is read from the cache, although check_files=True asks for a comparison.
# Seen: filecache and blockcache give b'old'; info has the size 8 and the new ETag.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet fsspec==2026.9.0 aiohttp==3.14.5
cat > case.py <<'PYTHON'
import hashlib
import http.server
import threading

import fsspec

content = b"old"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.md5(content).hexdigest()}"')
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/labels.csv"
print("fsspec", fsspec.__version__)
seen = []
for cache in ("filecache", "blockcache"):
    options = {"target_protocol": "http", "cache_storage": cache, "check_files": True}
    for content in (b"old", b"replaced"):
        files = fsspec.filesystem(cache, skip_instance_cache=True, **options)
        with files.open(url, "rb") as file:
            seen.append(file.read())
    print(cache, "after the file was replaced:", seen[-1])
info = fsspec.filesystem("http").info(url)
print("info:", info["size"], info["ETag"])
assert seen == [b"old"] * 4 and info["size"] == len(b"replaced"), "this has changed"
PYTHON
venv/bin/python case.py
