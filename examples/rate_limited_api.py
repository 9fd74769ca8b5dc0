"""An API that answers 429 to too many requests, and a client of several processes that stays below its limit.

`python rate_limited_api.py` starts both: a real server on this machine, and four workers that share one `Limiter`.
"""

import http.client
import multiprocessing
import threading
import time
import uuid
from collections import Counter, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stampede import Limiter

ALLOWED, WINDOW = 10, 0.5
WORKERS, REQUESTS = 4, 10


class Api(BaseHTTPRequestHandler):
    """A third party's API. It allows ten requests in any half second, and sometimes refuses for reasons of its own."""

    protocol_version = "HTTP/1.1"
    lock, starts, asked = threading.Lock(), deque[float](), Counter[int]()

    def do_GET(self) -> None:
        with self.lock:
            now = time.monotonic()
            while self.starts and self.starts[0] <= now - WINDOW:
                self.starts.popleft()
            busy = sum(self.asked.values()) == 15  # a refusal that no client can foresee
            status = 429 if busy or len(self.starts) >= ALLOWED else 200
            if status == 200:
                self.starts.append(now)
            self.asked[status] += 1
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


def get(limiter: Limiter, port: int) -> int:
    """Ask the API until it answers, and return the number of attempts."""
    for asked in range(1, 100):
        with limiter:  # waits for a free slot, shared by all workers
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/")
            answer = connection.getresponse()
            connection.close()
        if answer.status == 200:
            return asked
        limiter.penalize(float(answer.headers["Retry-After"]))  # no process asks before then
    raise RuntimeError("the API refused 99 requests in a row")


def work(port: int, name: str) -> None:
    # For several machines, add on="redis://...". One less than allowed, because requests take time to arrive.
    limiter = Limiter(name, max=ALLOWED - 1, per=WINDOW)
    for _ in range(REQUESTS):
        get(limiter, port)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    name = f"example:api:{uuid.uuid4()}"
    workers = [spawn.Process(target=work, args=(server.server_port, name)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    server.shutdown()
    server.server_close()

    print(f"{WORKERS} processes, {Api.asked[200]} answers in {time.monotonic() - began:.1f} s")
    print(f"told to go away: {Api.asked[429]} time(s)")
