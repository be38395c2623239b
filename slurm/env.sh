# shellcheck shell=bash
# Sourced by the batch scripts beside it: modules, environment and the srun of a Perlmutter GPU node.
#
#   ARISTOS   the program [target/release/aristos below the folder that sbatch was called in]
#   OUT       where results go [results/JOB there]
#   DEVICE    cuda or cpu [cpu]: what layers run on
#   TRANSPORT what carries data between host memories [shm on one node, mpi on several]; tcp, hybrid (shared memory within a node) and ofi (libfabric) need no MPI
# shellcheck disable=SC2034 # the scripts that source this use what they need of it
set -euo pipefail

root=${SLURM_SUBMIT_DIR:-$PWD}
nodes=${SLURM_JOB_NUM_NODES:-1}
ARISTOS=${ARISTOS:-$root/target/release/aristos}
OUT=${OUT:-$root/results/${SLURM_JOB_ID:-here}}
DEVICE=${DEVICE:-cpu}
[ -x "$ARISTOS" ] || {
    echo "no program at $ARISTOS: build it (slurm/README.md), or set ARISTOS" >&2
    exit 1
}
mkdir -p "$OUT"

# Only on a machine with modules; elsewhere (a test cluster) the scripts run without these settings.
if [ "$(type -t module)" = function ]; then
    module load PrgEnv-gnu cray-mpich
    if [ "$DEVICE" = cuda ]; then
        module load cudatoolkit
    fi
fi

if [ "$DEVICE" = cuda ]; then
    : "${NVSHMEM_HOME:?set it to NVSHMEM (tools/cuda-toolchain prints one); no other NVSHMEM may be in LD_LIBRARY_PATH}"
    # GPU 3 is nearest to the cores of the first task, GPU 0 to those of the last. PEs take the visible devices in turn.
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-3,2,1,0}
    if [ "$nodes" -gt 1 ]; then
        # Slingshot has no InfiniBand's IBGDA: puts go through a proxy thread and libfabric. Without CUDA's virtual memory the heap
        # does not grow: aristos makes it as large as the job needs (NVSHMEM_SYMMETRIC_SIZE), and says so; a region above 1.5 GiB is slow in
        # libfabric 1.22's cxi.
        export NVSHMEM_REMOTE_TRANSPORT=libfabric NVSHMEM_LIBFABRIC_PROVIDER=cxi
        export NVSHMEM_DISABLE_CUDA_VMM=1
        export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=hsn0
        export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd
    fi
fi

transport=shm
[ "$nodes" = 1 ] || transport=mpi
transport=${TRANSPORT:-$transport}

# tasks PER_NODE COMMAND...: PER_NODE processes on every node, each a PE. Not --gpus-per-task: its cgroups hide the
# neighbours' GPUs, and CUDA cannot map their memory.
tasks() {
    local per_node=$1 gpus=()
    shift
    if [ "$DEVICE" = cuda ]; then
        gpus=(--gpus-per-node=4 --gpu-bind=none)
    fi
    srun --nodes="$nodes" --ntasks-per-node="$per_node" --cpus-per-task="${CPUS_PER_TASK:-32}" --cpu-bind=cores \
        --kill-on-bad-exit=1 "${gpus[@]}" "$@"
}

# into FILE COMMAND...: what it prints, as that file of the results if it ends well: a job that fails leaves no empty ones.
into() {
    local file=$OUT/$1 rc=0
    shift
    "$@" >"$file.part" || rc=$?
    [ $rc != 0 ] || mv "$file.part" "$file"
    rm -f "$file.part"
    return $rc
}

# What ran where, beside the results.
{
    date -u +%FT%TZ
    "$ARISTOS" --version
    echo "$nodes nodes: ${SLURM_JOB_NODELIST:-$(hostname)}"
    env | grep -E '^(SLURM_JOB|CUDA_VISIBLE|NVSHMEM_|FI_|MPICH_)' | sort
} >"$OUT/about.txt"
