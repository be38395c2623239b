#!/usr/bin/env bash
# usage: gpu/check.sh [--dry-run] [--again] STAGE...
#        STAGE: facts smoke correct speed profile network sanitize p2p nccl plugin groups stores tune hosts correct-all speed-all, or all
#
# Runs the checks and measurements that need a GPU, in stages of at most 8 minutes that can be run separately. `all` runs them in
# this order, the most informative first: the first four take at most ten minutes and show whether the program runs, is correct and
# is fast. The output of every command goes to $OUT (default target/gpu/out), one file per stage, and a short table ends the run.
# The exit code is 0 if no command failed. Commands that passed before with the same program, in any stage, are not repeated. For the
# first failures of a stage $OUT/STAGE.why holds the messages of the driver and the kernel, and of a second run with NVSHMEM's log.
#
# Needs an NVIDIA GPU (compute capability 8.0 or more), nvcc, NVSHMEM (PyTorch's is enough), python3 with PyTorch for the
# comparison, and the program target/gpu/aristos, which gpu/build.sh builds on any machine with Rust. Several PEs share the first
# GPU through MPS, which the script starts and stops; the card's settings are not changed.
#
#   --dry-run   builds what can be built here and prints the commands of each stage; without a CUDA driver it also checks their arguments:
#               the program must report only the missing driver
#   --again     repeats commands that passed before
#
#   CUDA_HOME, NVSHMEM_HOME   folders of nvcc and NVSHMEM [default: nvcc's folder on PATH; NVSHMEM from PyTorch, then CUDA]
#   NCCL_HOME                 folder of NCCL, for its send and receive and its symmetric memory [PyTorch's, then the loader's path]
#   OUT                       folder of the logs [target/gpu/out]
#   TIMEOUT                   time limit of a checked step, seconds [20]
#   LIMIT                     time limit of a stage, seconds [480; 60, 150, 150 and 240 for the first four]
set -uo pipefail
cd "$(dirname "$0")/.." || exit

all=(facts smoke correct speed profile network sanitize p2p nccl plugin groups stores tune hosts correct-all speed-all)
declare -A limits=([facts]=60 [smoke]=150 [correct]=150 [speed]=240)
dry=0 again=0 stages=()
for arg in "$@"; do
    case $arg in
    --dry-run) dry=1 ;;
    --again) again=1 ;;
    all) stages+=("${all[@]}") ;;
    *)
        if [[ $arg != [a-z]* || " ${all[*]} " != *" $arg "* ]]; then
            sed -n '2,23s/^# \{0,1\}//p' "$0" >&2
            exit 2
        fi
        stages+=("$arg")
        ;;
    esac
done
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")

OUT=${OUT:-target/gpu/out}
aristos=target/gpu/aristos
mkdir -p "$OUT" target/gpu
if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
    CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
fi
if [ -z "${NVSHMEM_HOME:-}" ] && command -v python3 >/dev/null; then
    NVSHMEM_HOME=$(python3 -c 'import nvidia.nvshmem as n; print(list(n.__path__)[0])' 2>/dev/null)
fi
if [ -d target/cuda-toolchain ] && { [ -z "${CUDA_HOME:-}" ] || [ -z "${NVSHMEM_HOME:-}" ]; }; then
    while IFS='=' read -r name value; do
        declare "$name=$value"
    done < <(tools/cuda-toolchain)
fi
if [ -z "${NCCL_HOME:-}" ] && command -v python3 >/dev/null; then
    NCCL_HOME=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null)
fi
export CUDA_HOME=${CUDA_HOME:-} NVSHMEM_HOME=${NVSHMEM_HOME:-} NCCL_HOME=${NCCL_HOME:-}

# try NAME COMMAND...: runs the command within the remaining time of the stage, logs its output and counts the result.
declare -A passed=() before=() failed=() seconds=()
try() {
    local name=$1 start=$SECONDS left=$((stage_end - SECONDS)) rc key
    shift
    if [ $dry = 1 ]; then
        printf '  %-44s %s\n' "$name" "$*"
        check_arguments "$name" "$@"
        return
    fi
    # The key does not contain the stage, so a command that has passed in one stage is skipped in the others.
    key=$(printf '%s\n' "$program" "$name" "$@" | sha256sum | cut -c1-32)
    if [ $again = 0 ] && grep -qsx "$key" "$OUT/passed"; then
        before[$stage]=$((${before[$stage]:-0} + 1))
        return 0
    fi
    printf '\n#### %s\n$ %s\n' "$name" "$*" >>"$log"
    if [ $left -le 0 ]; then
        echo "not run: the stage's $limit s are over" | tee -a "$log"
        rc=124
    else
        # The command runs in another shell, because it may be a function such as `to`.
        timeout --kill-after=5 "$left" bash -c '"$@"' try "$@" >>"$log" 2>&1
        rc=$?
    fi
    printf '#### exit code %d after %d s\n' $rc $((SECONDS - start)) >>"$log"
    if [ $rc = 0 ]; then
        passed[$stage]=$((${passed[$stage]:-0} + 1))
        echo "$key" >>"$OUT/passed"
    else
        failed[$stage]=$((${failed[$stage]:-0} + 1))
        printf 'FAILED (%d) %s: %s\n' $rc "$stage" "$name"
        tail -n 3 "$log" | sed 's/^/    /'
        [ $left -le 0 ] || [ "${failed[$stage]}" -gt 3 ] || why "$name" "$@"
    fi
    return $rc
}

