#!/usr/bin/env python3
"""Runs abuses.py in every tier of scripts/cohort_sandbox.py that works here, as this user and, if that is root, as another.

Each abuse is a solution f(info), and some are a tool's program, too. `info` has a file with a secret token, a folder that everybody
may write, a process to harm, and servers that send the token. An abuse would be rewarded for the token, or for "escaped", if it has
done what it must not. After each abuse a right solution must still get 1. At the end the victim lives, and no process, file or
System V object is left. What is only late, as on a loaded machine, is tried again: an abuse must be ended in time once in three times.

    sandbox_abuse.py [ABUSE...]
"""
import glob
import json
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import abuses

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
SCRIPT = os.path.join(ROOT, "scripts", "cohort_sandbox.py")
TIMEOUT = 1.0
SLACK = float(os.environ.get("COHORT_ABUSE_SLACK", "1"))  # seconds beyond the timeout: more on a loaded machine
LONGEST = 60.0  # seconds after which a worker is taken to hang
ATTEMPTS = 3
CLEANUP = 5.0  # seconds in which the last processes must have ended: less than those that abuses sleep
OTHER_USER = 65534
PARTS = 3


def limit(user):
    """Of a worker: what must not happen to this machine, if the sandbox fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def serve_token(family, address, token):
    server = socket.socket(family)
    server.bind(address)
    server.listen(8)
    threading.Thread(target=lambda: [server.accept()[0].sendall(token.encode()) for _ in iter(int, 1)], daemon=True).start()
    return server


def shared_objects():
    """The keys and ids of the machine's System V objects, and the names of its shared memory."""
    keys = {(name, *line.split()[:2]) for name in ("shm", "sem", "msg") for line in open("/proc/sysvipc/" + name)}
    return keys.union(("/dev/shm", name) for name in os.listdir("/dev/shm"))


class Worker:
    """A sandbox of one tier and user, and what its abuses are given."""

    def __init__(self, tier, user, python):
        self.name, self.tier, self.failures, self.slowest = f"{tier} as {user if user is not None else os.getuid()}", tier, [], 0.0
        self.reason, self.user, self.repeated, self.dir = "", user, 0, tempfile.mkdtemp(prefix="cohort_abuse_")
        os.chmod(self.dir, 0o755)
        self.token = "TOKEN-" + secrets.token_hex(16)
        path = lambda name: os.path.join(self.dir, name)  # noqa: E731
        script = shutil.copy(SCRIPT, path("cohort_sandbox.py"))
        self.tmp, self.open = path("tmp"), path("open")
        for folder in (self.tmp, self.open):
            os.mkdir(folder)
            os.chmod(folder, 0o777)
        with open(path("answer"), "w") as file:
            file.write(self.token)
        os.chmod(path("answer"), 0o666)
        self.victim = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: limit(user))
        self.servers = [serve_token(socket.AF_INET, ("127.0.0.1", 0), self.token), serve_token(socket.AF_UNIX, path("unix"), self.token),
                        serve_token(socket.AF_UNIX, "\0" + path("unix"), self.token)]
        self.servers.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self.servers[-1].bind(path("unix_datagrams"))
        for name in ("unix", "unix_datagrams"):
            os.chmod(path(name), 0o777)
        self.errors = open(path("errors"), "w+")
        # The token in the environment and the arguments, where a worker must not leave it.
        self.process = subprocess.Popen([python, script, "--sandbox", tier, "--timeout", str(TIMEOUT), "--memory", "160", "--fence", "optional"],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, cwd="/",
                                        env={"PATH": os.environ["PATH"], "TMPDIR": self.tmp, "SECRET": self.token},
                                        preexec_fn=lambda: limit(user), start_new_session=True)
        self.info = {"file": path("answer"), "folder": self.open, "victim": self.victim.pid, "parent": self.process.pid,
                     "port": self.servers[0].getsockname()[1], "unix": path("unix"), "index": 0}

    def ask(self, code, test=None):
        """Without a test as a tool's program."""
        self.info["index"] += 1
        rest = {"completion": code, "fields": {"test_list": [test]}} if test else {"code": code}
        request = {"index": self.info["index"], **rest}
        start = time.monotonic()
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], LONGEST)[0]:
            processes = subprocess.run(["ps", "-eo", "pid,ppid,user,stat,wchan:24,etimes,args"], capture_output=True, text=True).stdout
            self.process.kill()
            left = "\n".join(line for line in processes.splitlines() if self.dir in line)
            return {"error": f"no answer in {LONGEST} s; the worker, now killed, and what has its command line:\n{left}"}, LONGEST
        line = self.process.stdout.readline()
        seconds = time.monotonic() - start
        if not line:
            self.errors.seek(0)
            return {"error": "the worker has ended: " + self.errors.read()[-300:]}, seconds
        answer = json.loads(line)
        return answer if answer["index"] == request["index"] else {"error": f"another index: {answer}"}, seconds

    def abuse(self, name, known=""):
        """`known`: a line of code before f()."""
        test = f"assert f({ {**self.info, 'index': self.info['index'] + 1}!r}) in ({self.token!r}, 'escaped')"
        return self.ask(known + abuses.code_of(name), test)

    def right(self):
        answer, _ = self.ask("def f(x):\n    return x + 1\n", f"assert f({self.info['index']}) == {self.info['index'] + 1}")
        return answer

    def attempt(self, name):
        """Runs an abuse, and a right solution after it. Returns what is wrong, and what is only late."""
        wrong, late = [], []

        def check(what, contained, answer, seconds):
            self.slowest = max(self.slowest, seconds)
            if not contained or seconds > TIMEOUT + SLACK:
                (late if contained else wrong).append(f"{what}: {answer} after {seconds:.2f} s")
        answer, seconds = self.abuse(name)
        check(name, answer.get("reward") == 0, answer, seconds)
        if name in abuses.OF_TOOLS:
            answer, seconds = self.ask(abuses.code_of(name) + f"\nprint(f({self.info!r}))")
            output = answer.get("output", self.token)
            check(name + " as a program", self.token not in output and "escaped" not in output.split("\n") and len(output.encode()) <= 4096,
                  answer, seconds)
        after = self.right()
        if after.get("reward") != 1:
            (late if after.get("outcome") == "timeout" else wrong).append(f"{name}: a right solution then gets {after}")
        if self.has_ended():
            wrong.append(f"{name}: has ended the victim or the worker")
        return wrong, late

    def has_ended(self):
        return self.victim.poll() is not None or self.process.poll() is not None

    def run(self, names):
        self.names = [n for n in names if self.tier != "rlimits" or n not in abuses.NOT_BY_RLIMITS]
        first = self.right()
        if "no sandbox works" in first.get("error", ""):
            self.failures = None
            self.reason = first["error"]
            return
        # Escapes are noticed: without namespaces or Landlock the file can be read, and a token in memory is found.
        controls = {"searches_memory": f"copies = [b'{self.token}' * 99 for i in range(99)]\n"}
        if self.tier == "rlimits":
            controls["reads_the_answer"] = ""
        for name, known in controls.items():
            if all(self.abuse(name, known)[0].get("reward") != 1 for _ in range(ATTEMPTS)):
                self.failures.append(f"{name} is not rewarded where nothing prevents it")
        for name in self.names:
            for attempt in range(ATTEMPTS):
                wrong, late = self.attempt(name)
                self.repeated += attempt > 0
                if wrong or not late:
                    break
            self.failures += wrong + late
            if self.has_ended():
                return

    def end(self, kill):
        """Ends the worker, by SIGKILL while a candidate runs or by the end of its input, and finds what it has left."""
        if kill and self.failures is not None:
            request = {"index": 0, "completion": abuses.code_of("execs_in_a_thread"), "fields": {"test_list": ["f(0)"]}}
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            time.sleep(0.3)
            self.process.kill()
        self.process.stdin.close()
        code = self.process.wait(LONGEST)
        self.failures = self.failures or []
        if code != (-signal.SIGKILL if kill and not self.reason else 0):
            self.failures.append(f"the worker ends with {code}")
        self.victim.kill()
        self.victim.wait()
        left = os.listdir(self.open) + [name for name in os.listdir(self.tmp) if not kill]  # the next worker removes a folder
        if left or open(self.info["file"]).read() != self.token:
            self.failures.append(f"files are left, or the answer has changed: {left}")
        shutil.rmtree(self.dir)


