# usage: awk -F, -f gpu/beside_torch.awk TORCH OURS...
#
# TORCH: output of gpu/torch_layer.py; OURS: files speed-SHAPE-TOKENS[-skewed].csv of `aristos bench moe --csv`. Prints the median times in ms of
# aristos, of PyTorch and of cuBLAS at the experts' GEMMs (with backward three times the forward's, for as many FLOP), and the ratios of aristos to
# PyTorch and of cuBLAS to aristos. Fails if there are no common rows.

function median(list, n, of, i, j, t) {
    n = split(list, of, " ")
    for (i = 2; i <= n; i++) {
        t = of[i] + 0
        for (j = i - 1; j > 0 && of[j] + 0 > t; j--) of[j + 1] = of[j]
        of[j + 1] = t
    }
    return of[int((n + 1) / 2)]
}
FNR == 1 { file++; next }
file == 1 && $1 == "torch" { torch[$2 "," $3 "," $4 + 0 "," $5] = $6 }
file == 1 && $1 == "cublas" { cublas[$2 "," $3] = $6 }
file > 1 && $3 == "pipelined" {
    name = FILENAME
    sub(/.*\/speed-/, "", name)
    skew = sub(/-skewed\.csv$/, "", name) ? 0.7 : 0
    sub(/\.csv$/, "", name)
    tokens = name
    sub(/.*-/, "", tokens)
    sub(/-[0-9]+$/, "", name)
    key = name "," tokens "," skew "," $4
    if (!(key in ours)) order[++keys] = key
    ours[key] = ours[key] " " 1000 * $8
}
END {
    for (i = 1; i <= keys; i++) {
        key = order[i]
        if (!(key in torch) || torch[key] <= 0) continue
        split(key, of, ",")
        limit = cublas[of[1] "," of[2]] * (of[4] == "forward" ? 1 : 3)
        if (!n++) print "shape,tokens,skew,pass,ours_ms,torch_ms,cublas_ms,ours_of_torch,cublas_of_ours"
        mine = median(ours[key])
        printf "%s,%.4f,%.4f,%.4f,%.3f,%.3f\n", key, mine, torch[key], limit, mine / torch[key], limit / mine
    }
    exit !n
}