# why NAME COMMAND...: collects information about a failure, for which it runs the command again. The second run may take the remaining time
# of the stage, but at most a minute and at least ten seconds, because a command that hung has left no time.
why() {
    local name=$1 left=$((stage_end - SECONDS))
    left=$((left < 10 ? 10 : left > 60 ? 60 : left))
    shift
    {
        printf '\n#### %s\n$ %s\n' "$name" "$*"
        nvidia-smi
        nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv
        dmesg 2>/dev/null | grep -i 'nvrm\|xid' | tail -n 20
        [ -z "${CUDA_MPS_LOG_DIRECTORY:-}" ] || tail -n 40 "$CUDA_MPS_LOG_DIRECTORY"/*.log
        timeout --kill-after=5 $left env NVSHMEM_DEBUG=INFO RUST_LOG=debug bash -c '"$@"' why "$@"
        echo "#### exit code $? the second time"
    } >>"$OUT/$stage.why" 2>&1
}

# skip NAME WHY: reports a check that is not run, which is not a failure.
skip() { printf 'skipped %s: %s\n' "$1" "$2" | tee -a "$log"; }

# check_arguments NAME COMMAND...: in a dry run without a driver, checks that the program reports only the missing driver.
check_arguments() {
    local name=$1 said
    shift
    while [ $# -gt 0 ] && [ "$1" != "$aristos" ]; do shift; done
    if [ ! -x "$aristos" ] || [ -n "$driver" ] || [ "${2-}" = doctor ] || [ $# = 0 ]; then
        return 0
    fi
    # srun would set the rank. Without it, the program runs as the only PE.
    [[ " $* " != *" --transport hybrid "* ]] || set -- "$@" --rank 0 --ranks 1 --rendezvous 127.0.0.1:29400
    said=$(timeout 60 "$@" 2>&1)
    if [[ $said != *"no CUDA driver here"* ]]; then
        failed[$stage]=$((${failed[$stage]:-0} + 1))
        printf 'WRONG %s: %s\n' "$name" "$said"
    fi
}

# to FILE COMMAND...: also writes the command's stdout to FILE.
to() {
    local file=$1
    shift
    "$@" >"$file.part" && mv "$file.part" "$file" && cat "$file"
}
export -f to

# one_by_one PES COMMAND...: starts the PEs as separate processes that rendezvous over TCP.
one_by_one() {
    local pes=$1 rank children=() rc=0 child
    shift
    for ((rank = 0; rank < pes; rank++)); do
        "$@" --transport tcp --ranks "$pes" --rank "$rank" --rendezvous 127.0.0.1:29400 &
        children+=($!)
    done
    for child in "${children[@]}"; do wait "$child" || rc=$?; done
    return $rc
}
export -f one_by_one

mps_on() {
    [ $dry = 0 ] || return 0
    export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/aristos-mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/aristos-mps-log
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / $1))
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    pgrep -x nvidia-cuda-mps >/dev/null || nvidia-cuda-mps-control -d >>"$log" 2>&1
}
mps_off() {
    [ $dry = 0 ] || return 0
    [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || echo quit | nvidia-cuda-mps-control >>"$log" 2>&1
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
}
trap mps_off EXIT

# Builds the two C++ programs, facts.cu and perftest.cu, unless they are up to date. They may have been built on another machine.
build() {
    local nvcc=$CUDA_HOME/bin/nvcc name arch flags key
    if [ ! -x "$nvcc" ]; then
        echo "gpu/check.sh: no nvcc; set CUDA_HOME, or run tools/cuda-toolchain" >&2
        return 1
    fi
    if [ ! -e "$NVSHMEM_HOME/include/nvshmem.h" ]; then
        echo "gpu/check.sh: no NVSHMEM at '$NVSHMEM_HOME'; set NVSHMEM_HOME" >&2
        return 1
    fi
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
    arch=${arch:-90}
    flags=(-std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr -gencode "arch=compute_$arch,code=sm_$arch" "-I$NVSHMEM_HOME/include")
    key=$( (echo "$arch"; cat gpu/facts.cu gpu/perftest.cu gpu/pes.h "$NVSHMEM_HOME/include/non_abi/nvshmem_version.h") | sha256sum)
    for name in facts perftest; do
        if ! grep -qsx "$key" target/gpu/built; then
            "$nvcc" "${flags[@]}" -DFATBIN_ONLY -fatbin "gpu/$name.cu" -o "target/gpu/$name.fatbin" || return 1
            "$nvcc" "${flags[@]}" -c "gpu/$name.cu" -o "target/gpu/$name.o" || return 1
        fi
        if ldconfig -p | grep -q 'libcuda\.so\.1'; then
            "$nvcc" "target/gpu/$name.o" -o "target/gpu/$name" -Xlinker "$NVSHMEM_HOME/lib/libnvshmem_host.so.3" \
                -Xlinker "$(ldconfig -p | awk '/libcuda\.so\.1/ { print $NF; exit }')" -Xlinker "-rpath=$NVSHMEM_HOME/lib" || return 1
        fi
    done
    echo "$key" >target/gpu/built
}

# The settings of NVSHMEM for one host, which are the same as in the program.
host_env=(env NVSHMEM_REMOTE_TRANSPORT=none NVSHMEM_DISABLE_NVLS=1 NVSHMEM_DISABLE_NCCL=1 NVSHMEM_DISABLE_MNNVL=1
    NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=lo)

stage_facts() {
    try "nvidia-smi" nvidia-smi
    try "1 PE" timeout 15 "${host_env[@]}" NVSHMEM_DEBUG=INFO target/gpu/facts 1
    try "2 PEs without MPS" timeout 15 "${host_env[@]}" NVSHMEM_DEBUG=INFO target/gpu/facts 2
    mps_on 2
    try "2 PEs, MPS" timeout 15 "${host_env[@]}" NVSHMEM_DEBUG=INFO target/gpu/facts 2
    try "2 PEs, MPS, without VMM" timeout 15 "${host_env[@]}" NVSHMEM_DISABLE_CUDA_VMM=1 NVSHMEM_SYMMETRIC_SIZE=1G target/gpu/facts 2
    mps_on 4
    try "4 PEs, MPS" timeout 15 "${host_env[@]}" target/gpu/facts 4
    mps_off
}

run=("$aristos" run --device cuda --check --timeout "${TIMEOUT:-20}")
layer=(--hidden 512 --intermediate 768 --experts 16 --top-k 4)
small=("${layer[@]}" --tokens 1000 --dtype bf16)

# The path and the tile of each persistent kernel, from kernels/launch.h.
mapfile -t tiles < <(sed -nE 's/^ *\{(AMPERE|HOPPER), ([0-9]+), ([0-9]+),.*/\1 \2x\3/p' kernels/launch.h | tr '[:upper:]' '[:lower:]')
kernels=()
use() { kernels=(--gemm "${1% *}" --tile "${1#* }"); }

# runs PATH: whether the GPU supports the path's kernels.
runs() { [ $dry = 1 ] || [ "$1" = ampere ] || [ "$capability" = 9 ]; }

stage_smoke() {
    local tile
    try "doctor" "$aristos" doctor
    try "1 PE, Ampere path" "${run[@]}" --pes 1 --gemm ampere "${small[@]}"
    ! runs hopper || try "1 PE, Hopper path" "${run[@]}" --pes 1 --gemm hopper "${small[@]}"
    for tile in "${tiles[@]}"; do
        runs "${tile% *}" || continue
        use "$tile"
        try "1 PE, tiles of $tile" "${run[@]}" --pes 1 "${kernels[@]}" "${small[@]}"
    done
    # All kernels must be loaded before the first step, because that step is recorded and no kernel may be loaded during a recording.
    try "1 PE, recorded" "${run[@]}" --pes 1 "${small[@]}" --steps 3 --graph
    # If there are several PEs, they first exchange a block of bytes and check it (kernels/smoke.cu).
    mps_on 2
    try "2 PEs, Ampere path" "${run[@]}" --pes 2 --gemm ampere "${small[@]}"
    ! runs hopper || try "2 PEs, Hopper path" "${run[@]}" --pes 2 --gemm hopper "${small[@]}"
    mps_off
    mps_on 4
    # Rows and results are in the order of the experts, and take several rounds.
    try "4 PEs, all to a few, small budget" "${run[@]}" --pes 4 "${small[@]}" --hot-ratio 0.25 --hot-weight 1 --budget-factor 0.5 --chunk-rows 32
    mps_off
}

# Writes two plans with two groups each, in which every group holds all experts. In plan-4 one expert also has a replica, and its rows are
# split between the two copies.
two_groups() {
    python3 - "$OUT" <<'END'
import json, sys
def plan(name, *groups):
    one = dict(objective_ms=1.0, makespan_ms=0.5)
    groups = [dict(one, devices=devices, experts=experts, replicas=replicas) for devices, experts, replicas in groups]
    terms = dict(gamma=2.0, compute_ms=0.3, communication_ms=0.1, all_reduce_ms=0.2)
    whole = dict(feasible=True, objective="placed", algorithm="search", optimal=False, gap_bound=0.1, objective_ms=1.0, terms=terms,
                 groups=groups, idle_devices=[], elapsed_ms=0.0)
    with open(f"{sys.argv[1]}/{name}.json", "w") as file:
        json.dump(whole, file)
e = list(range(16))
plan("plan-2", ([0], {"0": e}, []), ([1], {"1": e}, []))
plan("plan-4", ([3, 0], {"0": e[:5], "3": e[5:] + [1]}, [dict(expert=1, devices=[3, 0], split=[[1, 0], [0.25, 0.75]])]),
     ([1, 2], {"1": e[::2], "2": e[1::2]}, []))
END
}

stage_groups() {
    local gemm
    two_groups || return
    for gemm in ampere hopper; do
        mps_on 2
        try "2 groups, $gemm" "${run[@]}" --pes 2 --gemm $gemm "${small[@]}" --plan "$OUT/plan-2.json" --steps 2
        mps_off
        mps_on 4
        try "2 groups, a replica, $gemm" "${run[@]}" --pes 4 --gemm $gemm "${small[@]}" --plan "$OUT/plan-4.json" --steps 2
        try "2 groups, losses, capacity, $gemm" "${run[@]}" --pes 4 --gemm $gemm "${small[@]}" --plan "$OUT/plan-4.json" \
            --aux-loss-coef 0.01 --z-loss-coef 0.001 --capacity-factor 1.1
        mps_off
    done
    # These commands probe the devices, make a plan for them, and run a job with that plan.
    mps_on 2
    try "probe of the devices" "$aristos" probe --device cuda --pes 2 --hidden 2048 --intermediate 4096 --out "$OUT/cluster-2.json"
    try "2 PEs, planned for the devices" "${run[@]}" --pes 2 "${small[@]}" --plan auto
    mps_off
    # The processes are started in the way of srun and of torchrun.
    mps_on 2
    try "2 PEs, one by one" one_by_one 2 "${run[@]}" "${small[@]}"
    # The devices are probed, and the layer then uses them without opening them again.
    try "2 PEs, one by one, planned for the devices" one_by_one 2 "${run[@]}" "${small[@]}" --plan auto
    mps_off
}

# Communication between hosts, tested on one host. The kernels use NVSHMEM's puts, fences and signals for every peer instead of loads and
# stores.
stage_network() {
    local gemm pes over=(env ARISTOS_REACH=network "${run[@]}")
    for pes in 2 4; do
        mps_on $pes
        for gemm in ampere hopper; do
            runs $gemm || continue
            try "$pes PEs, $gemm" "${over[@]}" --pes $pes --gemm $gemm "${small[@]}" --steps 3
            try "$pes PEs, $gemm, all to a few, small budget" "${over[@]}" --pes $pes --gemm $gemm "${small[@]}" --hot-ratio 0.25 --hot-weight 1 \
                --budget-factor 0.5 --chunk-rows 32
        done
        try "$pes PEs, bulk" "${over[@]}" --pes $pes "${small[@]}" --mode bulk
        mps_off
    done
    # These layers sum gradients between groups. The signals of all channels share one fence in each step.
    two_groups || return
    mps_on 4
    try "2 groups, a replica" "${over[@]}" --pes 4 "${small[@]}" --plan "$OUT/plan-4.json" --steps 2
    mps_off
}

# Layers on two nodes of a Slurm allocation, with one PE per GPU. NVSHMEM's own network connects them.
stage_hosts() {
    local gpus gemm over
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    if [ $dry = 0 ] && { [ "${SLURM_JOB_NUM_NODES:-1}" -lt 2 ] || ! command -v srun >/dev/null; }; then
        skip "two nodes" "this is no allocation of two: salloc -N2 --gpus-per-node=N, then gpu/check.sh hosts"
        return
    fi
    [ "$gpus" -gt 0 ] || gpus=1
    over=(srun -N2 -n $((2 * gpus)) --ntasks-per-node="$gpus" --gpus-per-node="$gpus" --gpu-bind=none)
    for gemm in ampere hopper; do
        runs $gemm || continue
        try "$gemm" "${over[@]}" "${run[@]}" --transport hybrid --gemm $gemm "${small[@]}" --steps 3
        try "$gemm, rows once per host" "${over[@]}" "${run[@]}" --transport hybrid --gemm $gemm "${small[@]}" --rows-per host --steps 3
        try "$gemm, all to a few, small budget" "${over[@]}" "${run[@]}" --transport hybrid --gemm $gemm "${small[@]}" --hot-ratio 0.25 --hot-weight 1 \
            --budget-factor 0.5 --chunk-rows 32
    done
    try "bandwidth" "${over[@]}" "$aristos" bench p2p --transport nvshmem
}

# layer_on PES PATH WHAT: checks a layer against float64.
layer_on() {
    local pes=$1 gemm=$2 what=$3 with=("${small[@]}")
    case $what in
    softmax | softmax-renormalised | sigmoid) with+=(--router "$what") ;;
    gelu | gelu-tanh | relu) with+=(--activation "$what" --mlp plain --bias) ;;
    f16) with=("${layer[@]}" --tokens 1000 --dtype f16) ;;
    "shared expert") with+=(--shared-intermediate 384) ;;
    "losses, capacity") with+=(--aux-loss-coef 0.01 --z-loss-coef 0.001 --capacity-factor 1.1) ;;
    "1 token") with=("${layer[@]}" --tokens 1 --dtype bf16) ;;
    "all to a few, small budget") with+=(--hot-ratio 0.25 --hot-weight 1 --budget-factor 0.5 --chunk-rows 32) ;;
    recorded) with+=(--steps 5 --graph) ;;
    bulk) with+=(--mode bulk) ;;
    "odd sizes") with=(--dtype bf16 --hidden 328 --intermediate 264 --experts 13 --top-k 3 --tokens 777) ;;
    esac
    try "$pes PEs, $gemm, $what" "${run[@]}" --pes "$pes" --gemm "$gemm" "${with[@]}"
}