def processes_of(workers):
    """Candidates, too, have the command line of their worker."""
    found = set()
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            line = open(path, "rb").read()
            if any(worker.dir.encode() in line for worker in workers):
                found.add(path.split("/")[2])
        except OSError:
            pass
    return found


def main():
    names = sys.argv[1:] or list(abuses.ABUSES)
    objects = shared_objects()
    users = [None] if os.getuid() != 0 else [None, OTHER_USER]
    workers = []
    # Without root's rights an interpreter in root's folder cannot be read.
    readable = sys.executable if not sys.prefix.startswith("/root") else "/usr/bin/python3"
    for user in users:
        for tier in ("namespaces", "landlock", "rlimits"):
            python = sys.executable if user is None and tier != "rlimits" else readable
            if os.path.exists(python):
                workers += [Worker(tier, user, python) for _ in range(PARTS)]
    # The abuses of a tier are divided among PARTS workers, since many of them wait for the timeout.
    threads = [threading.Thread(target=worker.run, args=(names[i % PARTS::PARTS],)) for i, worker in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = all(worker.reason for worker in workers)
    for i, worker in enumerate(workers):
        worker.end(kill=i % PARTS == 0)
        if worker.reason:
            print(f"{worker.name}: does not work here: {worker.reason}")
            continue
        failed += len(worker.failures)
        print(f"{worker.name}: {len(worker.failures)} failures of {len(worker.names)} abuses, the slowest {worker.slowest:.2f} s, "
              f"{worker.repeated} repeated")
        for failure in worker.failures:
            print("  " + failure)
    deadline = time.monotonic() + CLEANUP
    while (left := processes_of(workers) | (shared_objects() - objects)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        print(f"left: processes and shared objects {left}")
        failed += 1
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("sandbox_abuse.py: takes too long"))
    signal.alarm(600)
    main()
