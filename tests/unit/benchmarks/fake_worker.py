"""A worker that measures nothing, and misbehaves as its rows are called; see supervise.py.

python -m tests.unit.benchmarks.fake_worker PIDS ROW... --report FILE --folder DIRECTORY
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.gpu.goals import BY_NAME
from tests.benchmarks.gpu.results import line
from tests.benchmarks.gpu.supervise import Report


def main(arguments: list[str]) -> None:
    pids, *rows = arguments[: arguments.index("--report")]
    folder = Path(arguments[-1])
    report = Report(Path(arguments[-3]))
    (folder / "left").write_text("a checkpoint, say")
    below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    with Path(pids).open("a") as file:
        print(os.getpid(), below.pid, file=file)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report.about("nothing")
    for row in rows:
        report.began(row)
        match row:
            case "quick":
                report.measured(row, line(BY_NAME["disk"], 0.3, 0.2))
            case "fails":
                report.failed(row, "as it should")
            case "elsewhere":
                report.not_here(row, "needs two GPUs")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(300)
            case "hangs":
                time.sleep(300)
    below.kill()
    below.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
