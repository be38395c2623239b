"""Tests of layers over several hosts, which are network namespaces of this machine (tests/hosts/hosts); tools/test-python runs this script in the
repository's root. Skipped where such hosts cannot be made, because only root can.

The script runs again on the first host. Ranks are forked there after importing torch, and each enters its host.
"""

import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import test_experts
import test_lengths
import torch
import torch.distributed as dist
from harness import full, run_here
from test_experts import Problem, matches
from test_launches import LIMIT_S, reason

import aristos
from aristos import _group, _hosts

ROOT = pathlib.Path(__file__).parents[2]
N_HOSTS = 3
# Per host: its address, and a process in its namespaces.
HOSTS = [pair.split("=") for pair in os.environ.get("HOSTS_PIDS", "").split()]


def enter(host):
    """Moves this process to a host."""
    for kind in ("net", "uts"):
        with open(f"/proc/{HOSTS[host][1]}/ns/{kind}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")


def free_port():
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


class Failure(str):
    """The error of a rank."""


class Job:
    """Processes that run a function, each on the host whose index is `hosts[rank]`. Rank 0 is on the first host."""

    def __init__(self, hosts, function, *arguments):
        self.folder = tempfile.TemporaryDirectory()
        self.paths = [pathlib.Path(self.folder.name, str(rank)) for rank in range(len(hosts))]
        address = dict(MASTER_ADDR=HOSTS[0][0], MASTER_PORT=str(free_port()), WORLD_SIZE=str(len(hosts)), GLOO_SOCKET_IFNAME="eth0")
        self.pids = []
        for rank, host in enumerate(hosts):
            pid = os.fork()
            if pid == 0:
                try:
                    self.run(rank, host, address, function, arguments)
                finally:
                    os._exit(1)
            self.pids.append(pid)

    def run(self, rank, host, address, function, arguments):
        enter(host)
        os.environ |= dict(address, RANK=str(rank), MARK=f"{self.paths[rank]}.works")
        try:
            result = function(*arguments)
        except Exception as error:
            result = Failure(f"{type(error).__name__}: {error}")
        torch.save(result, f"{self.paths[rank]}.new")
        os.rename(f"{self.paths[rank]}.new", self.paths[rank])
        _group._leave()
        os._exit(0)

    def works(self):
        """Waits until all ranks have created the file `MARK`."""
        until = time.monotonic() + LIMIT_S
        while not all(pathlib.Path(f"{path}.works").exists() for path in self.paths):
            assert time.monotonic() < until and not any(path.exists() for path in self.paths), self.results()
            time.sleep(0.05)

    def results(self):
        """Waits for the ranks. Returns the results of their functions, a `Failure` for an error, or None for a rank that was killed."""
        until = time.monotonic() + LIMIT_S
        left = list(self.pids)
        while left and time.monotonic() < until:
            left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert not left, f"{len(left)} of {len(self.pids)} ranks hang"
        return [torch.load(path, weights_only=False) if path.exists() else None for path in self.paths]

    def values(self):
        """Like `results`; raises the first error."""
        results = self.results()
        for rank, result in enumerate(results):
            assert result is not None and not isinstance(result, Failure), f"rank {rank}: {result}"
        return results


def same(ones, others):
    """Whether two results, nested lists of tensors and numbers, have the same bits."""
    if isinstance(ones, (list, tuple)):
        return len(ones) == len(others) and all(map(same, ones, others))
    return torch.equal(ones, others) if isinstance(ones, torch.Tensor) else ones == others


def mapped():
    """The ranks whose windows this process has mapped."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return sorted({int(rank) for *_, rank in test_lengths._MAPPING.findall(maps)})


def crossed():
    """The number of bytes that this host's interface has sent."""
    table = pathlib.Path("/proc/self/net/dev").read_text()
    return int(table.split("eth0:")[1].split()[8])


def passes():
    group = aristos.init()
    results = []
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        problem = Problem(dtype, seed)
        output = problem.experts()
        output.backward(problem.grad)
        results.append([output.detach(), *(leaf.grad for leaf in problem.leaves())])
    return [results, group.sent_bytes()], mapped()