# Checks one layer for each feature, with the smallest number of PEs that the feature needs. `correct-all` checks all combinations.
stage_correct() {
    local gemm what
    for gemm in hopper ampere; do
        runs $gemm || continue
        for what in "odd sizes" sigmoid f16 "shared expert"; do layer_on 1 $gemm "$what"; done
    done
    mps_on 4
    for gemm in hopper ampere; do
        runs $gemm || continue
        for what in softmax-renormalised "all to a few, small budget" recorded bulk "1 token" "losses, capacity"; do layer_on 4 $gemm "$what"; done
    done
    mps_off
}

stage_correct_all() {
    local gemm pes what tile
    for pes in 1 2 4; do
        [ $pes = 1 ] || mps_on $pes
        for gemm in ampere hopper; do
            runs $gemm || continue
            for what in softmax softmax-renormalised sigmoid gelu gelu-tanh relu f16 "shared expert" "losses, capacity" "1 token" \
                "all to a few, small budget" recorded bulk "odd sizes"; do
                layer_on $pes $gemm "$what"
            done
        done
        for tile in "${tiles[@]}"; do
            runs "${tile% *}" || continue
            use "$tile"
            try "$pes PEs, tiles of $tile, odd sizes" "${run[@]}" --pes $pes "${kernels[@]}" --dtype bf16 --shared-intermediate 136 --bias \
                --hidden 328 --intermediate 264 --experts 13 --top-k 3 --tokens 777
            try "$pes PEs, tiles of $tile, f16, recorded, small budget" "${run[@]}" --pes $pes "${kernels[@]}" "${layer[@]}" --tokens 1000 \
                --dtype f16 --hot-ratio 0.25 --hot-weight 1 --budget-factor 0.5 --chunk-rows 32 --steps 3 --graph
        done
        mps_off
    done
    mps_on 2
    try "10,000 steps" "$aristos" run --device cuda --timeout 20 --pes 2 "${layer[@]}" --tokens 256 --dtype bf16 --steps 10000
    try "10,000 recorded steps" "$aristos" run --device cuda --timeout 20 --pes 2 "${layer[@]}" --tokens 256 --dtype bf16 --steps 10000 --graph
    mps_off
}

