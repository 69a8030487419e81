#!/usr/bin/env python3
"""Scores programs that a model writes by running them on tests in a sandbox. It is the reward `code`, or
    rewards: [{name: command, run: "python3 cohort_sandbox.py"}]

Reads one request at a time and answers it, as rl/rewards/external.h says. The tests are in the fields of the data's lines:
    test_list (and test_imports, test_setup_code)   statements that assert, as in MBPP
    test, entry_point                               a text that defines check(candidate), as in HumanEval
    inputs, outputs (and fn_name)                   arguments and results of a function, or standard input and output
A request {"index": 3, "code": "print(1)"}, as of the tool `python`, is answered by what the program writes to both streams:
    {"index": 3, "output": "1\\n", "outcome": "passed" or "failed" or "timeout", "sandbox": "namespaces"}

The tests run outside of the candidate, the process of the completion's code. For each completion the worker forks a supervisor,
which forks the candidate and only then reads the request; the worker never reads one. So no candidate inherits tests in its memory.
In namespaces a process between the two, the first of the PID namespace, takes all others with it when its supervisor dies.
To the tests, functions of the candidate are proxies: they send pickled arguments to the candidate, and receive a Python literal.
"""
import argparse
import ast
import atexit
import builtins
import ctypes
import errno
import gc
import glob
import importlib
import io
import json
import linecache
import os
import pathlib
import pickle
import platform
import random
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
import traceback
import types
import warnings
from typing import Any, Callable, Dict, List, NoReturn, Optional, Set, Tuple

# Modules that solutions often import. Where the interpreter's folder is unreadable to the worker's user they have to be here already.
import array, bisect, calendar, cmath, collections, copy, datetime, decimal, fractions, functools, hashlib, heapq  # noqa: E401, F401
import itertools, math, operator, queue, statistics, string  # noqa: E401, F401

MAX_LITERAL = 64 << 10         # bytes of a result
MAX_NAMES = 1 << 20            # bytes of the names of a solution
MAX_OUTPUT = 4 << 10           # bytes of the output of a tool's program
MAX_FILE, MAX_FOLDER = 8 << 20, 16 << 20
MAX_PROCESSES, MAX_FILES = 16, 64
# Tests may name these without an import, as where a solution has imported them.
TEST_MODULES = ("collections", "datetime", "heapq", "itertools", "math", "random", "re", "string", "sys")
WORK = "/solution"             # the candidate's folder in the namespaces
TIERS = ("namespaces", "landlock", "rlimits")

# ---- System calls

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18


def call(name: str, *arguments: Any) -> int:
    """Calls a function of the C library, or a system call by its number. Raises OSError naming it."""
    values = [ctypes.c_ulong(a) if isinstance(a, int) else a.encode() if isinstance(a, str) else a for a in arguments]
    result: int = getattr(LIBC, name)(*values)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


# Refused system calls: their numbers on x86-64 and AArch64, or -1. From 424 on they are equal.
REFUSED = """ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, process_madvise 440 440,
pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424, process_mrelease 448 448, mount 165 40, umount2 166 39,
pivot_root 155 41, chroot 161 51, open_tree 428 428, open_tree_attr 467 467, move_mount 429 429, fsopen 430 430, fsconfig 431 431,
fsmount 432 432, fspick 433 433, mount_setattr 442 442, unshare 272 97, setns 308 268, keyctl 250 219, add_key 248 217,
request_key 249 218, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
io_uring_register 427 427, io_setup 206 0, open_by_handle_at 304 265, name_to_handle_at 303 264, kexec_load 246 104,
kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106, personality 135 92, shmget 29 194,
shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188,
msgctl 71 187, mq_open 240 180, mq_unlink 241 181, memfd_create 319 279, memfd_secret 447 447, socket 41 198, migrate_pages 256 238,
move_pages 279 239, setpriority 141 140, ioprio_set 251 30, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274,
sched_setaffinity 203 122, syslog 103 116, quotactl 179 60, quotactl_fd 443 443, acct 163 89, reboot 169 142, swapon 167 224,
swapoff 168 225, sethostname 170 161, setdomainname 171 162, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171,
clock_adjtime 305 266, fanotify_init 300 262, mknod 133 33, mknodat 259 33, modify_ldt 154 -1, iopl 172 -1, ioperm 173 -1, vhangup 153 58,
lookup_dcookie 212 18, uselib 134 -1, sync 162 81, tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
landlock_restrict_self 446 446, vmsplice 278 75"""
# Without namespaces: new processes, which nothing would end, and changes to files by their paths, which Landlock does not know.
REFUSED_WITHOUT_NAMESPACES = """fork 57 -1, vfork 58 -1, execve 59 221, execveat 322 281, setsid 112 157, setpgid 109 154, chmod 90 -1,
fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -1, fchown 93 55, lchown 94 -1, fchownat 260 54, truncate 76 45, utime 132 -1,
utimes 235 -1, futimesat 261 -1, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466, file_setattr 469 469"""
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
EQUAL, ANY_BIT, LEAST = 0x15, 0x45, 0x35  # jumps of BPF


