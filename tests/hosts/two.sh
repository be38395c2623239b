# shellcheck shell=bash
# Sourced by the benchmarks between two hosts, inside `hosts 2`: runs jobs with one PE per host, and sets the link's rate.
#
#   here, aristos   the folder of `hosts`, and the binary; set by the caller
#   transport       tcp (the default), ofi, openmpi or mpich, over TCP; the last two need a binary with the feature `mpi` for that MPI, and
#                   MPICH the environment of tools/mpi-env, whose folder ARISTOS_TEST_MPICH names
# shellcheck disable=SC2154
zero=${HOSTS%,*} one=${HOSTS#*,}
# both COMMAND...: runs a job of one PE per host over $transport.
both() {
    local run
    case ${transport:-tcp} in
    openmpi)
        run=(mpirun.openmpi --allow-run-as-root --bind-to none -n 2 --host "$zero,$one" --mca plm_rsh_agent "$here/hosts --on")
        run+=(--mca pml ob1 --mca btl "tcp,self" --mca osc "^rdma,ucx")
        "${run[@]}" "$aristos" "$@" --transport mpi
        return
        ;;
    mpich)
        run=("$ARISTOS_TEST_MPICH/bin/mpirun" -launcher ssh -launcher-exec "$here/hosts" -hosts "$zero,$one" -n 2)
        run+=(-genv UCX_TLS tcp -genv UCX_NET_DEVICES eth0)
        LD_LIBRARY_PATH=$ARISTOS_TEST_MPICH/debian:$ARISTOS_TEST_MPICH/lib/mpich "${run[@]}" "$aristos" "$@" --transport mpi
        return
        ;;
    esac
    local place=(--transport "${transport:-tcp}" --ranks 2 --rendezvous "$zero:29400")
    "$here/hosts" --on "$one" "$aristos $* ${place[*]} --rank 1" >/dev/null &
    "$aristos" "$@" "${place[@]}" --rank 0
    wait $!
}
# limit RATE: limits the link to RATE bit/s per direction; 0 removes the limit. The queue is large enough to avoid drops. Bursts
# hold a few segments: with smaller bursts the kernel would split every segment into packets and use CPU time that the layer
# needs; a network card would do that in hardware.
limit() {
    local shape=(root tbf rate "${1}bit" burst 256kb limit 32mb)
    if [ "$1" = 0 ]; then
        tc qdisc del dev eth0 root 2>/dev/null || true
        "$here/hosts" --on "$one" "tc qdisc del dev eth0 root 2>/dev/null || true"
        return
    fi
    tc qdisc replace dev eth0 "${shape[@]}"
    "$here/hosts" --on "$one" "tc qdisc replace dev eth0 ${shape[*]}"
}