stage_sanitize() {
    local tiny=(--hidden 128 --intermediate 192 --experts 8 --top-k 2 --tokens 96 --dtype bf16 --timeout 300) gemm tool
    for gemm in ampere hopper; do
        for tool in memcheck racecheck; do
            try "$tool, $gemm" compute-sanitizer --tool $tool --error-exitcode 9 --target-processes all \
                "$aristos" run --device cuda --pes 1 --gemm $gemm "${tiny[@]}"
        done
    done
}

# compare_with_c P2P PERFTEST: prints the ratios of the times on streams of aristos to those of the loops in C. Fails if the two files have
# no rows in common. In C the time of a ping-pong is that of a round trip, so the time of aristos is doubled.
compare_with_c() {
    awk -F, '
        FNR == 1 { file++; next }
        file == 1 && $5 == "stream" && ($4 == "put" || $4 == "get") { ours[$4 "_" $3 "_on_stream," $6] = $12 }
        file == 1 && $5 == "stream" && $4 == "put-signal" { ours["ping_pong_on_stream," $6] = 2 * $12 }
        file == 2 && ($1 "," $2) in ours && $4 > 0 {
            if (!n++) print "op,bytes,aristos_us,c_us,ratio"
            printf "%s,%s,%s,%s,%.3f\n", $1, $2, ours[$1 "," $2], $4, ours[$1 "," $2] / $4
        }
        END { exit !n }' "$1" "$2"
}
export -f compare_with_c

