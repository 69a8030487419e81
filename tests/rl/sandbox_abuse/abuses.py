"""Escapes and abuses that scripts/cohort_sandbox.py must contain, for sandbox_abuse.py, which explains f() and `info`."""

# Every abuse begins with this.
PRELUDE = r"""
import ctypes, errno, glob, os, re, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
def system_call(*arguments):
    return libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
def escaped_if(condition):
    return "escaped" if condition else "contained"
def token_in(data):
    found = re.search(b"TOKEN-[0-9a-f]{32}", data)
    return found and found[0].decode()
def read(path):
    with open(path, "rb") as file: return token_in(file.read())
def first_of(function, items):
    for item in items:
        try: found = function(item)
        except Exception: continue
        if found: return found
def writes(path):
    with open(path, "w") as file: file.write("x")
    return "escaped"
def forever():
    while True: pass
"""

# name -> the code, which defines f(info). A body without "def f" is that of f().
ABUSES = {
    # Too much of something.
    "fork_bomb": "while True:\n try: os.fork()\n except OSError: pass",
    "fork_bomb_of_sessions": "while True:\n try:\n  os.fork(); os.setsid()\n except OSError: pass",
    "thread_bomb": "threading.stack_size(32768)\nwhile True:\n try: threading.Thread(target=time.sleep, args=(99,)).start()\n except RuntimeError: pass",
    "memory_at_once": "return b'x' * (1 << 36)",
    "memory_in_steps": "a = []\nwhile True: a.append(bytearray(1 << 20))",
    "memory_of_forks": "for i in range(9):\n try: os.fork()\n except OSError: pass\na = []\nwhile True:\n try: a.append(bytearray(1 << 20))\n except MemoryError: time.sleep(9)",
    "memory_mapped_shared": "import mmap\na = []\nwhile True: a.append(mmap.mmap(-1, 1 << 24)); a[-1].write(b'x' * (1 << 24))",
    "memory_files": "a = [system_call(319, b'x', 0) for i in range(50)]\nreturn escaped_if(max(a) >= 0)",
    "memory_locked": "libc.mlockall(3)\nreturn escaped_if(libc.mlock(ctypes.create_string_buffer(1 << 20), 1 << 20) == 0 and os.getuid() != 0)",
    "disk_of_one_file": "with open('big', 'wb') as file:\n while True: file.write(b'x' * (1 << 20))",
    "disk_of_many_files": "n = 0\nwhile True:\n n += 1\n try:\n  with open(f'big{n}', 'wb') as file: file.write(b'x' * (8 << 20))\n except OSError: pass",
    "disk_of_files_without_names": "a = []\nfor i in range(2000):\n try:\n  a.append(open('t', 'wb')); a[-1].write(b'x' * (8 << 20)); a[-1].flush(); os.unlink('t')\n except OSError: pass\n if len(a) > 50: a.clear()\nforever()",
    "disk_by_tmpfile": "a = [os.open('.', os.O_TMPFILE | os.O_RDWR) for i in range(40)]\nfor d in a: os.write(d, b'x' * (8 << 20))\nforever()",
    "disk_sparse": "with open('s', 'wb') as file: file.truncate(1 << 40)\nreturn 'escaped'",
    "inodes": "n = 0\nwhile True:\n n += 1\n try: open(f'i{n}', 'w').close()\n except OSError: pass",
    "folders_in_folders": "while True:\n try: os.mkdir('d'); os.chdir('d')\n except OSError: pass",
    "links_in_the_folder": "n = 0\nwhile True:\n n += 1\n try: os.symlink('x' * 4000, f'l{n}')\n except OSError: time.sleep(0.001)",
    "descriptors": "a = []\ntry:\n while True: a.append(os.open('/dev/null', 0))\nexcept OSError: return escaped_if(len(a) > 70)",
    "higher_limits": "for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):\n try: resource.setrlimit(kind, (1 << 40, 1 << 40)); return 'escaped'\n except (ValueError, OSError): pass",
    "timers": "class S(ctypes.Structure): _fields_ = [('value', ctypes.c_void_p), ('signo', ctypes.c_int), ('notify', ctypes.c_int), ('rest', ctypes.c_char * 48)]\nn = 0\nwhile n < 5000:\n t = ctypes.c_long()\n if system_call(222, 1, ctypes.byref(S(None, 10, 0)), ctypes.byref(t)) < 0: return 'contained'\n n += 1\nreturn 'escaped'",
    "output_of_1_gb": "for stream in (1, 2):\n for i in range(1 << 10): os.write(stream, b'x' * (1 << 20))",
    "prints_forever": "while True: print('x' * 4096)",
    # Time.
    "sleep": "time.sleep(99)",
    "loop": "forever()",
    "loop_at_import": "forever()\ndef f(info): pass",
    "loop_in_c": "return re.match('(a+)+b', 'a' * 99)",
    "loop_without_signals": "for n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\nforever()",
    "no_death_signal": "libc.prctl(1, 0)\nforever()",
    "execs_in_a_thread": "for d in range(3, 64):\n try: os.set_inheritable(d, True)\n except OSError: pass\nthreading.Thread(target=os.execv, args=('/bin/sleep', [info['folder'], '99'])).start()\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\nforever()",
    "stops_itself": "os.kill(os.getpid(), signal.SIGSTOP)\nforever()",
    "daemon": "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  while True: time.sleep(0.1)\n os._exit(0)\nos._exit(0)",
    "daemon_in_another_group": "if os.fork() == 0:\n os.setpgid(0, 0)\n signal.signal(signal.SIGHUP, signal.SIG_IGN)\n forever()\nreturn 'contained'",
    # Its own end.
    "exit_0": "os._exit(0)",
    "system_exit": "sys.exit(0)",
    "system_exit_at_import": "sys.exit(0)\ndef f(info): pass",
    "keyboard_interrupt": "raise KeyboardInterrupt",
    "segmentation_fault": "ctypes.string_at(0)",
    "stack_overflow": "sys.setrecursionlimit(1 << 30)\ndef g(n): return g(n + 1) + 1\nreturn g(0)",
    "abort": "os.abort()",
    "execs_true": "os.execv('/bin/true', ['true'])",
    # Signals and other processes.
    "kill_group": "os.kill(0, 9)\nforever()",
    "kill_all": "os.kill(-1, 9)\nforever()",
    "kill_the_first_process": "for n in range(1, 65):\n try: os.kill(1, n)\n except OSError: pass\nfor n in range(1, 65):\n if n != signal.SIGCHLD:\n  try: os.kill(-1, n)\n  except OSError: pass\nforever()",
    "kill_parent": "for p in {os.getppid(), info['parent']} - {0}: os.kill(p, 9)\nforever()",
    "kill_victim": "os.kill(info['victim'], 9)",
    "kill_victim_by_thread": "return escaped_if(system_call(200, info['victim'], 9) == 0 or system_call(234, info['victim'], info['victim'], 9) == 0)",
    "kill_victim_by_queue": "system_call(129, info['victim'], 9, ctypes.create_string_buffer(128))",
    "kill_victim_by_pidfd": "return escaped_if(system_call(424, system_call(434, info['victim'], 0), 9, 0, 0) == 0)",
    "kill_victim_by_pipe": "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, 8, info['victim'])\nfcntl.fcntl(r, 10, 9)\nfcntl.fcntl(r, 4, 0o20000)\nos.write(w, b'x')",
    "kill_victim_by_ioctl": "import fcntl\nr, w = os.pipe()\nfcntl.ioctl(r, 0x8901, struct.pack('i', info['victim']))\nfcntl.fcntl(r, 4, 0o20000)\nos.write(w, b'x')",
    "limits_of_victim": "resource.prlimit(info['victim'], resource.RLIMIT_CPU, (0, 0))\nreturn 'escaped'",
    "priority_of_victim": "os.setpriority(os.PRIO_PROCESS, info['victim'], 19)\nreturn 'escaped'",
    "cores_of_victim": "os.sched_setaffinity(info['victim'], {0})\nreturn 'escaped'",
    "ptrace": "return escaped_if(any(system_call(101, 16, p, 0, 0) == 0 for p in (info['victim'], info['parent'], os.getppid())))",
    "ptrace_of_itself": "return escaped_if(system_call(101, 0, 0, 0, 0) == 0)",
    "memory_of_parent": "b = ctypes.create_string_buffer(64)\nv = (ctypes.c_void_p * 4)(ctypes.addressof(b), 64, 0x400000, 64)\nreturn escaped_if(system_call(310, info['parent'], v, 1, ctypes.byref(v, 16), 1, 0) > 0)",
    "descriptors_of_parent": "return escaped_if(system_call(438, system_call(434, info['parent'], 0), 0, 0) >= 0)",
    # Files outside.
    "reads_the_answer": "return read(info['file'])",
    "reads_the_answer_by_a_symlink": "os.symlink(info['file'], 'l')\nreturn read('l')",
    "reads_the_answer_by_a_link": "os.link(info['file'], 'l')\nreturn read('l')",
    "reads_the_answer_by_handle": "b = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128), 200)\nm = ctypes.c_int()\nsystem_call(303, -100, info['file'].encode(), b, ctypes.byref(m), 0)\nd = system_call(304, os.open('.', 0), b, 0)\nreturn token_in(os.read(d, 99))",
    "reads_the_answer_from_above": "d = os.open('/', 0)\nos.chdir('/')\nfor i in range(50): os.chdir('..')\nreturn read('.' + info['file'])",
    "reads_the_answer_after_chroot": "os.mkdir('r')\nd = os.open('.', 0)\nos.chroot('r')\nos.fchdir(d)\nfor i in range(50): os.chdir('..')\nos.chroot('.')\nreturn read(info['file'])",
    "reads_the_answer_by_another_user": "for u in (0, 1000): os.setresuid(u, u, u)\nreturn read(info['file'])",
    "reads_passwd": "return escaped_if(first_of(lambda p: open(p).read(), ['/etc/passwd', '/etc/shadow', '/root/.bashrc']))",
    "reads_environments": "return escaped_if(first_of(lambda p: open(p, 'rb').read(), glob.glob('/proc/[0-9]*/environ') + ['/proc/1/environ', '/proc/self/environ']))",
    "reads_by_proc": "return first_of(read, [p + info['file'] for p in ('/proc/1/root', '/proc/self/root', f'/proc/{info[\"parent\"]}/root')] + glob.glob('/proc/self/fd/*'))",
    "memory_by_proc": "return escaped_if(first_of(lambda p: open(f'/proc/{p}/mem', 'rb+'), [info['parent'], os.getppid(), info['victim'], 'self']))",
    "writes_outside": "return first_of(writes, [info['folder'] + '/x', '/usr/x', '/usr/bin/x', '/etc/x', '/x', '/root/x', '/dev/x', '/dev/shm/x', '/var/tmp/x', '/proc/self/oom_score_adj', '/sys/x'])",
    "writes_over_a_symlink": "os.symlink(info['folder'] + '/x', 'l')\nreturn writes('l')",
    "writes_over_the_answer": "return writes(info['file'])",
    "renames_and_removes": "def g(h):\n h()\n return 'escaped'\nopen('x', 'w').close()\nreturn first_of(g, [lambda: os.rename(info['file'], 'y'), lambda: os.rename('x', info['folder'] + '/x'), lambda: os.unlink(info['file']), lambda: os.mkdir(info['folder'] + '/d'), lambda: os.symlink('a', info['folder'] + '/l'), lambda: os.link('x', info['folder'] + '/h')])",
    "changes_modes": "def g(h):\n h()\n return 'escaped'\nreturn first_of(g, [lambda: os.chmod(info['file'], 0), lambda: os.chown(info['file'], os.getuid(), os.getgid()), lambda: os.utime(info['file'], (0, 0)), lambda: os.setxattr(info['file'], 'user.x', b'x'), lambda: os.truncate(info['file'], 0)])",
    "closes_its_folder": "try: os.chmod('.', 0)\nexcept OSError: pass\ntry: os.rmdir(os.getcwd())\nexcept OSError: pass\nforever()",
    "devices": "return escaped_if(first_of(lambda p: open(p, 'rb').read(1), ['/dev/mem', '/dev/kmem', '/dev/vda', '/dev/sda', '/dev/kmsg', '/dev/fuse', '/dev/tty', '/dev/ptmx', '/dev/kvm']))",
    "makes_a_device": "os.mknod('m', 0o20666, os.makedev(1, 1))\nreturn escaped_if(open('m', 'rb'))",
    "setuid_file": "open('s', 'wb').write(open('/bin/sh', 'rb').read(1 << 20))\nos.chown('s', 0, 0)\nos.chmod('s', 0o4755)\nreturn escaped_if(os.stat('s').st_uid == 0 and os.stat('s').st_mode & 0o4000)",
    "setuid_programs": "import subprocess\nsubprocess.run(['su', '-c', 'id'], timeout=0.5)\nreturn escaped_if(subprocess.run(['unshare', '-r', 'true'], timeout=0.5).returncode == 0)",
    # Privileges of the kernel.
    "mounts": "return escaped_if(any(libc.mount(a, b'.', t, f, None) == 0 for a, t, f in ((b'tmpfs', b'tmpfs', 0), (b'/', None, 4096), (b'proc', b'proc', 0), (None, None, 32))))",
    "unmounts": "return escaped_if(any(libc.umount2(p, 2) == 0 for p in (b'/usr', b'/solution', b'/', b'/dev/null')))",
    "mounts_by_the_new_calls": "return escaped_if(system_call(430, b'tmpfs', 0) >= 0 or system_call(428, -100, b'/', 1) >= 0 or system_call(442, -100, b'/', 0, bytes(32), 32) == 0)",
    "namespaces": "return escaped_if(any(libc.unshare(f) == 0 for f in (0x10000000, 0x20000, 0x40000000, 0x20000000)))",
    "namespaces_by_clone": "p = system_call(56, 0x10000000 | 17, 0, 0, 0, 0)\nif p == 0: os._exit(0)\nreturn escaped_if(p > 0)",
    "namespaces_by_clone3": "p = system_call(435, struct.pack('11Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)\nif p == 0: os._exit(0)\nreturn escaped_if(p > 0)",
    "enters_namespaces": "return escaped_if(libc.setns(os.open('/proc/1/ns/mnt', 0), 0) == 0)",
    "another_root": "return escaped_if(system_call(155, b'.', b'.') == 0 or libc.chroot(b'.') == 0)",
    "capabilities": "b = ctypes.create_string_buffer(24)\nsystem_call(125, struct.pack('Ii', 0x20080522, 0), b)\ne, p, i, e2, p2, i2 = struct.unpack('6I', b.raw)\nreturn escaped_if((e | p | i) & ~4 or e2 | p2 | i2)",
    "user_0": "os.setuid(0)\nreturn 'escaped'",
    "keyrings": "return escaped_if(any(system_call(*a) >= 0 for a in ((248, b'user', b'a', b'b', 1, -3), (250, 0, -3, 1), (250, 1, b'ring'))))",
    "io_uring": "return escaped_if(system_call(425, 4, ctypes.create_string_buffer(256)) >= 0)",
    "bpf": "return escaped_if(system_call(321, 0, struct.pack('4I', 2, 4, 4, 1) + bytes(100), 116) >= 0)",
    "perf_events": "return escaped_if(system_call(298, struct.pack('2I', 1, 112) + bytes(104), 0, -1, -1, 0) >= 0)",
    "userfaultfd": "return escaped_if(system_call(323, 1) >= 0)",
    "kernel_modules": "return escaped_if(system_call(313, 0, b'', 0) == 0 or system_call(246, 0, 0, 0, 0) == 0)",
    "clock_and_names": "return escaped_if(system_call(170, b'x', 1) == 0 or system_call(227, 0, struct.pack('2q', 0, 0)) == 0 or system_call(169, 0, 0, 0, 0) == 0)",
    "kernel_log": "return escaped_if(system_call(103, 3, ctypes.create_string_buffer(999), 999) >= 0)",
    "old_abi": "return escaped_if(system_call(0x40000000 + 101, 16, info['victim'], 0, 0) == 0)",
    "removes_the_filter": "return escaped_if(system_call(317, 0, 0, 0) == 0 or libc.prctl(21) == 0 or libc.prctl(38, 0, 0, 0, 0) == 0)",
    "landlock_again": "return escaped_if(system_call(446, -1, 0) == 0)",
    "personality": "return escaped_if(libc.personality(0x40000) >= 0)",
    "terminal": "import fcntl\nfor d in range(3): fcntl.ioctl(d, 0x5412, b'x')\nreturn 'escaped'",
    # Networks and shared memory.
    "loopback": "s = socket.create_connection(('127.0.0.1', info['port']), 0.5)\nreturn token_in(s.recv(99))",
    "unix_socket": "s = socket.socket(socket.AF_UNIX)\ns.connect(info['unix'])\nreturn token_in(s.recv(99))",
    "unix_socket_without_a_file": "s = socket.socket(socket.AF_UNIX)\ns.connect('\\0' + info['unix'])\nreturn token_in(s.recv(99))",
    "sockets_of_every_family": "made = []\nfor family in range(64):\n for kind in (1, 2, 3, 5):\n  if libc.socket(family, kind, 0) >= 0: made.append((family, kind))\nreturn escaped_if(made)",
    "connected_pair": "a, b = socket.socketpair()\nreturn escaped_if(libc.connect(a.fileno(), struct.pack('=HH', 2, info['port']) + b'\\x7f\\0\\0\\1' + bytes(8), 16) == 0)",
    "pair_that_sends_elsewhere": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\na.sendto(b'x', info['unix'] + '_datagrams')\nreturn 'escaped'",
    "shared_memory": "return escaped_if(system_call(29, 4242, 4096, 0o1666) >= 0)",
    "semaphores_and_queues": "return escaped_if(system_call(64, 4242, 1, 0o1666) >= 0 or system_call(68, 4242, 0o1666) >= 0 or system_call(240, b'q', 0o102, 0o666, None) >= 0)",
    "shared_memory_of_posix": "from multiprocessing import shared_memory\nshared_memory.SharedMemory('cohort_abuse', True, 4096)\nreturn 'escaped'",
    # The answer and the protocol.
    "always_equal": "class E:\n def __eq__(self, other): return True\n def __hash__(self): return 0\n def __repr__(self): return 'E()'\nreturn E()",
    "equal_text": "class T(str):\n def __eq__(self, other): return True\n __hash__ = str.__hash__\nreturn T('x')",
    "contains_all": "class D(dict):\n def __contains__(self, key): return True\n def __eq__(self, other): return True\nreturn D()",
    "repr_of_code": "class R:\n def __repr__(self): return '__import__(\"os\").kill(0, 9)'\nreturn R()",
    "metaclass": "class M(type):\n def __instancecheck__(self, other): return True\nclass N(str, metaclass=M): __repr__ = lambda self: '__import__(\"os\")._exit(0)'\nreturn N()",
    "not_a_number": "return float('nan')",
    "deep_brackets": "forge(b'=' + b'(' * 60000)",
    "deep_signs": "forge(b'=' + b'-' * 60000 + b'1')",
    "deep_sum": "forge(b'=' + b'+'.join([b'1'] * 32000))",
    "deep_attributes": "forge(b'=1' + b'.a' * 30000)",
    "deep_list": "a = []\nfor i in range(100000): a = [a]\nreturn a",
    "list_of_itself": "a = []\na.append(a)\nreturn a",
    "huge_text": "return 'x' * (1 << 28)",
    "huge_number": "return 10 ** 100000",
    "surrogates": "return '\\ud800'",
    "not_utf8": "forge(b'=\\xff\\xfe')",
    "null_bytes": "forge(b'=\\0\\0')",
    "code_for_a_literal": "forge(b'=__import__(\"os\")._exit(0)')",
    "forged_error_of_the_sandbox": "class LineError(Exception): pass\nraise LineError('x')",
    "forged_import_error": "raise ImportError('x')",
    "forged_timeout": "class Timeout(BaseException): pass\nraise Timeout",
    "end_of_an_iteration": "raise StopIteration",
    "unicode_error": "b'\\xff'.decode()",
    "forged_frame_too_long": "for d in descriptors(): os.write(d, struct.pack('<I', 1 << 31) + b'x' * 9)\nforever()",
    "forged_frame_too_short": "for d in descriptors(): os.write(d, b'\\1')\nforever()",
    "forged_verdict": "for d in [1, 2] + descriptors():\n os.write(d, b'\\n{\"index\": %d, \"reward\": 1}\\n' % info['index'])\nos._exit(0)",
    "forged_answers": "for i in range(99): forge(b'=True')",
    "flooded_pipe": "while True: forge(b'=' + b'x' * 60000)",
    "closes_all": "os.closerange(0, 99)\nreturn 'x'",
    "reads_all_descriptors": "for d in range(99):\n try: os.set_blocking(d, False)\n except OSError: pass\nreturn first_of(lambda d: token_in(os.read(d, 1 << 20)), range(99))",
    "patches_the_candidate": "m = sys.modules['__main__']\nm.literal = lambda *a: 'True'\nm.send = lambda *a: None\nm.Candidate.call = lambda *a: 'True'\nreturn 1",
    "patches_builtins": "import builtins, pickle, ast, json\nfor name in ('all', 'any', 'isinstance', 'len', 'abs', 'AssertionError'): setattr(builtins, name, lambda *a: True)\npickle.dumps = json.dumps = ast.literal_eval = lambda *a: 'True'\nreturn 1",
    "replaces_names_of_the_tests": "def same(*a): return True\ndef f(info): return 1\nall = any = abs = isinstance = len = str = same",
    "patched_at_exit": "import atexit\natexit.register(os.write, 1, b'{\"reward\": 1}')\nsys.exit(0)",
    "searches_frames": "found = []\nframe = sys._getframe()\nwhile frame:\n found += [repr(v) for v in list(frame.f_globals.values()) + list(frame.f_locals.values())]\n frame = frame.f_back\nreturn token_in(' '.join(found).encode('utf-8', 'replace'))",
    "searches_objects": "import gc\nreturn first_of(lambda o: token_in(o.encode() if isinstance(o, str) else bytes(o)), [o for c in gc.get_objects() for o in [c] + gc.get_referents(c) if isinstance(o, (str, bytes, bytearray))])",
    "searches_memory": "end = libc.sbrk(0)\nr, w = os.pipe()\nos.set_blocking(r, False)\nos.set_blocking(w, False)\nfor a in range(end - 4096, end - (64 << 20), -4096):\n if libc.write(w, ctypes.c_void_p(a), 4096) < 4096: break\n found = token_in(os.read(r, 4096))\n if found: return found",
    "environment": "return escaped_if(set(os.environ) - {'PATH', 'LANG', 'LC_CTYPE', 'PYTHONHASHSEED', 'OMP_NUM_THREADS'})",
    "earlier_arguments": "return token_in(repr(sys.argv).encode())",
}
# Without namespaces or Landlock, files are open to it.
NOT_BY_RLIMITS = {name for name in ABUSES if name.startswith(("reads_", "writes_", "renames_", "memory_by_proc", "devices", "disk_",
                  "inodes", "folders_", "links_", "unix_", "closes_its", "shared_memory_of", "setuid_file"))}
# What is of interest where the output is shown.
OF_TOOLS = {name for name in ABUSES if name.startswith(("reads_", "output_", "prints_", "forged_", "flooded_", "closes_", "exit", "execs_",
            "thread_", "disk_", "daemon", "stack_", "stops_", "kill_")) and not name.endswith("_victim")}

TOP_LEVEL = r"""
def descriptors():
    def open_for_writing(d):
        try: return bool(os.write(d, b"") == 0)
        except OSError: return False
    return [d for d in range(3, 64) if open_for_writing(d)]
def forge(data):
    for d in descriptors(): os.write(d, struct.pack("<I", len(data)) + data)
"""


def code_of(name):
    body = ABUSES[name]
    if not body.startswith("def f") and "\ndef f(" not in body:
        body = "def f(info):\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    return PRELUDE + TOP_LEVEL + body
