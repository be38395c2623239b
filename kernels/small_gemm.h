// D = A B for the router: few columns or few rows, and operands in one to three planes of the layer's dtype that add up to the f32 value.
// The product of plane i of A and plane j of B is computed only if i + j <= 2; the others are below 2^-24 of the result.
//
// A block of 256 threads computes TILE_M x 128 of D. Operands are K-major or, transposed, MN-major (gemm.h):
//   A [M, K] or, transposed, [K, M];   B [N, K] or, transposed, [K, N].
// The tensor cores sum each 32 steps of K from zero, and these sums are added in f32 with round-to-nearest. The tensor cores' own
// accumulation truncates, which would bias a sum of thousands of terms.
#pragma once
#include "platform.h"
#include "route_sizes.h"

namespace aristos {

// One operand: `parts` planes of a matrix whose rows are whole 16-byte pieces. Elements beyond `rows` and `cols` read as zero.
struct SmallOperand {
    const void* base;
    u64 plane;   // elements from one plane to the next
    u32 stride;  // elements from one row to the next
    u32 rows, cols;
};

// Position of 16-byte piece `p` of row `row` in a tile with `PIECES` pieces per row, such that the pieces of eight rows in one column are
// in different banks.
template <u32 PIECES>
DEVICE u32 small_piece(u32 row, u32 p) {
    return PIECES == 4 ? row * 4 + (p ^ ((row >> 1) & 3)) : row * PIECES + (p ^ (row & 7));
}

template <u32 ROWS, u32 PIECES>
DEVICE void small_load(char* to, const SmallOperand& from, u32 part, u32 row0, u32 col0) {
    const char* base = static_cast<const char*>(from.base) + from.plane * part * 2;
    UNROLL
    for (u32 at = 0; at < ROWS * PIECES; at += ROUTE_THREADS) {
        const u32 i = at + dev::thread();
        if (ROWS * PIECES % ROUTE_THREADS != 0 && i >= ROWS * PIECES) break;
        const u32 row = row0 + i / PIECES, col = col0 + i % PIECES * 8;
        const bool valid = row < from.rows && col < from.cols;
        const char* source = valid ? base + (u64(row) * from.stride + col) * 2 : base;
        dev::cp_async16(to + small_piece<PIECES>(i / PIECES, i % PIECES) * 16, source, valid);
    }
}

template <class T, u32 TILE_M, bool A_TRANS, bool B_TRANS, u32 PARTS_A, u32 PARTS_B>
struct SmallGemm {
    static constexpr u32 M_TILES = TILE_M / 32;  // of 16 rows, per warp; two warps down, four across
    static constexpr u32 A_ROWS = A_TRANS ? SMALL_TILE_K : TILE_M, A_PIECES = (A_TRANS ? TILE_M : SMALL_TILE_K) / 8;
    static constexpr u32 B_ROWS = B_TRANS ? SMALL_TILE_K : SMALL_TILE_N, B_PIECES = (B_TRANS ? SMALL_TILE_N : SMALL_TILE_K) / 8;
    static constexpr u32 A_BYTES = TILE_M * SMALL_TILE_K * 2, B_BYTES = SMALL_TILE_N * SMALL_TILE_K * 2;
    static constexpr u32 STAGE = PARTS_A * A_BYTES + PARTS_B * B_BYTES, STAGES = small_stages(TILE_M, PARTS_A, PARTS_B);
    static_assert(STAGE == small_step_bytes(TILE_M, PARTS_A, PARTS_B), "what the launches reserve");
    float acc[M_TILES][4][4];

    static DEVICE u32 warp_row() { return dev::warp() % 2 * (TILE_M / 2); }
    static DEVICE u32 warp_col() { return dev::warp() / 2 * 32; }

    static DEVICE void load(char* stage, const SmallOperand& a, const SmallOperand& b, u32 m0, u32 n0, u32 k0) {
        UNROLL
        for (u32 i = 0; i < PARTS_A; i++)
            small_load<A_ROWS, A_PIECES>(stage + i * A_BYTES, a, i, A_TRANS ? k0 : m0, A_TRANS ? m0 : k0);
        UNROLL
        for (u32 j = 0; j < PARTS_B; j++)
            small_load<B_ROWS, B_PIECES>(stage + PARTS_A * A_BYTES + j * B_BYTES, b, j, B_TRANS ? k0 : n0,
                                         B_TRANS ? n0 : k0);
    }