stage_p2p() {
    mps_on 2
    try "perftest's loops in C" to "$OUT/perftest.csv" "${host_env[@]}" target/gpu/perftest 2
    # NCCL refuses two PEs on one GPU. One line of the output then reports that, and all other operations are measured.
    try "aristos" "$aristos" bench p2p --transport nvshmem --csv "$OUT/p2p.csv" --plot "$OUT/p2p"
    try "on streams, beside C" to "$OUT/p2p-streams.csv" compare_with_c "$OUT/p2p.csv" "$OUT/perftest.csv"
    mps_off
    if [ $dry = 1 ] || [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
        try "NCCL, a GPU each" "$aristos" bench p2p --transport nvshmem --op send-recv --csv "$OUT/p2p-nccl.csv"
        try "aristos, a GPU each" "$aristos" bench p2p --transport nvshmem --csv "$OUT/p2p-2-gpus.csv" --plot "$OUT/p2p-2-gpus"
    fi
}

# Prints the version of the NCCL that the program would load, for example 23003 for 2.30.3. Prints nothing if there is no NCCL.
nccl_version() {
    local library=libnccl.so.2
    [ ! -e "${NCCL_HOME:-}/lib/$library" ] || library=$NCCL_HOME/lib/$library
    python3 - "$library" 2>/dev/null <<'END'
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)
END
}

