#!@PYTHON@ -SE
# Stands in for an interpreter: hands its descriptors to the nursery, which forks what was to run here, and
# ends as that does. If this is killed, the nursery kills that.
import os
import signal
import socket
import sys

fds = [0, 1, 2]  # and what stands behind --fd, --front-fd and so on
fds += [int(number) for flag, number in zip(sys.argv, sys.argv[1:], strict=False) if flag.endswith("fd")]
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect("@SOCKET@")
socket.send_fds(link, ["\0".join(["stub", *sys.argv[1:]]).encode()], fds)
link.recv(64)
for fd in fds:
    os.close(fd)
code = int(link.recv(64) or b"-9")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