def seccomp_filter(pid: int, namespaces: bool) -> bytes:
    """The BPF program of a candidate with the process id `pid`."""
    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def give(action: int) -> bytes:
        return struct.pack("HBBI", 6, 0, 0, action)

    def test(jump: int, value: int, then: bytes) -> bytes:
        return struct.pack("HBBI", jump, 0, len(then) // 8, value & 0xFFFFFFFF) + then

    def number(x86: int, arm: int, then: bytes) -> bytes:
        return test(EQUAL, x86 if X86 else arm, then)

    def argument(index: int, *tests: Tuple[int, int, int], otherwise: int = ALLOW) -> bytes:
        return load(16 + 8 * index) + b"".join(test(jump, value, give(action)) for jump, value, action in tests) + give(otherwise)

    # The architecture, and on x86-64 not its ABI of 32-bit pointers.
    out = load(4) + struct.pack("HBBI", EQUAL, 1, 0, 0xC000003E if X86 else 0xC00000B7) + give(KILL) + load(0)
    out += test(LEAST, 0x40000000, give(KILL))
    refused = REFUSED + ("" if namespaces else ", " + REFUSED_WITHOUT_NAMESPACES)
    for entry in refused.split(","):
        _, on_x86, on_arm = entry.split()
        out += number(int(on_x86), int(on_arm), give(EPERM))
    out += test(EQUAL, 435, give(ENOSYS)) + test(EQUAL, 437, give(ENOSYS))  # clone3 and openat2 have their flags in memory
    thread = 0 if namespaces else 0x10000
    no_namespace = (ANY_BIT, NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x2000000, EPERM)
    # clone, prlimit64 of this process, socketpair of SOCK_STREAM (which sends nowhere else), prctl but for PR_SET_PDEATHSIG, fcntl
    # but for F_SETOWN, F_SETSIG and F_SETOWN_EX, ioctl but for FIOSETOWN, SIOCSPGRP and TIOCSTI.
    out += number(56, 220, argument(0, no_namespace, (ANY_BIT, thread, ALLOW), otherwise=EPERM if thread else ALLOW))
    out += number(302, 261, argument(0, (EQUAL, 0, ALLOW), otherwise=EPERM))
    out += number(53, 199, argument(1, (ANY_BIT, 0xE, EPERM)))
    out += number(157, 167, argument(0, (EQUAL, 1, EPERM)))
    out += number(72, 25, argument(1, *((EQUAL, own, EPERM) for own in (8, 10, 15))))
    out += number(16, 29, argument(1, *((EQUAL, own, EPERM) for own in (0x8901, 0x8902, 0x5412))))
    if not namespaces:  # kill and tgkill of this process, open and openat without O_TMPFILE's bit
        for x86, arm in ((62, 129), (234, 131)):
            out += number(x86, arm, argument(0, (EQUAL, pid, ALLOW), otherwise=EPERM))
        for x86, arm, index in ((2, -1, 1), (257, 56, 2)):
            out += number(x86, arm, argument(index, (ANY_BIT, 0x400000, EPERM)))
    return out + give(ALLOW)


def restrict_system_calls(namespaces: bool) -> None:
    code = seccomp_filter(os.getpid(), namespaces)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("prctl", 22, 2, program)  # PR_SET_SECCOMP


# ---- Tiers

def readable_paths() -> List[str]:
    """The system's programs and libraries, and the interpreter's own folders."""
    paths = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
    for prefix in sorted(os.path.realpath(p) for p in prefixes):
        if prefix != "/" and os.path.isdir(prefix) and not any((prefix + "/").startswith(p + "/") for p in paths):
            paths.append(prefix)
    return [p for p in paths if os.path.lexists(p)]


def make_root(paths: List[str]) -> None:
    """Makes an empty root folder with read-only mounts of `paths`, in this process's mount namespace."""
    call("mount", None, "/", None, REC | PRIVATE, None)
    root = next(p for p in ("/mnt", "/media", "/sys") if os.path.isdir(p) and not any((q + "/").startswith(p + "/") for q in paths))
    call("mount", "tmpfs", root, "tmpfs", NOSUID, "size=1m,mode=755")
    for path in paths + ["/dev/null", "/dev/zero", "/dev/urandom"]:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        call("mount", path, target, None, BIND | REC, None)
        device = path.startswith("/dev/")
        try:  # mount_setattr, with all mounts below
            call("syscall", 442, -100 & (1 << 64) - 1, target, 0x8000, struct.pack("4Q", 2 if device else 7, 0, 0, 0), 32)
        except OSError:  # before Linux 5.12
            kept = os.statvfs(target).f_flag & (NODEV | 8 | 1024 | 2048)
            call("mount", None, target, None, REMOUNT | BIND | NOSUID | kept | (0 if device else RDONLY), None)
    os.mkdir(root + WORK)
    if not os.path.exists(root + "/tmp"):  # an interpreter may be there
        os.symlink(WORK, root + "/tmp")
    call("mount", None, root, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV, None)
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", 2)  # MNT_DETACH: the former root
    os.chdir("/")


def users_of_threads() -> List[int]:
    """The user of each thread of the system."""
    users = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            users += [os.stat("/proc/" + process).st_uid] * len(os.listdir(f"/proc/{process}/task"))
        except OSError:  # it has ended meanwhile
            pass
    return users


def unused_users() -> List[int]:
    """Ids of users without a process, for root's workers, since limits of processes do not hold for root."""
    used = set(users_of_threads())
    # A container may have 65,536 users only.
    return [i for i in [(1 << 30) + random.getrandbits(28)] + random.sample(range(40000, 60000), 50) if i not in used]


def take_user(users: List[int], reads: bool = False) -> None:
    """Becomes the first of `users` that the system has; with `reads` it may read what root may."""
    os.setgroups([])
    call("prctl", 8, int(reads), 0, 0, 0)  # PR_SET_KEEPCAPS
    for user in users:
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:
            continue
        if reads:  # only CAP_DAC_READ_SEARCH
            call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 4, 4, 0, 0, 0, 0))
        call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or /proc/self/uid_map is root's
        return
    raise OSError(errno.EPERM, "setuid: this container's root has no other user")


