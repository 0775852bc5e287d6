"""The process that trains one run of a sweep: `tandem`, which stops when the process of the sweep ends.

Standard input is a pipe whose other end the sweep holds. The pipe closes when the sweep ends, even if it is killed.
"""

import os
import runpy
import signal
import threading


def stop_with_parent() -> None:
    """From now on, stop this process as SIGTERM does when standard input is closed: a run that is training saves a checkpoint."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    stop_with_parent()
    runpy.run_module("tandem", run_name="__main__", alter_sys=True)
