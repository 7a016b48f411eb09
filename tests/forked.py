"""Code in processes of its own that share their imports, which take longer than all else."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

FORKS = """
import json, os, sys, tempfile
for environment, code in json.load(sys.stdin):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if not (child := os.fork()):
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            os.environ |= environment
            status = 0
            try:
                exec(code)
            except SystemExit as end:
                print(end, file=sys.stderr)
                status = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)  # Python itself would take seconds to end
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), err.seek(0)
        print(json.dumps([status, out.read(), err.read()]), flush=True)
"""


class Ended(NamedTuple):
    status: int
    printed: str
    errors: str


def forked(imports: str, codes: Sequence[tuple[dict[str, str], str]]) -> list[Ended]:
    """How each code ended that ran with its environment, in a fork of a process that ran `imports`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFOLD_")}
    run = subprocess.run(
        [sys.executable, "-c", imports + FORKS],
        input=json.dumps(list(codes)),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return [Ended(*json.loads(line)) for line in run.stdout.splitlines()[-len(codes) :]]