def enter_user_namespace(proc: int, flags: int) -> None:
    user, group = os.getuid(), os.getgid()
    call("unshare", NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(os.open("self/" + name, os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(text)


def apply_landlock(paths: List[str], folder: str) -> None:
    """Lets this process read `paths`, and write files in `folder`, but make neither folders nor links."""
    abi = call("syscall", 444, None, 0, 1)
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("3Q", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    ruleset = call("syscall", 444, attributes, 24 if abi >= 6 else 16 if abi >= 4 else 8, 0)
    read, write = 1 << 0 | 1 << 2, (1 << 1 | 1 << 14) & files  # execute, read; write, truncate
    rules = [(path, read | 1 << 3) for path in paths] + [(folder, read | write | 1 << 3 | 1 << 8)]
    for path, access in rules + [("/dev/" + name, read | write) for name in ("null", "zero", "urandom")]:
        descriptor = os.open(path, os.O_PATH)
        access &= -1 if os.path.isdir(path) else ~(1 << 3)
        call("syscall", 445, ruleset, 1, struct.pack("=Qi", access, descriptor), 0)
        os.close(descriptor)
    call("prctl", 38, 1, 0, 0, 0)
    call("syscall", 446, ruleset, 0)
    os.close(ruleset)


def set_limit(name: str, value: int) -> None:
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def close_all(keep: List[int]) -> None:
    """Closes all descriptors but `keep`, and those of the standard streams, which become those of /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    edges = [2, *sorted(keep), 256]  # main() has closed all that it was given, and opens few
    for low, high in zip(edges, edges[1:]):
        os.closerange(low + 1, high)


def remove_folders_of_dead_workers() -> None:
    for path in glob.glob(os.path.join(tempfile.gettempdir(), "cohort_sandbox_*_*")):
        process = re.match(r"cohort_sandbox_(\d+)_", os.path.basename(path))
        if process and not os.path.exists("/proc/" + process[1]):
            shutil.rmtree(path, ignore_errors=True)  # of another user only by root


class Sandbox:
    """One tier. The worker calls enter(), each supervisor make_folder(), its candidate confine()."""

    def __init__(self, tier: str, memory: int, timeout: float) -> None:
        self.tier, self.memory, self.timeout, self.namespaces = tier, memory << 20, timeout, tier == "namespaces"
        self.folder = WORK
        self.others = 3  # processes of the user outside of the candidate: worker, supervisor, first process

    def enter(self) -> None:
        self.paths, root = readable_paths(), os.getuid() == 0
        users = unused_users() if root else []
        if self.namespaces:
            self.proc = os.open("/proc", os.O_PATH)
            if root:
                call("unshare", NEWNS)
                make_root(self.paths)
                take_user(users)
                enter_user_namespace(self.proc, NEWNS | NEWIPC | NEWNET | NEWUTS)
            else:
                enter_user_namespace(self.proc, NEWNS | NEWIPC | NEWNET | NEWUTS)
                make_root(self.paths)
            return
        remove_folders_of_dead_workers()
        if root:
            # Landlock knows what may be read in root's folder.
            hidden = any(not os.stat(p).st_mode & 5 for path in self.paths for p in [path, *map(str, pathlib.Path(path).parents)])
            take_user(users, hidden and self.tier == "landlock")
        else:
            # Other workers start processes of this user meanwhile. Its forks are refused, so this limits threads.
            self.others = 512 + users_of_threads().count(os.getuid())
        self.folder = tempfile.mkdtemp(prefix=f"cohort_sandbox_{os.getpid()}_")

    def make_folder(self) -> None:
        if self.namespaces:
            call("unshare", NEWNS | NEWPID)
            call("mount", "tmpfs", WORK, "tmpfs", NOSUID | NODEV, f"size={MAX_FOLDER},nr_inodes=1024,mode=700")
        self.output = tempfile.TemporaryFile(dir=self.folder)  # what programs print

    def clean(self, last: bool = False) -> None:
        """Empties the folder after a completion. That of namespaces is gone."""
        if not self.namespaces:
            os.chmod(self.folder, 0o700)
            for entry in os.scandir(self.folder):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
            if last:
                os.rmdir(self.folder)

    def memory_of(self, process: int, itself: bool = True) -> int:
        """Bytes of all that a process has started and, with `itself`, of its own. /proc is that from before make_root()."""
        total = 0
        try:
            folder = os.open(f"{process}/task", os.O_RDONLY, dir_fd=self.proc)
            tasks = os.listdir(folder)
            os.close(folder)
            own = 0  # a thread that has ended shows none
            for task in tasks:
                with open(os.open(f"{process}/task/{task}/status", os.O_RDONLY, dir_fd=self.proc)) as status:
                    own = max(own, sum(int(kb) << 10 for kb in re.findall(r"(?:RssAnon|RssShmem):\s*(\d+)", status.read())))
                with open(os.open(f"{process}/task/{task}/children", os.O_RDONLY, dir_fd=self.proc)) as children:
                    total += sum(self.memory_of(int(child)) for child in children.read().split())
            total += own if itself else 0
        except OSError:  # it has ended meanwhile
            pass
        return total

    def exceeded(self, first: int) -> str:
        """The limit of a process, or of all files, that is exceeded by all processes which the first has started; "": none."""
        if self.namespaces:  # the mount limits files
            return f"{self.memory >> 20} MiB of memory" if self.memory_of(first, itself=False) > self.memory else ""
        sizes = [entry.stat().st_blocks * 512 for entry in os.scandir(self.folder)]
        return f"{MAX_FILES} files or {MAX_FOLDER >> 20} MiB of them" if len(sizes) > MAX_FILES or sum(sizes) > MAX_FOLDER else ""

    def confine(self, keep: List[int]) -> None:
        """Confines this process, which keeps the descriptors `keep` open, for good."""
        os.setsid()
        close_all(keep)
        os.chdir(self.folder)
        tempfile.tempdir = self.folder
        os.umask(0o077)
        limits = {"AS": self.memory, "FSIZE": MAX_FILE, "NOFILE": MAX_FILES, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0,
                  "CPU": (int(self.timeout) + 2) * MAX_PROCESSES, "NPROC": MAX_PROCESSES + self.others, "SIGPENDING": 64, "STACK": 64 << 20}
        for name, value in limits.items():
            set_limit(name, value)
        if self.namespaces:
            for capability in range(64):
                LIBC.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
            LIBC.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT_CLEAR_ALL
            call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        elif self.tier == "landlock":
            apply_landlock(self.paths, self.folder)
        call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        restrict_system_calls(self.namespaces)


# ---- Frames between supervisor and candidate

class CandidateEnded(Exception):
    """It has ended, or sends more than it may."""


def send(descriptor: int, data: bytes) -> None:
    data = struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data):]


def receive(descriptor: int, limit: int = 1 << 31) -> bytes:
    """Raises CandidateEnded at the end, or for more than `limit` bytes."""
    def read(size: int) -> bytes:
        out = bytearray()
        while len(out) < size:
            chunk = os.read(descriptor, min(size - len(out), 1 << 20))
            if not chunk:
                raise CandidateEnded
            out += chunk
        return bytes(out)
    size = struct.unpack("<I", read(4))[0]
    if size > limit:
        raise CandidateEnded
    return read(size)


# ---- The candidate

def literal(value: Any, depth: int = 0) -> str:
    """The literal of a value of built-in types, or of classes derived from them."""
    if depth > 100:
        raise ValueError("deeper than 100 levels")
    if value is None:
        return "None"
    for kind in (bool, int, complex, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value).replace("inf", "1e999")
    if isinstance(value, dict):
        return "{" + ",".join(f"{literal(k, depth + 1)}:{literal(v, depth + 1)}" for k, v in value.items()) + "}"
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(f"a result of type {type(value).__name__} is no literal")
    items = "".join(literal(item, depth + 1) + "," for item in value)
    return f"[{items}]" if isinstance(value, list) else f"({items})" if isinstance(value, tuple) else f"{{{items}}}" if items else "set()"


class Candidate:
    """The candidate's side: answers the supervisor's requests, each a pickled tuple of a method's name and its arguments."""
    scope: Dict[str, Any]

    def __init__(self, output: int) -> None:
        self.output = output

    def load(self, source: str) -> str:
        """Runs the code as a module, and returns the names of what can be called in it."""
        module = sys.modules["solution"] = types.ModuleType("solution")
        self.scope = module.__dict__
        exec(compile(source, "solution.py", "exec"), self.scope)
        names = [n for n, v in list(self.scope.items()) if callable(v) and n.isidentifier()]
        if isinstance(self.scope.get("Solution"), type):
            names += [n for n in dir(self.scope["Solution"]) if not n.startswith("_")]
        return "\n".join(names)

    def call(self, name: str, arguments: Tuple[Any, ...], named: Dict[str, Any]) -> str:
        function = self.scope[name] if name in self.scope else getattr(self.scope["Solution"](), name)
        return literal(function(*arguments, **named))

    def test_inside(self, setup: str, source: str) -> str:
        exec(setup + "\n" + source, self.scope)
        return "True"

    def run(self, source: str, data: str, both: bool = False) -> str:
        """Runs the code as a program, and returns its exit code. Its output goes to the supervisor's file; with `both` standard
        error does, too, in the order of writing."""
        with open(".stdin", "w") as file:
            file.write(data)
        stdin = os.open(".stdin", os.O_RDONLY)
        if stdin != 0:  # the code before may have closed it
            os.dup2(stdin, 0)
            os.close(stdin)
        for stream in (1, 2) if both else (1,):
            os.dup2(self.output, stream)
        stdout = io.TextIOWrapper(open(1, "wb", 0 if both else -1, closefd=False), "utf-8", write_through=both)
        stderr = io.TextIOWrapper(open(2 if both else os.devnull, "wb", 0), "utf-8", "backslashreplace", write_through=True)
        sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), stdout, stderr
        linecache.cache["solution.py"] = (len(source), None, source.splitlines(True), "solution.py")
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        code: Any = 0
        try:
            exec(compile(source, "solution.py", "exec"), module.__dict__)
        except SystemExit as end:
            code = end.code
            if code is not None and not isinstance(code, int):
                print(code, file=stderr)
        except BaseException as error:
            code = 1
            traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next, 1000, stderr)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        for file in (sys.stdout, stdout):  # or their last bytes come to the next run's output
            if not getattr(file, "closed", False):
                file.flush()
        return "1" if code else "0"

    def shell(self, command: str, data: str = "", file: str = "", source: str = "") -> str:
        """Runs a command, all processes of which then end, as a program."""
        if file:
            with open(file, "w") as program:
                program.write(source)
        with open(".stdin", "w+") as stdin:
            stdin.write(data)
            stdin.seek(0)
            code = subprocess.call(["/bin/sh", "-c", command], stdin=stdin, stdout=self.output, stderr=subprocess.DEVNULL)
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError:
            pass
        return str(code)


def run_candidate(requests: int, replies: int, sandbox: Sandbox) -> NoReturn:
    try:
        if sandbox.namespaces:
            run_first_process()
        sandbox.confine([requests, replies, sandbox.output.fileno()])
    except BaseException as error:
        send(replies, b"!" + str(error).encode())
        os._exit(1)
    send(replies, b"=")
    candidate = Candidate(sandbox.output.fileno())
    while True:
        name, *arguments = pickle.loads(receive(requests))
        try:
            result = getattr(candidate, name)(*arguments)
            send(replies, b"=" + result.encode("utf-8", "surrogatepass"))
        except BaseException as error:
            send(replies, b"!" + f"{type(error).__name__}\n{error}".encode("utf-8", "replace")[:1000])


def run_first_process() -> None:
    """Makes this the first process of the PID namespace, and returns in its child, the candidate."""
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; had the supervisor died before, the candidate would get no request
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the namespace cannot send it a signal that it has no handler for
    candidate = os.fork()
    if candidate == 0:
        return
    close_all([])
    while os.wait()[0] != candidate:
        pass
    os._exit(0)


# ---- The supervisor

class LimitExceeded(BaseException):
    pass


class Limits:
    """A context that raises LimitExceeded once a candidate has used up its time, memory or files. Tests may catch some."""

    def __init__(self, sandbox: Sandbox, process: int) -> None:
        self.sandbox, self.process, self.deadline = sandbox, process, time.monotonic() + sandbox.timeout
        self.late, self.exceeded = False, ""
        signal.signal(signal.SIGALRM, self.check)

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self, *_: Any) -> None:
        self.late = self.late or time.monotonic() > self.deadline
        self.exceeded = self.exceeded or (f"{self.sandbox.timeout:g} s" if self.late else self.sandbox.exceeded(self.process))
        if self.exceeded:
            raise LimitExceeded


class LineError(Exception):
    """The data or the sandbox, not the completion, is at fault."""


class Channel:
    """The supervisor's side of a candidate."""

    def __init__(self, process: int, requests: int, replies: int, output: int) -> None:
        self.process, self.requests, self.replies, self.output = process, requests, replies, output
        ready = receive(replies, MAX_LITERAL)
        if ready[:1] != b"=":
            raise LineError(ready[1:].decode("utf-8", "replace"))

    def ask(self, *request: Any, limit: int = MAX_LITERAL) -> bytes:
        """Raises what the candidate's code has raised, by name; CandidateEnded."""
        try:
            data = pickle.dumps(request)
        except Exception as error:
            raise LineError(f"a test passes what cannot be sent to the solution ({type(error).__name__}); hint: inside: yes") from None
        try:
            send(self.requests, data)
        except BrokenPipeError:
            raise CandidateEnded from None
        reply = receive(self.replies, limit + 1)
        if reply[:1] == b"=":
            return reply[1:]
        name, _, text = reply[1:].decode("utf-8", "replace").partition("\n")
        kind = getattr(builtins, name, None)
        # StopIteration would end a test's map() early.
        known = isinstance(kind, type) and issubclass(kind, Exception) and kind not in (StopIteration, StopAsyncIteration)
        try:
            raised: Exception = kind(text) if known else RuntimeError(f"{name}: {text}")  # type: ignore[misc]
        except TypeError:  # UnicodeDecodeError has five arguments
            raised = RuntimeError(f"{name}: {text}")
        raised.of_candidate = True  # type: ignore[attr-defined]
        raise raised

    def printed(self, *request: Any) -> bytes:
        """The output of a program."""
        os.ftruncate(self.output, 0)
        os.lseek(self.output, 0, os.SEEK_SET)
        if self.ask(*request) != b"0":
            raise RuntimeError("exit code")
        return os.pread(self.output, MAX_FILE, 0)

    def value(self, *request: Any) -> Any:
        text = self.ask(*request).decode("utf-8", "surrogatepass")
        try:
            return ast.literal_eval(text)
        except BaseException as error:
            if isinstance(error, LimitExceeded):
                raise
            raise RuntimeError("the result is no literal") from None


def proxy(channel: Channel, name: str) -> Callable[..., Any]:
    return lambda *arguments, **named: channel.value("call", name, arguments, named)


def compiled(source: str, name: str) -> Tuple[types.CodeType, List[str]]:
    """The code, and the names that it reads."""
    try:
        tree = ast.parse(source)
        return compile(tree, name, "exec"), [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    except (SyntaxError, ValueError) as error:
        raise LineError(f"{name} is no Python: {error}") from None


def can_fail(statement: ast.stmt, entry: str) -> bool:
    """False for what tests nothing as it runs: definitions, imports, assignments, bare comparisons, and what a main program runs."""
    if isinstance(statement, ast.Expr):
        is_print = isinstance(statement.value, ast.Call) and getattr(statement.value.func, "id", "") == "print"
        return not is_print and not isinstance(statement.value, (ast.Compare, ast.UnaryOp, ast.Constant))
    if isinstance(statement, ast.If):
        return "id='__name__'" not in ast.dump(statement.test)
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return bool(entry) and statement.name == "check"
    return not isinstance(statement, (ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Pass))


def listed(value: Any) -> Any:
    """A value with lists for tuples, as in JSON."""
    return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def lines_of(text: str) -> List[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def callables_of(prefix: str) -> Dict[str, Any]:
    """What the text before a solution defines, if that is code: to the tests, a solution must not redefine it. Functions whose body
    is missing are the solution's."""
    def is_missing(line: ast.stmt) -> bool:
        raises = isinstance(line, ast.Raise) and "id='NotImplementedError'" in ast.dump(line)
        return raises or isinstance(line, ast.Pass) or isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)

    scope: Dict[str, Any] = {"__name__": "tests"}
    for text in (prefix, prefix + "\n        pass"):  # it may end with a function's first line
        try:
            tree = ast.parse(text)
            exec(compile(tree, "prefix", "exec"), scope)
        except SyntaxError:
            continue
        except Exception:
            break
        missing = {node.name: all(map(is_missing, node.body)) for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        return {name: value for name, value in scope.items() if callable(value) and not missing.get(name)}
    return {}


def tested_builtin(read: Set[str]) -> Set[str]:
    """The function that tests call which read built-in names only: a solution must not replace another, as abs(), for them."""
    kinds = {name: getattr(builtins, name) for name in read}
    called = {name for name, kind in kinds.items() if not isinstance(kind, type)}
    found = called or {name for name, kind in kinds.items() if not issubclass(kind, BaseException)}
    if len(found) > 1:
        raise LineError(f"tests of the line: which of {', '.join(sorted(found))} do they test?")
    return found


def function_tests(channel: Channel, code: Tuple[str, str], setup: str, tests: List[str], entry: str,
                   inside: bool) -> List[Callable[[], bool]]:
    """Tests that are Python code. `code`: the solution and its prefix; `entry`: the function that check() gets, if there is one."""
    setup_code, setup_names = compiled(setup, "test_setup_code")
    codes = [compiled(test, f"test {i + 1}") for i, test in enumerate(tests)]
    if not any(can_fail(statement, entry) for text in (setup, *tests) for statement in ast.parse(text).body):
        raise LineError("tests of the line: they assert nothing where they are run, as classes of unittest and functions of pytest are not; "
                        "hint: assert statements, or a function check(candidate) and its entry_point")
    names = set(channel.ask("load", code[0], limit=MAX_NAMES).decode("utf-8", "replace").split("\n"))
    if inside:
        end = f"\nif 'check' in globals(): check({entry})" if entry else ""
        return [lambda test=test: channel.ask("test_inside", setup, test + end) == b"True" for test in tests]  # type: ignore[misc]
    read = {name for _, found in codes for name in found}.union(setup_names)
    tested = read - set(dir(builtins))
    scope: Dict[str, Any] = {"__name__": "tests"}
    scope.update((name, proxy(channel, name)) for name in (names & tested if tested else tested_builtin(read)))
    scope.update((name, value) for name, value in callables_of(code[1]).items() if name in read and name != entry)
    scope.update((name, importlib.import_module(name)) for name in read.intersection(TEST_MODULES))
    exec(setup_code, scope)

    def passes(code: types.CodeType) -> bool:
        exec(code, scope)
        if entry and callable(scope.get("check")):
            scope["check"](proxy(channel, entry))
        return True
    return [lambda code=code: passes(code) for code, _ in codes]  # type: ignore[misc]


def pair_tests(channel: Channel, source: str, function: str, pairs: List[Tuple[Any, Any]], run: str) -> List[Callable[[], bool]]:
    """Tests that are pairs of an input and an output: of a function, or of a program."""
    def parsed(value: Any) -> Any:
        return [json.loads(line) for line in value.split("\n") if line.strip()] if isinstance(value, str) else value

    def call_passes(arguments: Any, expected: Any) -> bool:
        result = listed(channel.value("call", function, tuple(arguments), {}))
        return bool(result == expected or (wrapped and result == expected[0]))

    def run_passes(data: Any, expected: Any) -> bool:
        data, expected = ("\n".join(map(str, x)) if isinstance(x, list) else str(x) for x in (data, expected))
        request = ("shell", command, data) if run else ("run", source, data)
        return lines_of(channel.printed(*request).decode("utf-8", "replace")) == lines_of(expected)

    if function:
        try:
            calls = [(parsed(data), listed(parsed(expected))) for data, expected in pairs]
        except ValueError as error:
            raise LineError(f"inputs or outputs of {function}: {error}") from None
        wrapped = all(isinstance(expected, list) and len(expected) == 1 for _, expected in calls)  # APPS: a list of the result
        channel.ask("load", source, limit=MAX_NAMES)
        return [lambda p=pair: call_passes(*p) for pair in calls]  # type: ignore[misc]
    build, _, command = run.rpartition("&&")
    if run:
        file = re.search(r"\bsolution\.\w+", run)
        if not file:
            raise LineError("run: names no file of the solution; hint: g++ -o a solution.cpp && ./a")
        channel.printed("shell", build or "true", "", file[0], source)
    return [lambda p=pair: run_passes(*p) for pair in pairs]  # type: ignore[misc]


def make_tests(channel: Channel, code: Tuple[str, str], fields: Dict[str, Any],
               options: argparse.Namespace) -> Optional[List[Callable[[], bool]]]:
    """None: the line has no tests. `code`: the solution and its prefix."""
    try:
        if isinstance(fields.get("input_output"), str):  # APPS, TACO
            fields = {**fields, **json.loads(fields["input_output"])}
        fields = {k: json.loads(v) if k in ("inputs", "outputs", "test_list") and isinstance(v, str) else v for k, v in fields.items()}
        if "inputs" in fields and "outputs" in fields:
            if not fields["inputs"] or len(fields["inputs"]) != len(fields["outputs"]):
                raise LineError("inputs and outputs: expected two lists of equal length")
    except (ValueError, TypeError) as error:
        raise LineError(f"tests of the line: {error}") from None
    if "inputs" in fields and "outputs" in fields:
        pairs = list(zip(fields["inputs"], fields["outputs"]))
        return pair_tests(channel, code[0], fields.get("fn_name") or "", pairs, options.run)
    setup = "\n".join([*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""])
    tests = fields.get("test_list") or ([fields["test"]] if isinstance(fields.get("test"), str) and "entry_point" in fields else [])
    if not tests:
        return None
    if options.run:
        raise LineError("run: the tests of other languages are inputs and outputs")
    entry = "" if fields.get("test_list") else fields["entry_point"].replace("Solution().", "")  # as in LeetCode's data
    return function_tests(channel, code, setup, tests, entry, options.inside == "yes")


def prefix_of(request: Dict[str, Any], options: argparse.Namespace) -> str:
    given = (request.get("fields") or {}).get("prompt")
    return str(options.prefix.replace("{prompt}", given if isinstance(given, str) else request.get("prompt", "")))


def code_of(request: Dict[str, Any], options: argparse.Namespace) -> Optional[str]:
    """The last fenced block of the completion, after the prefix."""
    code, fence, indent = None, "", ""
    lines: List[str] = []
    for line in request["completion"].split("\n"):
        mark = re.match(r"([ \t]*)(```+|~~~+)([^`]*)$", line)
        if not fence and mark:
            indent, fence, lines = mark[1], mark[2], []
        elif mark and mark[2].startswith(fence) and not mark[3].strip():
            code = "\n".join(lines) + "\n"
            code, fence = textwrap.dedent(code) if indent else code, ""
        else:
            lines.append(line)
    if code is None and options.fence == "required":
        return None
    prefix = prefix_of(request, options)
    if code is None:
        code = request["completion"]
        if request.get("stop_reason") == "stop_string" and not is_python(prefix + code):
            code = code[:code.rfind("\n") + 1]  # as for "\ndef", with which the next function begins
    return prefix + code


def is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def misses_module(error: BaseException) -> bool:
    """True for an import of the tests, not of the solution."""
    return isinstance(error, ImportError) and not hasattr(error, "of_candidate")


def passed_fraction(channel: Channel, request: Dict[str, Any], options: argparse.Namespace, sandbox: Sandbox) -> Dict[str, Any]:
    """The answer to a request, without its index."""
    source = code_of(request, options)
    limits, passed, count = Limits(sandbox, channel.process), 0, 0
    try:
        with limits:
            tests = make_tests(channel, (source or "", prefix_of(request, options)), request.get("fields") or {}, options)
            if tests is None:
                return {"reward": None}
            count = len(tests)
            for test in tests if source is not None else []:
                try:
                    ok = test()
                except (LineError, CandidateEnded):
                    raise
                except Exception as error:
                    if misses_module(error):
                        raise
                    ok = False
                passed += ok
                if not ok and options.credit == "all":
                    break
    except LimitExceeded:
        pass
    except LineError as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:  # the code cannot be loaded, or has ended its process
        if misses_module(error):
            return {"error": f"a test imports what is not installed: {error}"}
    share = passed / max(count, 1)
    outcome = "no_code" if source is None else "passed" if share == 1 else "timeout" if limits.late else "failed"
    return {"reward": share if options.credit == "share" else float(share == 1), "outcome": outcome}


def shown(output: bytes, why: str) -> str:
    """The output of a program, and why it was ended, in at most MAX_OUTPUT bytes."""
    data, last = output.decode("utf-8", "replace").encode(), f"error: {why}" if why else ""
    room = MAX_OUTPUT - len(last.encode()) - 1
    text = data[:room].decode("utf-8", "ignore")
    if len(data) > room:
        text = data[:room - 32].decode("utf-8", "ignore")
        last = f"... ({len(data) - len(text.encode())} bytes more)\n{last}".rstrip()
    return text + ("\n" if last and text and not text.endswith("\n") else "") + last


def tool_answer(channel: Channel, code: str, sandbox: Sandbox) -> Dict[str, Any]:
    """The answer to a request of a tool, without its index."""
    limits, why, passed = Limits(sandbox, channel.process), "", False
    try:
        with limits:
            passed = channel.ask("run", code, "", True) == b"0"
    except LimitExceeded:
        why = f"ended after {limits.exceeded}"
    except CandidateEnded:
        why = "the program has ended its process"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:200]
    output = os.pread(channel.output, MAX_FILE, 0)
    return {"output": shown(output, why), "outcome": "passed" if passed else "timeout" if limits.late else "failed"}


def supervise(source: int, answers: int, worker: int, sandbox: Sandbox, options: argparse.Namespace) -> NoReturn:
    """Reads a request from `source` and answers it. To the worker it sends the answer that holds if it hangs, and a further byte once it
    has another."""
    warnings.simplefilter("ignore")  # those of parsed results
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no process of this user reads its memory by /proc
    process, error = 0, ""  # the candidate, or the first process
    (request_end, requests), (replies, reply_end) = os.pipe(), os.pipe()
    try:
        sandbox.make_folder()
        process = os.fork()
        if process == 0:
            run_candidate(request_end, reply_end, sandbox)
    except OSError as failure:
        error = str(failure)
    os.close(request_end)
    os.close(reply_end)
    # No process is forked from here on.
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(source, 1 << 20)
        if not chunk:
            os._exit(0)
        line += chunk
    # The candidate chooses what is parsed and compared here.
    set_limit("AS", 2 << 30)
    set_limit("STACK", 64 << 20)
    request = json.loads(line)
    tool = "code" in request
    late = {"output": f"error: ended after {sandbox.timeout:g} s"} if tool else {"reward": 0}
    answer: Dict[str, Any] = {**late, "outcome": "timeout"}

    def line_of(answer: Dict[str, Any]) -> bytes:
        return json.dumps({"index": request["index"], **answer, "sandbox": sandbox.tier}).encode() + b"\n"
    os.write(worker, line_of(answer))
    try:
        if error:
            raise LineError(error)
        channel = Channel(process, requests, replies, sandbox.output.fileno())
        answer = tool_answer(channel, request["code"], sandbox) if tool else passed_fraction(channel, request, options, sandbox)
    except LimitExceeded:  # as it was about to return
        pass
    except (LineError, CandidateEnded) as failure:
        answer = {"error": f"the sandbox has failed: {failure or 'a process has ended'}"}
    if process:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    os.write(worker, b".")
    os.write(answers, line_of(answer))
    os._exit(0)


def serve(source: int, answers: int, sandbox: Sandbox, options: argparse.Namespace) -> bool:
    """Forks a supervisor for one request. False: there was none. The worker never reads a request."""
    reading, writing = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(reading)
        supervise(source, answers, writing, sandbox, options)
    os.close(writing)
    sent = os.read(reading, 4096)
    hangs = sent.endswith(b"\n") and not select.select([reading], [], [], sandbox.timeout + 0.5)[0]
    if hangs:  # in a test's code or a result, since its timer raises an exception elsewhere
        os.kill(supervisor, signal.SIGKILL)  # and with it the candidate
        os.write(answers, sent)
    status = os.waitpid(supervisor, 0)[1]
    os.close(reading)
    sandbox.clean(last=not sent)
    if status != 0 and not hangs:
        sys.exit(f"cohort_sandbox: a supervisor has ended with the status {status}")
    return bool(sent)


def works(tier: str, options: argparse.Namespace) -> str:
    """Tries a tier in a process of its own. Returns why it does not work, or ""."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            sandbox = Sandbox(tier, options.memory, 5)
            sandbox.enter()
            (source, request), (results, answers) = os.pipe(), os.pipe()
            code = ("def f(x):\n    import fractions, threading, wave\n    t = threading.Thread(target=print)\n    t.start()\n    t.join()\n"
                    "    open('a', 'w').write('b')\n    try:\n        open('/etc/passwd')\n    except OSError:\n        return 1\n    return x\n")
            fields = {"inputs": [[2 if tier == "rlimits" else 1]], "outputs": [2 if tier == "rlimits" else 1], "fn_name": "f"}
            os.write(request, json.dumps({"index": 0, "completion": code, "fields": fields}).encode() + b"\n")
            own = argparse.Namespace(fence="optional", prefix="", run="", credit="all", inside="no")
            serve(source, answers, sandbox, own)
            answer = json.loads(os.read(results, 1 << 16))
            sandbox.clean(last=True)
            reason = "" if answer.get("reward") == 1 else answer.get("error", "a right solution fails in it; can its user read " + sys.prefix + "?")
        except BaseException as error:
            reason = str(error) or type(error).__name__
        os.write(writing, reason.encode()[:1000])
        os._exit(0)
    os.close(writing)
    reason = os.read(reading, 1000).decode()
    os.waitpid(process, 0)
    os.close(reading)
    return reason


def refuse(reason: str) -> None:
    """Answers every request with an error."""
    for line in sys.stdin:
        print(json.dumps({"index": json.loads(line)["index"], "error": reason}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(usage="cohort_sandbox.py [OPTION]...")
    parser.add_argument("--fence", choices=["required", "optional"], default="required")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--credit", choices=["all", "share"], default="all")
    parser.add_argument("--inside", choices=["yes", "no"], default="no")
    parser.add_argument("--run", default="")
    parser.add_argument("--sandbox", choices=["auto", *TIERS], default="auto")
    parser.add_argument("--timeout", type=float, default=10)
    parser.add_argument("--memory", type=int, default=512)
    options = parser.parse_args()
    environment = {"PATH": os.path.dirname(sys.executable) + ":/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
                   "OMP_NUM_THREADS": "1"}  # numpy would start a thread per core, beyond the limits
    folder = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}  # of Landlock's folders, not for candidates
    if dict(os.environ) != {**environment, **folder}:
        os.execve(sys.executable, [sys.executable, "-s", *sys.argv], {**environment, **folder})
    os.closerange(3, 1 << 20)
    tempfile.gettempdir()  # is kept
    os.environ.pop("TMPDIR", None)
    sys.path.pop(0)
    sys.argv = ["solution.py"]
    tried = ["namespaces", "landlock"] if options.sandbox == "auto" else [options.sandbox]
    if options.run:
        tried = [tier for tier in tried if tier == "namespaces"]
    reasons = {}
    for tier in tried:
        reasons[tier] = works(tier, options)
        if not reasons[tier]:
            break
    else:
        why = "; ".join(f"{tier}: {reason}" for tier, reason in reasons.items()) or "run: other languages need namespaces"
        return refuse(f"no sandbox works here: {why}; hint: sandbox: rlimits limits resources only")
    if tier != "namespaces":
        why = "".join(f" ({other}: {reason})" for other, reason in reasons.items() if reason)
        files = "; warning: solutions can read and write this user's files" if tier == "rlimits" else ""
        print(f"cohort_sandbox: uses {tier}{why}{files}", file=sys.stderr, flush=True)
    sandbox = Sandbox(tier, options.memory, options.timeout)
    sandbox.enter()
    # Tests may read and print.
    source, answers, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    gc.freeze()  # a collection in a child would copy the pages of all objects
    while serve(source, answers, sandbox, options):
        pass


if __name__ == "__main__":
    main()
