# shellcheck shell=bash
# Sourced by the benchmarks between two hosts, inside `hosts 2`: runs jobs with one PE per host, and sets the link's rate.
#
#   here, aristos   the folder of `hosts`, and the binary; set by the caller
# shellcheck disable=SC2154
zero=${HOSTS%,*} one=${HOSTS#*,}
# both COMMAND...: runs a job of one PE per host over $transport (default tcp).
both() {
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
