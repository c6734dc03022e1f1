"""Jail: shut this very process in, then run a test file in it. Run by `sandbox` as a script, with Python alone.

    settings on stdin ─► resource limits ─► Landlock (files) ─► seccomp (system calls) ─► tests ─► one line by a pipe

Landlock: only the folder may be written, only it and Python's library may be read. seccomp: no fork, exec, socket,
signal to others, mount, ptrace, change of owners or limits; and no folders, links or truncation by path, because a
tree too deep to be deleted is easily made, and a kernel before 6.2 has no Landlock rule about truncation. Both need no
privileges and cannot be undone, and hold for root too. Layouts: linux/landlock.h, linux/seccomp.h, linux/filter.h.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
import sysconfig
import traceback

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR, EXECUTE = 1 << 2, 1 << 3, 1 << 0
CLONE_THREAD = 0x10000
# Known to both architectures by the same number.
COMMON = (424, 425, 426, 427, 434, 438, 452)  # pidfd_send_signal, io_uring ×3, pidfd_open, pidfd_getfd, fchmodat2
DENIED = {
    # fork vfork execve execveat socket ptrace kill tkill tgkill mount umount2 unshare setns chroot pivot_root bpf
    # process_vm_* setrlimit prlimit64 chmod chown utime xattr shm/sem/msg keys perf userfaultfd open_by_handle_at
    # reboot kexec swap time names modules ioperm iopl acct quotactl mkdir link symlink mknod truncate
    "x86_64": (57, 58, 59, 322, 41, 101, 62, 200, 234, 165, 166, 272, 308, 161, 155, 321, 310, 311, 160, 302, 90, 91,
               268, 92, 93, 94, 260, 132, 235, 261, 280, 188, 189, 190, 197, 198, 199, 29, 64, 68, 248, 249, 250, 298,
               323, 304, 169, 246, 320, 167, 168, 164, 227, 159, 305, 170, 171, 175, 313, 176, 172, 173, 163, 179,
               83, 258, 86, 265, 88, 266, 133, 259, 76),
    "aarch64": (221, 281, 198, 117, 129, 130, 131, 40, 39, 97, 268, 51, 41, 280, 270, 271, 164, 261, 52, 53, 54, 55, 88,
                5, 6, 7, 14, 15, 16, 194, 190, 186, 217, 218, 219, 241, 282, 265, 142, 104, 294, 224, 225, 170, 112,
                171, 266, 161, 162, 105, 273, 106, 89, 60, 34, 37, 36, 33, 45),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}  # audit number, clone
CLONE3 = 435

libc = ctypes.CDLL(None, use_errno=True)


def limit(cpu_s, memory_bytes, file_bytes):
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def restrict_files(folder):
    """Landlock; returns False on a kernel without it."""
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    handled = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    # Files; from version 4 also TCP (bind, connect), from 6 abstract sockets and signals.
    attributes = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.syscall(LANDLOCK_CREATE, attributes, size, 0)
    if ruleset < 0:
        return False
    readable = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "/lib", "/lib64", "/usr/lib"}
    readable |= {"/usr/lib64", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"}
    allowed = [(path, READ_FILE | READ_DIR | EXECUTE) for path in readable] + [(folder, handled & ~EXECUTE)]
    for path, access in allowed:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                access &= READ_FILE
            rule = struct.pack("=Qi", access, descriptor)
            if libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0) != 0:
                return False
            os.close(descriptor)
    done = libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


def restrict_calls():
    """seccomp; returns False where the kernel or the architecture has none."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        return False
    audit, clone = ARCHITECTURES[machine]

    def instruction(code, yes, no, value):
        return struct.pack("=HBBI", code, yes, no, value)

    load, equal, at_least, anyset, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    program = [
        instruction(load, 0, 0, 4),
        instruction(equal, 1, 0, audit),
        instruction(answer, 0, 0, kill),
        instruction(load, 0, 0, 0),
        # The other calling convention of x86-64 has numbers of its own.
        instruction(at_least, 0, 1, 0x40000000),
        instruction(answer, 0, 0, refuse),
        # Threads may be made, processes not. The C library tries clone3 first, whose flags no filter can see.
        instruction(equal, 0, 1, CLONE3),
        instruction(answer, 0, 0, unknown),
        instruction(equal, 0, 4, clone),
        instruction(load, 0, 0, 16),
        instruction(anyset, 1, 0, CLONE_THREAD),
        instruction(answer, 0, 0, refuse),
        instruction(answer, 0, 0, allow),
    ]
    for number in (*DENIED[machine], *COMMON):
        program += [instruction(equal, 0, 1, number), instruction(answer, 0, 0, refuse)]
    program.append(instruction(answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("HP", len(program), ctypes.addressof(code))
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0


def shut_in(folder):
    """Names of what holds from now on."""
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return []
    return [name for name, held in (("landlock", restrict_files(folder)), ("seccomp", restrict_calls())) if held]


def show(error):
    """Print the end of its traceback, without the frame of this file: the model reads it, on whatever machine."""
    own = error.__traceback__
    traceback.print_exception(type(error), error, own and own.tb_next, limit=-2, file=sys.stdout)


def run(path):
    """Names of the test functions in a file, each with whether it passed. What fails is printed."""
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), os.path.basename(path), "exec")
    names = {"__name__": "tests"}
    try:
        exec(code, names)
    except BaseException as error:
        show(error)
        return {"import": False}
    results = {}
    for name, function in list(names.items()):
        if not name.startswith("test") or not callable(function):
            continue
        try:
            function()
            results[name] = True
        except BaseException as error:
            results[name] = False
            print(f"--- {name}")
            show(error)
    return results


def main():
    if sys.argv[1:] == ["--probe"]:
        print(*shut_in(os.getcwd()))
        return
    told = json.loads(sys.stdin.buffer.read())
    sys.path.insert(0, told["folder"])
    write, nonce = os.write, told["nonce"]
    limit(told["cpu_s"], told["memory_bytes"], told["file_bytes"])
    shut_in(told["folder"])
    results = run(os.path.join(told["folder"], told["tests"]))
    sys.stdout.flush()
    write(told["report"], json.dumps({"nonce": nonce, "results": results}).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
