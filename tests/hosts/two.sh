# shellcheck shell=bash
# Sourced by what measures between two hosts, inside of `hosts 2`: jobs of one PE on each, and the link's rate.
#
#   here, aristos   the folder of `hosts`, and the binary; set by who sources this
# shellcheck disable=SC2154
zero=${HOSTS%,*} one=${HOSTS#*,}
# both COMMAND...: a job of one PE a host, over $transport, or tcp.
both() {
    local place=(--transport "${transport:-tcp}" --ranks 2 --rendezvous "$zero:29400")
    "$here/hosts" --on "$one" "$aristos $* ${place[*]} --rank 1" >/dev/null &
    "$aristos" "$@" "${place[@]}" --rank 0
    wait $!
}
# limit RATE: bit/s each way, or 0 for none; enough room that nothing is dropped, and bursts of a few segments: of smaller ones the kernel would cut every
# segment into packets, and take the CPUs for it that should compute; a network card does that itself.
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