def results_have_the_bits_of_one_host():
    (one, shared), *_ = ones = Job([0] * 4, passes).values()
    assert shared == [0, 1, 2, 3]
    # Ranks of one host share memory, next to each other or not.
    for hosts in ([0, 0, 1, 1], [0, 1, 2, 1]):
        for rank, ((want, _), (got, maps)) in enumerate(zip(ones, Job(hosts, passes).values())):
            assert same(got, want), f"{hosts}: rank {rank} differs"
            assert maps == [other for other, host in enumerate(hosts) if host == hosts[rank]], f"{hosts}: rank {rank} maps {maps}"


ROWS, WIDTH, STEPS = 64, 512, 8


def far_rows():
    """Steps in which each token is sent to an expert of the other host. Returns the bytes that the host has sent meanwhile."""
    group = aristos.init()
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    ids = torch.full((ROWS, 1), (group.rank + 2) % 4)
    up, down = (torch.ones(1, *shape, requires_grad=True) for shape in ((16, WIDTH), (WIDTH, 8)))

    def step():
        aristos.experts(x, ids, torch.ones(ROWS, 1), up, down).sum().backward()

    step()
    dist.barrier()
    before, sent_before = crossed(), group.sent_bytes()
    # Another rank of this host must not begin before its bytes count.
    dist.barrier()
    for _ in range(STEPS):
        step()
    sent = group.sent_bytes() - sent_before
    dist.barrier()
    return crossed() - before, sent


def interface_sends_the_rows_and_little_more():
    # A row crosses as a token, as its output, and with the gradients of both.
    formula = STEPS * 4 * 4 * ROWS * WIDTH * 4
    values = Job([0, 0, 1, 1], far_rows).values()
    through, put = values[0][0] + values[2][0], sum(sent for _, sent in values)
    assert formula <= put <= 1.05 * formula, f"{put} bytes put, {formula} of rows"
    assert put <= through <= 1.25 * put, f"{through} bytes crossed, {put} put"
    return f"{formula} bytes of rows, {put} put, {through} through the interfaces"


def train():
    group = aristos.init()
    torch.manual_seed(0)
    moe = aristos.MoE(32, 48, 8, 2, mean_gradients=True)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.01)
    losses = []
    for step in range(20):
        every = torch.randn(48, 32, generator=torch.Generator().manual_seed(step))
        mine = every.chunk(group.size)[group.rank]
        loss = (moe(mine) - mine.flip(-1)).square().mean()
        loss.backward()
        if group.size > 1:
            for parameter in moe.parameters():
                if not hasattr(parameter, "full_tensor"):
                    parameter.grad = group.sum(parameter.grad) / group.size
        optimizer.step()
        optimizer.zero_grad()
        losses.append(group.sum(loss.detach() / group.size))
    return torch.stack(losses), full(moe.gate_up_proj).detach()


def twenty_steps_equal_one_process():
    [(alone, weights)] = Job([0], train).values()
    one_host, two_hosts = (Job(hosts, train).values() for hosts in ([0] * 4, [0, 0, 1, 1]))
    assert same(one_host, two_hosts)
    losses, spread = two_hosts[0]
    errors = [((got - want).norm() / want.norm()).item() for got, want in ((losses, alone), (spread, weights))]
    assert losses[-1] < 0.8 * losses[0] and max(errors) <= 1e-4, (losses[0], losses[-1], errors)
    return f"losses {errors[0]:.1e}, weights {errors[1]:.1e}"


def cases_of_one_host():
    size = 4
    wanted = ("f32", "bf16", "checkpointed", "forwards_before_backwards", "wrong")
    cases = [*test_lengths.CASES[:4], *(case for case in test_experts.cases("", size) if any(word in case[0] for word in wanted))]
    for name, case in cases:
        aristos.init()
        case()
        dist.barrier()
    return [name for name, _ in cases]


def longer_batches_grow_and_other_cases_pass():
    [names, *_] = Job([0, 0, 1, 1], cases_of_one_host).values()
    assert len(names) >= 7, names
    return f"{len(names)} cases"


