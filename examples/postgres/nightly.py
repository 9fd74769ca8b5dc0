"""A nightly job under a lock: one machine runs it, and a failure is recorded with its traceback.

pip install 'stampede-guard[postgres]'
export SHOP_POSTGRES=postgres://user@host/shop
stampede postgres init $SHOP_POSTGRES
python examples/postgres/nightly.py
stampede locks $SHOP_POSTGRES --history --failed --since 1h     # the example shows this at its end
"""

import os
import subprocess
import sys
from decimal import Decimal, InvalidOperation

from stampede import try_lock

URL = os.environ.get("SHOP_POSTGRES") or sys.exit("export SHOP_POSTGRES=postgres://user@host/shop")


def nightly(prices: list[str]) -> None:
    """Run the job on only one of the machines that have it in their crontab."""
    with try_lock("example:nightly-turnover", on=URL, lease=60) as lock:
        if not lock:
            print("another machine runs it")
            return
        print("turnover:", sum(map(Decimal, prices)))


if __name__ == "__main__":
    nightly(["9.50", "12.00"])
    try:
        nightly(["9.50", "12,00"])
    except InvalidOperation as error:  # a cron job would end here
        print("failed:", error)
    sys.stdout.flush()
    history = ["locks", URL, "--history", "--failed", "--since", "1h"]
    subprocess.run([sys.executable, "-m", "stampede", *history], check=True)