# compare_ways ONE OTHER PREFIX: prints the median times of a layer's passes in the two variants ONE and OTHER, from the files
# PREFIX-VARIANT-ROUND.csv. Fails if a variant has no measurements.
compare_ways() {
    local mode pass way
    echo "mode,pass,$1_ms,$2_ms,$2_of_$1"
    for mode in pipelined bulk; do
        for pass in forward forward+backward; do
            for way in "$1" "$2"; do
                awk -F, -v mode=$mode -v pass=$pass '$3 == mode && $4 == pass { print 1000 * $8 }' "$3-$way"-?.csv | sort -g |
                    awk '{ t[NR] = $1 } END { if (!NR) exit 1; print t[int((NR + 1) / 2)] }' || return
            done | awk -v mode=$mode -v pass=$pass '{ t[NR] = $1 } END { if (NR != 2) exit 1; printf "%s,%s,%.4f,%.4f,%.3f\n", mode, pass, t[1], t[2], t[2] / t[1] }' || return
        done
    done
}
export -f compare_ways

# nvshmem_and_nccl PES WHERE: runs a layer on PES PEs, with the symmetric memory of NVSHMEM and with that of NCCL. The layer is compared
# with float64, recorded, and timed.
nvshmem_and_nccl() {
    local pes=$1 where=$2 by bench=(bench moe --device cuda --dtype bf16 --gated --activation silu --iterations 20 --warmup 5)
    for by in nvshmem nccl; do
        try "$pes PEs, $where, $by" "${run[@]}" --pes "$pes" --symmetric $by "${small[@]}"
        try "$pes PEs, $where, $by, recorded" "${run[@]}" --pes "$pes" --symmetric $by "${small[@]}" --steps 5 --graph
        try "$pes PEs, $where, $by, small budget" "${run[@]}" --pes "$pes" --symmetric $by "${small[@]}" \
            --hot-ratio 0.25 --hot-weight 1 --budget-factor 0.5 --chunk-rows 32
        try "$pes PEs, $where, $by, qwen3-30b, 4096 tokens" "$aristos" "${bench[@]}" --pes "$pes" --symmetric $by --tokens 4096 \
            --experts 128 --hidden 2048 --intermediate 768 --top-k 8 --csv "$OUT/nccl-$pes-${where// /-}-$by-1.csv"
    done
    try "$pes PEs, $where, the times of both" to "$OUT/nccl-$pes-${where// /-}.csv" compare_ways \
        nvshmem nccl "$OUT/nccl-$pes-${where// /-}"
}

# If there are several GPUs, each has one PE. From 2.30 on, NCCL supports several PEs per GPU experimentally.
stage_nccl() {
    local version gpus pes
    version=$(nccl_version)
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    if [ $dry = 0 ] && [ "${version:-0}" -lt 22902 ]; then
        skip "NCCL's symmetric memory" "NCCL is ${version:-not here}, and 22902 or newer is needed; set NCCL_HOME"
        return
    fi
    try "1 PE" "${run[@]}" --pes 1 --symmetric nccl "${small[@]}"
    if [ $dry = 1 ] || [ "$gpus" -ge 2 ]; then
        nvshmem_and_nccl $((gpus < 2 ? 2 : gpus)) "a GPU each"
    fi
    if [ $dry = 1 ] || { [ "$gpus" = 1 ] && [ "$version" -ge 23000 ]; }; then
        for pes in 2 4; do
            mps_on $pes
            nvshmem_and_nccl $pes "one GPU"
            mps_off
        done
    elif [ "$gpus" = 1 ]; then
        skip "several PEs on one GPU" "NCCL is $version, and takes them from 23000 on"
    fi
}

# The layers of models, which are those of gpu/torch_layer.py. For DeepSeek-V3 it is the share of one PE of eight: its experts, with the
# rows from all PEs.
declare -A shapes=([mixtral]="--experts 8 --top-k 2 --hidden 4096 --intermediate 14336"
    [deepseek-v3-of-8]="--experts 32 --top-k 8 --hidden 7168 --intermediate 2048"
    [qwen3-30b]="--experts 128 --top-k 8 --hidden 2048 --intermediate 768"
    [llama4-scout]="--experts 16 --top-k 1 --hidden 5120 --intermediate 8192")
models=(deepseek-v3-of-8 mixtral qwen3-30b llama4-scout)

