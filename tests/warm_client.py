"""Takes the place of Python where code of ours starts a trainer: the child is a warm fork.

`python -S tests/warm_client.py SOCKET ARGV` has the process that forks run `python ARGV` with the
standard streams and the environment of this one. Signals go on to the fork, and if this process is
killed, so is the fork.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    address, *argv = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    asked = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}
    request = json.dumps(asked).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], [1, 2, 0])
    connection.sendall(request)
    answers = connection.makefile("r")
    pid = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    for number in (0, 1):  # the fork has them: who reads should see its end
        os.close(number)
    status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