def steps_until_an_error(dying=None, how="is killed"):
    """Steps until one fails. Rank `dying` kills itself before the sixth step, or ends like a program that returns."""
    group = aristos.init(wait_limit_s=3000)
    for step in range(1_000_000):
        if step == 5:
            pathlib.Path(os.environ["MARK"]).touch()
            if group.rank == dying:
                if how == "returns":
                    return "it has returned"
                os.kill(os.getpid(), signal.SIGKILL)
        problem = Problem(seed=step)
        problem.experts().backward(problem.grad)


def lost(results, rank):
    """The number of the rank that a rank's error names as lost: the last one, if a rank that ended for that reason was noticed first."""
    text = results[rank]
    assert isinstance(text, Failure) and text.startswith("AristosError") and "\n" not in text and " is lost: " in text, f"rank {rank}: {text!r}"
    return int(text.rsplit(" is lost: ", 1)[0].split("PE ")[-1]), text


def killed_rank_is_named_on_both_hosts():
    results = Job([0, 0, 1, 1], steps_until_an_error, 3).results()
    assert results[3] is None
    for rank in range(3):
        assert lost(results, rank)[0] == 3, results[rank]
    return results[0]


def rank_that_returns_early_is_named_on_both_hosts():
    results = Job([0, 0, 1, 1], steps_until_an_error, 3, "returns").results()
    assert results[3] == "it has returned"
    for rank in range(3):
        assert lost(results, rank)[0] == 3, results[rank]
    return results[0]


def partition_is_named_on_both_sides():
    job = Job([0, 0, 1, 1], steps_until_an_error)
    job.works()
    link = ["nsenter", "-t", HOSTS[1][1], "-n", "ip", "link", "set", "eth0"]
    subprocess.run([*link, "down"], check=True)
    try:
        results = job.results()
    finally:
        subprocess.run([*link, "up"], check=True)
    for rank in range(4):
        named, text = lost(results, rank)
        # A rank that ends first may be named by that of its own host.
        assert named // 2 != rank // 2 and "its host has acknowledged nothing for" in text, f"rank {rank}: {text}"
    return results[0]


def stopped_then_restarted():
    group = aristos.init(wait_limit_s=3)
    first = Problem()
    matches(first, first.experts(), [])
    said = ""
    if group.rank != 3:
        try:
            first.experts()
        except aristos.AristosError as error:
            said = str(error)
    dist.barrier()
    # The wait limit of the others must not end the passes below on a busy machine.
    aristos.init(wait_limit_s=60)
    for seed in range(3):
        problem = Problem(seed=seed)
        output = problem.experts()
        output.backward(problem.grad)
        matches(problem, output, [leaf.grad for leaf in problem.leaves()])
    return said


def rank_that_stops_calling_is_named_and_a_restart_works():
    said = Job([0, 0, 1, 1], stopped_then_restarted).values()
    assert all("waited 3.0 s" in text or "is lost: it failed: " in text for text in said[:3]), said
    assert any("for PE 3" in text for text in said[:3]) and said[3] == "", said
    return said[0]


