"""A Flask application whose views are computed once, however many requests ask for them at the same time.

    pip install 'stampede-guard[flask-caching]'
    python examples/flask/app.py 5000 &
    python examples/flask/app.py 5001 &                         # as a second worker: they share a cache on the disk

    curl -i localhost:5000/reports/north                        # computed once for both workers
    curl -i localhost:5001/reports/north                        # found: the header hit_cache says so
    curl -i localhost:5000/prices/gold                          # a 404 is computed once, too
    curl -i -X POST -d 14.5 localhost:5000/prices/tea           # removes the price and the reports, for both
    curl -i localhost:5000/health                               # how often this worker has computed

The cache is a directory. To use Redis, set SHOP_CACHE=redis://localhost:6379/0 in the environment.
"""

import os
import sys
import tempfile
import time

from flask import Flask, abort, jsonify, make_response, request

from stampede.contrib.flask_caching import Cache

app = Flask(__name__)
app.config.update(
    SECRET_KEY=os.environ.get("SHOP_SECRET", "not a secret"),
    CACHE_TYPE="stampede.contrib.flask_caching.StampedeCache",
    CACHE_STAMPEDE_URL=os.environ.get("SHOP_CACHE", f"disk://{tempfile.gettempdir()}/shop"),
    CACHE_OPTIONS={"stale": "1h"},  # while there is an old report, no request waits for the new one
)
cache = Cache(app)
prices = {"tea": 12.0, "coffee": 9.5}  # stands for a slow database


@cache.memoize(timeout=600)
def price(product):
    time.sleep(0.2)
    return prices.get(product)


@app.get("/reports/<region>")
@cache.cached(timeout=60, response_hit_indication=True)
def report(region):
    time.sleep(0.5)
    response = make_response(jsonify(region=region, prices=prices, at=time.time()))
    response.headers["X-Computed-By"] = str(os.getpid())
    response.cache_control.public, response.cache_control.max_age = True, 10
    return response


@app.get("/prices/<product>")
@cache.cached(timeout=600)
def get_price(product):
    return jsonify(price=price(product) or abort(404))


@app.post("/prices/<product>")
def set_price(product):
    prices[product] = float(request.get_data())  # first the database, then the cache
    cache.delete_memoized(price, product)
    cache.delete_cached(get_price, path=f"/prices/{product}")
    cache.delete_many(*(f"view//reports/{region}" for region in ("north", "south")))
    return "", 204


@app.get("/health")
def health():
    stats = cache.cache.cache.stats()
    return jsonify(computed=stats.computations, hits=stats.hits + stats.found)


@app.after_request
def validate(response):
    """Give each response a validator, by which a client can ask whether it has changed."""
    if request.method == "GET":
        response.add_etag()
        response.make_conditional(request)
    return response


if __name__ == "__main__":
    app.run(port=int(sys.argv[1]) if sys.argv[1:] else 5000, threaded=True)