    // `m_tiles` and `n_tiles`: the warp's tiles that lie inside the matrix.
    DEVICE void compute(const char* stage, u32 m_tiles, u32 n_tiles, float scale) {
        const u32 lane = dev::lane();
        float part[M_TILES][4][4] = {};
        UNROLL
        for (u32 k16 = 0; k16 < SMALL_TILE_K / 16; k16++) {
            u32 b[PARTS_B][4][2];
            UNROLL
            for (u32 j = 0; j < PARTS_B; j++) {
                const char* tile = stage + PARTS_A * A_BYTES + j * B_BYTES;
                UNROLL
                for (u32 pair = 0; pair < 2; pair++) {
                    u32 r[4];
                    const u32 col = warp_col() + pair * 16;
                    if (B_TRANS) {
                        const u32 row = k16 * 16 + (lane & 15), p = col / 8 + (lane >> 4);
                        dev::ldmatrix_x4_trans(r, tile + small_piece<B_PIECES>(row, p) * 16);
                    } else {
                        const u32 row = col + (lane & 7) + (lane >> 4) * 8, p = k16 * 2 + ((lane >> 3) & 1);
                        dev::ldmatrix_x4(r, tile + small_piece<B_PIECES>(row, p) * 16);
                    }
                    b[j][pair * 2][0] = r[0], b[j][pair * 2][1] = r[1];
                    b[j][pair * 2 + 1][0] = r[2], b[j][pair * 2 + 1][1] = r[3];
                }
            }
            UNROLL
            for (u32 i = 0; i < PARTS_A; i++) {
                UNROLL
                for (u32 mt = 0; mt < M_TILES; mt++) {
                    if (mt >= m_tiles) continue;
                    const char* tile = stage + i * A_BYTES;
                    const u32 m = warp_row() + mt * 16;
                    u32 a[4];
                    if (A_TRANS) {
                        const u32 row = k16 * 16 + (lane & 7) + (lane >> 4) * 8, p = m / 8 + ((lane >> 3) & 1);
                        dev::ldmatrix_x4_trans(a, tile + small_piece<A_PIECES>(row, p) * 16);
                    } else {
                        const u32 row = m + (lane & 15), p = k16 * 2 + (lane >> 4);
                        dev::ldmatrix_x4(a, tile + small_piece<A_PIECES>(row, p) * 16);
                    }
                    UNROLL
                    for (u32 j = 0; j < PARTS_B; j++) {
                        if (i + j > 2) continue;
                        UNROLL
                        for (u32 nt = 0; nt < 4; nt++) {
                            if (nt < n_tiles) dev::mma<T>(part[mt][nt], a, b[j][nt]);
                        }
                    }
                }
            }
        }
        UNROLL
        for (u32 mt = 0; mt < M_TILES; mt++) {
            UNROLL
            for (u32 nt = 0; nt < 4; nt++) {
                UNROLL
                for (u32 i = 0; i < 4; i++) acc[mt][nt][i] += part[mt][nt][i] * scale;
            }
        }
    }

    // All threads of the block. acc = A B over [k_begin, k_end), for the tile at (m0, n0) of an m by n matrix. `scale(k)` multiplies the
    // step at k. Returns with no copy in flight and the shared memory free.
    template <class Scale>
    DEVICE void run(const SmallOperand& a, const SmallOperand& b, u32 m0, u32 n0, u32 m, u32 n, u32 k_begin, u32 k_end,
                    Scale scale) {
        char* memory = dev::shared();
        UNROLL
        for (u32 mt = 0; mt < M_TILES; mt++) {
            UNROLL
            for (u32 nt = 0; nt < 4; nt++) {
                UNROLL
                for (u32 i = 0; i < 4; i++) acc[mt][nt][i] = 0.0f;
            }
        }
        const u32 row = m0 + warp_row(), col = n0 + warp_col();
        const u32 n_tiles = col < n ? min_of(4, div_up(n - col, 8)) : 0;
        const u32 m_tiles = row < m && n_tiles > 0 ? min_of(M_TILES, div_up(m - row, 16)) : 0;
        const u32 steps = k_end > k_begin ? div_up(k_end - k_begin, SMALL_TILE_K) : 0;
        for (u32 s = 0; s + 1 < STAGES; s++) {
            if (s < steps) load(memory + s * STAGE, a, b, m0, n0, k_begin + s * SMALL_TILE_K);
            dev::cp_async_commit();
        }
        for (u32 s = 0; s < steps; s++) {
            dev::cp_async_wait<STAGES - 2>();
            dev::sync_block();
            const u32 next = s + STAGES - 1;
            if (next < steps) load(memory + next % STAGES * STAGE, a, b, m0, n0, k_begin + next * SMALL_TILE_K);
            dev::cp_async_commit();
            const u32 k = k_begin + s * SMALL_TILE_K;
            if (m_tiles > 0) compute(memory + s % STAGES * STAGE, m_tiles, n_tiles, scale(k));
        }
        dev::cp_async_wait<0>();
        dev::sync_block();
    }

    // Calls `store(row, col, v0, v1)` for elements (row, col) and (row, col + 1), col even, including some beyond the matrix.
    template <class Store>
    DEVICE void each(u32 m0, u32 n0, Store store) const {
        const u32 lane = dev::lane();
        UNROLL
        for (u32 mt = 0; mt < M_TILES; mt++) {
            UNROLL
            for (u32 nt = 0; nt < 4; nt++) {
                const u32 row = m0 + warp_row() + mt * 16 + lane / 4, col = n0 + warp_col() + nt * 8 + lane % 4 * 2;
                store(row, col, acc[mt][nt][0], acc[mt][nt][1]);
                store(row + 8, col, acc[mt][nt][2], acc[mt][nt][3]);
            }
        }
    }
};

}  // namespace aristos