# speed_of MODEL TOKENS NAME OPTION...: times a layer and writes the results to speed-MODEL-TOKENS[-NAME].csv.
speed_of() {
    local shape=$1 tokens=$2 name=$3 file="$OUT/speed-$1-$2" shape_of
    shift 3
    read -ra shape_of <<<"${shapes[$shape]}"
    [ -z "$name" ] || file+=-${name// /-}
    try "$shape, $tokens tokens${name:+, $name}" "$aristos" bench moe --device cuda --dtype bf16 --gated --activation silu --iterations 20 --warmup 5 \
        --tokens "$tokens" "${shape_of[@]}" "$@" --csv "$file.csv"
}

# Makes the table again from all measurements that exist, and prints it.
speed_table() {
    local ours torch="$OUT/torch.csv"
    [ $dry = 0 ] || return 0
    [ ! -s "$OUT/torch-all.csv" ] || torch="$OUT/torch-all.csv"
    ours=$(find "$OUT" -name 'speed-*.csv' | grep -E -- '-[0-9]+(-skewed)?\.csv$' | sort)
    if [ ! -s "$torch" ] || [ -z "$ours" ]; then
        skip "ours beside PyTorch and cuBLAS" "one of them has not been measured"
        return
    fi
    mapfile -t ours <<<"$ours"
    if awk -F, -f gpu/beside_torch.awk "$torch" "${ours[@]}" >"$OUT/speed.csv"; then
        tr , ' ' <"$OUT/speed.csv" | awk '{ printf "%-17s %6s %4s %-17s %9s %9s %9s %13s %14s\n", $1, $2, $3, $4, $5, $6, $7, $8, $9 }' | tee -a "$log"
    else
        skip "ours beside PyTorch and cuBLAS" "nothing of both"
    fi
}

# Times the models' layers with a number of tokens that is typical of training, and with a small number. `speed-all` has more numbers.
stage_speed() {
    local shape tokens
    try "PyTorch and cuBLAS, 4096 and 512 tokens" to "$OUT/torch.csv" python3 gpu/torch_layer.py --tokens 4096,512 --skews 0
    for tokens in 4096 512; do
        for shape in "${models[@]}"; do speed_of "$shape" $tokens "" --pes 1; done
    done
    speed_table
}

# traced FILE COMMAND...: writes a timeline of all blocks to FILE.gz.
traced() { "${@:2}" --trace "$1" && gzip -f "$1"; }
# profiled FILE PASS COMMAND...: writes ncu's report on the second persistent kernel of a pass to FILE.txt, and its values for each
# instruction to FILE-source.csv.
profiled() {
    ncu --clock-control none --section SpeedOfLight --section WarpStateStats --section SourceCounters --section MemoryWorkloadAnalysis \
        --import-source no -k "regex:aristos_$2_" -s 1 -c 1 -f -o "$1" "${@:3}" &&
        ncu --import "$1.ncu-rep" --page details >"$1.txt" && ncu --import "$1.ncu-rep" --page source --csv >"$1-source.csv" && rm "$1.ncu-rep"
}
export -f traced profiled

# Shows how much time each part of a step takes.
stage_profile() {
    local shape pass shape_of step
    for shape in qwen3-30b deepseek-v3-of-8; do
        read -ra shape_of <<<"${shapes[$shape]}"
        step=("$aristos" run --device cuda --timeout 60 --pes 1 --dtype bf16 --tokens 4096 "${shape_of[@]}")
        try "$shape, what blocks do when" traced "$OUT/trace-$shape.json" "${step[@]}" --steps 3
        if [ $dry = 0 ] && ! command -v ncu >/dev/null; then
            skip "$shape by ncu" "there is none"
            continue
        fi
        try "$shape, the time of each kernel" to "$OUT/kernels-$shape.csv" ncu --clock-control none --csv --metrics gpu__time_duration.sum "${step[@]}" --steps 2
        for pass in forward backward; do
            try "$shape, $pass" profiled "$OUT/ncu-$shape-$pass" $pass "${step[@]}" --steps 2
        done
    done
}

stage_speed_all() {
    local shape tokens pes
    try "PyTorch and cuBLAS" to "$OUT/torch-all.csv" python3 gpu/torch_layer.py
    for shape in "${models[@]}"; do
        for tokens in 128 512 2048 4096 8192 16384; do
            speed_of "$shape" $tokens "" --pes 1
            speed_of "$shape" $tokens skewed --pes 1 --hot-ratio 0.25 --hot-weight 0.7
        done
        speed_of "$shape" 4096 "Ampere path" --pes 1 --gemm ampere
    done
    for pes in 2 4; do
        mps_on $pes
        for shape in "${models[@]}"; do speed_of "$shape" 4096 "$pes PEs" --pes $pes; done
        mps_off
    done
    speed_table
}

# The Python package is a wheel that was built on another machine.
stage_plugin() {
    if [ $dry = 0 ] && ! python3 -c 'import aristos' 2>/dev/null; then
        skip "the Python package" "python3 has no wheel of tools/cuda-wheel"
        return
    fi
    try "the Python package on one GPU" python3 gpu/plugin.py
}

# Compares 16-bit results that are stored by TMA with results that are stored by lanes. Both are measured twice, in turn, so that changes of
# the GPU clock affect both.
stage_stores() {
    local problem name experts top_k hidden intermediate tokens round way
    local common=(bench moe --device cuda --dtype bf16 --gated --activation silu --iterations 20 --warmup 5 --pes 1 --gemm hopper)
    if [ $dry = 0 ] && [ "$capability" != 9 ]; then
        skip "stores by TMA and by lanes" "no Hopper"
        return
    fi
    try "lanes store, checked" "${run[@]}" --pes 1 --gemm hopper --lane-stores "${small[@]}"
    for problem in "mixtral 8 2 4096 14336" "qwen3-30b 128 8 2048 768" "deepseek-v3-of-8 32 8 7168 2048"; do
        read -r name experts top_k hidden intermediate <<<"$problem"
        for tokens in 512 4096; do
            for round in 1 2; do
                for way in tma lanes; do
                    local how=()
                    [ $way = tma ] || how=(--lane-stores)
                    try "$name, $tokens tokens, $way, $round" "$aristos" "${common[@]}" "${how[@]}" --experts "$experts" --top-k "$top_k" \
                        --hidden "$hidden" --intermediate "$intermediate" --tokens $tokens --csv "$OUT/stores-$name-$tokens-$way-$round.csv"
                done
            done
            try "$name, $tokens tokens, the times of both" to "$OUT/stores-$name-$tokens.csv" compare_ways tma lanes "$OUT/stores-$name-$tokens"
        done
    done
}

# fastest PATH HIDDEN INTERMEDIATE EXPERTS ROWS NAME: prints the measured tile with the lowest median of forward and backward, in the form
# of a row of MEASURED in src/moe/device/tiles.rs, followed by the times of all tiles, ms.
fastest() {
    local path=$1 tile took best='' least='' said='' file
    for file in "$OUT/tune-$6-$path"-*.csv; do
        [ -s "$file" ] || continue
        tile=${file##*-} tile=${tile%.csv}
        took=$(awk -F, '$3 == "pipelined" && $4 == "forward+backward" { print 1000 * $8 }' "$file" | sort -g | awk '{ t[NR] = $1 } END { if (NR) print t[int((NR + 1) / 2)] }')
        [ -n "$took" ] || continue
        said+=" $tile $took"
        if [ -z "$least" ] || awk "BEGIN { exit !($took < $least) }"; then best=$tile least=$took; fi
    done
    [ -n "$best" ] || return 0
    printf '    (GemmPath::%s, %s, %s, %s, %s, %s, (%s, %s)), // %s:%s\n' "${path^}" "$multiprocessors" "$2" "$3" "$4" "$5" "${best%x*}" "${best#*x}" "$6" "$said"
}

# Times whole layers on one PE, and the share of one PE of 8 or 16: its experts, with the rows from all PEs.
stage_tune() {
    local problem name experts top_k hidden intermediate tokens tile path multiprocessors
    local common=(bench moe --device cuda --dtype bf16 --gated --activation silu --iterations 10 --warmup 3 --pes 1)
    local problems=("mixtral 8 2 4096 14336" "mixtral-of-8 1 1 4096 14336" "qwen3-30b 128 8 2048 768" "qwen3-30b-of-16 8 8 2048 768"
        "deepseek-v3-of-8 32 8 7168 2048")
    for problem in "${problems[@]}"; do
        read -r name experts top_k hidden intermediate <<<"$problem"
        for tokens in 128 1024 4096; do
            for tile in "${tiles[@]}"; do
                path=${tile% *}
                runs "$path" || continue
                use "$tile"
                try "$name, $tokens tokens, $tile" "$aristos" "${common[@]}" "${kernels[@]}" --experts "$experts" --top-k "$top_k" \
                    --hidden "$hidden" --intermediate "$intermediate" --tokens $tokens --csv "$OUT/tune-$name-$tokens-$path-${tile#* }.csv"
            done
        done
    done
    [ $dry = 0 ] || return 0
    multiprocessors=$("${host_env[@]}" target/gpu/facts 1 | awk '/^multiprocessors:/ { print $NF }')
    for path in ampere hopper; do
        for problem in "${problems[@]}"; do
            read -r name experts top_k hidden intermediate <<<"$problem"
            for tokens in 128 1024 4096; do
                fastest $path "$hidden" "$intermediate" "$experts" $((tokens * top_k / experts)) "$name-$tokens"
            done
        done
    done | tee "$OUT/tune.txt" | tee -a "$log"
}

{
    date -u +%FT%TZ
    git log -1 --format='commit %H' 2>/dev/null
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
} | tee "$OUT/where.txt"
if ! build >"$OUT/build.log" 2>&1; then
    cat "$OUT/build.log"
    exit 1
fi
if [ ! -x $aristos ]; then
    echo "gpu/check.sh: no $aristos; run gpu/build.sh where Rust is" >&2
    [ $dry = 1 ] || exit 1
fi
if [ $dry = 0 ] && ! nvidia-smi >/dev/null 2>&1; then
    echo "gpu/check.sh: no GPU here (nvidia-smi does not answer); --dry-run builds and says what would run" >&2
    exit 1
fi
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1)
driver=$(ldconfig -p | grep 'libcuda\.so\.1')
program=$(cat $aristos target/gpu/*.fatbin 2>/dev/null | sha256sum)
for stage in "${stages[@]}"; do
    log=$OUT/$stage.log limit=${LIMIT:-${limits[$stage]:-480}}
    echo "== $stage" | tee -a "$log"
    began=$SECONDS stage_end=$((SECONDS + limit))
    "stage_${stage//-/_}"
    seconds[$stage]=$((SECONDS - began))
done
[ $dry = 1 ] || printf '\n%-11s %7s %7s %7s %8s\n' stage passed before failed seconds
total=0
for stage in "${stages[@]}"; do
    [ $dry = 1 ] || printf '%-11s %7d %7d %7d %8d\n' "$stage" "${passed[$stage]:-0}" "${before[$stage]:-0}" "${failed[$stage]:-0}" "${seconds[$stage]}"
    total=$((total + ${failed[$stage]:-0}))
done
[ $total = 0 ]
