# shellcheck shell=bash
# Sourced by the batch scripts of this folder: modules, environment and srun options of Perlmutter's GPU nodes.
#
#   ARISTOS   the binary [target/release/aristos below the folder in which sbatch was called]
#   OUT       folder of the results [results/JOB there]
#   DEVICE    cuda or cpu [cpu]: where layers run
#   TRANSPORT between host memories [shm on one node, mpi on several]; tcp, hybrid (shared memory within a node) and ofi (libfabric)
#             need no MPI
# shellcheck disable=SC2034 # used by the scripts that source this file
set -euo pipefail

root=${SLURM_SUBMIT_DIR:-$PWD}
nodes=${SLURM_JOB_NUM_NODES:-1}
ARISTOS=${ARISTOS:-$root/target/release/aristos}
OUT=${OUT:-$root/results/${SLURM_JOB_ID:-here}}
DEVICE=${DEVICE:-cpu}
[ -x "$ARISTOS" ] || {
    echo "no binary at $ARISTOS: build it (slurm/README.md), or set ARISTOS" >&2
    exit 1
}
mkdir -p "$OUT"

# Skipped on machines without modules, such as a test cluster.
if [ "$(type -t module)" = function ]; then
    module load PrgEnv-gnu cray-mpich
    if [ "$DEVICE" = cuda ]; then
        module load cudatoolkit
    fi
fi

if [ "$DEVICE" = cuda ]; then
    : "${NVSHMEM_HOME:?set it to NVSHMEM (tools/cuda-toolchain prints one); no other NVSHMEM may be in LD_LIBRARY_PATH}"
    # GPU 3 is closest to the cores of the first task, GPU 0 to those of the last. PEs use the visible devices in this order.
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-3,2,1,0}
    if [ "$nodes" -gt 1 ]; then
        # Slingshot lacks InfiniBand's IBGDA, so puts go through a proxy thread and libfabric. Without CUDA's virtual memory management the
        # heap has a fixed size: aristos sets NVSHMEM_SYMMETRIC_SIZE to the job's needs and reports it. Regions above 1.5 GiB are slow
        # with the cxi provider of libfabric 1.22.
        export NVSHMEM_REMOTE_TRANSPORT=libfabric NVSHMEM_LIBFABRIC_PROVIDER=cxi
        export NVSHMEM_DISABLE_CUDA_VMM=1
        export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=hsn0
        export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd
    fi
fi

transport=shm
[ "$nodes" = 1 ] || transport=mpi
transport=${TRANSPORT:-$transport}

# tasks PER_NODE COMMAND...: runs PER_NODE processes on every node, each a PE. Without --gpus-per-task, whose cgroups hide the
# other GPUs of the node, so that CUDA could not map their memory.
tasks() {
    local per_node=$1 gpus=()
    shift
    if [ "$DEVICE" = cuda ]; then
        gpus=(--gpus-per-node=4 --gpu-bind=none)
    fi
    srun --nodes="$nodes" --ntasks-per-node="$per_node" --cpus-per-task="${CPUS_PER_TASK:-32}" --cpu-bind=cores \
        --kill-on-bad-exit=1 "${gpus[@]}" "$@"
}

# into FILE COMMAND...: stores the output in that result file if the command succeeds.
into() {
    local file=$OUT/$1 rc=0
    shift
    "$@" >"$file.part" || rc=$?
    [ $rc != 0 ] || mv "$file.part" "$file"
    rm -f "$file.part"
    return $rc
}

# Record nodes, versions and environment with the results.
{
    date -u +%FT%TZ
    "$ARISTOS" --version
    echo "$nodes nodes: ${SLURM_JOB_NODELIST:-$(hostname)}"
    env | grep -E '^(SLURM_JOB|CUDA_VISIBLE|NVSHMEM_|FI_|MPICH_)' | sort
} >"$OUT/about.txt"