def smaller_groups():
    """A group on one host, and one on two others, whose first rank is not on that of MASTER_ADDR."""
    aristos.init()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine = aristos.Group(groups[dist.get_rank() // 2])
    ids, x = torch.tensor([[0, 1]] * 3), torch.ones(3, 4, requires_grad=True)
    up, down = torch.ones(1, 8, 4), torch.ones(1, 4, 4)
    y = aristos.experts(x, ids, torch.ones(3, 2), up, down, group=mine)
    y.sum().backward()
    address = mine._rendezvous and mine._rendezvous.address
    try:
        aristos.init()
        _group.default().layer(4, "emulated", hidden=4)
    except ValueError as error:
        refused = str(error)
    return y.detach(), x.grad, address, refused


def groups_inside_a_job_and_refused_devices():
    values = Job([0, 0, 1, 2], smaller_groups).values()
    assert all(same(value[:2], values[0][:2]) for value in values)
    near, far = (values[rank][2] for rank in (0, 2))
    assert near is None and far.startswith(HOSTS[1][0] + ":"), (near, far)
    assert all(value[3].startswith("host is node") and "expected the same on all" in value[3] for value in values), values[0][3]


def first_pass(tokens):
    group = aristos.init(wait_limit_s=4)
    os.environ["ARISTOS_JOB_TOKEN"] = tokens[group.rank]
    Problem().experts()


def rank_with_another_token_is_refused():
    zero, one = Job([0, 1], first_pass, ("a", "b")).results()
    assert "10.77.0.1:" in one and "is not PE 0 of this job: it does not know the job's token" in one, one
    assert f"PE 1 has not come within 4 s; refused {HOSTS[1][0]}: it does not know the job's token" in zero, zero
    return one


def addresses():
    chosen = []
    for variables in (dict(), dict(MASTER_ADDR="localhost"), dict(MASTER_ADDR="127.0.0.1"), dict(MASTER_ADDR="no.such.host"), dict(ARISTOS_ADDRESS="::2")):
        os.environ |= variables
        chosen.append(_hosts.address())
    return chosen, aristos._aristos.Rendezvous.listen("::2").address


def address_is_that_of_the_interface():
    for host, (chosen, ipv6) in enumerate(Job([0, 1], addresses).values()):
        name = f"node{host}"
        assert chosen == [HOSTS[host][0], name, name, "no.such.host", "::2"] and ipv6.startswith("[::2]:"), (chosen, ipv6)


def forking():
    """Passes before and after a fork whose child drops its copy of the layer."""
    group = aristos.init()
    for seed in range(2):
        problem = Problem(seed=seed)
        output = problem.experts()
        output.backward(problem.grad)
        matches(problem, output, [leaf.grad for leaf in problem.leaves()])
        if os.fork() == 0:
            group._layers.clear()
            os._exit(0)
        assert os.wait()[1] == 0
    return "the child has ended"


def fork_leaves_the_connections_alone():
    Job([0, 0, 1, 1], forking).values()


# In the last pass rank 1 waits long for rank 0, on its own host; ranks 2 and 3 end meanwhile.
UNEVEN = """
import ctypes, os, torch
os.environ["ARISTOS_CPU"] = "scalar"
import aristos
group = aristos.init(max_tokens=8192)
# A program's reference may keep the layer until the process has ended.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
up, down = torch.ones(1, 4096, 1024), torch.ones(1, 1024, 2048)
def call(tokens):
    ids = torch.zeros(tokens, 1, dtype=torch.int64)
    return aristos.experts(torch.ones(tokens, 1024), ids, torch.ones(tokens, 1), up, down)
call(1)
assert call(8192 if group.rank == 1 else 0).isfinite().all()
print(f"rank {group.rank} of {group.size} ends", flush=True)
"""


def torchrun_on_two_hosts_ends_cleanly():
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "uneven.py"
        script.write_text(UNEVEN)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", HOSTS[0][0]]
        command += ["--master-port", str(free_port())]
        jobs = []
        for host in range(2):
            on = ["nsenter", "-t", HOSTS[host][1], "-n", "-u", "--", "env", "GLOO_SOCKET_IFNAME=eth0"]
            run = [*on, *command, "--node-rank", str(host), str(script)]
            jobs.append(subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        said = [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(map(reason, said))
        assert all(f"rank {rank} of 4 ends" in said[rank // 2] for rank in range(4)), said


CASES = [
    results_have_the_bits_of_one_host,
    interface_sends_the_rows_and_little_more,
    twenty_steps_equal_one_process,
    longer_batches_grow_and_other_cases_pass,
    killed_rank_is_named_on_both_hosts,
    rank_that_returns_early_is_named_on_both_hosts,
    partition_is_named_on_both_sides,
    rank_that_stops_calling_is_named_and_a_restart_works,
    groups_inside_a_job_and_refused_devices,
    address_is_that_of_the_interface,
    rank_with_another_token_is_refused,
    fork_leaves_the_connections_alone,
    torchrun_on_two_hosts_ends_cleanly,
]


def main(wanted):
    cases = [case for case in CASES if not wanted or case.__name__ in wanted]
    if not HOSTS:
        inside = [ROOT / "tests/hosts/hosts", str(N_HOSTS), sys.executable, *sys.argv]
        code = subprocess.run(inside).returncode if os.geteuid() == 0 else 77
        if code == 77:
            print(f"running {len(cases)} cases")
            for case in cases:
                print(f"test hosts::{case.__name__} ... skipped (only root can make network namespaces)", flush=True)
        return 0 if code == 77 else code
    return run_here([(f"hosts::{case.__name__}", case) for case in cases])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
