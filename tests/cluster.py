"""Private SLURM cluster on this machine: munged, slurmctld and two nodes, all of them children of this process."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from processes import Mark, environments, terminate

from mpitest import mpi_environment, quick_start

REPOSITORY = Path(__file__).resolve().parents[1]
SECOND = "second"  # name of the second node; the first is named like the machine
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")

# Two nodes on one machine that claim eight processors each. The first also claims the GPUs for yoon2022.sbatch. A
# single-node job in partition "either" prefers the second node, which a test takes down. Jobs in "high" preempt "main".
# Several clusters may run at once. Open MPI names shared memory after the job, so that no two have jobs of one number.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={ports[0]}000
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
TmpFS={folder}/tmp/%n
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=5,sched_interval=1,sched_min_interval=100000
MailProg=/bin/true
ReturnToService=2
KillWait=5
SlurmctldTimeout=30
SlurmdTimeout=30
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=DEFAULT CPUs=8 RealMemory=4000
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} Gres=gpu:8 Feature=a100 Weight=10
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} Weight=1
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={host} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=either Nodes={host},{second} MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=OFF
"""


class Cluster:
    """Running SLURM cluster, as a context manager. Leaving it ends all jobs and daemons.

    Its programs are those of the machine: `tests/slurm/install.sh` installs them.
    """

    def __init__(self) -> None:
        self.first = socket.gethostname().partition(".")[0]
        # Not in pytest's folder: a socket's path must be shorter than 108 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._stack = ExitStack()
        self._daemons: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
        binaries = Path(sys.executable).parent
        variables = {**mpi_environment(), "PYTHONPATH": str(REPOSITORY)}
        self._environment = {
            **{name: value for name, value in quick_start(variables).items() if not name.startswith("SLURM")},
            "PATH": f"{binaries}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin",
            "SLURM_CONF": str(self._folder / "slurm.conf"),
        }

    def __enter__(self) -> Cluster:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        folder = self._folder
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        ports = _free_ports(3)
        values = {"host": self.first, "second": SECOND, "user": getpass.getuser(), "folder": folder, "ports": ports}
        (folder / "slurm.conf").write_text(_CONFIGURATION.format_map(values))
        (folder / "gres.conf").write_text(f"NodeName={self.first} Name=gpu File={folder}/gpu[0-7]\n")
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", *(f"{kind}/{node}" for kind in ("spool", "tmp") for node in (self.first, SECOND))):
            (folder / name).mkdir(parents=True)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
        self._daemon("munged", "-F", "--force", "--num-threads=2", *options)
        self._until(lambda: (folder / "munge.socket").exists(), 10, "munged's socket")
        self._daemon("slurmctld", "-D")
        for node in (self.first, SECOND):
            self.start_node(node)
        self._stack.callback(self.cancel_all)  # runs before the daemons end

    def _daemon(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.output").open("ab") as log:
            self._daemons[command] = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        self._stack.callback(terminate, self._daemons[command])

    def start_node(self, node: str) -> None:
        """Start a node's daemon and wait until jobs can run on the node."""
        self._daemon("slurmd", "-D", "-N", node)
        self._until(lambda: node in self._idle(), 30, f"node {node} to be idle")

    def crash_node(self, node: str, mark: Mark) -> None:
        """Kill a node's daemon and the marked job; set the node's state in SLURM to down."""
        daemon = self._daemons["slurmd", "-D", "-N", node]
        daemon.kill()
        daemon.wait()
        # Each job step has a SLURM process that leads its session. Kill it first, so that it cannot report anything.
        sessions = {os.getsid(pid) for pid in mark.processes()}
        for pid, _ in environments():
            with suppress(ProcessLookupError):
                if os.getsid(pid) in sessions:
                    os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=crash")

    def _idle(self) -> list[str]:
        try:
            return self.run("sinfo", "-h", "-N", "-p", "either", "-t", "idle", "-o", "%N").split()
        except subprocess.CalledProcessError:
            return []  # slurmctld does not answer yet

    def _until(self, condition: Callable[[], bool], limit: float, what: str) -> None:
        try:
            wait_until(condition, limit, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """Return the last lines of the output of all daemons."""
        paths = [*self._folder.glob("*.log"), *self._folder.glob("*.output")]
        ends = (path.read_text(errors="replace").splitlines()[-30:] for path in paths)
        return "\n".join(line for end in ends for line in end)

    def run(self, *command: str, **variables: str) -> str:
        """Run a SLURM command in the repository's folder and return its output."""
        environment = {**self._environment, **variables}
        done = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, job: str, log: Path, *options: str, **variables: str) -> str:
        """Submit a script of slurm/, or ``--wrap=COMMAND``, with variables in the environment; return the job ID."""
        command = ("sbatch", "--parsable", f"--output={log}", *options, job if job.startswith("-") else f"slurm/{job}")
        return self.run(*command, **variables).strip()

    def show(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job` for a job or a task of an array."""
        fields = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.partition("=")[::2] for field in fields if "=" in field)

    def wait_for(self, job: str, limit: float) -> str:
        """Wait until the job has ended, and return its final state, such as COMPLETED."""
        self._until(lambda: self.show(job)["JobState"] in _ENDED, limit, f"job {job} to end")
        return self.show(job)["JobState"]

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until the queue is empty."""
        self.run("scancel", "--user", getpass.getuser())
        self._until(lambda: not self.run("squeue", "-h").strip(), 40, "all jobs to be gone")


def wait_until(condition: Callable[[], bool], limit: float, what: str) -> None:
    """Wait until a condition holds; after `limit` seconds, fail with a message that contains `what`."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"timed out after {limit:.0f} s waiting for {what}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Return unused TCP ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
