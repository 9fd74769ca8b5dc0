"""Locks shared by all processes of this machine: wait for one, try one, hold one until a transaction commits."""

from collections.abc import Callable

from stampede import Lock, LockTimeout, try_lock


class Transaction:
    """A stand-in for a database library's transaction: it calls the hooks after the commit."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[], object]] = []

    def on_commit(self, hook: Callable[[], object]) -> None:
        self.hooks.append(hook)

    def commit(self) -> None:
        for hook in self.hooks:
            hook()


def is_free(name: str) -> bool:
    with try_lock(name) as lock:  # never waits
        return bool(lock)


if __name__ == "__main__":
    with Lock("example:nightly-report", lease=30, wait=10) as lock:
        print(f"we hold it: {lock.held}, so others find it free: {is_free('example:nightly-report')}")
        try:
            with Lock("example:nightly-report", wait=0.1):
                pass
        except LockTimeout as error:
            print(error)
    print(f"after the block it is free: {is_free('example:nightly-report')}")

    transaction = Transaction()
    with Lock("example:order", release_via=transaction.on_commit):
        pass  # changes that others see only after the commit
    print(f"before the commit the order is free: {is_free('example:order')}")
    transaction.commit()
    print(f"after the commit: {is_free('example:order')}")
